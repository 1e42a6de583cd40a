// The rules of port.h that are not about the bytes: whose memory, who is known, when to sleep, what is full.
#include <dirent.h>
#include <poll.h>

#include <optional>
#include <thread>

#include "tests/conformance/port_fixture.h"

namespace sluice::port::testing {
namespace {

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
