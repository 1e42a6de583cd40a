// How fast the ports are: kernel UDP between two network namespaces, with and without GSO/GRO, and the simulator.
//
//   port_bench [--seconds 2] [--size 1472] [--burst 256] [--loopback]
//
// Makes the namespaces port-a and port-b joined by a veth pair and removes them at the end (root; --loopback does
// without). Sender and receiver are pinned to one CPU each. Prints; asserts nothing: compare runs on an idle machine.
#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/cpu_set.h"
#include "base/numeric/numeric.h"
#include "base/unique_fd.h"
#include "transport/port/endpoint.h"
#include "transport/port/sim/network.h"
#include "transport/port/udp/udp_port.h"

namespace sluice::port {
namespace {

struct Settings {
  double seconds = 2;
  uint32_t size = 1472;
  uint32_t burst = 256;
  bool loopback = false;
};

bool run(const std::string& command) {
  return std::system(("PATH=$PATH:/usr/sbin:/sbin " + command).c_str()) == 0;
}

struct Namespaces {
  bool made = false;
  bool open() {
    made = true;
    return run("ip netns add port-a") && run("ip netns add port-b") &&
           run("ip link add port-va netns port-a type veth peer name port-vb netns port-b") &&
           run("ip -n port-a addr add 10.200.0.1/24 dev port-va") &&
           run("ip -n port-b addr add 10.200.0.2/24 dev port-vb") &&
           run("ip -n port-a link set port-va up") && run("ip -n port-b link set port-vb up");
  }
  ~Namespaces() {
    if (made) run("ip netns del port-a; ip netns del port-b");
  }
};

bool enter(const char* name) {
  const UniqueFd fd(open((std::string("/run/netns/") + name).c_str(), O_RDONLY | O_CLOEXEC));
  return fd.valid() && setns(fd.get(), CLONE_NEWNET) == 0;
}

double thread_seconds() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

// CPUs as far apart as the process may use.
CpuSet cpu(size_t index) {
  const CpuSet allowed = CpuSet::allowed();
  return *CpuSet::parse(std::to_string(allowed.cpus()[index % allowed.cpus().size()]));
}

struct Shared {
  std::atomic<bool> ready{false};
  std::atomic<bool> stop{false};
  Endpoint receiver;
  std::string note;
  double receiver_cpu = 0;
  uint64_t wrong = 0;
  QueueCounters received;
};

UdpOptions options_for(const Settings& settings, bool offload, uint8_t host) {
  UdpOptions options;
  options.bind = settings.loopback ? ipv4_endpoint(127, 0, 0, 1, 0) : ipv4_endpoint(10, 200, 0, host, 0);
  options.receive_buffer = 32 << 20;
  options.send_buffer = 32 << 20;
  options.gso = offload;
  options.gro = offload;
  options.max_datagram = settings.size;
  options.receive_slots = offload ? 64 : 1024;
  return options;
}

void receive_side(const Settings& settings, bool offload, Shared* shared) {
  (void)pin_current_thread(cpu(1));
  if (!settings.loopback && !enter("port-b")) return;
  auto port = open_udp_port(options_for(settings, offload, 2));
  auto queue = std::move(*(*port)->open_queue(0));
  shared->receiver = queue->local();
  shared->note = (*port)->capabilities().note;
  shared->ready = true;
  std::vector<RxPacket> packets(256);
  const double start = thread_seconds();
  while (true) {
    const size_t got = queue->receive(packets);
    for (size_t i = 0; i < got; ++i) shared->wrong += packets[i].length != settings.size;
    queue->release(std::span(packets).first(got));
    if (got > 0) continue;
    if (shared->stop) break;
    pollfd entry{queue->fd(), POLLIN, 0};
    if (queue->arm()) poll(&entry, 1, 50);
  }
  shared->receiver_cpu = thread_seconds() - start;
  shared->received = queue->counters();
}

void measure_udp(const Settings& settings, bool offload) {
  Shared shared;
  std::thread receiver([&] { receive_side(settings, offload, &shared); });
  while (!shared.ready) poll(nullptr, 0, 1);
  std::thread([&] {
    (void)pin_current_thread(cpu(0));
    if (!settings.loopback && !enter("port-a")) return;
    auto port = open_udp_port(options_for(settings, offload, 1));
    auto queue = std::move(*(*port)->open_queue(0));
    const PeerHandle peer = *queue->add_peer(shared.receiver);
    // As the engine sends: header and tag in small buffers, payload from a large tensor.
    std::vector<std::byte> tensor(32 << 20, std::byte{1});
    std::vector<std::byte> headers(size_t{settings.burst} * 64, std::byte{2});
    const uint32_t payload = settings.size - 48 - 16;
    std::vector<TxPacket> packets(settings.burst);
    size_t offset = 0;
    const double cpu_start = thread_seconds();
    const int64_t start = monotonic_nanos();
    const auto end = start + static_cast<int64_t>(settings.seconds * 1e9);
    while (monotonic_nanos() < end) {
      for (uint32_t i = 0; i < settings.burst; ++i) {
        TxPacket& packet = packets[i];
        packet.peer = peer;
        packet.header = &headers[size_t{i} * 64];
        packet.header_length = 48;
        packet.trailer = packet.header + 48;
        packet.trailer_length = 16;
        packet.payload = &tensor[offset];
        packet.payload_length = payload;
        offset += payload;
        if (offset + payload > tensor.size()) offset = 0;
      }
      std::span<const TxPacket> left = packets;
      while (!left.empty()) left = left.subspan(queue->send(left));
    }
    const double seconds = static_cast<double>(monotonic_nanos() - start) * 1e-9;
    const double sender_cpu = thread_seconds() - cpu_start;
    poll(nullptr, 0, 100);
    shared.stop = true;
    receiver.join();
    const QueueCounters sent = queue->counters();
    const QueueCounters& got = shared.received;
    const double gigabytes = static_cast<double>(got.rx_bytes) * 1e-9;
    fmt::print(
        "udp {:8} {:5} B: {:8.0f} kpps sent, {:8.0f} kpps {:6.2f} Gb/s received, {:.3f} % lost, {} wrong; "
        "per call {:.1f} sent {:.1f} received; CPU s/GB {:.3f} send {:.3f} receive\n",
        offload ? "gso+gro" : "plain", settings.size, static_cast<double>(sent.tx_datagrams) / seconds * 1e-3,
        static_cast<double>(got.rx_datagrams) / seconds * 1e-3, gigabytes * 8 / seconds,
        100.0 - 100.0 * static_cast<double>(got.rx_datagrams) / static_cast<double>(sent.tx_datagrams),
        shared.wrong, static_cast<double>(sent.tx_datagrams) / static_cast<double>(sent.tx_calls),
        static_cast<double>(got.rx_datagrams) / static_cast<double>(got.rx_calls), sender_cpu / gigabytes,
        shared.receiver_cpu / gigabytes);
    if (!shared.note.empty()) fmt::print("  note: {}\n", shared.note);
  }).join();
}

void measure_sim(const Settings& settings) {
  for (const uint32_t size : {64U, settings.size}) {
    sim::FaultPlan plan;
    plan.everywhere.jitter = 100;
    plan.everywhere.loss = 0.01;
    sim::Network network({.nodes = 16, .queues = 1, .seed = 1, .plan = plan, .max_datagram = settings.size});
    uint64_t delivered = 0;
    network.on_delivery([&](uint32_t, uint32_t, std::span<const std::byte>) { ++delivered; });
    const std::vector<std::byte> bytes(size, std::byte{1});
    const int64_t start = monotonic_nanos();
    uint32_t next = 0;
    while (monotonic_nanos() - start < static_cast<int64_t>(settings.seconds * 0.5e9)) {
      for (int i = 0; i < 1000; ++i) {
        network.send(next % 16, (next / 16 + 7) % 16, bytes);
        if (++next % 16 == 0) network.advance_to(network.now() + 1);
      }
    }
    const double seconds = static_cast<double>(monotonic_nanos() - start) * 1e-9;
    fmt::print("sim {:5} B: {:.2f} M deliveries/s\n", size, static_cast<double>(delivered) / seconds * 1e-6);
  }
}

void measure_numeric() {
  constexpr size_t kCount = 64 << 10;  // elements; stays in the L2 cache, as a block being summed does
  std::vector<std::byte> wire(kCount * 8);
  std::vector<std::byte> sum(kCount * 8);
  for (const ElementType type : {ElementType::kF32, ElementType::kF16, ElementType::kBf16}) {
    const auto rate = [&](auto&& call) {
      int rounds = 0;
      const int64_t start = monotonic_nanos();
      while (monotonic_nanos() - start < 100'000'000) {
        call();
        ++rounds;
      }
      return static_cast<double>(rounds) * kCount / static_cast<double>(monotonic_nanos() - start);
    };
    const double add = rate([&] { numeric::add(type, wire.data(), sum.data(), kCount); });
    const double finish = rate([&] { numeric::finish(type, sum.data(), wire.data(), kCount, 3); });
    fmt::print("numeric {:5} ({}): add {:.1f}, finish {:.1f} G elements/s\n", element_type_name(type),
               numeric::target_name(), add, finish);
  }
}

}  // namespace
}  // namespace sluice::port

int main(int argc, char** argv) {
  sluice::port::Settings settings;
  CLI::App app("How fast the ports are");
  app.add_option("--seconds", settings.seconds, "length of each measurement")->check(CLI::PositiveNumber);
  app.add_option("--size", settings.size, "bytes of a datagram")->check(CLI::Range(65, 65507));
  app.add_option("--burst", settings.burst, "datagrams of one send()")->check(CLI::Range(1, 4096));
  app.add_flag("--loopback", settings.loopback, "over loopback instead of two namespaces");
  CLI11_PARSE(app, argc, argv);
  sluice::port::Namespaces namespaces;
  if (!settings.loopback && !namespaces.open()) {
    fmt::print(stderr,
               "port_bench: cannot make network namespaces (root and iproute2 are needed); try --loopback\n");
    return 77;
  }
  for (const bool offload : {true, false, true}) sluice::port::measure_udp(settings, offload);
  sluice::port::measure_sim(settings);
  sluice::port::measure_numeric();
  return 0;
}
