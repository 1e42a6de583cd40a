#include "tests/simulation/cluster.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "base/assert.h"
#include "tests/simulation/hash.h"

namespace sluice::simulation {
namespace {

constexpr size_t kOldKept = 1024;
constexpr Micros kRest = 20'000'000;    // within which everything must come to rest after the last op
constexpr int kRoundsPerMoment = 1000;  // of one node at one moment: more is an endless loop

port::sim::Network::Options network_options(const Options& options) {
  port::sim::Network::Options network;
  network.nodes = options.nodes();
  network.queues = options.lanes;
  network.seed = mix(options.seed, 0xFA17);
  network.plan = options.plan;
  network.max_datagram = options.payload + wire::kHeaderBytes + wire::kTagBytes;
  return network;
}

}  // namespace

Cluster::Cluster(const Options& options, const Gradients& gradients,
                 std::vector<std::unique_ptr<Checker>> checkers)
    : options_(options),
      gradients_(gradients),
      checkers_(std::move(checkers)),
      network_(network_options(options)),
      random_(mix(options.seed, 0x7AB5)),
      fault_random_(mix(options.seed, 0xF0F6)),
      nodes_(options.nodes()),
      sent_(static_cast<size_t>(options.nodes()) * options.lanes) {
  SLUICE_ASSERT(options_.ranks() <= kMaxRanks);
  network_.advance_to(options_.clock);
  last_progress_ = options_.clock;
  ranks_.reserve(options_.ranks());
  for (uint32_t node = 0; node < nodes_.size(); ++node) {
    for (uint32_t local = 0; local < options_.ranks_of_node[node]; ++local) {
      Rank rank;
      rank.id = static_cast<uint32_t>(ranks_.size());
      rank.node = node;
      rank.local = local;
      rank.taken.assign(gradients_.tags().size(), 0);
      ranks_.push_back(std::move(rank));
      schedule_next_call(&ranks_.back());
      nodes_[node].ranks.push_back(&ranks_.back());
    }
    for (uint32_t lane = 0; lane < options_.lanes; ++lane) {
      nodes_[node].lanes.push_back(
          std::make_unique<exchange::Lane>(settings_for(node, lane), network_.now()));
    }
  }
  network_.on_delivery(
      [this](uint32_t from, uint32_t to, std::span<const std::byte> bytes) { arrive(from, to, bytes); });
}

Cluster::~Cluster() = default;

exchange::Settings Cluster::settings_for(uint32_t node, uint32_t lane) const {
  exchange::Settings s;
  s.job = "simulation";
  for (size_t i = 0; i < s.key.size(); ++i) s.key[i] = static_cast<uint8_t>(mix(options_.seed, i));
  s.sealing = options_.sealing;
  s.generation = options_.generation;
  for (uint32_t n = 0; n < nodes_.size(); ++n) {
    wire::ViewMember member;
    for (size_t i = 0; i < member.join_nonce.size(); ++i) {
      const uint64_t start = n == options_.started_anew ? options_.generation : 0;
      member.join_nonce[i] = static_cast<uint8_t>(mix(options_.seed + n, i + 100 + 100 * start));
    }
    s.members.push_back(member);
    s.node_of_rank.insert(s.node_of_rank.end(), options_.ranks_of_node[n], n);
  }
  s.self = node;
  s.lane = lane;
  s.lanes = options_.lanes;
  s.payload = options_.payload;
  s.hard_deadline = options_.hard_deadline;
  s.op_timeout = options_.op_timeout;
  s.rank_timeout = options_.rank_timeout;
  s.peer_interval = options_.peer_interval;
  s.peer_timeout = options_.peer_timeout;
  s.pull_patience = options_.pull_patience;
  s.min_contribution = options_.min_contribution;
  s.max_lag = options_.max_lag;
  s.incast = options_.incast;
  s.carry_over = options_.carry_over;
  s.carry_max_ops = options_.carry_max_ops;
  s.fill_own = options_.fill_own;
  s.adaptive = options_.adaptive;
  s.hard_deadline_min = options_.hard_deadline_min;
  s.warmup_ops = options_.warmup_ops;
  s.h_factor = options_.h_factor;
  s.flow_window = options_.flow_window;
  s.flow_window_min = options_.flow_window_min;
  s.max_op_bytes = std::max<uint64_t>(options_.largest_op_bytes(), 4096);
  s.pool_bytes = options_.pool_ops * exchange::minimum_pool_bytes(s);
  return s;
}

void Cluster::note(uint64_t a, uint64_t b) { facts_.hash = mix(mix(facts_.hash, a), b); }

void Cluster::print_packet(const char* what, uint32_t from, uint32_t to, const wire::Header& header,
                           size_t payload) const {
  const auto type = static_cast<wire::Type>(header.type);
  const bool of_op = type != wire::Type::kPing && type != wire::Type::kPong;
  if (watched_op_ != kAllOps && (!of_op || header.op_seq != watched_op_)) return;
  std::printf(
      "%10lld   %u > %u %s op %u shard %u block %u of %u ranks %u flags %02x counter %llu, %zu bytes: %s\n",
      static_cast<long long>(network_.now()), from, to, wire::type_name(type), header.op_seq, header.shard,
      static_cast<uint32_t>(header.block), static_cast<uint32_t>(header.total), header.ranks, header.flags,
      static_cast<unsigned long long>(header.counter), payload, what);
}

// --- Packets in -----------------------------------------------------------------------------------------------------

bool Cluster::genuine(uint32_t from_node, uint32_t lane, std::span<const std::byte> bytes) const {
  wire::Header header;
  if (bytes.size() < sizeof header) return false;
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto& hashes = sent_[from_node * options_.lanes + lane];
  return header.counter < hashes.size() && hashes[header.counter] == (hash_bytes(bytes) | 1);
}

void Cluster::arrive(uint32_t from, uint32_t to, std::span<const std::byte> bytes) {
  const uint32_t lanes = options_.lanes;
  if (!healed_) {  // before the true one, whose bits would be set
    if (options_.misroute > 0 || options_.forge > 0) misroute_and_forge(from, to, bytes);
    if (!older_view_.empty() && fault_random_.chance(options_.older_view)) replay_older_view();
  }
  deliver(from / lanes, to / lanes, to % lanes, bytes);
}

void Cluster::replay_older_view() {
  const Old& old = older_view_[fault_random_.below(older_view_.size())];
  const uint32_t lanes = options_.lanes, to = old.to / lanes;
  if (network_.paused(to)) return;
  ++facts_.older_view;
  deliver(old.from / lanes, to, old.to % lanes, old.bytes, Delivered::Kind::kOlderView);
}

void Cluster::deliver(uint32_t from_node, uint32_t index, uint32_t lane, std::span<const std::byte> bytes,
                      Delivered::Kind kind) {
  Node& node = nodes_[index];
  if (node.crashed) return;
  wire::Header header;
  if (bytes.size() >= sizeof header) {
    std::memcpy(&header, bytes.data(), sizeof header);
    // The engine's part of the order of checks: the source must be the address of the sender that is named.
    if (header.sender != from_node && header.sender < nodes_.size() && header.sender != index) {
      ++facts_.source_mismatch;
      ++facts_.drops[static_cast<size_t>(wire::Drop::kSource)];
      return;
    }
  }
  Delivered delivered;
  delivered.now = network_.now();
  delivered.node = index;
  delivered.lane = lane;
  delivered.from = from_node;
  delivered.genuine = genuine(from_node, lane, bytes);
  delivered.datagram = bytes;
  delivered.kind = kind;
  delivered.drop = node.lanes[lane]->on_packet(network_.now(), bytes);
  ++facts_.drops[static_cast<size_t>(delivered.drop)];
  if (watched_op_ != kNoOp && bytes.size() >= sizeof header) {
    print_packet(wire::drop_name(delivered.drop), from_node, index, header, bytes.size() - sizeof header);
  }
  for (const auto& checker : checkers_) checker->on_delivered(delivered);
  node.touched = true;
}

// Faults that the network does not know, because they need to know what a packet is.
void Cluster::misroute_and_forge(uint32_t from, uint32_t to, std::span<const std::byte> bytes) {
  const uint32_t lanes = options_.lanes;
  if (nodes_.size() > 2 && fault_random_.chance(options_.misroute)) {
    const auto other = static_cast<uint32_t>(fault_random_.below(nodes_.size()));
    if (other != from / lanes && other != to / lanes && !network_.paused(other)) {
      ++facts_.misrouted;
      deliver(from / lanes, other, to % lanes, bytes, Delivered::Kind::kMisrouted);
    }
  }
  if (fault_random_.chance(options_.forge) && bytes.size() >= wire::kHeaderBytes + wire::kTagBytes) {
    scratch_.assign(bytes.begin(), bytes.end());
    wire::Header header;
    std::memcpy(&header, scratch_.data(), sizeof header);
    if (options_.sealing == wire::Sealing::kNone) {
      // Without tags a node believes what it reads; but it must not count a block that was made under another policy
      // than its own, or of a type that does not exist.
      if (header.type != static_cast<uint8_t>(wire::Type::kPush)) return;
      if (fault_random_.chance(0.5))
        header.policy ^= static_cast<uint8_t>(1 + fault_random_.below(255));
      else
        header.flags |= 0xe0;
      std::memcpy(scratch_.data(), &header, sizeof header);
      ++facts_.forged;
      const std::vector<std::byte> other = scratch_;
      return deliver(from / lanes, to / lanes, to % lanes, other, Delivered::Kind::kForged);
    }
    const auto near = [&](uint32_t value) {
      return value + static_cast<uint32_t>(fault_random_.below(5)) - 2;
    };
    for (uint64_t changes = 1 + fault_random_.below(3); changes > 0; --changes) {
      switch (fault_random_.below(11)) {
        case 0:
          header.epoch = near(header.epoch);
          break;
        case 1:
          header.job ^= 1U << fault_random_.below(32);
          break;
        case 2:
          header.op_seq += static_cast<uint32_t>(fault_random_.below(140)) - 70;
          break;
        case 3:
          header.block = near(header.block);
          break;
        case 4:
          header.shard = static_cast<uint16_t>(near(header.shard));
          break;
        case 5:
          header.type = static_cast<uint8_t>(1 + fault_random_.below(17));
          break;
        case 6:
          header.counter += fault_random_.below(10'000);
          break;
        case 7:
          header.flags = static_cast<uint8_t>(fault_random_.next());
          break;
        case 8:
          header.sender = static_cast<uint16_t>(near(header.sender));
          break;
        case 9:
          header.elements = static_cast<uint16_t>(near(header.elements));
          break;
        default:
          header.total = near(header.total);
          break;
      }
    }
    std::memcpy(scratch_.data(), &header, sizeof header);
    for (size_t i = scratch_.size() - wire::kTagBytes; i < scratch_.size(); ++i) {
      scratch_[i] = static_cast<std::byte>(fault_random_.next());
    }
    ++facts_.forged;
    const std::vector<std::byte> forged = scratch_;
    deliver(from / lanes, to / lanes, to % lanes, forged, Delivered::Kind::kForged);
  }
}

// --- Packets out ------------------------------------------------------------------------------------------------------

bool Cluster::flush_unsent(Node* node, uint32_t index) {
  while (node->unsent_first < node->unsent.size()) {
    const Unsent& next = node->unsent[node->unsent_first];
    const uint32_t from = index * options_.lanes + next.to % options_.lanes;  // lane k talks to lane k
    if (!network_.send(from, next.to, next.bytes)) return false;
    ++node->unsent_first;
  }
  node->unsent.clear();
  node->unsent_first = 0;
  return true;
}

bool Cluster::send_one(uint32_t index, uint32_t lane, const exchange::Outgoing& packet) {
  wire::Header header;
  std::memcpy(&header, packet.header, sizeof header);
  const std::span<const std::byte> pieces[3] = {{packet.header, wire::kHeaderBytes},
                                                {packet.payload, packet.payload_length},
                                                {packet.tag, packet.tag != nullptr ? wire::kTagBytes : 0}};
  scratch_.clear();
  for (const auto& piece : pieces) scratch_.insert(scratch_.end(), piece.begin(), piece.end());

  Sent sent;
  sent.now = network_.now();
  sent.node = index;
  sent.to = packet.node;
  sent.lane = lane;
  sent.header = header;
  sent.payload = pieces[1];
  sent.hash = hash_bytes(scratch_) | 1;
  for (const auto& checker : checkers_) checker->on_sent(sent);
  auto& hashes = sent_[index * options_.lanes + lane];
  if (header.counter >= hashes.size()) hashes.resize(header.counter + 1 + header.counter / 2, 0);
  hashes[header.counter] = sent.hash;
  note(mix(sent.now, static_cast<uint64_t>(index) << 32 | packet.node), sent.hash);
  ++facts_.datagrams;
  facts_.bytes += scratch_.size();
  ++facts_.by_type[header.type % wire::kTypes];
  // A sample of everything: all of the first ones, later ones at random places.
  if (old_.size() < kOldKept) {
    old_.push_back({index * options_.lanes + lane, packet.node * options_.lanes + lane, scratch_});
  } else if (const uint64_t place = mix(facts_.datagrams, 0x01D) % facts_.datagrams; place < kOldKept) {
    old_[place] = {index * options_.lanes + lane, packet.node * options_.lanes + lane, scratch_};
  }

  SLUICE_ASSERT(packet.node < nodes_.size() && packet.node != index);
  if (watched_op_ != kNoOp) print_packet("sent", index, packet.node, header, packet.payload_length);
  if (filter_ != nullptr && !filter_(header, index, packet.node, filter_context_)) return true;
  const uint32_t to = packet.node * options_.lanes + lane;
  Node& node = nodes_[index];
  if (node.unsent.empty() && network_.send(index * options_.lanes + lane, to, scratch_)) return true;
  node.unsent.push_back({to, scratch_});
  return false;
}

// True: there were events.
bool Cluster::send_all(uint32_t index) {
  Node& node = nodes_[index];
  bool events = false;
  node.more_to_send = false;
  std::array<exchange::Outgoing, 32> out;
  const size_t burst = std::min<size_t>(options_.burst, out.size());
  for (uint32_t turn = 0, idle = 0; idle < options_.lanes; ++turn) {
    if (!flush_unsent(&node, index) || network_.device_free_at(index * options_.lanes) > network_.now()) {
      node.more_to_send = true;
      return events;
    }
    const uint32_t lane = (node.first_lane + turn) % options_.lanes;
    const size_t count = node.lanes[lane]->poll_send(network_.now(), std::span(out).first(burst));
    SLUICE_ASSERT(count <= burst);
    for (size_t i = 0; i < count; ++i) send_one(index, lane, out[i]);
    events |= take_events(index);  // what ended in this call may have let later ops begin
    idle = count == 0 ? idle + 1 : 0;
    if (turn > 1'000'000) SLUICE_ASSERT(!"poll_send never ends");
  }
  node.first_lane = (node.first_lane + 1) % options_.lanes;
  return events;
}

// --- Time ---------------------------------------------------------------------------------------------------------------

// Lanes know nothing of each other: that a job has ended on one is told to the others by the daemon.
void Cluster::share_failure(Node* node) {
  for (const auto& lane : node->lanes) {
    if (!lane->failed()) continue;
    for (const auto& other : node->lanes) {
      if (!other->failed()) other->fail(network_.now(), lane->failure(), lane->failure_text(), true);
    }
    return;
  }
}

void Cluster::run_node(uint32_t index) {
  Node& node = nodes_[index];
  node.touched = false;
  const Micros now = network_.now();
  for (int round = 0;; ++round) {
    SLUICE_ASSERT(round < kRoundsPerMoment);
    for (Rank* rank : node.ranks) submit_ready(rank);
    for (const auto& lane : node.lanes) {
      if (lane->next_timer() <= now) lane->tick(now);
    }
    share_failure(&node);
    bool events = take_events(index);
    for (Rank* rank : node.ranks) events |= retire_at_end(rank);
    events |= send_all(index);
    events |= take_events(index);
    update_wake(index);
    if (!events && node.wake > now) return;
  }
}

void Cluster::update_wake(uint32_t index) {
  Node& node = nodes_[index];
  Micros wake = kNever;
  const Micros device = network_.device_free_at(index * options_.lanes);
  for (const auto& lane : node.lanes) {
    // A timer that is still due after a tick means work for poll_send, which has to wait for the device.
    const Micros timer = lane->next_timer();
    wake = std::min(wake, node.more_to_send && timer <= network_.now() ? device : timer);
  }
  for (const Rank* rank : node.ranks) {
    if (!rank->retiring && rank->next_op < options_.program.size() &&
        rank->without_result < options_.in_flight && rank->without_resolved < exchange::kWindow) {
      wake = std::min(wake, rank->ready);
    }
  }
  if (node.more_to_send) wake = std::min(wake, device);
  node.wake = wake;
}

void Cluster::heal() {
  healed_ = true;
  network_.heal();
  port::sim::FaultPlan roomy = network_.plan();
  roomy.switch_queue_bytes = port::sim::FaultPlan().switch_queue_bytes;
  network_.set_plan(std::move(roomy));
  for (Rank& rank : ranks_) rank.ready = std::min(rank.ready, network_.now() + options_.compute);
  for (uint32_t node = 0; node < nodes_.size(); ++node) {
    if (!nodes_[node].crashed) nodes_[node].touched = true;
  }
  last_progress_ = network_.now();
  if (verbose_) std::printf("%10lld the network heals\n", static_cast<long long>(network_.now()));
  for (const auto& checker : checkers_) checker->on_heal(network_.now(), furthest_ == 0 ? 0 : furthest_ - 1);
}

bool Cluster::all_resolved() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
    if (nodes_[rank.node].crashed) return true;
    if (rank.next_op != options_.program.size() || !rank.calls.empty()) return false;
    if (nodes_[rank.node].lanes[0]->failed()) return true;
    const uint64_t all = (uint64_t{1} << options_.lanes) - 1;
    return std::all_of(rank.taken.begin(), rank.taken.end(), [&](uint64_t lanes) { return lanes == all; });
  });
}

