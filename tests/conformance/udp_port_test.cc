// What only the UDP port has: kernel options, their refusal, buffer limits, ECN.
#include "transport/port/udp/udp_port.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transport/port/endpoint.h"

namespace sluice::port {
namespace {

constexpr Micros kPatience = 20 * kMicrosPerSecond;

struct Pair {
  std::unique_ptr<Port> port;
  std::unique_ptr<Queue> sender;
  std::unique_ptr<Queue> receiver;
  PeerHandle peer = kUnknownPeer;
};

Pair open_pair(UdpOptions options) {
  Pair pair;
  options.queues = 2;
  auto port = open_udp_port(options);
  EXPECT_TRUE(port.ok()) << port.error().message;
  pair.port = std::move(*port);
  pair.sender = std::move(*pair.port->open_queue(0));
  pair.receiver = std::move(*pair.port->open_queue(1));
  pair.peer = *pair.sender->add_peer(pair.receiver->local());
  return pair;
}

UdpOptions loopback() {
  UdpOptions options;
  options.bind = ipv4_endpoint(127, 0, 0, 1, 0);
  return options;
}

TxPacket packet_to(PeerHandle peer, const std::vector<std::byte>& bytes) {
  TxPacket packet;
  packet.peer = peer;
  packet.payload = bytes.data();
  packet.payload_length = static_cast<uint32_t>(bytes.size());
  return packet;
}

// Receives and releases until `count` datagrams are in or nothing has come for a while.
size_t drain(Queue& queue, size_t count) {
  size_t total = 0;
  RxPacket packets[64];
  int quiet = 0;
  const Micros end = monotonic_micros() + kPatience;
  while (total < count && quiet < 200 && monotonic_micros() < end) {
    const size_t got = queue.receive(packets);
    queue.release(std::span(packets).first(got));
    total += got;
    quiet = got == 0 ? quiet + 1 : 0;
    if (got == 0) usleep(500);
  }
  return total;
}

TEST(UdpPort, RunsTravelInFewCalls) {
  Pair pair = open_pair(loopback());
  const std::vector<std::byte> bytes(1400, std::byte{1});
  const std::vector<TxPacket> packets(440, packet_to(pair.peer, bytes));
  ASSERT_EQ(pair.sender->send(packets), packets.size());
  EXPECT_EQ(drain(*pair.receiver, packets.size()), packets.size());
  // 44 to a message: 440 datagrams fit one sendmmsg; GRO gives them back in runs.
  EXPECT_LE(pair.sender->counters().tx_calls, 2U);
  EXPECT_LE(pair.receiver->counters().rx_calls, 40U);
}

TEST(UdpPort, RefusedSegmentationIsNoticedOnceAndWorkedAround) {
  Pair pair = open_pair(loopback());
  const int on = 1;  // the kernel refuses to segment what has no checksum
  ASSERT_EQ(setsockopt(pair.sender->fd(), SOL_SOCKET, SO_NO_CHECK, &on, sizeof on), 0);
  EXPECT_EQ(pair.port->capabilities().note.find("UDP_SEGMENT"), std::string::npos);
  const std::vector<std::byte> bytes(700, std::byte{2});
  const std::vector<TxPacket> packets(100, packet_to(pair.peer, bytes));
  ASSERT_EQ(pair.sender->send(packets), packets.size());
  EXPECT_EQ(drain(*pair.receiver, packets.size()), packets.size());
  EXPECT_EQ(pair.sender->counters().tx_errors, 0U);
  EXPECT_EQ(pair.sender->counters().tx_datagrams, packets.size());
  const std::string note = pair.port->capabilities().note;
  EXPECT_NE(note.find("UDP_SEGMENT"), std::string::npos) << note;
  EXPECT_EQ(pair.port->capabilities().note, note);
  // From then on without asking: 64 messages to a call.
  const uint64_t calls = pair.sender->counters().tx_calls;
  ASSERT_EQ(pair.sender->send(packets), packets.size());
  EXPECT_EQ(pair.sender->counters().tx_calls, calls + 2);
}

TEST(UdpPort, OverflowOfTheSocketIsCounted) {
  UdpOptions options = loopback();
  options.receive_buffer = 16 << 10;
  options.gso = false;
  options.gro = false;
  Pair pair = open_pair(options);
  const std::vector<std::byte> bytes(1400, std::byte{3});
  const std::vector<TxPacket> packets(500, packet_to(pair.peer, bytes));
  ASSERT_EQ(pair.sender->send(packets), packets.size());
  size_t received = drain(*pair.receiver, packets.size());
  EXPECT_LT(received, packets.size());
  // The kernel tells the number with the next datagram that it accepts.
  ASSERT_EQ(pair.sender->send(std::span(packets).first(1)), 1U);
  received += drain(*pair.receiver, 1);
  EXPECT_EQ(received + pair.receiver->counters().rx_overflow, packets.size() + 1);
}

TEST(UdpPort, BufferSizesAreReadBackAndClampedOnesNoted) {
  UdpOptions options = loopback();
  options.receive_buffer = 300'000;
  auto port = open_udp_port(options);
  ASSERT_TRUE(port.ok());
  if ((*port)->capabilities().receive_buffer_bytes == 600'000) {
    EXPECT_EQ((*port)->capabilities().note.find("receive buffer"), std::string::npos);
  }
  if (geteuid() != 0) GTEST_SKIP() << "giving up CAP_NET_ADMIN for a moment needs root";
  long long limit = 0;
  std::ifstream("/proc/sys/net/core/rmem_max") >> limit;
  // Without root's effective id there are no capabilities, and SO_RCVBUFFORCE is refused.
  ASSERT_EQ(seteuid(65534), 0);
  options.receive_buffer = static_cast<size_t>(limit) + 1'000'000;
  auto clamped = open_udp_port(options);
  ASSERT_EQ(seteuid(0), 0);
  ASSERT_TRUE(clamped.ok()) << clamped.error().message;
  const Capabilities& capabilities = (*clamped)->capabilities();
  EXPECT_EQ(capabilities.receive_buffer_bytes, static_cast<uint64_t>(limit) * 2);
  EXPECT_NE(capabilities.note.find("sysctl -w net.core.rmem_max=" + std::to_string(options.receive_buffer)),
            std::string::npos)
      << capabilities.note;
}

TEST(UdpPort, CongestionMarksArrive) {
  for (const bool v6 : {false, true}) {
    UdpOptions options;
    options.bind = *parse_ip(v6 ? "::1" : "127.0.0.1");
    options.queues = 1;
    auto port = open_udp_port(options);
    if (!port.ok() && v6) GTEST_SKIP() << "no IPv6 here: " << port.error().message;
    ASSERT_TRUE(port.ok());
    auto queue = std::move(*(*port)->open_queue(0));
    const UniqueFd fd(socket(v6 ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    for (const int tos : {0, 1, 2, 3, 0xb8, 0xbb}) {
      ASSERT_EQ(
          setsockopt(fd.get(), v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_TCLASS : IP_TOS, &tos, sizeof tos),
          0);
      sockaddr_in v4{AF_INET, htons(queue->local().port), {htonl(INADDR_LOOPBACK)}, {}};
      sockaddr_in6 six{AF_INET6, htons(queue->local().port), 0, in6addr_loopback, 0};
      const auto* address =
          v6 ? reinterpret_cast<const sockaddr*>(&six) : reinterpret_cast<const sockaddr*>(&v4);
      ASSERT_EQ(sendto(fd.get(), "x", 1, 0, address, v6 ? sizeof six : sizeof v4), 1);
      RxPacket packet;
      const Micros end = monotonic_micros() + kPatience;
      while (queue->receive({&packet, 1}) == 0 && monotonic_micros() < end) usleep(200);
      EXPECT_EQ(packet.congestion_experienced, (tos & 3) == 3) << "TOS " << tos << (v6 ? " v6" : " v4");
      queue->release({&packet, 1});
    }
  }
}

TEST(UdpPort, SaysWhatIsWrongWithTheAddress) {
  UdpOptions options;
  options.bind = ipv4_endpoint(192, 0, 2, 1, 0);  // TEST-NET-1, RFC 5737: nobody has it
  auto port = open_udp_port(options);
  ASSERT_FALSE(port.ok());
  EXPECT_NE(port.error().message.find("192.0.2.1"), std::string::npos) << port.error().message;

  options = loopback();
  options.interface = "nosuch0";
  port = open_udp_port(options);
  ASSERT_FALSE(port.ok());
  EXPECT_NE(port.error().message.find("nosuch0"), std::string::npos);
  EXPECT_NE(port.error().message.find("lo"), std::string::npos);

  options = loopback();
  options.bind.port = 65535;
  options.queues = 2;
  EXPECT_FALSE(open_udp_port(options).ok());
  options = loopback();
  options.queues = 0;
  EXPECT_FALSE(open_udp_port(options).ok());
}

TEST(UdpPort, ATakenPortIsNamed) {
  Pair pair = open_pair(loopback());
  UdpOptions options = loopback();
  options.bind.port = pair.receiver->local().port;
  auto port = open_udp_port(options);
  ASSERT_TRUE(port.ok());
  const auto queue = (*port)->open_queue(0);
  ASSERT_FALSE(queue.ok());
  EXPECT_EQ(queue.error().code, EADDRINUSE);
  EXPECT_NE(queue.error().message.find(to_string(options.bind)), std::string::npos) << queue.error().message;
}

TEST(UdpPort, FamiliesDoNotMix) {
  Pair pair = open_pair(loopback());
  const auto peer = pair.sender->add_peer(*parse_endpoint("[2001:db8::1]:9470"));
  ASSERT_FALSE(peer.ok());
  EXPECT_NE(peer.error().message.find("IPv6"), std::string::npos);
  EXPECT_FALSE(pair.sender->add_peer(ipv4_endpoint(127, 0, 0, 1, 0)).ok());
  EXPECT_EQ(pair.port->max_datagram_to(*parse_endpoint("[::1]:1")), 0U);
  EXPECT_EQ(pair.port->max_datagram_to(ipv4_endpoint(127, 0, 0, 1, 9)), 65507U);
}

TEST(UdpPort, BindsToEveryInterface) {
  UdpOptions options;
  options.bind = ipv4_endpoint(0, 0, 0, 0, 0);
  auto port = open_udp_port(options);
  ASSERT_TRUE(port.ok()) << port.error().message;
  EXPECT_EQ((*port)->capabilities().device, "any");
  auto queue = (*port)->open_queue(0);
  ASSERT_TRUE(queue.ok());
  Pair pair = open_pair(loopback());
  const PeerHandle peer = *pair.sender->add_peer(ipv4_endpoint(127, 0, 0, 1, (*queue)->local().port));
  const std::vector<std::byte> bytes(50, std::byte{1});
  const TxPacket packet = packet_to(peer, bytes);
  ASSERT_EQ(pair.sender->send({&packet, 1}), 1U);
  EXPECT_EQ(drain(**queue, 1), 1U);
}

TEST(UdpPort, NoRouteIsCountedAndDoesNotStopTheRest) {
  Pair pair = open_pair(loopback());
  // From 127.0.0.1 nothing outside can be reached.
  const PeerHandle nowhere = *pair.sender->add_peer(ipv4_endpoint(192, 0, 2, 1, 9));
  const std::vector<std::byte> bytes(100, std::byte{1});
  const std::vector<TxPacket> packets = {packet_to(pair.peer, bytes), packet_to(nowhere, bytes),
                                         packet_to(nowhere, bytes), packet_to(pair.peer, bytes)};
  ASSERT_EQ(pair.sender->send(packets), packets.size());
  EXPECT_EQ(pair.sender->counters().tx_errors, 2U);
  EXPECT_EQ(drain(*pair.receiver, 2), 2U);
}

}  // namespace
}  // namespace sluice::port
