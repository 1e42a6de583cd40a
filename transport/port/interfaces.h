// Which network interface to use: the list of what the node has, and the choice for `bind:` with its reason in
// words, since a wrong choice (loopback, a container bridge) is the most common fault of a first installation.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "transport/port/port.h"

namespace sluice::port {

struct InterfaceAddress {
  Endpoint ip;                 // port 0; scope set for link-local IPv6
  uint32_t prefix_length = 0;  // bits of the address as written: 24 for 10.0.0.1/24
};

struct Interface {
  std::string name;
  uint32_t index = 0;
  bool up = false;  // administratively up and with carrier
  bool loopback = false;
  bool default_route = false;  // the IPv4 default route leaves here
  uint32_t mtu = 0;
  uint64_t bits_per_second = 0;  // 0: not known (virtual devices report fictions; those are not believed)
  std::vector<InterfaceAddress> addresses;
};

// All interfaces of this network namespace, by index. Control thread.
Result<std::vector<Interface>> list_interfaces();

// Speed of a link from the kernel, 0 if not known or fictitious (veth, tun, dummy).
uint64_t link_speed(const std::string& interface);

struct BindChoice {
  Endpoint endpoint;
  std::string interface;
  std::string
      reason;  // "eth0 (10.0.0.2/24, mtu 9000, 25 Gb/s): fastest of 2; not: lo (loopback), docker0 (...)"
};

// Chooses where to bind. `want` is one of
//   auto          the fastest interface that is up and has a routable address: never loopback, link-local, or one
//                 whose name says that it belongs to containers, virtual machines or VPNs (docker0, veth1a2b, ...);
//                 ties go to the one with the default route, then to the lowest index
//   10.0.0.0/8    the interface with an address in this range, whatever its name
//   eth0          this interface; its first IPv4 address, else its first IPv6 address
//   10.0.0.2      this address
// Errors list what there is and why it was not taken. A pure function of the list: any thread.
Result<BindChoice> choose_bind(std::string_view want, uint16_t port, std::span<const Interface> interfaces);

}  // namespace sluice::port
