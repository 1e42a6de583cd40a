// The sweep of sluice-bench over MPI_Allreduce, for comparison. Started by mpirun (scripts/bench has the flags).
#include <mpi.h>

#include <cstdio>

#include "tools/sluice_bench/measure.h"
#include "tools/sluice_bench/options.h"
#include "tools/sluice_bench/oracle.h"

namespace sluice::bench {
namespace {

class Bench {
 public:
  explicit Bench(const SweepOptions& options) : options_(options) {
    int number = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &number);
    rank_ = static_cast<uint32_t>(number);
    MPI_Comm_size(MPI_COMM_WORLD, &number);
    world_ = static_cast<uint32_t>(number);
  }

  bool run() {
    Report report("mpi", "tcp, out of place", world_, options_.sweep);
    if (rank_ == 0) report.print_head();
    for (const uint64_t bytes : sizes(options_.sweep)) {
      const Row row = measure(bytes);
      if (rank_ == 0) report.add(row);
      right_ = right_ && row.wrong <= 0;
    }
    if (rank_ != 0) return right_;
    report.print_foot();
    return (options_.json.empty() || report.write_json(options_.json)) && right_;
  }

 private:
  Row measure(uint64_t bytes) {
    const Sweep& sweep = options_.sweep;
    const uint64_t count = bytes / sizeof(float);
    std::vector<float> contribution(count), result(count);
    const Pattern pattern{ElementType::kF32, ReduceKind::kSum, world_, 1};
    fill(pattern, rank_, contribution.data(), count);
    Sample sample;
    std::vector<double> ignored;
    const auto call = [&](uint32_t) {
      MPI_Allreduce(contribution.data(), result.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
    };
    const auto nothing = [](uint32_t) {};
    run_calls(sweep.warmup, 1, call, nothing, &ignored);
    MPI_Barrier(MPI_COMM_WORLD);
    Stopwatch watch(0);
    watch.start();
    run_calls(sweep.iterations, 1, call, nothing, &sample.duration);
    watch.stop(&sample);
    sample.wrong = sweep.check ? static_cast<double>(check(pattern, result.data(), count).wrong) : -1;

    const std::vector<double> mine = pack(sample);
    std::vector<double> all(mine.size() * world_);
    MPI_Allgather(mine.data(), static_cast<int>(mine.size()), MPI_DOUBLE, all.data(),
                  static_cast<int>(mine.size()), MPI_DOUBLE, MPI_COMM_WORLD);
    std::vector<Sample> ranks;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      ranks.push_back(unpack(all.data() + rank * mine.size(), mine.size()));
    }
    return summarize(bytes, count, ranks);
  }

  const SweepOptions& options_;
  uint32_t rank_ = 0, world_ = 1;
  bool right_ = true;
};

int run(int argc, char** argv) {
  CLI::App app{"The sweep of sluice-bench over MPI_Allreduce (float32, sum, out of place)"};
  SweepOptions options;
  options.add_to(&app);
  try {
    app.parse(argc, argv);
    options.finish();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  MPI_Init(&argc, &argv);
  const bool right = Bench(options).run();
  MPI_Finalize();
  return right ? 0 : 1;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  try {
    return sluice::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_bench: %s\n", error.what());
    return 1;
  }
}
