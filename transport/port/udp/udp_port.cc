#include "transport/port/udp/udp_port.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "transport/port/endpoint.h"
#include "transport/port/interfaces.h"
#include "transport/port/udp/udp_queue.h"

namespace sluice::port {
namespace {

constexpr uint32_t kUdpHeader = 8;    // RFC 768
constexpr uint32_t kIpv4Header = 20;  // without options
constexpr uint32_t kIpv6Header = 40;
constexpr uint32_t kMaxUdpPayloadV4 = 65507;  // 65535 - 20 - 8
constexpr uint32_t kGroBytes = 65536;         // the kernel never merges more

bool is_any(const Endpoint& endpoint) {
  const size_t first = is_ipv4(endpoint) ? 12 : 0;
  return std::all_of(endpoint.ip.begin() + first, endpoint.ip.end(), [](uint8_t byte) { return byte == 0; });
}

uint32_t headers(bool ipv4) { return kUdpHeader + (ipv4 ? kIpv4Header : kIpv6Header); }

uint32_t datagram_of(uint32_t mtu, bool ipv4) {
  return std::min(mtu > headers(ipv4) ? mtu - headers(ipv4) : 0, kMaxUdpPayloadV4);
}

std::string list_names(const std::vector<Interface>& interfaces) {
  std::string text;
  for (const Interface& interface : interfaces) text += (text.empty() ? "" : ", ") + interface.name;
  return text;
}

class UdpPort final : public Port {
 public:
  static Result<std::unique_ptr<Port>> open(const UdpOptions& options);

  const Capabilities& capabilities() const override;
  Result<std::unique_ptr<Queue>> open_queue(uint32_t index) override;
  uint32_t max_datagram_to(const Endpoint& endpoint) override;

 private:
  Result<void> find_interface();
  void note(const std::string& text) const;

