// The engine of a daemon alone: one lane over kernel UDP, the exchange protocol and one client's rings in one process,
// without control socket, configuration or libsluice. What sluice-bench measures beyond this is their cost; what can be
// profiled here is the data path and nothing else. One process per node:
//
//   engine_bench --self I --nodes 10.77.0.1,10.77.0.2,... [--port 9470] [--bytes 25M] [-n 20] [--class exact] [--sealing none]
#include <sys/mman.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

#include "base/clock.h"
#include "base/ipc/doorbell.h"
#include "base/ipc/ring.h"
#include "daemon/engine/lane_worker.h"
#include "tools/sluice_bench/measure.h"
#include "tools/sluice_bench/oracle.h"
#include "transport/port/udp/udp_port.h"
#include "transport/wire/packet.h"

namespace sluice::bench {
namespace {

struct Options {
  uint32_t self = 0;
  std::vector<std::string> nodes;
  uint16_t port = 9470;
  std::string bytes = "25M", op_class = "exact", sealing = "none";
  uint32_t iterations = 20, warmup = 3, inflight = 1, flow_window = 512 * 1024;
  Micros spin = 20;
};

struct Failure {
  std::string text;
};

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) throw Failure{result.error().message};
  return std::move(*result);
}

void* map_shared(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw Failure{"mmap"};
  return memory;
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), bytes_(parse_size(options.bytes)) {
    port::UdpOptions udp;
    udp.bind = endpoint(options.self);
    port_ = must(port::open_udp_port(udp));
    queue_ = must(port_->open_queue(0));
    worker_ =
        std::make_unique<daemon::LaneWorker>(queue_.get(), daemon::WorkerOptions{.spin = options.spin}, -1);
    control_ = new (map_shared(sizeof(ipc::ControlPage))) ipc::ControlPage;
    submit_ = new (map_shared(sizeof(ipc::SubmitPage))) ipc::SubmitPage;
    slot_bytes_ = (bytes_ + 4095) / 4096 * 4096;
    arena_bytes_ = 2 * options.inflight * slot_bytes_;
    arena_ = static_cast<std::byte*>(map_shared(arena_bytes_));
    descriptors_ = ipc::descriptor_writer(*submit_, *control_, 0);
    completions_ = ipc::completion_reader(*submit_, *control_, 0);
    worker_->post(attach());
    thread_ = std::thread([this] { worker_->run(); });
  }

  ~Bench() {
    daemon::Command stop;
    stop.kind = daemon::Command::Kind::kStop;
    worker_->post(std::move(stop));
    thread_.join();
  }

  bool run() {
    const uint64_t count = bytes_ / 4;
    Pattern pattern{ElementType::kF32, ReduceKind::kSum, static_cast<uint32_t>(options_.nodes.size()), 1};
    for (uint32_t slot = 0; slot < options_.inflight; ++slot) {
      fill(pattern, options_.self, contribution(slot), count);
      std::memset(result(slot), 0, bytes_);
    }
    const auto begin = [&](uint32_t slot) { submit(slot, count); };
    const auto finish = [&](uint32_t) { wait(); };
    std::vector<double> durations;
    run_calls(options_.warmup, options_.inflight, begin, finish, &durations);
    Stopwatch watch(0);
    Sample sample;
    watch.start();
    run_calls(options_.iterations, options_.inflight, begin, finish, &sample.duration);
    watch.stop(&sample);
    uint64_t wrong = 0;
    for (uint32_t slot = 0; slot < options_.inflight; ++slot)
      wrong += check(pattern, result(slot), count).wrong;
    const Row row = summarize(bytes_, count, {sample});
    daemon::LaneStats stats;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    worker_->stats(&stats);
    std::printf("node %u: %.3f ms (p50 %.3f, p99 %.3f), cpu %.4f s/GB of this node, wrong %llu\n",
                options_.self, row.mean_s * 1e3, row.p50_s * 1e3, row.p99_s * 1e3, row.cpu_per_gb,
                static_cast<unsigned long long>(wrong));
    const port::QueueCounters& q = stats.queue;
    const auto per = [](uint64_t a, uint64_t b) {
      return b == 0 ? 0 : static_cast<double>(a) / static_cast<double>(b);
    };
    std::printf("  tx %.1f datagrams a call, rx %.1f, overflow %llu, again %llu, loops %llu",
                per(q.tx_datagrams, q.tx_calls), per(q.rx_datagrams, q.rx_calls),
                static_cast<unsigned long long>(q.rx_overflow), static_cast<unsigned long long>(q.tx_again),
                static_cast<unsigned long long>(stats.loops));
    for (const auto& job : stats.jobs) {
      std::printf(", repaired %llu, resent %llu",
                  static_cast<unsigned long long>(job.counters.blocks_repaired),
                  static_cast<unsigned long long>(job.counters.blocks_resent));
      for (size_t i = 0; i < static_cast<size_t>(wire::Drop::kCount); ++i) {
        if (job.counters.drops[i] > 0) {
          std::printf(", %s %llu", wire::drop_name(static_cast<wire::Drop>(i)),
                      static_cast<unsigned long long>(job.counters.drops[i]));
        }
      }
    }
    std::printf("\n");
    // The others may still need something.
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    return wrong == 0;
  }

 private:
  port::Endpoint endpoint(uint32_t node) const {
    return must(port::parse_endpoint(options_.nodes[node] + ":" + std::to_string(options_.port)));
  }
  std::byte* contribution(uint32_t slot) { return arena_ + 2 * slot * slot_bytes_; }
  std::byte* result(uint32_t slot) { return contribution(slot) + slot_bytes_; }

  daemon::Command attach() {
    auto job = std::make_unique<daemon::LaneJob>();
    job->id = 1;
    exchange::Settings& settings = job->settings;
    settings.job = "engine";
    settings.key.fill(7);
    settings.sealing = options_.sealing == "none" ? wire::Sealing::kNone : wire::Sealing::kAuth;
    for (uint32_t node = 0; node < options_.nodes.size(); ++node) {
      wire::ViewMember member;
      member.join_nonce[0] = static_cast<uint8_t>(node + 1);
      settings.members.push_back(member);
      settings.node_of_rank.push_back(node);
      job->nodes.push_back(endpoint(node));
    }
    settings.self = options_.self;
    settings.payload = wire::payload_for_datagram(port_->capabilities().max_datagram);
    settings.max_op_bytes = bytes_;
    settings.hard_deadline = 20'000'000;
    settings.flow_window = options_.flow_window;
    daemon::LaneClient client;
    client.id = 1;
    client.control = control_;
    client.submit = submit_;
    client.arena = arena_;
    client.arena_bytes = arena_bytes_;
    job->clients.push_back(client);
    daemon::Command command;
    command.kind = daemon::Command::Kind::kAttachJob;
    command.job = std::move(job);
    return command;
  }

  void submit(uint32_t slot, uint64_t count) {
    ipc::Descriptor descriptor;
    descriptor.request = static_cast<uint32_t>(ipc::Request::kAllreduce);
    descriptor.op_seq = next_++;
    descriptor.count = count;
    descriptor.tag = slot + 1;
    descriptor.contribution = static_cast<uint64_t>(contribution(slot) - arena_);
    descriptor.result = static_cast<uint64_t>(result(slot) - arena_);
    descriptor.op_class =
        static_cast<uint8_t>(options_.op_class == "exact" ? OpClass::kExact : OpClass::kConsistent);
    if (descriptors_.push(descriptor) != ipc::RingState::kOk) throw Failure{"the submit ring is full"};
    ipc::ring_lane(*control_, 0, worker_->event_fd());
  }

  void wait() {
    const double end = now_seconds() + 60;
    for (;;) {
      const uint32_t seen = ipc::wake_seen(*control_);
      ipc::Completion completion;
      if (completions_.pop(&completion) == ipc::RingState::kOk) {
        if (completion.status != 0)
          throw Failure{std::string("op: ") + status_name(static_cast<Status>(completion.status))};
        return;
      }
      if (now_seconds() > end) throw Failure{"an op did not end within 60 s"};
      ipc::wait_for_wake(*control_, *submit_, seen, 1'000'000);
    }
  }

  Options options_;
  uint64_t bytes_, slot_bytes_ = 0, arena_bytes_ = 0;
  std::unique_ptr<port::Port> port_;
  std::unique_ptr<port::Queue> queue_;
  std::unique_ptr<daemon::LaneWorker> worker_;
  ipc::ControlPage* control_ = nullptr;
  ipc::SubmitPage* submit_ = nullptr;
  std::byte* arena_ = nullptr;
  ipc::DescriptorWriter descriptors_;
  ipc::CompletionReader completions_;
  std::thread thread_;
  uint32_t next_ = 0;
};

int run(int argc, char** argv) {
  CLI::App app{"The engine alone: lane, exchange protocol and kernel UDP"};
  Options options;
  app.add_option("--self", options.self)->required();
  app.add_option("--nodes", options.nodes, "addresses of all nodes")->delimiter(',')->required();
  app.add_option("--port", options.port);
  app.add_option("--bytes", options.bytes);
  app.add_option("-n,--iters", options.iterations);
  app.add_option("-w,--warmup", options.warmup);
  app.add_option("--inflight", options.inflight);
  app.add_option("--flow-window", options.flow_window);
  app.add_option("--spin", options.spin);
  app.add_option("--class", options.op_class)->check(CLI::IsMember({"exact", "consistent"}));
  app.add_option("--sealing", options.sealing)->check(CLI::IsMember({"none", "auth"}));
  CLI11_PARSE(app, argc, argv);
  return Bench(options).run() ? 0 : 1;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  try {
    return sluice::bench::run(argc, argv);
  } catch (const sluice::bench::Failure& failure) {
    std::fprintf(stderr, "engine_bench: %s\n", failure.text.c_str());
    return 1;
  }
}
