#include "tests/unit/fake_daemon.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <new>
#include <vector>

#include "base/clock.h"
#include "base/ipc/channel.h"
#include "base/ipc/doorbell.h"
#include "base/ipc/ring.h"
#include "base/ipc/view_blob.h"
#include "base/mapping.h"

namespace sluice::test {
namespace {

using ipc::Channel;
using ipc::Completion;
using ipc::Descriptor;
using ipc::Message;
using ipc::MessageType;

constexpr int kSendTimeoutMs = 2000;

struct Client {
  explicit Client(Channel connected) : channel(std::move(connected)) {}

  Channel channel;
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint64_t arena_bytes = 0;
  uint64_t max_op_bytes = 0;
  Micros join_by = 0;
  bool wants_in = false;  // JOIN came
  bool joined = false;
  bool dead = false;
  UniqueFd control_fd, submit_fd, arena_fd;
  Mapping control_map, submit_map, arena;
  ipc::ControlPage* control = nullptr;
  ipc::SubmitPage* submit = nullptr;
  std::array<ipc::DescriptorReader, ipc::kMaxLanes> readers;
  std::array<ipc::CompletionWriter, ipc::kMaxLanes> writers;
  // Submitted on a lane and not answered yet.
  std::array<std::map<uint32_t, Descriptor>, ipc::kMaxLanes> open;
  // Answered with RESULT, RESOLVED still owed.
  std::array<std::vector<Completion>, ipc::kMaxLanes> owed;