  UdpSetup setup_;
  std::shared_ptr<UdpFindings> findings_ = std::make_shared<UdpFindings>();
  mutable Capabilities capabilities_;
  mutable bool gso_noted_ = false;
};

// Sets device, MTU and speed from the interface that has the bind address (or the one named).
Result<void> UdpPort::find_interface() {
  auto interfaces = list_interfaces();
  if (!interfaces.ok()) return interfaces.error();
  const Endpoint& bind = setup_.options.bind;
  const std::string& name = setup_.options.interface;
  const auto found = std::find_if(interfaces->begin(), interfaces->end(), [&](const Interface& interface) {
    if (!name.empty()) return interface.name == name;
    return std::any_of(interface.addresses.begin(), interface.addresses.end(),
                       [&](const InterfaceAddress& address) { return address.ip.ip == bind.ip; });
  });
  if (found != interfaces->end()) {
    capabilities_.device = found->name;
    capabilities_.link_bits_per_second = found->bits_per_second;
    capabilities_.max_datagram = datagram_of(found->mtu, setup_.ipv4);
    return {};
  }
  if (!name.empty()) {
    return Error{ENODEV, "no interface '" + name + "'; there are: " + list_names(*interfaces)};
  }
  // All of 127/8 is local although only 127.0.0.1 is listed.
  const bool loopback = setup_.ipv4 && bind.ip[12] == 127;
  uint32_t mtu = 0;
  for (const Interface& interface : *interfaces) {
    if (interface.loopback != loopback || !interface.up) continue;
    mtu = mtu == 0 ? interface.mtu : std::min(mtu, interface.mtu);
    if (loopback) capabilities_.device = interface.name;
  }
  if (!loopback) {
    if (!is_any(bind)) {
      return Error{EADDRNOTAVAIL, "no interface has the address " + ip_to_string(bind) +
                                      " (`ip address` shows what there is)"};
    }
    capabilities_.device = "any";
  }
  // 1280: the least that IPv6 guarantees, for a node that has no interface up yet.
  capabilities_.max_datagram = datagram_of(mtu == 0 ? 1280 : mtu, setup_.ipv4);
  return {};
}

void UdpPort::note(const std::string& text) const {
  if (!capabilities_.note.empty()) capabilities_.note += "; ";
  capabilities_.note += text;
}

Result<std::unique_ptr<Port>> UdpPort::open(const UdpOptions& options) {
  auto port = std::make_unique<UdpPort>();
  port->setup_.options = options;
  port->setup_.ipv4 = is_ipv4(options.bind);
  if (options.queues == 0 || options.receive_slots == 0) {
    return Error{EINVAL, "a UDP port needs at least one queue and one receive slot"};
  }
  if (options.bind.port != 0 && uint32_t{options.bind.port} + options.queues - 1 > 65535) {
    return Error{EINVAL, std::to_string(options.queues) + " queues from port " +
                             std::to_string(options.bind.port) +
                             " on would pass port 65535; choose a lower port"};
  }
  port->capabilities_.kind = "udp";
  port->capabilities_.queues = options.queues;
  if (auto found = port->find_interface(); !found.ok()) return found.error();
  if (options.max_datagram != 0) {
    port->capabilities_.max_datagram = std::min(port->capabilities_.max_datagram, options.max_datagram);
  }
  port->setup_.max_datagram = port->capabilities_.max_datagram;
  // Without GRO a slot holds one datagram and no more than this port would send itself.
  port->setup_.slot_bytes = options.gro ? kGroBytes : (port->capabilities_.max_datagram + 63) / 64 * 64;

  // The first queue's grants are known only when it is opened; a socket of its own tells them now.
  UdpSetup probe = port->setup_;
  probe.options.bind.port = 0;
  probe.options.receive_slots = 1;
  auto queue = UdpQueue::open(probe, 0, port->findings_);
  if (!queue.ok()) return queue.error();
  const UdpGrants& grants = (*queue)->grants();
  port->capabilities_.receive_buffer_bytes = grants.receive_buffer;
  const auto clamped = [&](const char* what, size_t wanted, size_t granted, const char* sysctl) {
    if (granted >= 2 * wanted) return;
    port->note(std::string(what) + " buffer is " + std::to_string(granted / 2) + " bytes instead of " +
               std::to_string(wanted) + "; raise it with `sysctl -w " + sysctl + "=" +
               std::to_string(wanted) + "` or give CAP_NET_ADMIN");
  };
  clamped("receive", options.receive_buffer, grants.receive_buffer, "net.core.rmem_max");
  clamped("send", options.send_buffer, grants.send_buffer, "net.core.wmem_max");
  if (options.gso && !grants.gso)
    port->note("no UDP_SEGMENT in this kernel (needs 4.18): sending costs more");
  if (options.gro && !grants.gro) port->note("no UDP_GRO in this kernel (needs 5.0): receiving costs more");
  return std::unique_ptr<Port>(std::move(port));
}

const Capabilities& UdpPort::capabilities() const {
  if (!gso_noted_ && findings_->gso_refused.load(std::memory_order_relaxed)) {
    gso_noted_ = true;
    note("the way out refuses UDP_SEGMENT (" + capabilities_.device +
         " lacks checksum offload?): sending one by one, which costs more");
  }
  return capabilities_;
}

Result<std::unique_ptr<Queue>> UdpPort::open_queue(uint32_t index) {
  if (index >= setup_.options.queues) {
    return Error{EINVAL, "queue " + std::to_string(index) + " of " + std::to_string(setup_.options.queues)};
  }
  auto queue = UdpQueue::open(setup_, index, findings_);
  if (!queue.ok()) return queue.error();
  return std::unique_ptr<Queue>(std::move(*queue));
}

uint32_t UdpPort::max_datagram_to(const Endpoint& endpoint) {
  const uint32_t own = capabilities_.max_datagram;
  const bool ipv4 = setup_.ipv4;
  if (is_ipv4(endpoint) != ipv4) return 0;
  // A connected socket knows the MTU of its route, path MTU discovery included.
  const UniqueFd probe(socket(ipv4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  SocketAddress address;
  Endpoint from = setup_.options.bind;
  from.port = 0;
  socklen_t length = to_socket_address(from, ipv4, &address);
  if (!probe || bind(probe.get(), &address.any, length) != 0) return own;
  length = to_socket_address(endpoint, ipv4, &address);
  int mtu = 0;
  socklen_t size = sizeof mtu;
  if (connect(probe.get(), &address.any, length) != 0 ||
      getsockopt(probe.get(), ipv4 ? IPPROTO_IP : IPPROTO_IPV6, ipv4 ? IP_MTU : IPV6_MTU, &mtu, &size) != 0 ||
      mtu <= 0) {
    return own;
  }
  return std::min(own, datagram_of(static_cast<uint32_t>(mtu), ipv4));
}

}  // namespace

Result<std::unique_ptr<Port>> open_udp_port(const UdpOptions& options) { return UdpPort::open(options); }

}  // namespace sluice::port
