// transport/port/faulty: the contract of port.h holds while faults happen: full devices, whose memory, peers that come
// and go, sleeping.
#include <poll.h>

#include "tests/unit/faulty_support.h"
#include "transport/port/udp/udp_port.h"

namespace sluice::port::testing {
namespace {

TEST(FaultyPort, RefusalsShortenSends) {
  FaultyPlan plan;
  plan.refuse = 0.05;
  Bench bench(plan);
  std::vector<Bytes> bytes;
  for (uint64_t i = 0; i < 5000; ++i) bytes.push_back(numbered(i));
  std::vector<TxPacket> packets;
  for (const Bytes& one : bytes) {
    TxPacket packet;
    packet.peer = bench.peers[0];
    packet.payload = one.data();
    packet.payload_length = static_cast<uint32_t>(one.size());
    packets.push_back(packet);
  }
  uint64_t calls = 0;
  for (std::span<const TxPacket> left = packets; !left.empty(); ++calls)
    left = left.subspan(bench.queue->send(left));
  EXPECT_EQ(bench.fired(Fault::kRefused) + 1, calls);
  expect_rate(bench.fired(Fault::kRefused), 5000, 0.05);
  bench.wait();
  const auto got = Bench::take(*bench.other_queues[0]);
  ASSERT_EQ(got.size(), 5000U);
  for (uint64_t i = 0; i < got.size(); ++i) EXPECT_EQ(number_of(got[i]), i);
  EXPECT_EQ(bench.queue->counters().tx_datagrams, 5000U);
  EXPECT_EQ(bench.queue->reap(), 5000U);
}

TEST(FaultyPort, HeldOnesComeWhenTheirTimeHasCome) {
  FaultyPlan plan;
  plan.send.latency = 100;
  plan.receive.latency = 200;
  Bench bench(plan);
  Bench::put(*bench.queue, bench.peers[0], numbered(1));
  Bench::put(*bench.other_queues[1], bench.back[1], numbered(2));
  bench.network.advance_to(10);
  EXPECT_FALSE(bench.queue->arm()) << "a datagram has arrived";
  EXPECT_TRUE(Bench::take(*bench.queue).empty());  // held from 10 to 210
  EXPECT_TRUE(bench.queue->arm());
  bench.network.advance_to(99);
  EXPECT_TRUE(bench.queue->arm());
  EXPECT_TRUE(Bench::take(*bench.queue).empty());
  bench.network.advance_to(100);
  EXPECT_FALSE(bench.queue->arm()) << "one is due to leave";
  EXPECT_TRUE(Bench::take(*bench.queue).empty());  // sends it
  EXPECT_TRUE(bench.queue->arm());
  bench.network.advance_to(101);
  EXPECT_EQ(Bench::take(*bench.other_queues[0]), std::vector<Bytes>{numbered(1)});
  bench.network.advance_to(209);
  EXPECT_TRUE(Bench::take(*bench.queue).empty());
  bench.network.advance_to(210);
  EXPECT_FALSE(bench.queue->arm());
  EXPECT_EQ(Bench::take(*bench.queue), std::vector<Bytes>{numbered(2)});
}

TEST(FaultyPort, PayloadIsCopiedWhenItIsHeld) {
  FaultyPlan plan;
  plan.send.latency = 100;
  Bench bench(plan);
  Bytes bytes = numbered(77);
  ASSERT_EQ(Bench::put(*bench.queue, bench.peers[0], bytes), 1U);
  EXPECT_EQ(bench.queue->reap(), 1U);
  std::fill(bytes.begin(), bytes.end(), std::byte{0xee});
  bench.wait();
  EXPECT_EQ(Bench::take(*bench.other_queues[0]), std::vector<Bytes>{numbered(77)});
}

TEST(FaultyPort, MemoryForHeldOnesIsBounded) {
  for (const bool sends : {true, false}) {
    FaultyPlan plan;
    (sends ? plan.send : plan.receive).latency = 500'000;
    Bench bench(plan, 10 * 1472);  // ten slots
    const auto got = sends ? bench.send(100) : bench.receive(100);
    EXPECT_EQ(got.size(), 100U);
    EXPECT_EQ(bench.fired(Fault::kDelayed), 10U);
    EXPECT_EQ(bench.fired(Fault::kUnheld), 90U);
    EXPECT_EQ(number_of(got[0]), 10U) << "those without room pass at once";
    const auto more = sends ? bench.send(5, 1, 100) : bench.receive(5, 1, 100);
    EXPECT_EQ(more.size(), 5U);
    EXPECT_EQ(bench.fired(Fault::kDelayed), 15U) << "slots come back";
  }
}

TEST(FaultyPort, LentMemoryStaysUntilItIsReleased) {
  FaultyPlan plan;
  plan.receive.corrupt = 1;
  Bench bench(plan, 4 * 1472);
  std::vector<RxPacket> held;
  std::vector<Bytes> copies;
  for (uint64_t i = 0; i < 10; ++i) {
    Bench::put(*bench.other_queues[0], bench.back[0], numbered(i));
    bench.network.advance_to(bench.network.now() + 1);
    RxPacket packet;
    ASSERT_EQ(bench.queue->receive({&packet, 1}), 1U);
    held.push_back(packet);
    copies.emplace_back(packet.data, packet.data + packet.length);
  }
  EXPECT_EQ(bench.fired(Fault::kCorrupted), 4U);
  for (size_t i = 0; i < held.size(); ++i)
    EXPECT_EQ(std::memcmp(held[i].data, copies[i].data(), copies[i].size()), 0) << i;
  bench.queue->release(held);  // ours and the network's, mixed
  bench.receive(4);
  EXPECT_EQ(bench.fired(Fault::kCorrupted), 8U);
}

TEST(FaultyPort, PeersComeAndGoWhileTheirDatagramsAreHeld) {
  FaultyPlan plan;
  plan.send.latency = plan.receive.latency = 100;
  Bench bench(plan);
  // What is held for a peer that goes still leaves: a handshake sends so.
  Bench::put(*bench.queue, bench.peers[0], numbered(1));
  bench.queue->remove_peer(bench.peers[0]);
  // Its owner does not know it meanwhile, although it is known below.
  EXPECT_EQ(Bench::put(*bench.queue, bench.peers[0], numbered(2)), 1U);
  EXPECT_EQ(bench.queue->counters().tx_errors, 1U);
  Bench::put(*bench.other_queues[0], bench.back[0], numbered(3));
  Bench::put(*bench.other_queues[1], bench.back[1], numbered(4));
  bench.network.advance_to(1);
  EXPECT_TRUE(Bench::take(*bench.queue).empty());
  bench.queue->remove_peer(bench.peers[1]);
  bench.network.advance_to(50);
  const PeerHandle again = *bench.queue->add_peer(bench.other_queues[0]->local());
  bench.network.advance_to(150);
  std::vector<RxPacket> packets;
  Bench::take(*bench.queue, &packets);
  ASSERT_EQ(packets.size(), 2U);
  EXPECT_EQ(packets[0].peer, again) << "known again when it is delivered";
  EXPECT_EQ(packets[0].source, bench.other_queues[0]->local());
  EXPECT_EQ(packets[1].peer, kUnknownPeer) << "known when it arrived, no more when it is delivered";
  bench.network.advance_to(200);
  EXPECT_EQ(Bench::take(*bench.other_queues[0]), std::vector<Bytes>{numbered(1)});
  // All is undone: the handle is free, and sending to it an error.
  bench.queue->remove_peer(again);
  EXPECT_EQ(Bench::put(*bench.queue, again, numbered(5)), 1U);
  EXPECT_EQ(bench.queue->counters().tx_errors, 2U);
}

TEST(FaultyPort, LuckGoesOnWhenAPeerComesBack) {
  FaultyPlan plan;
  plan.send.loss = 0.5;
  Bench bench(plan);
  // A handshake makes the peer known for each attempt. If each began anew, all would be lost or none.
  bench.queue->remove_peer(bench.peers[0]);
  for (uint64_t i = 0; i < 1000; ++i) {
    const PeerHandle peer = *bench.queue->add_peer(bench.other_queues[0]->local());
    Bench::put(*bench.queue, peer, numbered(i));
    bench.queue->remove_peer(peer);
  }
  bench.wait();
  expect_rate(Bench::take(*bench.other_queues[0]).size(), 1000, 0.5);
}

TEST(FaultyPort, PeersWithoutEndAreForgotten) {
  FaultyPlan plan;
  plan.send.loss = 0.5;
  plan.send.replay = 0.1;
  Bench bench(plan);
  for (uint32_t i = 0; i < 5000; ++i) {
    const auto peer = bench.queue->add_peer(
        ipv4_endpoint(192, 0, static_cast<uint8_t>(i >> 8), static_cast<uint8_t>(i), 9));
    ASSERT_TRUE(peer.ok());
    ASSERT_LE(*peer, 2U);
    Bench::put(*bench.queue, *peer, numbered(i));
    bench.queue->remove_peer(*peer);
  }
  const uint64_t lost = bench.fired(Fault::kLost);
  expect_rate(lost, 5000, 0.5);
  EXPECT_EQ(bench.fired(Fault::kReplayed), 0U) << "each peer had one datagram only";
  // Those that are in use were kept, and what was meant for others is not replayed to them.
  const auto got = bench.send(1000, 2, 1'000'000);
  EXPECT_EQ(got.size(), 1000 - (bench.fired(Fault::kLost) - lost) + bench.fired(Fault::kReplayed));
  for (const Bytes& bytes : got) EXPECT_GE(number_of(bytes), 1'000'000U);
}

// An inner queue that takes what it is told to take and keeps payloads until it is told otherwise.
struct Picky final : Queue {
  struct Sent {
    PeerHandle peer;
    std::vector<std::byte> bytes;
    const std::byte* payload;
    uint32_t length;
  };
  Result<PeerHandle> add_peer(const Endpoint&) override { return PeerHandle{0}; }
  void remove_peer(PeerHandle) override {}
  size_t receive(std::span<RxPacket>) override { return 0; }
  void release(std::span<const RxPacket>) override {}
  size_t send(std::span<const TxPacket> packets) override {
    const size_t taken = std::min(packets.size(), room);
    room -= taken;
    for (size_t i = 0; i < taken; ++i) {
      const TxPacket& packet = packets[i];
      sent.push_back({packet.peer, Bytes(packet.payload, packet.payload + packet.payload_length),
                      packet.payload, packet.payload_length});
    }
    return taken;
  }
  uint64_t reap() override { return reaped; }
  int fd() const override { return -1; }
  bool arm() override { return true; }
  Endpoint local() const override { return ipv4_endpoint(127, 0, 0, 1, 1); }
  QueueCounters counters() const override { return {}; }

