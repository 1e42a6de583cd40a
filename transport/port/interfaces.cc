#include "transport/port/interfaces.h"

#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "base/unique_fd.h"
#include "transport/port/endpoint.h"

namespace sluice::port {
namespace {

// Names that container engines, hypervisors and VPNs give to interfaces that are not a way out of the node.
constexpr std::string_view kForeignPrefixes[] = {
    "docker", "br-",   "veth",   "virbr", "vnet", "vmnet", "cni", "flannel",   "cali", "cilium",
    "lxc",    "lxdbr", "podman", "kube",  "tun",  "tap",   "wg",  "tailscale", "ifb",  "dummy"};

std::string_view foreign_prefix(std::string_view name) {
  for (const std::string_view prefix : kForeignPrefixes) {
    if (name.substr(0, prefix.size()) == prefix) return prefix;
  }
  return {};
}

bool is_link_local(const Endpoint& ip) {
  if (is_ipv4(ip)) return ip.ip[12] == 169 && ip.ip[13] == 254;
  return ip.ip[0] == 0xfe && (ip.ip[1] & 0xc0) == 0x80;
}

bool in_range(const Endpoint& ip, const Endpoint& range, uint32_t prefix_length) {
  if (is_ipv4(ip) != is_ipv4(range)) return false;
  const uint32_t bits = is_ipv4(range) ? 96 + prefix_length : prefix_length;
  for (uint32_t i = 0; i < bits; i += 8) {
    const uint32_t left = std::min<uint32_t>(8, bits - i);
    const auto mask = static_cast<uint8_t>(0xff00U >> left);
    if ((ip.ip[i / 8] & mask) != (range.ip[i / 8] & mask)) return false;
  }
  return true;
}

std::string speed_text(uint64_t bits_per_second) {
  char text[32];
  if (bits_per_second == 0) return "speed not known";
  const double gigabits = static_cast<double>(bits_per_second) / 1e9;
  std::snprintf(text, sizeof text, "%g Gb/s", gigabits);
  return text;
}

std::string describe(const Interface& interface, const InterfaceAddress& address) {
  return interface.name + " (" + ip_to_string(address.ip) + "/" + std::to_string(address.prefix_length) +
         ", mtu " + std::to_string(interface.mtu) + ", " + speed_text(interface.bits_per_second) + ")";
}

// "lo (loopback), docker0 (belongs to containers by its name)"
struct Rejected {
  std::string text;
  void add(const Interface& interface, const std::string& why) {
    if (!text.empty()) text += ", ";
    text += interface.name + " (" + why + ")";
  }
};

const InterfaceAddress* first_address(const Interface& interface, bool allow_link_local) {
  const InterfaceAddress* best = nullptr;
  // IPv4 first: that is what the rendezvous of the launchers speaks on most clusters.
  for (const bool link_local : {false, true}) {
    if (link_local && !allow_link_local) break;
    for (const bool v4 : {true, false}) {
      for (const InterfaceAddress& address : interface.addresses) {
        if (is_ipv4(address.ip) == v4 && is_link_local(address.ip) == link_local && best == nullptr)
          best = &address;
      }
    }
  }
  return best;
}

struct Candidate {
  const Interface* interface;
  const InterfaceAddress* address;
};

bool better(const Candidate& a, const Candidate& b) {
  if (a.interface->bits_per_second != b.interface->bits_per_second) {
    return a.interface->bits_per_second > b.interface->bits_per_second;
  }
  if (a.interface->default_route != b.interface->default_route) return a.interface->default_route;
  return a.interface->index < b.interface->index;
}

BindChoice chosen(const Candidate& candidate, uint16_t port, const std::string& why,
                  const Rejected& rejected) {
  BindChoice choice;
  choice.endpoint = candidate.address->ip;
  choice.endpoint.port = port;
  choice.interface = candidate.interface->name;
  choice.reason = describe(*candidate.interface, *candidate.address) + ": " + why;
  if (!rejected.text.empty()) choice.reason += "; not: " + rejected.text;
  return choice;
}

Result<BindChoice> best_of(std::vector<Candidate> candidates, uint16_t port, const std::string& rule,
                           Rejected rejected, const std::string& nothing) {
  if (candidates.empty()) {
    return Error{ENODEV, nothing + "; interfaces: " + (rejected.text.empty() ? "none" : rejected.text)};
  }
  std::stable_sort(candidates.begin(), candidates.end(), better);
  std::string why = rule;
  if (candidates.size() > 1) {
    const Interface& first = *candidates[0].interface;
    const Interface& second = *candidates[1].interface;
    const std::string of = " of " + std::to_string(candidates.size());
    why += first.bits_per_second != second.bits_per_second ? ", fastest" + of
           : first.default_route != second.default_route   ? ", has the default route, one" + of
                                                           : ", first" + of;
  }
  for (size_t i = 1; i < candidates.size(); ++i) {
    rejected.add(*candidates[i].interface, speed_text(candidates[i].interface->bits_per_second));
  }
  return chosen(candidates[0], port, why, rejected);
}

Result<BindChoice> choose_auto(uint16_t port, std::span<const Interface> interfaces) {
  std::vector<Candidate> candidates;
  Rejected rejected;
  for (const Interface& interface : interfaces) {
    const InterfaceAddress* address = first_address(interface, false);
    if (interface.loopback) {
      rejected.add(interface, "loopback");
    } else if (const std::string_view prefix = foreign_prefix(interface.name); !prefix.empty()) {
      rejected.add(interface, "'" + std::string(prefix) + "*' is not a way out of the node");
    } else if (!interface.up) {
      rejected.add(interface, "down");
    } else if (address == nullptr) {
      rejected.add(interface, "no routable address");
    } else {
      candidates.push_back({&interface, address});
    }
  }
  return best_of(std::move(candidates), port, "chosen by auto", rejected,
                 "bind: auto found no usable interface; name one, or give its address or range");
}

Result<BindChoice> choose_range(std::string_view want, const Endpoint& range, uint32_t prefix_length,
                                uint16_t port, std::span<const Interface> interfaces) {
  std::vector<Candidate> candidates;
  Rejected rejected;
  for (const Interface& interface : interfaces) {
    const auto found =
        std::find_if(interface.addresses.begin(), interface.addresses.end(),
                     [&](const InterfaceAddress& a) { return in_range(a.ip, range, prefix_length); });
    if (found == interface.addresses.end()) {
      rejected.add(interface,
                   interface.addresses.empty() ? "no address" : ip_to_string(interface.addresses[0].ip));
    } else if (!interface.up) {
      rejected.add(interface, "down");
    } else {
      candidates.push_back({&interface, &*found});
    }
  }
  const std::string text(want);
  return best_of(std::move(candidates), port, "in " + text, rejected,
                 "no interface has an address in " + text);
}

Result<BindChoice> choose_name(std::string_view want, uint16_t port, std::span<const Interface> interfaces) {
  Rejected others;
  for (const Interface& interface : interfaces) {
    if (interface.name != want) {
      others.add(interface,
                 interface.addresses.empty() ? "no address" : ip_to_string(interface.addresses[0].ip));
      continue;
    }
    const InterfaceAddress* address = first_address(interface, true);
    if (address == nullptr) return Error{EADDRNOTAVAIL, interface.name + " has no address"};
    if (!interface.up)
      return Error{ENETDOWN, interface.name + " is down (ip link set " + interface.name + " up)"};
    return chosen({&interface, address}, port, "named in the configuration", {});
  }
  return Error{ENODEV, "'" + std::string(want) +
                           "' is neither auto, nor an address, nor a range (10.0.0.0/8), nor one of: " +
                           (others.text.empty() ? "no interfaces" : others.text)};
}

Endpoint from_sockaddr(const sockaddr* address) {
  Endpoint endpoint;
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    uint8_t bytes[4];
    std::memcpy(bytes, &v4->sin_addr, 4);
    return ipv4_endpoint(bytes[0], bytes[1], bytes[2], bytes[3], 0);
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
  std::memcpy(endpoint.ip.data(), &v6->sin6_addr, 16);
  endpoint.scope = v6->sin6_scope_id;
  return endpoint;
}

uint32_t prefix_of(const sockaddr* mask) {
  if (mask == nullptr) return 0;
  const bool v4 = mask->sa_family == AF_INET;
  const auto* bytes =
      v4 ? reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in*>(mask)->sin_addr)
         : reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr);
  uint32_t bits = 0;
  for (size_t i = 0; i < (v4 ? 4U : 16U); ++i) bits += static_cast<uint32_t>(std::popcount(bytes[i]));
  return bits;
}

