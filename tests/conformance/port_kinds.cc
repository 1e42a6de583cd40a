#include "tests/conformance/port_kinds.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transport/port/endpoint.h"
#include "transport/port/faulty/faulty_port.h"
#include "transport/port/sim/network.h"
#include "transport/port/udp/udp_port.h"

namespace sluice::port::testing {
namespace {

// Moves the calling thread, until it ends, into a network namespace of its own whose loopback sends at 50 Mbit/s and
// holds what it cannot send yet: plain loopback never makes a sender wait.
Result<void> enter_slow_namespace() {
  if (unshare(CLONE_NEWNET) != 0) {
    return Error{errno, "a slow device needs a network namespace of its own (run as root): " +
                            std::string(std::strerror(errno))};
  }
  const UniqueFd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP | IFF_RUNNING | IFF_LOOPBACK;
  if (ioctl(fd.get(), SIOCSIFFLAGS, &request) != 0)
    return Error{errno, "cannot bring up lo in the new namespace"};
  if (std::system(
          "PATH=$PATH:/usr/sbin:/sbin tc qdisc add dev lo root tbf rate 50mbit burst 128kb limit 64mb") !=
      0) {
    return Error{ENOENT, "a slow device needs tc (iproute2) and the qdisc tbf"};
  }
  return {};
}

// What is put around each port of a world.
using Wrap = std::function<std::unique_ptr<Port>(std::unique_ptr<Port>, std::function<Micros()> clock)>;
std::unique_ptr<Port> bare(std::unique_ptr<Port> port, const std::function<Micros()>&) { return port; }

class UdpWorld final : public World {
 public:
  static Result<std::unique_ptr<World>> open(const WorldOptions& options, UdpOptions udp,
                                             const Wrap& wrap = bare) {
    if (options.slow) {
      if (auto entered = enter_slow_namespace(); !entered.ok()) return entered.error();
      udp.send_buffer = 64 << 10;
    }
    auto world = std::make_unique<UdpWorld>();
    world->ipv6_ = !is_ipv4(udp.bind);
    udp.queues = options.queues;
    for (uint32_t node = 0; node < options.nodes; ++node) {
      auto port = open_udp_port(udp);
      if (!port.ok()) return port.error();
      world->ports_.push_back(wrap(std::move(*port), monotonic_micros));
    }
    return std::unique_ptr<World>(std::move(world));
  }