bool Cluster::all_at_rest() const {
  for (const Node& node : nodes_) {
    if (node.crashed) continue;
    for (const auto& lane : node.lanes) {
      if (!lane->failed() && (!lane->idle() || !lane->drained())) return false;
    }
  }
  return true;
}

std::string Cluster::who_waits() const {
  std::string text;
  for (const Rank& rank : ranks_) {
    if (nodes_[rank.node].crashed || (rank.calls.empty() && rank.next_op == options_.program.size()))
      continue;
    text += "rank " + std::to_string(rank.id) + " next op " + std::to_string(rank.next_op) + ", open";
    for (const auto& [op, call] : rank.calls) {
      text += " " + std::to_string(op) + (call.lanes_result == options_.lanes ? "(has result)" : "");
    }
    const auto& lane = *nodes_[rank.node].lanes[0];
    text += ", hears done";
    for (uint32_t node = 0; node < nodes_.size(); ++node) text += " " + std::to_string(lane.peer(node).done);
    text += "; ";
  }
  return text;
}

// When everything has come to rest, what was sent long ago comes again: nothing may begin anew (trap 1).
void Cluster::everything_again() {
  for (const Old& old : old_) {
    deliver(old.from / options_.lanes, old.to / options_.lanes, old.to % options_.lanes, old.bytes,
            Delivered::Kind::kAgain);
  }
  for (uint32_t node = 0; node < nodes_.size(); ++node) run_node(node);
}

