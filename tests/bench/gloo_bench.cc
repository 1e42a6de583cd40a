// The sweep of sluice-bench over Gloo's TCP transport, for comparison: the all-reduce that DDP calls (ring, in place,
// gloo::sum), without Python around it. Ranks meet in a folder (--rendezvous), as Gloo's FileStore does.
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <cstdio>
#include <cstring>

#include "tools/sluice_bench/measure.h"
#include "tools/sluice_bench/options.h"
#include "tools/sluice_bench/oracle.h"

namespace sluice::bench {
namespace {

struct Options : SweepOptions {
  std::string rendezvous, interface;
  uint32_t rank = 0, world = 1;
  int timeout_ms = 60'000;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    gloo::transport::tcp::attr attribute;
    attribute.iface = options.interface;
    auto device = gloo::transport::tcp::CreateDevice(attribute);
    gloo::rendezvous::FileStore store(options.rendezvous);
    auto context = std::make_shared<gloo::rendezvous::Context>(static_cast<int>(options.rank),
                                                               static_cast<int>(options.world));
    context->setTimeout(std::chrono::milliseconds(options.timeout_ms));
    context->connectFullMesh(store, device);
    context_ = context;
  }

  bool run() {
    Report report("gloo", "ring, tcp, in place", options_.world, options_.sweep);
    if (options_.rank == 0) report.print_head();
    for (const uint64_t bytes : sizes(options_.sweep)) {
      const Row row = measure(bytes);
      if (options_.rank == 0) report.add(row);
      right_ = right_ && row.wrong <= 0;
    }
    if (options_.rank == 0) {
      report.print_foot();
      if (!options_.json.empty() && !report.write_json(options_.json)) return false;
    }
    barrier();
    return right_;
  }

 private:
  void barrier() {
    gloo::BarrierOptions barrier(context_);
    barrier.setTag(1);
    gloo::barrier(barrier);
  }

  void allreduce(std::vector<float>* data) {
    gloo::AllreduceOptions op(context_);
    op.setOutput(data->data(), data->size());
    op.setReduceFunction(static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
    op.setTag(2);
    gloo::allreduce(op);
  }

  Row measure(uint64_t bytes) {
    const Sweep& sweep = options_.sweep;
    std::vector<float> data(bytes / sizeof(float));
    Sample sample;
    sample.wrong = -1;
    if (sweep.check) {
      const Pattern pattern{ElementType::kF32, ReduceKind::kSum, options_.world, 1};
      fill(pattern, options_.rank, data.data(), data.size());
      allreduce(&data);
      sample.wrong = static_cast<double>(check(pattern, data.data(), data.size()).wrong);
    }
    // In place the sums would grow without bound; zeros stay zeros and cost the same.
    std::fill(data.begin(), data.end(), 0.0F);
    std::vector<double> ignored;
    const auto call = [&](uint32_t) { allreduce(&data); };
    const auto nothing = [](uint32_t) {};
    run_calls(sweep.warmup, 1, call, nothing, &ignored);
    barrier();
    Stopwatch watch(0);
    watch.start();
    run_calls(sweep.iterations, 1, call, nothing, &sample.duration);
    watch.stop(&sample);

    const std::vector<double> mine = pack(sample);
    std::vector<double> all(mine.size() * options_.world);
    gloo::AllgatherOptions gather(context_);
    gather.setInput(const_cast<double*>(mine.data()), mine.size());
    gather.setOutput(all.data(), all.size());
    gather.setTag(3);
    gloo::allgather(gather);
    std::vector<Sample> ranks;
    for (uint32_t rank = 0; rank < options_.world; ++rank) {
      ranks.push_back(unpack(all.data() + rank * mine.size(), mine.size()));
    }
    return summarize(bytes, data.size(), ranks);
  }

  const Options& options_;
  std::shared_ptr<gloo::Context> context_;
  bool right_ = true;
};

int run(int argc, char** argv) {
  CLI::App app{"The sweep of sluice-bench over Gloo (float32, sum, in place)"};
  Options options;
  options.add_to(&app);
  app.add_option("--rank", options.rank, "this rank")->envname("RANK");
  app.add_option("--world", options.world, "number of ranks")->envname("WORLD_SIZE");
  app.add_option("--rendezvous", options.rendezvous, "empty folder that all ranks can see")->required();
  app.add_option("--interface", options.interface, "network interface")->required();
  app.add_option("--timeout-ms", options.timeout_ms, "bound of every wait");
  try {
    app.parse(argc, argv);
    options.finish();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  Bench bench(options);
  return bench.run() ? 0 : 1;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  try {
    return sluice::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gloo_bench: %s\n", error.what());
    return 1;
  }
}
