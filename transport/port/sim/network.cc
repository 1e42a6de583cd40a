#include "transport/port/sim/network.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/port/endpoint.h"
#include "transport/port/sim/sim_port.h"

namespace sluice::port::sim {
namespace {

constexpr uint16_t kFirstPort = 9470;
constexpr size_t kHistory = 32;  // old datagrams kept per link for replay
constexpr int64_t kNanosPerMicro = 1000;
// What a datagram costs on the cable besides its bytes: Ethernet preamble, header, FCS and gap, IPv4, UDP.
constexpr size_t kWireOverhead = 38 + 20 + 8;

uint64_t mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x9e3779b97f4a7c15ULL;
  return h ^ (h >> 32);
}

// Four independent lanes: one chain of multiplications would cost more than the whole rest of a delivery.
uint64_t hash_bytes(std::span<const std::byte> bytes) {
  uint64_t lanes[4] = {1, 2, 3, 4};
  size_t i = 0;
  for (; i + 32 <= bytes.size(); i += 32) {
    for (size_t lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, bytes.data() + i + lane * 8, 8);
      lanes[lane] = mix(lanes[lane], word);
    }
  }
  uint64_t h = mix(mix(lanes[0], lanes[1]), mix(lanes[2], lanes[3]));
  for (; i < bytes.size(); ++i) h = mix(h, static_cast<uint64_t>(bytes[i]));
  return h;
}

// For the heap functions of the standard library, which put the greatest first.
constexpr auto later = [](const auto& a, const auto& b) { return a.later_than(b); };

}  // namespace

Network::Network(Options options) : options_(std::move(options)), plan_(options_.plan) {
  SLUICE_ASSERT(options_.nodes > 0 && options_.nodes < (1U << 24) && options_.queues > 0);
  SLUICE_ASSERT(options_.queues <= 65535U - kFirstPort);
  links_.resize(options_.nodes);
  up_busy_until_.resize(options_.nodes, 0);
  down_busy_until_.resize(options_.nodes, 0);
  waiting_.resize(options_.nodes, 0);
  open_queues_.resize(size_t{options_.nodes} * options_.queues, nullptr);
}

Network::~Network() {
  for (const SimQueue* queue : open_queues_) SLUICE_ASSERT(queue == nullptr);
}

Endpoint Network::address(uint32_t endpoint) const {
  const uint32_t node = node_of(endpoint);
  return ipv4_endpoint(10, static_cast<uint8_t>(node >> 16), static_cast<uint8_t>(node >> 8),
                       static_cast<uint8_t>(node),
                       static_cast<uint16_t>(kFirstPort + endpoint % options_.queues));
}

uint32_t Network::endpoint_of(const Endpoint& address) const {
  if (!is_ipv4(address) || address.ip[12] != 10 || address.port < kFirstPort) return UINT32_MAX;
  const uint32_t node = uint32_t{address.ip[13]} << 16 | uint32_t{address.ip[14]} << 8 | address.ip[15];
  const uint32_t queue = uint32_t{address.port} - kFirstPort;
  if (node >= options_.nodes || queue >= options_.queues) return UINT32_MAX;
  return node * options_.queues + queue;
}

LinkFaults Network::faults_of(uint32_t from_node, uint32_t to_node) const {
  LinkFaults faults = plan_.everywhere;
  for (const LinkRule& rule : plan_.rules) {
    if ((rule.from == kAnyNode || rule.from == from_node) && (rule.to == kAnyNode || rule.to == to_node)) {
      faults = rule.faults;
    }
  }
  return faults;
}

Network::Link& Network::link(uint32_t from_node, uint32_t to_node) {
  auto& row = links_[from_node];
  if (row.empty()) row.resize(options_.nodes);
  auto& entry = row[to_node];
  if (entry == nullptr) {
    uint64_t seed = options_.seed ^ (uint64_t{from_node} << 32 | to_node) * 0x9e3779b97f4a7c15ULL;
    entry = std::make_unique<Link>(split_mix(&seed));
    entry->faults = faults_of(from_node, to_node);
  }
  return *entry;
}

void Network::set_plan(FaultPlan plan) {
  plan_ = std::move(plan);
  for (uint32_t from = 0; from < links_.size(); ++from) {
    for (uint32_t to = 0; to < links_[from].size(); ++to) {
      if (links_[from][to] == nullptr) continue;
      links_[from][to]->faults = faults_of(from, to);
      links_[from][to]->bad = false;
    }
  }
  // Pauses may have changed: who waits at a door looks again now.
  for (Event& event : events_) {
    if (event.stage == Stage::kParked) event.time = now_;
  }
  std::make_heap(events_.begin(), events_.end(), later);
}

void Network::heal() {
  FaultPlan plan = plan_;
  LinkFaults calm;
  calm.latency = plan.everywhere.latency;
  plan.everywhere = calm;
  plan.rules.clear();
  plan.partitions.clear();
  plan.pauses.clear();
  set_plan(std::move(plan));
}