  void say(MessageType type, uint32_t code, const std::string& text) {
    Message message;
    message.type = static_cast<uint32_t>(type);
    message.code = code;
    ipc::set_text(message.text, text);
    (void)channel.send(message, kSendTimeoutMs);
  }
};

template <typename T>
void sum_elements(const std::vector<Client*>& ranks, const std::vector<Descriptor>& d, size_t from, size_t to,
                  bool mean) {
  for (size_t i = from; i < to; ++i) {
    T sum{};
    for (size_t r = 0; r < ranks.size(); ++r) {
      T value;
      std::memcpy(&value, ranks[r]->arena.data() + d[r].contribution + i * sizeof(T), sizeof(T));
      sum = static_cast<T>(sum + value);
    }
    if (mean) sum = static_cast<T>(sum / static_cast<T>(ranks.size()));
    for (size_t r = 0; r < ranks.size(); ++r) {
      std::memcpy(ranks[r]->arena.data() + d[r].result + i * sizeof(T), &sum, sizeof(T));
    }
  }
}

bool same_call(const Descriptor& a, const Descriptor& b) {
  return a.kind == b.kind && a.element_type == b.element_type && a.count == b.count && a.tag == b.tag &&
         a.op_class == b.op_class;
}

std::string words(const Descriptor& d) {
  return std::to_string(d.count) + " x " + element_type_name(static_cast<ElementType>(d.element_type)) +
         " tag " + std::to_string(d.tag);
}

}  // namespace

class FakeDaemon::Server {
 public:
  Server(FakeDaemon& owner, const FakeOptions& options) : owner_(owner), options_(options) {
    for (uint32_t lane = 0; lane < options_.lanes; ++lane) {
      events_.emplace_back(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    }
  }

  void serve(ipc::Listener& listener) {
    while (!owner_.die_) {
      if (owner_.evict_.exchange(false)) evict_all();
      if (owner_.shut_down_.exchange(false)) {
        for (Client& client : clients_) client.say(MessageType::kBye, 0, "it is being upgraded");
        return;
      }
      for (Client& client : clients_) hear(client);
      answer_joins();
      for (uint32_t lane = 0; lane < options_.lanes; ++lane) work(lane);
      bury();
      owner_.clients_ = static_cast<int>(clients_.size());
      sleep(listener);
      while (true) {
        auto channel = listener.accept(0);
        if (!channel.ok()) break;
        clients_.emplace_back(std::move(*channel));
      }
    }
  }

 private:
  // --- Control messages ---

  void hear(Client& client) {
    if (options_.silent) return;
    for (;;) {
      auto received = client.channel.receive(0);
      if (!received.ok()) {
        if (received.error().code != ETIMEDOUT) client.dead = true;
        return;
      }
      handle(client, *received);
    }
  }

  void handle(Client& client, ipc::Received& received) {
    const Message& message = received.message;
    switch (static_cast<MessageType>(message.type)) {
      case MessageType::kHello:
        return welcome(client, message);
      case MessageType::kJoin:
        return want_in(client, received);
      case MessageType::kMapped:
        // The client has its writable mappings; nobody makes new ones, and no hole can be punched any more.
        if (!seal_future_writes(client.submit_fd.get()).ok() ||
            !seal_future_writes(client.arena_fd.get()).ok()) {
          std::abort();
        }
        return;
      case MessageType::kLeave:
        ++owner_.leaves_;
        client.say(MessageType::kBye, 0, "");
        client.dead = true;
        client.joined = false;  // it left in peace: no other rank suffers
        return;
      case MessageType::kAbort:
        for (Client& other : clients_) {
          if (other.job == client.job && other.joined)
            fail_open(other, Status::kAborted, "a rank called abort");
        }
        return;
      default:
        return;
    }
  }

  void welcome(Client& client, const Message& message) {
    Message reply;
    reply.type = static_cast<uint32_t>(MessageType::kWelcome);
    reply.abi_version = options_.abi_version;
    reply.lanes = options_.lanes;
    reply.payload = options_.payload;
    client.job = message.job;
    client.rank = message.rank;
    client.world_size = message.world_size;
    // One nonce per job, so that its ranks are one node.
    uint8_t& last = nonces_[client.job];
    if (last == 0) last = static_cast<uint8_t>(nonces_.size());
    std::fill(std::begin(reply.join_nonce), std::end(reply.join_nonce), last);
    ipc::set_text(reply.text, "127.0.0.1:9470 ant");
    (void)client.channel.send(reply, kSendTimeoutMs);
  }

  void want_in(Client& client, ipc::Received& received) {
    const Message& message = received.message;
    if (!options_.refuse_join.empty()) {
      client.say(MessageType::kRefuse, static_cast<uint32_t>(Status::kRefused), options_.refuse_join);
      client.dead = true;
      return;
    }
    if (received.fd_count == 1) {
      auto view = ipc::decode_view(received.fds[0].get());
      if (!view.ok() || view->node_of_rank.size() != message.world_size) {
        client.say(MessageType::kRefuse, static_cast<uint32_t>(Status::kInvalid), "bad view");
        client.dead = true;
        return;
      }
    }
    client.arena_bytes = message.arena_bytes;
    client.max_op_bytes = message.max_op_bytes;
    client.join_by = monotonic_micros() + Micros{message.timeout_ms} * kMicrosPerMilli;
    client.wants_in = true;
  }

  void answer_joins() {
    for (Client& client : clients_) {
      if (!client.wants_in || client.dead) continue;
      std::vector<bool> here(client.world_size, false);
      for (const Client& other : clients_) {
        if (other.job == client.job && (other.wants_in || other.joined) && other.rank < here.size()) {
          here[other.rank] = true;
        }
      }
      if (std::all_of(here.begin(), here.end(), [](bool b) { return b; })) {
        // All of them at once: by the next look some would count as joined.
        for (Client& other : clients_) {
          if (other.job == client.job && other.wants_in) admit(other);
        }
      } else if (monotonic_micros() > client.join_by) {
        std::string missing;
        for (size_t r = 0; r < here.size(); ++r) {
          if (!here[r]) missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(r);
        }
        client.say(MessageType::kRefuse, static_cast<uint32_t>(Status::kTimeout),
                   missing + " did not join in time");
        client.dead = true;
      }
    }
  }

  static UniqueFd region(const char* name, size_t size) {
    auto fd = create_memfd(name, size);
    if (!fd.ok()) std::abort();
    return std::move(*fd);
  }
  static Mapping map(const UniqueFd& fd, size_t size) {
    auto mapping = Mapping::map(fd.get(), size, Access::kReadWrite);
    if (!mapping.ok()) std::abort();
    return std::move(*mapping);
  }

  void admit(Client& client) {
    client.wants_in = false;
    client.joined = true;
    client.control_fd = region("fake-control", sizeof(ipc::ControlPage));
    client.submit_fd = region("fake-submit", sizeof(ipc::SubmitPage));
    client.arena_fd = region("fake-arena", client.arena_bytes);
    client.control_map = map(client.control_fd, sizeof(ipc::ControlPage));
    client.submit_map = map(client.submit_fd, sizeof(ipc::SubmitPage));
    client.arena = map(client.arena_fd, client.arena_bytes);
    client.control = new (client.control_map.data()) ipc::ControlPage();
    client.submit = new (client.submit_map.data()) ipc::SubmitPage();
    client.control->lanes = options_.lanes;
    // Only read by the client: sealed before it gets the descriptor.
    if (!seal_future_writes(client.control_fd.get()).ok()) std::abort();
    Message reply;
    reply.type = static_cast<uint32_t>(MessageType::kJoined);
    reply.lanes = options_.lanes;
    reply.payload = options_.payload;
    reply.arena_bytes = client.arena_bytes;
    reply.nodes = 1;
    reply.node = 0;
    std::vector<int> fds = {client.control_fd.get(), client.submit_fd.get(), client.arena_fd.get()};
    for (uint32_t lane = 0; lane < options_.lanes; ++lane) {
      fds.push_back(events_[lane].get());
      client.readers[lane] = ipc::descriptor_reader(*client.control, *client.submit, lane);
      client.writers[lane] = ipc::completion_writer(*client.control, *client.submit, lane);
    }
    if (!client.channel.send(reply, fds, kSendTimeoutMs).ok()) client.dead = true;
  }

  // --- Lanes ---

  bool valid(const Client& client, const Descriptor& d) const {
    if (d.request != static_cast<uint32_t>(ipc::Request::kAllreduce) || d.element_type >= kElementTypes)
      return false;
    const uint64_t element = element_size(static_cast<ElementType>(d.element_type));
    if (d.count > client.max_op_bytes / element) return false;
    const uint64_t bytes = d.count * element;
    return d.contribution % 64 == 0 && d.result % 64 == 0 && d.contribution <= client.arena_bytes &&
           bytes <= client.arena_bytes - d.contribution && d.result <= client.arena_bytes &&
           bytes <= client.arena_bytes - d.result;
  }

  void let_go(Client& client, Status status, const std::string& text) {
    if (client.control != nullptr) {
      ipc::set_text(client.control->gone.text, text);
      client.control->gone.value.store(static_cast<uint32_t>(status), std::memory_order_release);
    }
    client.dead = true;
  }

  void evict_all() {
    for (Client& client : clients_) let_go(client, Status::kRefused, "an operator drained this node");
  }

  void work(uint32_t lane) {
    for (Client& client : clients_) {
      if (!client.joined || client.dead) continue;
      Descriptor d;
      ipc::RingState state = ipc::RingState::kEmpty;
      while ((state = client.readers[lane].pop(&d)) == ipc::RingState::kOk) {
        ++owner_.descriptors_read_;
        if (!valid(client, d)) {
          ++owner_.bad_descriptors_;
          let_go(client, Status::kInvalid, "bad descriptor: " + words(d));
          break;
        }
        client.open[lane].emplace(d.op_seq, d);
      }
      if (state == ipc::RingState::kBroken) let_go(client, Status::kInvalid, "the submit ring is broken");
    }
    if (owner_.held_) return;
    for (Client& client : clients_) {
      if (!client.joined || client.dead || client.rank != 0) continue;
      while (!client.open[lane].empty() && finish(client, lane, client.open[lane].begin()->first)) {
      }
    }
    if (owner_.resolve_) resolve(lane);
  }

  // Ends op `op_seq` on `lane` when every rank of the job has submitted it. Rank 0's entry leads.
  bool finish(Client& leader, uint32_t lane, uint32_t op_seq) {
    std::vector<Client*> ranks(leader.world_size, nullptr);
    for (Client& other : clients_) {
      if (other.job == leader.job && other.joined && !other.dead) ranks[other.rank] = &other;
    }
    std::vector<Descriptor> d;
    for (Client* rank : ranks) {
      if (rank == nullptr) return false;
      const auto place = rank->open[lane].find(op_seq);
      if (place == rank->open[lane].end()) return false;
      d.push_back(place->second);
    }
    const bool match =
        std::all_of(d.begin(), d.end(), [&](const Descriptor& x) { return same_call(x, d[0]); });
    const auto type = static_cast<ElementType>(d[0].element_type);
    const uint64_t per_block = options_.payload / element_size(type);
    const uint64_t blocks = (d[0].count + per_block - 1) / per_block;
    uint32_t mine = 0;
    if (match) {
      for (uint64_t block = lane; block < blocks; block += options_.lanes) {
        sum(ranks, d, block * per_block, std::min(d[0].count, (block + 1) * per_block), type);
        ++mine;
      }
    }
    for (size_t r = 0; r < ranks.size(); ++r) {
      Completion c;
      c.op_seq = op_seq;
      c.cookie = d[r].cookie;
      c.lane = static_cast<uint16_t>(lane);
      c.events = kEventResult | kEventResolved;
      c.blocks_expected = c.blocks_received = mine;
      c.total_us = 10 + lane;
      c.bytes_sent = 1000;
      if (!match) {
        c.status = static_cast<uint8_t>(Status::kMismatch);
        ipc::Report report;
        report.op_seq = op_seq;
        const size_t other = words(d[r]) == words(d[0]) ? ranks.size() - 1 : 0;
        ipc::set_text(report.text, "op " + std::to_string(op_seq) + ": rank " + std::to_string(r) + " has " +
                                       words(d[r]) + ", rank " + std::to_string(other) + " has " +
                                       words(d[other]));
        ipc::write_report(*ranks[r]->control, lane, report);
      } else if (op_seq == options_.incomplete_op && lane == 0) {
        c.status = static_cast<uint8_t>(Status::kIncomplete);
        --c.blocks_received;
        std::memset(ranks[r]->arena.data() + d[r].result, 0,
                    std::min(d[r].count, per_block) * element_size(type));
        ipc::Report report;
        report.op_seq = op_seq;
        report.ranges = report.ranges_total = 1;
        report.range[0] = {0, static_cast<uint32_t>(std::min(d[r].count, per_block)), 0};
        ipc::set_text(report.text, "op " + std::to_string(op_seq) + ": 1 block of node 0 is missing");
        ipc::write_report(*ranks[r]->control, lane, report);
      }
      ranks[r]->open[lane].erase(op_seq);
      if (options_.split_events) {
        c.events = kEventResult;
        ranks[r]->owed[lane].push_back(c);
      }
      tell(*ranks[r], lane, c);
    }
    return true;
  }

  static void sum(const std::vector<Client*>& ranks, const std::vector<Descriptor>& d, size_t from, size_t to,
                  ElementType type) {
    const bool mean = d[0].kind == static_cast<uint8_t>(ReduceKind::kMean);
    switch (type) {
      case ElementType::kF32:
        return sum_elements<float>(ranks, d, from, to, mean);
      case ElementType::kF64:
        return sum_elements<double>(ranks, d, from, to, mean);
      case ElementType::kI32:
        return sum_elements<uint32_t>(ranks, d, from, to, false);
      case ElementType::kI64:
        return sum_elements<uint64_t>(ranks, d, from, to, false);
      case ElementType::kU8:
        return sum_elements<uint8_t>(ranks, d, from, to, false);
      default:
        std::abort();  // 16-bit floats are not for this daemon
    }
  }

  void resolve(uint32_t lane) {
    for (Client& client : clients_) {
      if (!client.joined || client.dead) continue;
      for (Completion& c : client.owed[lane]) {
        c.events = kEventResolved;
        c.total_us += 1000;
        tell(client, lane, c);
      }
      client.owed[lane].clear();
    }
  }

  void fail_open(Client& client, Status status, const std::string& text) {
    for (uint32_t lane = 0; lane < options_.lanes; ++lane) {
      for (const auto& [op_seq, d] : client.open[lane]) {
        ipc::Report report;
        report.op_seq = op_seq;
        ipc::set_text(report.text, text);
        ipc::write_report(*client.control, lane, report);
        Completion c;
        c.op_seq = op_seq;
        c.lane = static_cast<uint16_t>(lane);
        c.cookie = d.cookie;
        c.events = kEventResult | kEventResolved;
        c.status = static_cast<uint8_t>(status);
        tell(client, lane, c);
      }
      client.open[lane].clear();
    }
  }

  void tell(Client& client, uint32_t lane, Completion c) {
    const int how = owner_.misbehave_.exchange(0);
    if (how == 2) c.op_seq += 1'000'000;
    if (how == 3) c.events = 0x80;
    if (client.writers[lane].push(c) != ipc::RingState::kOk) {
      let_go(client, Status::kInvalid, "the completion ring is full or broken");
      return;
    }
    if (how == 1) client.control->complete_tail[lane].value += 1000;
    ipc::wake_client(*client.control, *client.submit);
  }

  // --- Ends ---

  void bury() {
    for (Client& client : clients_) {
      if (!client.dead || !client.joined) continue;
      client.joined = false;
      for (Client& other : clients_) {
        if (&other != &client && other.job == client.job && other.joined && !other.dead) {
          fail_open(other, Status::kPeerLost, "rank " + std::to_string(client.rank) + " is gone");
        }
      }
    }
    clients_.remove_if([](const Client& client) { return client.dead; });
  }

  void sleep(const ipc::Listener& listener) {
    for (Client& client : clients_) {
      if (!client.joined) continue;
      for (uint32_t lane = 0; lane < options_.lanes; ++lane) ipc::lane_sleeps_soon(*client.control, lane);
    }
    ipc::full_fence();
    bool idle = true;
    for (Client& client : clients_) {
      if (!client.joined) continue;
      for (uint32_t lane = 0; lane < options_.lanes; ++lane) {
        idle = idle && client.readers[lane].look() == ipc::RingState::kEmpty;
      }
    }
    if (idle) {
      std::vector<pollfd> entries = {{listener.fd(), POLLIN, 0}};
      if (!options_.silent) {
        for (const Client& client : clients_) entries.push_back({client.channel.fd(), POLLIN, 0});
      }
      for (const UniqueFd& event : events_) entries.push_back({event.get(), POLLIN, 0});
      ::poll(entries.data(), entries.size(), 5);  // the test's switches are looked at every 5 ms
    }
    for (const UniqueFd& event : events_) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t ignored = ::read(event.get(), &count, sizeof(count));
    }
    for (Client& client : clients_) {
      if (!client.joined) continue;
      for (uint32_t lane = 0; lane < options_.lanes; ++lane) ipc::lane_awake(*client.control, lane);
    }
  }

  FakeDaemon& owner_;
  const FakeOptions options_;
  std::vector<UniqueFd> events_;
  std::list<Client> clients_;
  std::map<std::string, uint8_t> nonces_;
};

FakeDaemon::FakeDaemon(std::string path, const FakeOptions& options) {
  thread_ = std::thread([this, path = std::move(path), options] { run(path, options); });
  while (!listening_) std::this_thread::yield();
}

FakeDaemon::~FakeDaemon() { die(); }

void FakeDaemon::die() {
  die_ = true;
  if (thread_.joinable()) thread_.join();
}

void FakeDaemon::run(std::string path, FakeOptions options) {
  auto listener = ipc::Listener::listen(path, 0600, static_cast<gid_t>(-1));
  if (!listener.ok()) {
    std::fprintf(stderr, "fake daemon: %s\n", listener.error().message.c_str());
    std::abort();
  }
  listening_ = true;
  Server(*this, options).serve(*listener);
}

}  // namespace sluice::test
