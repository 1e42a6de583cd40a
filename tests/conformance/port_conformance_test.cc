// What every port must do, whatever it is made of (port.h). Loss-free ports only: the worlds of port_kinds() do not
// lose datagrams at the rates used here.
#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/prng.h"
#include "tests/conformance/port_kinds.h"

namespace sluice::port::testing {
namespace {

using Bytes = std::vector<std::byte>;

// Long enough for the busiest machine; reached only on failure.
constexpr Micros kPatience = 20 * kMicrosPerSecond;

Bytes pattern(size_t length, uint64_t seed) {
  Bytes bytes(length);
  Prng random(seed);
  for (size_t i = 0; i < length; i += 8) {
    const uint64_t word = random.next();
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, length - i));
  }
  return bytes;
}

TxPacket payload_packet(PeerHandle peer, const Bytes& bytes) {
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

INSTANTIATE_TEST_SUITE_P(Ports, PortConformance, ::testing::ValuesIn(port_kinds()),
                         [](const auto& info) { return info.param.name; });

TEST_P(PortConformance, SaysWhatItCanDo) {
  OPEN_OR_SKIP({.nodes = 2, .queues = 2});
  const Capabilities& capabilities = world_->port(0).capabilities();
  EXPECT_FALSE(capabilities.kind.empty());
  EXPECT_FALSE(capabilities.device.empty());
  EXPECT_EQ(capabilities.queues, 2U);
  EXPECT_GE(capabilities.max_datagram, 512U);
  const uint32_t to_peer = world_->port(0).max_datagram_to(queue(1).local());
  EXPECT_GE(to_peer, 512U);
  EXPECT_LE(to_peer, capabilities.max_datagram);
  EXPECT_NE(queue(0).local().port, 0);
  EXPECT_NE(to_string(queue(0).local()), to_string(queue(1).local()));
  const auto beyond = world_->port(0).open_queue(2);
  ASSERT_FALSE(beyond.ok());
  EXPECT_FALSE(beyond.error().message.empty());
}

TEST_P(PortConformance, EverySizeComesThrough) {
  OPEN_OR_SKIP({.nodes = 2});
  std::vector<size_t> sizes;
  for (size_t size = 1; size <= std::min<size_t>(max_, 1600); ++size) sizes.push_back(size);
  for (size_t size = 1600; size <= max_; size += 997) sizes.push_back(size);
  for (size_t size : {max_ - 1, max_}) sizes.push_back(size);
  for (size_t first = 0; first < sizes.size(); first += 32) {
    std::vector<Bytes> sent;
    std::vector<TxPacket> packets;
    for (size_t i = first; i < std::min(first + 32, sizes.size()); ++i) sent.push_back(pattern(sizes[i], i));
    for (const Bytes& bytes : sent) packets.push_back(payload_packet(to_[1], bytes));
    send_all(queue(0), packets);
    const auto received = collect(queue(1), sent.size());
    expect_same(sent, received);
    for (const Received& one : received) EXPECT_EQ(one.peer, from_[1]);
  }
}

TEST_P(PortConformance, MixedBurstsComeThrough) {
  OPEN_OR_SKIP();
  Prng random(5);
  for (const size_t burst : {1, 2, 3, 7, 32, 44, 45, 64, 65, 128, 129, 300, 511, 512}) {
    std::vector<std::vector<Bytes>> expected(3);
    std::vector<Bytes> sent;
    std::vector<PeerHandle> peers;
    // Runs of one length to one peer, now and then closed by a shorter or longer one, as an engine makes them.
    while (sent.size() < burst) {
      const size_t node = 1 + random.below(2);
      const size_t length = random.below(std::min<size_t>(max_, 1400) + 1);
      for (uint64_t run = 1 + random.below(random.chance(0.2) ? 200 : 8); run > 0 && sent.size() < burst;
           --run) {
        size_t own = length;
        if (random.chance(0.05)) own = random.below(std::min<size_t>(max_, 1400) + 1);
        sent.push_back(pattern(own, burst * 1000 + sent.size()));
        peers.push_back(to_[node]);
        expected[node].push_back(sent.back());
      }
    }
    std::vector<TxPacket> packets;
    for (size_t i = 0; i < burst; ++i) packets.push_back(payload_packet(peers[i], sent[i]));
    send_all(queue(0), packets);
    for (const size_t node : {1, 2}) {
      expect_same(expected[node], collect(queue(node), expected[node].size(), 1 + random.below(burst)));
    }
    ASSERT_FALSE(HasFailure()) << "burst of " << burst;
  }
}

TEST_P(PortConformance, GathersHeaderPayloadTrailer) {
  OPEN_OR_SKIP({.nodes = 2});
  std::vector<Bytes> expected;
  std::vector<Bytes> parts;
  std::vector<TxPacket> packets;
  parts.reserve(3000);
  for (const size_t header : {size_t{0}, size_t{1}, size_t{48}, kMaxHeader}) {
    for (const size_t payload : {0, 1, 63, 512}) {
      for (const size_t trailer : {size_t{0}, size_t{1}, kMaxTrailer}) {
        for (int repeat = 0; repeat < 4; ++repeat) {  // runs of equal length
          const uint64_t seed = parts.size();
          parts.push_back(pattern(header, seed));
          parts.push_back(pattern(payload, seed + 1));
          parts.push_back(pattern(trailer, seed + 2));
          const Bytes* part = &parts[parts.size() - 3];
          TxPacket packet;
          packet.peer = to_[1];
          packet.header = part[0].data();
          packet.header_length = static_cast<uint16_t>(header);
          packet.payload = part[1].data();
          packet.payload_length = static_cast<uint32_t>(payload);
          packet.trailer = part[2].data();
          packet.trailer_length = static_cast<uint16_t>(trailer);
          packets.push_back(packet);
          Bytes whole = part[0];
          whole.insert(whole.end(), part[1].begin(), part[1].end());
          whole.insert(whole.end(), part[2].begin(), part[2].end());
          expected.push_back(whole);
        }
      }
    }
  }
  send_all(queue(0), packets);
  expect_same(expected, collect(queue(1), expected.size()));
}

TEST_P(PortConformance, EmptyDatagramsAndEmptyCalls) {
  OPEN_OR_SKIP({.nodes = 2});
  EXPECT_EQ(queue(0).send({}), 0U);
  EXPECT_EQ(queue(0).receive({}), 0U);
  queue(0).release({});
  const Bytes some = pattern(100, 1);
  // Empty ones at the start, in the middle and at the end of a run.
  const TxPacket empty = payload_packet(to_[1], {});
  const TxPacket full = payload_packet(to_[1], some);
  const std::vector<TxPacket> packets = {empty, full, full, empty, empty, full, full, full, empty};
  send_all(queue(0), packets);
  expect_same({{}, some, some, {}, {}, some, some, some, {}}, collect(queue(1), packets.size()));
}

TEST_P(PortConformance, AnswersGoBackAndForth) {
  OPEN_OR_SKIP({.nodes = 2});
  for (uint64_t round = 0; round < 50; ++round) {
    const Bytes ping = pattern(200 + round, round);
    const TxPacket there = payload_packet(to_[1], ping);
    send_all(queue(0), {&there, 1});
    const auto at_1 = collect(queue(1), 1);
    ASSERT_EQ(at_1.size(), 1U);
    EXPECT_EQ(at_1[0].peer, from_[1]);
    EXPECT_EQ(at_1[0].source, queue(0).local());
    const TxPacket back = payload_packet(at_1[0].peer, at_1[0].bytes);
    send_all(queue(1), {&back, 1});
    const auto at_0 = collect(queue(0), 1);
    ASSERT_EQ(at_0.size(), 1U);
    EXPECT_EQ(at_0[0].bytes, ping);
    EXPECT_EQ(at_0[0].peer, to_[1]);
  }
}

TEST_P(PortConformance, ANodeCanSendToItself) {
  OPEN_OR_SKIP({.nodes = 1});
  const Bytes bytes = pattern(333, 1);
  const TxPacket packet = payload_packet(to_[0], bytes);
  send_all(queue(0), {&packet, 1});
  const auto received = collect(queue(0), 1);
  ASSERT_EQ(received.size(), 1U);
  EXPECT_EQ(received[0].bytes, bytes);
  EXPECT_EQ(received[0].peer, to_[0]);
}

TEST_P(PortConformance, UnreleasedMemoryStaysAsItIs) {
  OPEN_OR_SKIP({.nodes = 2});
  Prng random(3);
  struct Held {
    RxPacket packet;
    Bytes copy;
  };
  std::vector<Held> held;
  std::vector<Bytes> expected;
  std::vector<Received> received;
  uint64_t seed = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<Bytes> sent;
    for (uint64_t i = 1 + random.below(20); i > 0; --i)
      sent.push_back(pattern(1 + random.below(500), ++seed));
    std::vector<TxPacket> packets;
    for (const Bytes& bytes : sent) packets.push_back(payload_packet(to_[1], bytes));
    send_all(queue(0), packets);
    expected.insert(expected.end(), sent.begin(), sent.end());
    // Hold a dozen at most, released in random order, so that releases cross the bursts.
    const Micros end = monotonic_micros() + kPatience;
    while (received.size() < expected.size() && monotonic_micros() < end) {
      RxPacket burst[5];
      const size_t got = queue(1).receive(burst);
      for (size_t i = 0; i < got; ++i) {
        const Bytes copy(burst[i].data, burst[i].data + burst[i].length);
        held.push_back({burst[i], copy});
        received.push_back({copy, burst[i].peer, burst[i].source});
      }
      if (got == 0) world_->pass_time();
      while (held.size() > 12) {
        const size_t pick = random.below(held.size());
        ASSERT_TRUE(std::equal(held[pick].copy.begin(), held[pick].copy.end(), held[pick].packet.data));
        queue(1).release({&held[pick].packet, 1});
        held.erase(held.begin() + static_cast<ptrdiff_t>(pick));
      }
    }
  }
  expect_same(expected, received);
  for (const Held& one : held) {
    EXPECT_TRUE(std::equal(one.copy.begin(), one.copy.end(), one.packet.data));
    queue(1).release({&one.packet, 1});
  }
}