// Name of the interface that the IPv4 default route leaves by, "" if there is none.
std::string default_route_interface() {
  std::FILE* file = std::fopen("/proc/net/route", "re");
  if (file == nullptr) return {};
  std::string found;
  char line[512];
  while (std::fgets(line, sizeof line, file) != nullptr && found.empty()) {
    char name[IFNAMSIZ + 1];
    unsigned destination = 0;
    unsigned gateway = 0;
    unsigned flags = 0;
    if (std::sscanf(line, "%16s %x %x %x", name, &destination, &gateway, &flags) == 4 && destination == 0 &&
        (flags & 1) != 0) {
      found = name;
    }
  }
  std::fclose(file);
  return found;
}

}  // namespace

uint64_t link_speed(const std::string& interface) {
  const UniqueFd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  if (!fd || interface.size() >= sizeof request.ifr_name) return 0;
  std::memcpy(request.ifr_name, interface.data(), interface.size());
  ethtool_drvinfo driver{};
  driver.cmd = ETHTOOL_GDRVINFO;
  request.ifr_data = reinterpret_cast<char*>(&driver);
  if (ioctl(fd.get(), SIOCETHTOOL, &request) == 0) {
    // These drivers answer with a constant (veth: 10 Gb/s, tun: 10 Mb/s) that says nothing about the way out.
    const std::string_view name(driver.driver, strnlen(driver.driver, sizeof driver.driver));
    if (name == "veth" || name == "tun" || name == "dummy") return 0;
  }
  std::FILE* file = std::fopen(("/sys/class/net/" + interface + "/speed").c_str(), "re");
  if (file == nullptr) return 0;
  long long megabits = 0;
  if (std::fscanf(file, "%lld", &megabits) != 1 || megabits < 0) megabits = 0;
  std::fclose(file);
  return static_cast<uint64_t>(megabits) * 1'000'000;
}

