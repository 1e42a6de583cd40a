// What the tests of the conformance suite share: a world of a few nodes, and sending and collecting in it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/prng.h"
#include "tests/conformance/port_kinds.h"

namespace sluice::port::testing {
using Bytes = std::vector<std::byte>;

// Long enough for the busiest machine; reached only on failure.
inline constexpr Micros kPatience = 20 * kMicrosPerSecond;

inline Bytes pattern(size_t length, uint64_t seed) {
  Bytes bytes(length);
  Prng random(seed);
  for (size_t i = 0; i < length; i += 8) {
    const uint64_t word = random.next();
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, length - i));
  }
  return bytes;
}

inline TxPacket payload_packet(PeerHandle peer, const Bytes& bytes) {
  TxPacket packet;
  packet.peer = peer;
  packet.payload = bytes.data();
  packet.payload_length = static_cast<uint32_t>(bytes.size());
  return packet;
}

struct Received {
  Bytes bytes;
  PeerHandle peer;
  Endpoint source;
};

class PortConformance : public ::testing::TestWithParam<PortKind> {
 protected:
  // Opens a world with queue 0 of every node; the first node knows the others and they know it.
  bool open(WorldOptions options = {}) {
    auto opened = GetParam().open(options);
    if (!opened.ok()) {
      missing_ = opened.error().message;
      return false;
    }
    world_ = std::move(*opened);
    for (uint32_t node = 0; node < options.nodes; ++node) {
      auto queue = world_->port(node).open_queue(0);
      if (!queue.ok()) {
        missing_ = queue.error().message;
        return false;
      }
      queues_.push_back(std::move(*queue));
    }
    for (uint32_t node = 0; node < options.nodes; ++node) {
      to_.push_back(*queues_[0]->add_peer(queues_[node]->local()));
      from_.push_back(node == 0 ? to_[0] : *queues_[node]->add_peer(queues_[0]->local()));
    }
    max_ = world_->port(0).capabilities().max_datagram;
    return true;
  }

  void TearDown() override {
    queues_.clear();  // before their ports
    world_.reset();
  }

  Queue& queue(size_t node) { return *queues_[node]; }

  // Sends all of it, however long that takes.
  void send_all(Queue& queue, std::span<const TxPacket> packets) {
    const Micros end = monotonic_micros() + kPatience;
    while (!packets.empty()) {
      packets = packets.subspan(queue.send(packets));
      if (!packets.empty()) world_->pass_time();
      ASSERT_LT(monotonic_micros(), end) << packets.size() << " packets left";
    }
    wait_for_payloads(queue);
  }

  void wait_for_payloads(Queue& queue) {
    if (world_->port(0).capabilities().copies_on_send) return;
    const Micros end = monotonic_micros() + kPatience;
    while (queue.reap() < queue.counters().tx_datagrams) {
      world_->pass_time();
      ASSERT_LT(monotonic_micros(), end);
    }
  }

  // Receives until there are `count` datagrams, then a little longer to see that there is not one too many.
  std::vector<Received> collect(Queue& queue, size_t count, size_t burst = 64) {
    std::vector<Received> all;
    std::vector<RxPacket> packets(burst);
    const Micros end = monotonic_micros() + kPatience;
    int extra = 3;
    while ((all.size() < count && monotonic_micros() < end) || extra-- > 0) {
      const size_t got = queue.receive(packets);
      for (size_t i = 0; i < got; ++i) {
        all.push_back({Bytes(packets[i].data, packets[i].data + packets[i].length), packets[i].peer,
                       packets[i].source});
      }
      queue.release(std::span(packets).first(got));
      if (got == 0) world_->pass_time();
    }
    EXPECT_EQ(all.size(), count);
    return all;
  }

  // Order is not promised by a port.
  static void expect_same(std::vector<Bytes> expected, const std::vector<Received>& received) {
    std::vector<Bytes> got;
    for (const Received& one : received) got.push_back(one.bytes);
    std::sort(expected.begin(), expected.end());
    std::sort(got.begin(), got.end());
    ASSERT_EQ(expected.size(), got.size());
    EXPECT_TRUE(expected == got) << "bytes differ";
  }

  std::unique_ptr<World> world_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::vector<PeerHandle> to_;    // node 0's handles
  std::vector<PeerHandle> from_;  // node i's handle of node 0
  uint32_t max_ = 0;
  std::string missing_;
};

#define OPEN_OR_SKIP(...) \
  if (!open(__VA_ARGS__)) GTEST_SKIP() << GetParam().name << ": " << missing_

}  // namespace sluice::port::testing