bool Network::cut(uint32_t from_node, uint32_t to_node) const {
  for (const Partition& partition : plan_.partitions) {
    if (now_ < partition.start || now_ >= partition.end) continue;
    const auto inside = [&](uint32_t node) {
      return std::find(partition.group.begin(), partition.group.end(), node) != partition.group.end();
    };
    const bool from_inside = inside(from_node);
    const bool to_inside = inside(to_node);
    if ((partition.out && from_inside && !to_inside) || (partition.into && !from_inside && to_inside))
      return true;
  }
  return false;
}

Micros Network::paused_until(uint32_t node) const {
  // Pauses may overlap or touch: follow them until one is found that ends in the open.
  Micros until = now_;
  for (bool again = true; again;) {
    again = false;
    for (const Pause& pause : plan_.pauses) {
      if (pause.node == node && pause.start <= until && until < pause.end) {
        until = pause.end;
        again = true;
      }
    }
  }
  return until;
}

int64_t Network::wire_nanos(size_t bytes) const {
  if (plan_.bits_per_second == 0) return 0;
  return static_cast<int64_t>((bytes + kWireOverhead) * 8 * 1'000'000'000ULL / plan_.bits_per_second);
}

Micros Network::device_free_at(uint32_t endpoint) const {
  if (plan_.bits_per_second == 0) return now_;
  const int64_t busy_until = up_busy_until_[node_of(endpoint)];
  const int64_t room_at =
      busy_until - wire_nanos(plan_.device_queue_bytes) + wire_nanos(options_.max_datagram);
  const int64_t free_at = std::min(busy_until, room_at);  // an idle device takes anything
  return std::max(now_, (free_at + kNanosPerMicro - 1) / kNanosPerMicro);
}

uint32_t Network::new_datagram() {
  if (free_.empty()) {
    datagrams_.emplace_back();
    return static_cast<uint32_t>(datagrams_.size() - 1);
  }
  const uint32_t datagram = free_.back();
  free_.pop_back();
  return datagram;
}

// `bytes` may be those of another datagram: making one moves its vector, not what that points to.
uint32_t Network::copy_of(uint32_t from, uint32_t to, std::span<const std::byte> bytes) {
  const uint32_t datagram = new_datagram();
  datagrams_[datagram].from = from;
  datagrams_[datagram].to = to;
  datagrams_[datagram].bytes.assign(bytes.begin(), bytes.end());
  return datagram;
}

void Network::schedule(Micros time, Stage stage, uint32_t datagram) {
  events_.push_back({time, order_++, datagram, stage});
  std::push_heap(events_.begin(), events_.end(), later);
}

bool Network::link_loses(Link* link) {
  const Loss loss = draw_loss(link->faults, &link->bad, &link->random);
  if (loss == Loss::kLostInBurst) ++counters_.lost_in_burst;
  if (loss == Loss::kLost) ++counters_.lost;
  return loss != Loss::kNone;
}

void Network::record(Link* link, const Datagram& datagram) {
  if (link->history.size() < kHistory) {
    link->history.push_back(datagram.bytes);
  } else if (link->random.chance(0.25)) {
    // At random places and not always, so that some very old ones stay.
    link->history[link->random.below(kHistory)] = datagram.bytes;
  }
}

void Network::damage(Link* link, Datagram* datagram) {
  std::vector<std::byte>& bytes = datagram->bytes;
  const size_t length = draw_length(link->faults, bytes.size(), &link->random);
  if (length < bytes.size()) {
    bytes.resize(length);
    ++counters_.truncated;
  }
  if (draw_corruption(link->faults, length, &link->random)) {
    flip_bits(bytes, &link->random);
    ++counters_.corrupted;
  }
}

// Puts a datagram that left its sender at `sent_nanos` on its way.
void Network::depart(Link* link, uint32_t datagram, int64_t sent_nanos) {
  damage(link, &datagrams_[datagram]);
  bool reordered = false;
  const Micros delay = draw_delay(link->faults, &reordered, &link->random);
  if (reordered)
    ++counters_.reordered;
  else if (delay > link->faults.latency + link->faults.jitter)
    ++counters_.tails;
  const Micros time = (sent_nanos + kNanosPerMicro - 1) / kNanosPerMicro + delay;
  schedule(time, plan_.bits_per_second == 0 ? Stage::kArrive : Stage::kSwitch, datagram);
}

bool Network::send(uint32_t from, uint32_t to, std::span<const std::span<const std::byte>> pieces) {
  SLUICE_ASSERT(from < open_queues_.size() && to < open_queues_.size());
  const uint32_t from_node = node_of(from);
  const uint32_t to_node = node_of(to);
  size_t length = 0;
  for (const auto& piece : pieces) length += piece.size();
  int64_t sent_nanos = now_ * kNanosPerMicro;
  if (plan_.bits_per_second != 0) {
    int64_t& busy_until = up_busy_until_[from_node];
    const int64_t start = std::max(sent_nanos, busy_until);
    if (start > sent_nanos &&
        start - sent_nanos + wire_nanos(length) > wire_nanos(plan_.device_queue_bytes)) {
      ++counters_.refused;
      return false;
    }
    busy_until = start + wire_nanos(length);
    sent_nanos = busy_until;
  }
  ++counters_.sent;
  if (cut(from_node, to_node)) {
    ++counters_.partitioned;
    return true;
  }
  Link& on = link(from_node, to_node);
  const bool lost = link_loses(&on);
  const bool recording = on.faults.replay > 0;
  if (lost && !recording) return true;

  const uint32_t datagram = new_datagram();
  Datagram& made = datagrams_[datagram];
  made.from = from;
  made.to = to;
  made.bytes.clear();
  for (const auto& piece : pieces) made.bytes.insert(made.bytes.end(), piece.begin(), piece.end());
  if (recording) record(&on, made);
  if (recording && on.random.chance(on.faults.replay)) {
    ++counters_.replayed;
    depart(&on, copy_of(from, to, on.history[on.random.below(on.history.size())]), sent_nanos);
  }
  if (lost) {
    drop(datagram);
    return true;
  }
  if (on.random.chance(on.faults.duplicate)) {
    ++counters_.duplicated;
    depart(&on, copy_of(from, to, datagrams_[datagram].bytes), sent_nanos);
  }
  depart(&on, datagram, sent_nanos);
  return true;
}

// The receiver's cable: first come, first served, with a finite queue in front of it.
void Network::at_switch(const Event& event) {
  const Datagram& datagram = datagrams_[event.datagram];
  const int64_t arrived = event.time * kNanosPerMicro;
  int64_t& busy_until = down_busy_until_[node_of(datagram.to)];
  const int64_t start = std::max(arrived, busy_until);
  const int64_t wire = wire_nanos(datagram.bytes.size());
  if (start > arrived && start - arrived + wire > wire_nanos(plan_.switch_queue_bytes)) {
    ++counters_.switch_overflow;
    drop(event.datagram);
    return;
  }
  busy_until = start + wire;
  schedule((busy_until + kNanosPerMicro - 1) / kNanosPerMicro, Stage::kArrive, event.datagram);
}

// True when the datagram was delivered.
bool Network::arrive(const Event& event) {
  const Datagram& datagram = datagrams_[event.datagram];
  const uint32_t node = node_of(datagram.to);
  if (event.stage == Stage::kParked) --waiting_[node];
  if (event.stage == Stage::kArrive && cut(node_of(datagram.from), node)) {
    ++counters_.partitioned;
    drop(event.datagram);
    return false;
  }
  SimQueue* queue = open_queues_[datagram.to];
  const Micros until = paused_until(node);
  const bool full = (queue != nullptr && queue->waiting() >= plan_.receive_buffer) ||
                    (until > now_ && waiting_[node] >= plan_.receive_buffer);
  if (full) {
    ++counters_.receive_overflow;
    if (queue != nullptr) queue->count_overflow();
    drop(event.datagram);
    return false;
  }
  if (until > now_) {
    ++waiting_[node];
    events_.push_back({until, event.order, event.datagram, Stage::kParked});  // the order of arrival is kept
    std::push_heap(events_.begin(), events_.end(), later);
    return false;
  }
  ++counters_.delivered;
  trace_ = mix(trace_, static_cast<uint64_t>(now_));
  trace_ = mix(trace_, uint64_t{datagram.from} << 32 | datagram.to);
  trace_ = mix(trace_, datagram.bytes.size());
  trace_ = mix(trace_, hash_bytes(datagram.bytes));
  if (queue != nullptr) {
    queue->deliver(event.datagram);
    return true;
  }
  // The slot is given back after the call: the handler may send, which would reuse it.
  if (handler_) handler_(datagram.from, datagram.to, datagram.bytes);
  drop(event.datagram);
  return true;
}

size_t Network::advance_to(Micros time) {
  SLUICE_ASSERT(time != kNever);
  size_t delivered = 0;
  while (!events_.empty() && events_.front().time <= time) {
    std::pop_heap(events_.begin(), events_.end(), later);
    const Event event = events_.back();
    events_.pop_back();
    now_ = std::max(now_, event.time);
    if (event.stage == Stage::kSwitch) {
      at_switch(event);
    } else {
      delivered += arrive(event) ? 1 : 0;
    }
  }
  now_ = std::max(now_, time);
  return delivered;
}

std::unique_ptr<Port> Network::open_port(uint32_t node) {
  SLUICE_ASSERT(node < options_.nodes);
  return std::make_unique<SimPort>(this, node);
}

}  // namespace sluice::port::sim
