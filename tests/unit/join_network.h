// A tiny virtual network for Join: seeded delays, loss, duplicates, largest datagram per direction. Everything that
// happens follows from the seed.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "transport/exchange/join.h"

namespace sluice::exchange {

using Bytes = std::vector<std::byte>;

inline wire::Nonce128 nonce_of(uint32_t node, uint32_t start = 0) {
  wire::Nonce128 nonce{};
  nonce[0] = static_cast<uint8_t>(node);
  nonce[1] = static_cast<uint8_t>(node >> 8);
  nonce[2] = static_cast<uint8_t>(start);
  nonce[15] = 0x77;
  return nonce;
}

class JoinNetwork {
 public:
  struct Options {
    uint64_t seed = 1;
    uint32_t nodes = 2;
    bool learn = false;  // `peers:`: nonces are not known beforehand
    double loss = 0, duplicates = 0;
    Micros delay_min = 50, delay_max = 300;
    Micros start_within = 0;                                   // nodes start at times up to this
    std::function<void(uint32_t, JoinSettings&)> adjust = {};  // per node, before it starts
  };

  explicit JoinNetwork(Options options)
      : options_(std::move(options)), random_(options_.seed * 0x9E3779B97F4A7C15U) {
    const uint32_t n = options_.nodes;
    joins.resize(n);
    starts_.resize(n, 0);
    for (uint32_t node = 0; node < n; ++node) {
      at(options_.start_within == 0
             ? 0
             : static_cast<Micros>(random_() % static_cast<uint64_t>(options_.start_within)),
         [this, node] { start(node); });
    }
  }

  JoinSettings settings(uint32_t node) {
    JoinSettings s;
    s.job = "job";
    s.key.fill(7);
    s.self = node;
    s.generation = 3;
    s.config_digest = 0xC0FFEE;
    s.lanes = 2;
    s.largest_datagram = 8972;
    for (uint32_t i = 0; i < options_.nodes; ++i) {
      s.join_nonces.emplace_back();
      if (!options_.learn || i == node) s.join_nonces.back() = nonce_of(i, i == node ? starts_[i] : 0);
    }
    for (uint8_t& byte : s.random) byte = static_cast<uint8_t>(random_());
    if (options_.adjust) options_.adjust(node, s);
    return s;
  }

  void start(uint32_t node) {
    joins[node] = std::make_unique<Join>(settings(node));
    serve(node);
  }
  // A new process with a new join nonce; what was on the way still arrives.
  void restart(uint32_t node) {
    ++starts_[node];
    start(node);
  }
  void stop(uint32_t node) { joins[node].reset(); }

  void at(Micros when, std::function<void()> what) { events_.push({when, order_++, std::move(what)}); }

  // Delivers a datagram now, as if it came from the address of `from`.
  wire::Drop deliver(uint32_t from, uint32_t to, const Bytes& datagram) {
    const wire::Drop drop = joins[to]->on_packet(from, datagram, now);
    ++drops[static_cast<size_t>(drop)];
    if (drop == wire::Drop::kNone || drop == wire::Drop::kReplay || drop == wire::Drop::kMismatch) {
      if (is_hello(datagram)) credit_[{to, from}] += static_cast<int64_t>(datagram.size());
    }
    serve(to);
    return drop;
  }

  // Runs until `done`, or until `limit`. True when done.
  bool run(Micros limit, const std::function<bool()>& done) {
    while (!done()) {
      if (events_.empty() || events_.top().when > limit) {
        now = limit;
        return done();
      }
      const Event event = events_.top();
      events_.pop();
      now = event.when;
      event.what();
    }
    return true;
  }
  bool run_until_finished(Micros limit) {
    return run(limit, [this] { return all(Join::State::kFinished); });
  }
  bool is(uint32_t node, Join::State state) const { return joins[node] && joins[node]->state() == state; }
  bool all(Join::State state) const {
    for (uint32_t node = 0; node < joins.size(); ++node) {
      if (!is(node, state)) return false;
    }
    return true;
  }

  void set_limit(uint32_t from, uint32_t to, size_t bytes) { limits_[{from, to}] = bytes; }
  // The payload that all must agree on: the largest size of the ladder that every direction carries.
  uint32_t expected_payload(uint32_t largest, const std::vector<uint16_t>& ladder) const {
    size_t smallest = largest;
    for (const auto& [pair, bytes] : limits_) smallest = std::min(smallest, bytes);
    uint32_t best = wire::payload_for_datagram(largest);
    if (best + 64 <= smallest) return best;
    best = 0;
    for (const uint16_t rung : ladder) {
      const uint32_t payload = wire::payload_for_datagram(rung);
      if (payload + 64 <= smallest) best = std::max(best, payload);
    }
    return best;
  }

  static bool is_hello(const Bytes& datagram) {
    return datagram.size() > 2 && datagram[2] == static_cast<std::byte>(wire::Type::kHello);
  }

  std::vector<std::unique_ptr<Join>> joins;
  Micros now = 0;
  uint64_t sent = 0, sent_bytes = 0;
  std::array<uint64_t, static_cast<size_t>(wire::Drop::kCount)> drops{};
  // Sees each datagram that is sent; may change it; false: it does not leave.
  std::function<bool(uint32_t from, uint32_t to, Bytes& datagram)> tap;

 private:
  struct Event {
    Micros when;
    uint64_t order;
    std::function<void()> what;
    bool operator<(const Event& other) const {  // the earliest on top
      return when != other.when ? when > other.when : order > other.order;
    }
  };
  double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

  // What a caller does: timers, then everything that wants to leave.
  void serve(uint32_t node) {
    Join* join = joins[node].get();
    if (join == nullptr) return;
    if (join->next_timer() <= now) join->tick(now);
    Join::Outgoing out;
    while (join->poll_send(now, &out)) send(node, out.node, Bytes(out.bytes.begin(), out.bytes.end()));
    const Micros next = join->next_timer();
    ASSERT_GT(next, now) << "a timer that never rests";
    if (next != kNever) {
      at(next, [this, node, join] {
        if (joins[node].get() == join) serve(node);
      });
    }
  }

  void send(uint32_t from, uint32_t to, Bytes datagram) {
    ++sent;
    sent_bytes += datagram.size();
    ASSERT_NE(from, to);
    ASSERT_LT(to, joins.size());
    if (!is_hello(datagram)) {
      // At most as many bytes as came (protocol, section 2).
      int64_t& credit = credit_[{from, to}];
      credit -= static_cast<int64_t>(datagram.size());
      ASSERT_GE(credit, 0) << "an answer larger than what it answers";
    }
    if (tap && !tap(from, to, datagram)) return;
    const auto limit = limits_.find({from, to});
    if (limit != limits_.end() && datagram.size() > limit->second) return;
    const int copies = uniform() < options_.duplicates ? 2 : 1;
    for (int i = 0; i < copies; ++i) {
      if (uniform() < options_.loss) continue;
      const auto spread = static_cast<uint64_t>(options_.delay_max - options_.delay_min + 1);
      at(now + options_.delay_min + static_cast<Micros>(random_() % spread), [this, from, to, datagram] {
        if (joins[to]) deliver(from, to, datagram);
      });
    }
  }

  Options options_;
  std::mt19937_64 random_;
  std::vector<uint32_t> starts_;
  std::priority_queue<Event> events_;
  uint64_t order_ = 0;
  std::map<std::pair<uint32_t, uint32_t>, size_t> limits_;
  std::map<std::pair<uint32_t, uint32_t>, int64_t> credit_;
};

}  // namespace sluice::exchange