Result<std::vector<Interface>> list_interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    const int code = errno;
    return Error{code, std::string("cannot list network interfaces: ") + std::strerror(code)};
  }
  const UniqueFd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const std::string default_route = default_route_interface();
  std::vector<Interface> interfaces;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    auto found = std::find_if(interfaces.begin(), interfaces.end(),
                              [&](const Interface& interface) { return interface.name == entry->ifa_name; });
    if (found == interfaces.end()) {
      Interface interface;
      interface.name = entry->ifa_name;
      interface.index = if_nametoindex(entry->ifa_name);
      interface.up = (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & IFF_RUNNING) != 0;
      interface.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
      interface.default_route = interface.name == default_route;
      ifreq request{};
      std::snprintf(request.ifr_name, sizeof request.ifr_name, "%s", entry->ifa_name);
      if (ioctl(fd.get(), SIOCGIFMTU, &request) == 0) interface.mtu = static_cast<uint32_t>(request.ifr_mtu);
      interface.bits_per_second = link_speed(interface.name);
      interfaces.push_back(std::move(interface));
      found = interfaces.end() - 1;
    }
    const sockaddr* address = entry->ifa_addr;
    if (address == nullptr || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) continue;
    found->addresses.push_back({from_sockaddr(address), prefix_of(entry->ifa_netmask)});
  }
  freeifaddrs(list);
  std::sort(interfaces.begin(), interfaces.end(),
            [](const Interface& a, const Interface& b) { return a.index < b.index; });
  return interfaces;
}

Result<BindChoice> choose_bind(std::string_view want, uint16_t port, std::span<const Interface> interfaces) {
  if (want == "auto") return choose_auto(port, interfaces);
  if (const size_t slash = want.find('/'); slash != std::string_view::npos) {
    const auto range = parse_ip(want.substr(0, slash));
    const std::string_view length = want.substr(slash + 1);
    uint32_t bits = 0;
    const auto [end, error] = std::from_chars(length.data(), length.data() + length.size(), bits);
    if (!range.ok() || error != std::errc() || end != length.data() + length.size() ||
        bits > (is_ipv4(*range) ? 32U : 128U)) {
      return Error{EINVAL,
                   "'" + std::string(want) + "' is not a range of addresses; write for example 10.0.0.0/8"};
    }
    return choose_range(want, *range, bits, port, interfaces);
  }
  if (auto address = parse_ip(want); address.ok()) {
    for (const Interface& interface : interfaces) {
      for (const InterfaceAddress& own : interface.addresses) {
        const bool same_scope = address->scope == 0 || address->scope == own.ip.scope;
        if (own.ip.ip == address->ip && same_scope) {
          return chosen({&interface, &own}, port, "given in the configuration", {});
        }
      }
    }
    Rejected all;
    for (const Interface& interface : interfaces) {
      all.add(interface,
              interface.addresses.empty() ? "no address" : ip_to_string(interface.addresses[0].ip));
    }
    return Error{EADDRNOTAVAIL,
                 "no interface has the address " + std::string(want) + "; there are: " + all.text};
  }
  return choose_name(want, port, interfaces);
}

}  // namespace sluice::port
