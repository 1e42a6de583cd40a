// What every port must do with datagrams, whatever it is made of (port.h). The worlds of port_kinds() lose none at the
// rates used here.
#include "tests/conformance/port_fixture.h"

namespace sluice::port::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Ports, PortConformance, ::testing::ValuesIn(port_kinds()),
                         [](const auto& info) { return info.param.name; });

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

}  // namespace
}  // namespace sluice::port::testing