RunFacts Cluster::run() {
  const auto heal_op = static_cast<uint32_t>(options_.heal_at * static_cast<double>(options_.program.size()));
  bool finished = false;
  Micros finished_at = 0;
  for (;;) {
    Micros next = network_.next_event();
    for (uint32_t index = 0; index < nodes_.size(); ++index) {
      Node& node = nodes_[index];
      if (node.crashed) continue;
      const Micros until = network_.paused_until(index);
      if (until > network_.now() && until != node.pause_seen) {
        node.paused += until - network_.now();
        node.pause_seen = until;
        ++facts_.pauses;
        if (until - network_.now() >= 1'000'000) ++facts_.long_pauses;
      }
      next = std::min(next, std::max(node.wake, until));
    }
    if (options_.crash && !nodes_[options_.crash_node].crashed) next = std::min(next, options_.crash_at);
    if (options_.abort && !aborted_) next = std::min(next, options_.abort_at);
    if (next == kNever) break;
    next = std::max(next, network_.now());
    network_.advance_to(next);
    const Micros now = network_.now();
    if (options_.crash && now >= options_.crash_at && !nodes_[options_.crash_node].crashed) {
      nodes_[options_.crash_node].crashed = true;
      ++facts_.crashes;
      last_progress_ = now;
      if (verbose_) std::printf("%10lld node %u crashes\n", static_cast<long long>(now), options_.crash_node);
    }
    if (options_.abort && !aborted_ && now >= options_.abort_at) {
      aborted_ = true;
      ++facts_.aborts;
      nodes_[options_.abort_node].lanes[0]->fail(now, Status::kAborted,
                                                 "ABORTED: the client of a rank has died");
      nodes_[options_.abort_node].touched = true;
      last_progress_ = now;
    }
    for (uint32_t index = 0; index < nodes_.size(); ++index) {
      Node& node = nodes_[index];
      if (!node.crashed && (node.touched || node.wake <= now) && !network_.paused(index)) run_node(index);
    }
    if (!healed_ && options_.heal_at <= 1 && furthest_ >= heal_op) heal();

    if (!finished && all_resolved()) {
      finished = true;
      finished_at = now;
      if (!healed_ && !options_.crash && !options_.abort) heal();
    }
    if (finished && (all_at_rest() || now > finished_at + kRest)) break;
    // While faults last only rank_timeout bounds a wait; afterwards a few rounds must do.
    const Micros patience = healed_ ? 2'000'000 + 20 * (1 + options_.pull_patience) * options_.hard_deadline
                                    : options_.rank_timeout + options_.peer_timeout + 5'000'000;
    if (!finished && now > last_progress_ + patience) break;
  }

  if (finished && all_at_rest() && !options_.ends_early()) everything_again();
  look_at_released(0);
  facts_.virtual_us = network_.now() - options_.clock;
  facts_.network = network_.counters();
  RunEnd end;
  end.now = network_.now();
  end.finished = finished;
  if (!finished) end.stuck = who_waits();
  for (uint32_t index = 0; index < nodes_.size(); ++index) {
    if (nodes_[index].crashed) continue;
    end.live_nodes.push_back(index);
    for (const auto& lane : nodes_[index].lanes) end.lanes.push_back(lane.get());
  }
  for (const auto& checker : checkers_) checker->at_end(end);
  note(network_.trace_hash(), facts_.virtual_us);
  return facts_;
}

}  // namespace sluice::simulation
