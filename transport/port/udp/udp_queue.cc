// Opening and describing a UDP queue; the data path is in udp_send.cc and udp_receive.cc.
#include "transport/port/udp/udp_queue.h"

#include <netinet/udp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/port/endpoint.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103  // linux/udp.h
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace sluice::port {
namespace {

bool set_option(int fd, int level, int name, int value) {
  return setsockopt(fd, level, name, &value, sizeof value) == 0;
}

// Asks for `wanted` bytes past the limit of the system, else within it; returns what the kernel says it is.
size_t set_buffer(int fd, size_t wanted, int force, int plain, int read_back) {
  // The kernel doubles the number and keeps it in an int.
  const int value = static_cast<int>(std::min<size_t>(wanted, (size_t{1} << 30) - 1));
  if (!set_option(fd, SOL_SOCKET, force, value)) set_option(fd, SOL_SOCKET, plain, value);
  int granted = 0;
  socklen_t length = sizeof granted;
  getsockopt(fd, SOL_SOCKET, read_back, &granted, &length);
  return static_cast<size_t>(std::max(granted, 0));
}

std::string bind_help(int code) {
  switch (code) {
    case EADDRINUSE:
      return " (another process has this port; `ss -ulpn` shows which)";
    case EADDRNOTAVAIL:
      return " (no interface has this address; `ip address` shows what there is)";
    case EACCES:
      return " (ports below 1024 need CAP_NET_BIND_SERVICE)";
    default:
      return "";
  }
}

}  // namespace

socklen_t to_socket_address(const Endpoint& endpoint, bool ipv4, SocketAddress* out) {
  std::memset(out, 0, sizeof *out);
  if (ipv4) {
    out->v4.sin_family = AF_INET;
    out->v4.sin_port = htons(endpoint.port);
    std::memcpy(&out->v4.sin_addr, endpoint.ip.data() + 12, 4);
    return sizeof out->v4;
  }
  out->v6.sin6_family = AF_INET6;
  out->v6.sin6_port = htons(endpoint.port);
  std::memcpy(&out->v6.sin6_addr, endpoint.ip.data(), 16);
  out->v6.sin6_scope_id = endpoint.scope;
  return sizeof out->v6;
}

Endpoint from_socket_address(const SocketAddress& address) {
  if (address.any.sa_family == AF_INET) {
    uint8_t ip[4];
    std::memcpy(ip, &address.v4.sin_addr, 4);
    return ipv4_endpoint(ip[0], ip[1], ip[2], ip[3], ntohs(address.v4.sin_port));
  }
  Endpoint endpoint;
  std::memcpy(endpoint.ip.data(), &address.v6.sin6_addr, 16);
  endpoint.port = ntohs(address.v6.sin6_port);
  endpoint.scope = address.v6.sin6_scope_id;
  return endpoint;
}

Result<std::unique_ptr<UdpQueue>> UdpQueue::open(const UdpSetup& setup, uint32_t index,
                                                 std::shared_ptr<UdpFindings> findings) {
  auto queue = std::unique_ptr<UdpQueue>(new UdpQueue(std::move(findings)));
  queue->ipv4_ = setup.ipv4;
  queue->socket_ =
      UniqueFd(socket(setup.ipv4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!queue->socket_) {
    const int code = errno;
    return Error{code, std::string("cannot open a UDP socket: ") + std::strerror(code)};
  }
  if (auto configured = queue->configure_socket(setup); !configured.ok()) return configured.error();

  Endpoint bind_to = setup.options.bind;
  if (bind_to.port != 0) bind_to.port = static_cast<uint16_t>(bind_to.port + index);
  SocketAddress address;
  queue->address_length_ = to_socket_address(bind_to, setup.ipv4, &address);
  if (bind(queue->socket_.get(), &address.any, queue->address_length_) != 0) {
    const int code = errno;
    return Error{code, "cannot bind " + to_string(bind_to) + " for queue " + std::to_string(index) + ": " +
                           std::strerror(code) + bind_help(code)};
  }
  socklen_t length = sizeof address;
  getsockname(queue->socket_.get(), &address.any, &length);
  queue->local_ = from_socket_address(address);
  if (auto allocated = queue->allocate(setup); !allocated.ok()) return allocated.error();
  return queue;
}

Result<void> UdpQueue::configure_socket(const UdpSetup& setup) {
  const int fd = socket_.get();
  const UdpOptions& options = setup.options;
  grants_.receive_buffer = set_buffer(fd, options.receive_buffer, SO_RCVBUFFORCE, SO_RCVBUF, SO_RCVBUF);
  grants_.send_buffer = set_buffer(fd, options.send_buffer, SO_SNDBUFFORCE, SO_SNDBUF, SO_SNDBUF);
  bool good = set_option(fd, SOL_SOCKET, SO_RXQ_OVFL, 1);
  if (setup.ipv4) {
    good = set_option(fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO) && good;
    good = set_option(fd, IPPROTO_IP, IP_RECVTOS, 1) && good;
  } else {
    // A port speaks one family: an IPv4 source never hides behind an IPv6 socket.
    good = set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1) && good;
    good = set_option(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO) && good;
    good = set_option(fd, IPPROTO_IPV6, IPV6_RECVTCLASS, 1) && good;
  }
  if (!good) {
    const int code = errno;
    return Error{code, std::string("cannot set up a UDP socket: ") + std::strerror(code)};
  }
  grants_.gro = options.gro && set_option(fd, SOL_UDP, UDP_GRO, 1);
  // Size 0 sets nothing but is refused by kernels that cannot segment.
  grants_.gso = options.gso && set_option(fd, SOL_UDP, UDP_SEGMENT, 0);
  gso_ = grants_.gso;
  return {};
}

Result<void> UdpQueue::allocate(const UdpSetup& setup) {
  max_datagram_ = setup.max_datagram;
  slot_bytes_ = setup.slot_bytes;
  const uint32_t slots = setup.options.receive_slots;
  auto buffers = Mapping::anonymous(size_t{slots} * slot_bytes_);
  if (!buffers.ok()) {
    return Error{buffers.error().code, "receive buffers of a UDP queue (" + std::to_string(slots) + " of " +
                                           std::to_string(slot_bytes_) +
                                           " bytes): " + buffers.error().message};
  }
  buffers_ = std::move(*buffers);
  lent_.assign(slots, 0);
  free_slots_.reserve(slots);
  for (uint32_t slot = slots; slot > 0; --slot) free_slots_.push_back(slot - 1);

  tx_messages_.resize(kTxMessages);
  tx_packets_.resize(kTxMessages);
  tx_iovecs_.resize(kTxIovecs);
  tx_control_.resize(kTxMessages);
  rx_messages_.resize(kRxMessages);
  rx_iovecs_.resize(kRxMessages);
  rx_sources_.resize(kRxMessages);
  rx_control_.resize(kRxMessages);
  rx_slots_.resize(kRxMessages);
  pending_.resize(kRxMessages);
  return {};
}

Result<PeerHandle> UdpQueue::add_peer(const Endpoint& endpoint) {
  if (is_ipv4(endpoint) != ipv4_) {
    return Error{EAFNOSUPPORT, "cannot reach " + to_string(endpoint) + " from " + to_string(local_) +
                                   ": one is IPv4, the other IPv6; bind both nodes to the same family"};
  }
  if (endpoint.port == 0) return Error{EINVAL, "peer " + to_string(endpoint) + " has no port"};
  const PeerHandle peer = peers_.add(endpoint);
  if (addresses_.size() < peers_.capacity()) addresses_.resize(peers_.capacity());
  to_socket_address(endpoint, ipv4_, &addresses_[peer]);
  return peer;
}

}  // namespace sluice::port