TEST_P(PortConformance, GoesOnAfterEverythingWasHeld) {
  OPEN_OR_SKIP({.nodes = 2});
  const Bytes bytes = pattern(300, 1);
  const std::vector<TxPacket> packets(128, payload_packet(to_[1], bytes));
  for (int round = 0; round < 5; ++round) {
    // Take all that the port can lend, and give it back in one piece.
    std::vector<RxPacket> held;
    for (int tries = 0; tries < 40; ++tries) {
      send_all(queue(0), packets);
      world_->pass_time();
      RxPacket burst[64];
      for (size_t got = 0; (got = queue(1).receive(burst)) > 0;) held.insert(held.end(), burst, burst + got);
    }
    ASSERT_GE(held.size(), 16U);
    for (const RxPacket& packet : held) {
      ASSERT_EQ(packet.length, bytes.size());
      ASSERT_EQ(std::memcmp(packet.data, bytes.data(), bytes.size()), 0);
    }
    queue(1).release(held);
    // What waited outside meanwhile comes now, or was dropped and counted; afterwards all is as before.
    RxPacket burst[64];
    for (int quiet = 0; quiet < 5;) {
      const size_t got = queue(1).receive(burst);
      queue(1).release(std::span(burst).first(got));
      quiet = got == 0 ? quiet + 1 : 0;
      if (got == 0) world_->pass_time();
    }
    send_all(queue(0), packets);
    collect(queue(1), packets.size());
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

TEST_P(PortConformance, PayloadMayChangeWhenThePortIsDoneWithIt) {
  OPEN_OR_SKIP({.nodes = 2});
  const bool copies = world_->port(0).capabilities().copies_on_send;
  std::vector<Bytes> expected;
  std::vector<Received> received;
  Bytes payload(512);
  uint64_t tickets = queue(0).reap();
  for (uint64_t i = 0; i < 200; ++i) {
    payload = pattern(512, i);
    expected.push_back(payload);
    const TxPacket packet = payload_packet(to_[1], payload);
    const Micros end = monotonic_micros() + kPatience;
    while (queue(0).send({&packet, 1}) == 0 && monotonic_micros() < end) world_->pass_time();
    ++tickets;
    if (copies) {
      EXPECT_EQ(queue(0).reap(), tickets);
    } else {
      while (queue(0).reap() < tickets && monotonic_micros() < end) world_->pass_time();
    }
    std::fill(payload.begin(), payload.end(), std::byte{0xee});
  }
  expect_same(expected, collect(queue(1), expected.size()));
}

TEST_P(PortConformance, UnknownSourcesAreDeliveredAsUnknown) {
  OPEN_OR_SKIP();
  const PeerHandle stranger = *queue(2).add_peer(queue(1).local());
  const Bytes bytes = pattern(64, 1);
  const TxPacket packet = payload_packet(stranger, bytes);
  send_all(queue(2), {&packet, 1});
  auto received = collect(queue(1), 1);
  ASSERT_EQ(received.size(), 1U);
  EXPECT_EQ(received[0].peer, kUnknownPeer);
  EXPECT_EQ(received[0].source, queue(2).local());

  const PeerHandle known = *queue(1).add_peer(received[0].source);
  EXPECT_NE(known, from_[1]);
  send_all(queue(2), {&packet, 1});
  received = collect(queue(1), 1);
  ASSERT_EQ(received.size(), 1U);
  EXPECT_EQ(received[0].peer, known);

  queue(1).remove_peer(known);
  send_all(queue(2), {&packet, 1});
  received = collect(queue(1), 1);
  ASSERT_EQ(received.size(), 1U);
  EXPECT_EQ(received[0].peer, kUnknownPeer);
}

TEST_P(PortConformance, PeersComeAndGo) {
  OPEN_OR_SKIP();
  // Known twice: one removal is not enough.
  EXPECT_EQ(*queue(0).add_peer(queue(1).local()), to_[1]);
  queue(0).remove_peer(to_[1]);
  const Bytes bytes = pattern(80, 1);
  const std::vector<TxPacket> packets = {payload_packet(to_[1], bytes), payload_packet(to_[2], bytes)};
  send_all(queue(0), packets);
  collect(queue(1), 1);
  collect(queue(2), 1);
  // Removed: what is sent there is dropped and counted, and does not stop the others.
  queue(0).remove_peer(to_[1]);
  const QueueCounters before = queue(0).counters();
  EXPECT_EQ(queue(0).send(packets), 2U);
  EXPECT_EQ(queue(0).counters().tx_errors, before.tx_errors + 1);
  EXPECT_EQ(queue(0).counters().tx_datagrams, before.tx_datagrams + 1);
  collect(queue(1), 0);
  collect(queue(2), 1);
  // Handles stay small however many peers come and go.
  for (int round = 0; round < 1000; ++round) {
    const auto peer = queue(0).add_peer(queue(1).local());
    ASSERT_TRUE(peer.ok());
    ASSERT_LE(*peer, 3U);
    queue(0).remove_peer(*peer);
  }
  queue(0).remove_peer(12345);
  queue(0).remove_peer(kUnknownPeer);
}

TEST_P(PortConformance, TooLongIsDroppedAndCounted) {
  OPEN_OR_SKIP({.nodes = 2});
  const Bytes good = pattern(max_, 1);
  const Bytes bad = pattern(max_ + 1, 2);
  const std::vector<TxPacket> packets = {payload_packet(to_[1], good), payload_packet(to_[1], bad),
                                         payload_packet(to_[1], bad), payload_packet(to_[1], good)};
  send_all(queue(0), packets);
  expect_same({good, good}, collect(queue(1), 2));
  EXPECT_EQ(queue(0).counters().tx_errors, 2U);
  EXPECT_EQ(queue(0).counters().tx_datagrams, 2U);
}

TEST_P(PortConformance, TruncatedNeverLooksWhole) {
  OPEN_OR_SKIP({.nodes = 2});
  const Bytes big = pattern(max_ + 500, 1);
  if (!world_->send_raw(queue(1).local(), big)) {
    EXPECT_GE(max_, 65487U) << "only the limit of UDP itself excuses a kind from being tried";
    return;
  }
  const Bytes normal = pattern(100, 2);
  ASSERT_TRUE(world_->send_raw(queue(1).local(), normal));
  // Either the port has room for it, or it drops and counts it; never a part of it.
  std::vector<Received> received;
  RxPacket packets[8];
  const Micros end = monotonic_micros() + kPatience;
  while ((received.empty() || received.back().bytes != normal) && monotonic_micros() < end) {
    const size_t got = queue(1).receive(packets);
    for (size_t i = 0; i < got; ++i) {
      received.push_back(
          {Bytes(packets[i].data, packets[i].data + packets[i].length), packets[i].peer, packets[i].source});
    }
    queue(1).release(std::span(packets).first(got));
    if (got == 0) world_->pass_time();
  }
  if (queue(1).counters().rx_truncated == 1) {
    expect_same({normal}, received);
  } else {
    EXPECT_EQ(queue(1).counters().rx_truncated, 0U);
    expect_same({big, normal}, received);
  }
}

TEST_P(PortConformance, CountersAddUp) {
  OPEN_OR_SKIP();
  Prng random(9);
  uint64_t bytes[3] = {};
  uint64_t datagrams[3] = {};
  for (int round = 0; round < 30; ++round) {
    std::vector<Bytes> sent;
    std::vector<TxPacket> packets;
    size_t count[3] = {};
    for (int i = 0; i < 40; ++i) sent.push_back(pattern(random.below(1000), static_cast<uint64_t>(i)));
    for (const Bytes& one : sent) {
      const size_t node = 1 + random.below(2);
      packets.push_back(payload_packet(to_[node], one));
      ++count[node];
      bytes[node] += one.size();
    }
    send_all(queue(0), packets);
    for (const size_t node : {1, 2}) {
      collect(queue(node), count[node]);
      datagrams[node] += count[node];
    }
  }
  const QueueCounters sender = queue(0).counters();
  EXPECT_EQ(sender.tx_datagrams, 1200U);
  EXPECT_EQ(sender.tx_bytes, bytes[1] + bytes[2]);
  EXPECT_EQ(sender.tx_errors, 0U);
  EXPECT_EQ(sender.rx_datagrams, 0U);
  EXPECT_GT(sender.tx_calls, 0U);
  for (const size_t node : {1, 2}) {
    const QueueCounters receiver = queue(node).counters();
    EXPECT_EQ(receiver.rx_datagrams, datagrams[node]);
    EXPECT_EQ(receiver.rx_bytes, bytes[node]);
    EXPECT_EQ(receiver.rx_overflow, 0U);
    EXPECT_EQ(receiver.rx_truncated, 0U);
    EXPECT_EQ(receiver.tx_datagrams, 0U);
    EXPECT_GT(receiver.rx_calls, 0U);
  }
}

// Whoever arms, sleeps and takes one at a time never sleeps on work.
TEST_P(PortConformance, ArmedSleepersWake) {
  OPEN_OR_SKIP({.nodes = 2});
  const Bytes bytes = pattern(600, 1);
  const std::vector<TxPacket> packets(20, payload_packet(to_[1], bytes));
  if (queue(1).fd() < 0) {
    EXPECT_TRUE(queue(1).arm());
    send_all(queue(0), packets);
    const Micros end = monotonic_micros() + kPatience;
    while (queue(1).arm() && monotonic_micros() < end) world_->pass_time();
    EXPECT_FALSE(queue(1).arm());
    collect(queue(1), packets.size());
    EXPECT_TRUE(queue(1).arm());
    return;
  }
  pollfd entry{queue(1).fd(), POLLIN, 0};
  ASSERT_TRUE(queue(1).arm());
  ASSERT_EQ(poll(&entry, 1, 0), 0) << "readable without work";
  for (int round = 0; round < 3; ++round) {
    std::thread sender([&] {
      poll(nullptr, 0, 30);
      send_all(queue(0), packets);
    });
    size_t taken = 0;
    int sleeps = 0;
    while (taken < packets.size()) {
      if (queue(1).arm()) {
        ++sleeps;
        if (poll(&entry, 1, static_cast<int>(kPatience / 1000)) != 1) break;
      }
      RxPacket packet;
      const size_t got = queue(1).receive({&packet, 1});
      queue(1).release({&packet, got});
      taken += got;
    }
    sender.join();
    ASSERT_EQ(taken, packets.size()) << "slept on work";
    EXPECT_GE(sleeps, 1);
    EXPECT_TRUE(queue(1).arm());
    EXPECT_EQ(poll(&entry, 1, 0), 0);
  }
}

TEST_P(PortConformance, AFullDeviceSaysSoAndRecovers) {
  // In a thread of its own: a kind may move it into a namespace.
  std::optional<std::string> skipped;
  std::thread([&] {
    if (!open({.nodes = 2, .slow = true})) {
      skipped = missing_;
      return;
    }
    const size_t length = std::min<size_t>(max_, 1400);
    std::vector<Bytes> sent;
    for (uint64_t i = 0; i < 400; ++i) sent.push_back(pattern(length, i));
    std::vector<TxPacket> packets;
    for (const Bytes& bytes : sent) packets.push_back(payload_packet(to_[1], bytes));
    std::span<const TxPacket> left = packets;
    size_t short_sends = 0;
    std::vector<Received> received;
    std::vector<RxPacket> burst(64);
    const Micros end = monotonic_micros() + kPatience;
    while ((!left.empty() || received.size() < packets.size()) && monotonic_micros() < end) {
      const size_t taken = queue(0).send(left);
      if (taken < left.size()) ++short_sends;
      left = left.subspan(taken);
      if (!left.empty() && queue(0).fd() >= 0) {
        pollfd entry{queue(0).fd(), POLLOUT, 0};
        poll(&entry, 1, 100);
      } else {
        world_->pass_time();
      }
      const size_t got = queue(1).receive(burst);
      for (size_t i = 0; i < got; ++i) {
        received.push_back(
            {Bytes(burst[i].data, burst[i].data + burst[i].length), burst[i].peer, burst[i].source});
      }
      queue(1).release(std::span(burst).first(got));
    }
    EXPECT_GE(short_sends, 1U);
    EXPECT_TRUE(left.empty());
    expect_same(sent, received);
    const QueueCounters counters = queue(0).counters();
    EXPECT_EQ(counters.tx_again, short_sends);
    EXPECT_EQ(counters.tx_datagrams, packets.size());
    EXPECT_EQ(counters.tx_errors, 0U);
    TearDown();
  }).join();
  if (skipped) GTEST_SKIP() << GetParam().name << ": " << *skipped;
}

TEST_P(PortConformance, QueuesAreApart) {
  constexpr uint32_t kQueues = 3;
  OPEN_OR_SKIP({.nodes = 2, .queues = kQueues});
  std::vector<std::unique_ptr<Queue>> left;
  std::vector<std::unique_ptr<Queue>> right;
  std::vector<PeerHandle> peers;
  for (uint32_t i = 1; i < kQueues; ++i) {
    left.push_back(std::move(*world_->port(0).open_queue(i)));
    right.push_back(std::move(*world_->port(1).open_queue(i)));
    peers.push_back(*left.back()->add_peer(right.back()->local()));
  }
  std::vector<Bytes> sent;
  for (size_t i = 0; i < left.size(); ++i) {
    sent.push_back(pattern(100, i));
    const TxPacket packet = payload_packet(peers[i], sent[i]);
    send_all(*left[i], {&packet, 1});
  }
  for (size_t i = 0; i < left.size(); ++i) expect_same({sent[i]}, collect(*right[i], 1));
  collect(queue(1), 0);
}

size_t open_descriptors() {
  size_t count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

TEST_P(PortConformance, OpeningAndClosingLeaksNothing) {
  OPEN_OR_SKIP({.nodes = 2, .queues = 2});
  const Bytes bytes = pattern(100, 1);
  const size_t before = open_descriptors();
  for (int round = 0; round < 1000; ++round) {
    auto opened = world_->port(0).open_queue(1);
    ASSERT_TRUE(opened.ok()) << opened.error().message << " in round " << round;
    const PeerHandle peer = *(*opened)->add_peer(queue(1).local());
    const TxPacket packet = payload_packet(peer, bytes);
    ASSERT_EQ((*opened)->send({&packet, 1}), 1U);
    if (round % 100 == 0) {
      collect(queue(1), round == 0 ? 1 : 100);
    }
  }
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace sluice::port::testing