  Port& port(size_t node) override { return *ports_[node]; }
  void pass_time() override { usleep(200); }
  bool send_raw(const Endpoint& to, const std::vector<std::byte>& bytes) override {
    const UniqueFd fd(socket(ipv6_ ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(to.port);
    std::memcpy(&v4.sin_addr, to.ip.data() + 12, 4);
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(to.port);
    std::memcpy(&v6.sin6_addr, to.ip.data(), 16);
    const auto* address =
        ipv6_ ? reinterpret_cast<const sockaddr*>(&v6) : reinterpret_cast<const sockaddr*>(&v4);
    const socklen_t length = ipv6_ ? sizeof v6 : sizeof v4;
    return sendto(fd.get(), bytes.data(), bytes.size(), 0, address, length) ==
           static_cast<ssize_t>(bytes.size());
  }

 private:
  std::vector<std::unique_ptr<Port>> ports_;
  bool ipv6_ = false;
};

class SimWorld final : public World {
 public:
  static Result<std::unique_ptr<World>> open(const WorldOptions& options, const Wrap& wrap = bare) {
    sim::Network::Options network;
    network.nodes = options.nodes + 1;  // the last one is for send_raw
    network.queues = options.queues;
    network.seed = 1;
    if (options.slow) {
      network.plan.bits_per_second = 50'000'000;
      network.plan.device_queue_bytes = 64 << 10;
    }
    return std::unique_ptr<World>(new SimWorld(network, wrap));
  }
  SimWorld(const sim::Network::Options& options, const Wrap& wrap) : network_(options) {
    for (uint32_t node = 0; node < options.nodes; ++node)
      ports_.push_back(wrap(network_.open_port(node), [this] { return network_.now(); }));
  }

  Port& port(size_t node) override { return *ports_[node]; }
  void pass_time() override { network_.advance_to(network_.now() + 1000); }
  bool send_raw(const Endpoint& to, const std::vector<std::byte>& bytes) override {
    return network_.send((network_.nodes() - 1) * network_.queues(), network_.endpoint_of(to), bytes);
  }

 private:
  sim::Network network_;
  std::vector<std::unique_ptr<Port>> ports_;
};

UdpOptions udp_options(const char* address) {
  UdpOptions options;
  options.bind = *parse_ip(address);
  options.receive_slots = 16;
  return options;
}

Wrap faulty(const FaultyPlan& plan) {
  return [plan](std::unique_ptr<Port> port, std::function<Micros()> clock) -> std::unique_ptr<Port> {
    FaultyOptions options;
    options.plan = plan;
    options.hold_bytes = 1 << 20;
    options.clock = std::move(clock);
    return make_faulty_port(std::move(port), std::move(options));
  };
}

// Everything is looked at, nothing happens: the only faults are those of a peer that nobody has (TEST-NET-1, RFC 5737).
FaultyPlan faults_elsewhere() {
  FaultyPlan plan;
  PeerRule rule;
  rule.peer.endpoint = ipv4_endpoint(192, 0, 2, 1, 0);
  rule.send = {.latency = 1000, .loss = 1, .duplicate = 1, .replay = 1, .corrupt = 1};
  rule.receive = rule.send;
  plan.rules = {rule};
  plan.cuts = {{rule.peer}};
  return plan;
}

// Every datagram that arrives is copied, waits, and overtakes others: nothing that a port may not do. On the way out
// held ones would need owners that go on calling, which the suite's senders are not.
FaultyPlan delayed_on_arrival() {
  FaultyPlan plan;
  plan.receive.latency = 1;
  plan.receive.jitter = 300;
  return plan;
}

UdpOptions ethernet() {
  UdpOptions options = udp_options("127.0.0.1");
  options.max_datagram = 1472;
  return options;
}

}  // namespace

std::vector<PortKind> port_kinds() {
  return {
      {"udp_v4",
       [](const WorldOptions& options) { return UdpWorld::open(options, udp_options("127.0.0.1")); }},
      {"udp_v6", [](const WorldOptions& options) { return UdpWorld::open(options, udp_options("::1")); }},
      // One datagram a message and a buffer, of the size that Ethernet carries: what old kernels and odd devices leave.
      {"udp_plain",
       [](const WorldOptions& options) {
         UdpOptions udp = udp_options("127.0.0.1");
         udp.gso = false;
         udp.gro = false;
         udp.max_datagram = 1472;
         udp.receive_slots = 700;
         return UdpWorld::open(options, udp);
       }},
      {"udp_v4_1472", [](const WorldOptions& options) { return UdpWorld::open(options, ethernet()); }},
      {"sim", [](const WorldOptions& options) { return SimWorld::open(options); }},
      // Without faults a decorated port is the port itself.
      {"faulty_udp",
       [](const WorldOptions& options) {
         return UdpWorld::open(options, udp_options("127.0.0.1"), faulty({}));
       }},
      {"faulty_sim", [](const WorldOptions& options) { return SimWorld::open(options, faulty({})); }},
      {"faulty_udp_elsewhere",
       [](const WorldOptions& options) {
         return UdpWorld::open(options, udp_options("127.0.0.1"), faulty(faults_elsewhere()));
       }},
      {"faulty_sim_elsewhere",
       [](const WorldOptions& options) { return SimWorld::open(options, faulty(faults_elsewhere())); }},
      {"faulty_udp_delayed",
       [](const WorldOptions& options) {
         return UdpWorld::open(options, ethernet(), faulty(delayed_on_arrival()));
       }},
      {"faulty_sim_delayed",
       [](const WorldOptions& options) { return SimWorld::open(options, faulty(delayed_on_arrival())); }},
  };
}

}  // namespace sluice::port::testing