  size_t room = SIZE_MAX;
  uint64_t reaped = 0;
  std::vector<Sent> sent;
};
struct PickyPort final : Port {
  explicit PickyPort(bool copies) {
    capabilities_.kind = "picky";
    capabilities_.max_datagram = 1472;
    capabilities_.copies_on_send = copies;
  }
  const Capabilities& capabilities() const override { return capabilities_; }
  Result<std::unique_ptr<Queue>> open_queue(uint32_t) override {
    auto queue = std::make_unique<Picky>();
    last = queue.get();
    return std::unique_ptr<Queue>(std::move(queue));
  }
  uint32_t max_datagram_to(const Endpoint&) override { return 1472; }
  Capabilities capabilities_;
  Picky* last = nullptr;
};

struct PickyBench {
  PickyBench(const FaultyPlan& plan, bool copies, size_t hold_bytes = 1 << 16) {
    auto inner = std::make_unique<PickyPort>(copies);
    auto* inner_port = inner.get();
    FaultyOptions options;
    options.plan = plan;
    options.hold_bytes = hold_bytes;
    options.clock = [this] { return now; };
    port = make_faulty_port(std::move(inner), options);
    queue = std::move(*port->open_queue(0));
    picky = inner_port->last;
    peer = *queue->add_peer(ipv4_endpoint(127, 0, 0, 1, 2));
    for (uint64_t i = 0; i < 2000; ++i) bytes.push_back(numbered(i));
    for (const Bytes& one : bytes) {
      TxPacket packet;
      packet.peer = peer;
      packet.payload = one.data();
      packet.payload_length = static_cast<uint32_t>(one.size());
      packets.push_back(packet);
    }
  }
  Micros now = 0;
  std::unique_ptr<FaultyPort> port;
  std::unique_ptr<Queue> queue;
  Picky* picky = nullptr;
  PeerHandle peer = kUnknownPeer;
  std::vector<Bytes> bytes;
  std::vector<TxPacket> packets;
};

// However often the device says no, each packet's fate is drawn once.
TEST(FaultyPort, AFullDeviceDoesNotChangeWhatHappens) {
  FaultyPlan plan;
  plan.send.loss = 0.2;
  plan.send.duplicate = 0.2;
  plan.send.corrupt = 0.1;
  const auto traffic = [&](bool crowded) {
    PickyBench bench(plan, true, 1 << 22);
    Prng random(3);
    std::span<const TxPacket> left = bench.packets;
    for (int tries = 0; !left.empty() && tries < 100'000; ++tries) {
      bench.picky->room = crowded ? random.below(4) : SIZE_MAX;
      // Sometimes only a part is offered again.
      const size_t offered = crowded ? std::min<size_t>(left.size(), 1 + random.below(300)) : left.size();
      left = left.subspan(bench.queue->send(left.first(offered)));
    }
    EXPECT_TRUE(left.empty());
    bench.picky->room = SIZE_MAX;
    bench.queue->send({});
    EXPECT_EQ(bench.queue->reap(), 2000U);
    std::vector<Bytes> sent;
    for (const Picky::Sent& one : bench.picky->sent) sent.push_back(one.bytes);
    std::sort(sent.begin(), sent.end());
    return sent;
  };
  EXPECT_EQ(traffic(false), traffic(true));
}

// A port that does not copy refers to payloads, the owner's and ours, until reap() says otherwise.
TEST(FaultyPort, MemoryComesBackNoEarlierThanTheInnerPortsReap) {
  FaultyPlan plan;
  plan.send.loss = 0.3;
  plan.send.corrupt = 0.3;
  PickyBench bench(plan, false);
  EXPECT_FALSE(bench.port->capabilities().copies_on_send);
  Prng random(5);
  std::span<const TxPacket> left = bench.packets;
  uint64_t last = 0;
  size_t checked = 0;
  for (int tries = 0; (!left.empty() || checked < bench.picky->sent.size()) && tries < 100'000; ++tries) {
    left = left.subspan(bench.queue->send(left.first(std::min<size_t>(left.size(), random.below(40)))));
    const uint64_t free = bench.queue->reap();
    ASSERT_GE(free, last);
    last = free;
    // What the device still has is as it was sent, wherever it lies.
    for (size_t i = checked; i < bench.picky->sent.size(); ++i) {
      const Picky::Sent& one = bench.picky->sent[i];
      ASSERT_EQ(std::memcmp(one.payload, one.bytes.data(), one.length), 0) << i;
      // And the owner's packets that it has are not counted as free.
      const uint64_t number = number_of(one.bytes);
      if (number < 2000 && one.payload == bench.packets[number].payload) {
        ASSERT_LE(free, number);
      }
    }
    bench.picky->reaped =
        std::min<uint64_t>(bench.picky->sent.size(), bench.picky->reaped + random.below(40));
    checked = bench.picky->reaped;
  }
  EXPECT_TRUE(left.empty());
  EXPECT_EQ(bench.queue->reap(), 2000U);
  EXPECT_GT(bench.port->fault_counters().total(Fault::kCorrupted), 250U);
}

// Whoever sleeps on the descriptor wakes for what is held, and for nothing else.
TEST(FaultyPort, SleepersWakeForHeldOnes) {
  FaultyOptions options;
  options.plan.send.latency = options.plan.receive.latency = 50'000;
  UdpOptions udp;
  udp.bind = ipv4_endpoint(127, 0, 0, 1, 0);
  udp.queues = 2;
  auto inner = open_udp_port(udp);
  ASSERT_TRUE(inner.ok()) << inner.error().message;
  auto port = make_faulty_port(std::move(*inner), options);
  auto left = std::move(*port->open_queue(0));
  auto right = std::move(*port->open_queue(1));
  const PeerHandle peer = *left->add_peer(right->local());
  const auto sleep = [](Queue& queue, int milliseconds) {
    if (!queue.arm()) return true;
    pollfd entry{queue.fd(), POLLIN, 0};
    return poll(&entry, 1, milliseconds) == 1;
  };
  EXPECT_FALSE(sleep(*left, 0));
  for (int round = 0; round < 2; ++round) {
    const Micros sent = monotonic_micros();
    ASSERT_EQ(Bench::put(*left, peer, numbered(7)), 1U);
    EXPECT_TRUE(sleep(*left, 10'000));
    EXPECT_TRUE(Bench::take(*left).empty());  // sends it
    EXPECT_GE(monotonic_micros() - sent, 50'000);
    EXPECT_FALSE(sleep(*left, 0)) << "nothing is held any more";
    EXPECT_TRUE(sleep(*right, 10'000));
    EXPECT_TRUE(Bench::take(*right).empty());  // holds it
    std::vector<Bytes> got;
    for (int tries = 0; got.empty() && tries < 3; ++tries) {
      EXPECT_TRUE(sleep(*right, 10'000));
      got = Bench::take(*right);
    }
    EXPECT_EQ(got, std::vector<Bytes>{numbered(7)});
    EXPECT_GE(monotonic_micros() - sent, 100'000);
    EXPECT_FALSE(sleep(*right, 0));
  }
  EXPECT_EQ(port->fault_counters().send[static_cast<size_t>(Fault::kDelayed)], 2U);
  EXPECT_EQ(port->fault_counters().receive[static_cast<size_t>(Fault::kDelayed)], 2U);
}

// After a refused send the owner waits for room on the same descriptor.
TEST(FaultyPort, SleepersWakeForRoom) {
  FaultyOptions options;
  options.plan.send.jitter = 10;
  options.plan.refuse = 0.5;
  UdpOptions udp;
  udp.bind = ipv4_endpoint(127, 0, 0, 1, 0);
  auto inner = open_udp_port(udp);
  ASSERT_TRUE(inner.ok()) << inner.error().message;
  auto port = make_faulty_port(std::move(*inner), options);
  auto queue = std::move(*port->open_queue(0));
  const PeerHandle self = *queue->add_peer(queue->local());
  int refused = 0;
  for (uint64_t i = 0; i < 30; ++i) {
    while (Bench::put(*queue, self, numbered(i)) == 0) {
      ++refused;
      if (!queue->arm()) continue;
      pollfd entry{queue->fd(), POLLIN | POLLOUT, 0};
      ASSERT_EQ(poll(&entry, 1, 10'000), 1) << "the device has room";
    }
  }
  EXPECT_GT(refused, 5);
}

}  // namespace
}  // namespace sluice::port::testing
