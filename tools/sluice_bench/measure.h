// What a benchmark of collective calls measures and how it is shown: the columns of nccl-tests, percentiles, and CPU
// time. Shared by sluice-bench and by the same sweep over other libraries (tests/bench), so that all of them are
// counted alike.
//
// Time: calls follow one another without a barrier in between. "time" is the wall time of all iterations divided by
// their number, the largest of all ranks; p50 and p99 are over iterations, each the slowest rank's.
// Bandwidth: algbw = bytes / time; busbw = algbw x 2 (N - 1) / N for all-reduce over N ranks (nccl-tests,
// doc/PERFORMANCE.md), which can be held against the speed of a link whatever N is.
// CPU: seconds that the rank processes and their daemons ran, per 10^9 bytes of tensor reduced, all ranks together.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/types.h"

namespace sluice::bench {

// What is swept, as every program of the family takes it.
struct Sweep {
  uint64_t begin = 1 << 10, end = 64 << 20;  // bytes
  uint32_t factor = 2;
  std::vector<uint64_t>
      list;  // when not empty, these sizes instead; begin and end are its smallest and largest
  uint32_t iterations = 20, warmup = 5;
  uint32_t inflight = 1;  // calls that are open at once
  bool check = false;
  ElementType type = ElementType::kF32;
  ReduceKind kind = ReduceKind::kSum;
};

// "1K", "25M", "1G" (powers of 1024) or plain bytes; 0: not a size.
uint64_t parse_size(const std::string& text);

// Bytes of each step of the sweep, rounded down to whole elements.
std::vector<uint64_t> sizes(const Sweep& sweep);

// Monotonic seconds.
double now_seconds();

// CPU seconds of this process (all threads), of another one (0 when it cannot be read), and of the whole machine. The
// last one includes what the kernel did on nobody's account.
double own_cpu_seconds();
double process_cpu_seconds(pid_t pid);
double machine_cpu_seconds();

// One rank's measurement of one size. `duration` holds seconds per iteration.
struct Sample {
  std::vector<double> duration;
  double wall = 0, cpu_own = 0, cpu_daemon = 0, cpu_machine = 0;
  double daemon_key = 0;  // ranks with the same key share a daemon, which counts once; 0: no daemon
  double wrong = 0;       // elements; < 0: not checked
  double incomplete = 0;  // calls that ended with something missing
};

// Starts and stops the clocks around the iterations of one size.
class Stopwatch {
 public:
  explicit Stopwatch(pid_t daemon) : daemon_(daemon) {}
  void start();
  void stop(Sample* sample);

 private:
  pid_t daemon_;
  double wall_ = 0, own_ = 0, other_ = 0, machine_ = 0;
};

// Runs `iterations` calls, at most `inflight` of them open. begin(slot) starts one in buffers `slot`, finish(slot)
// waits for it. Durations are from begin to the end of finish.
void run_calls(uint32_t iterations, uint32_t inflight, const std::function<void(uint32_t)>& begin,
               const std::function<void(uint32_t)>& finish, std::vector<double>* duration);

// For an exchange of samples between ranks by all-gather: equal length on all ranks.
std::vector<double> pack(const Sample& sample);
Sample unpack(const double* data, size_t count);

// One line of the table.
struct Row {
  uint64_t bytes = 0, count = 0;
  double mean_s = 0, min_s = 0, p50_s = 0, p99_s = 0;
  double algbw = 0, busbw = 0;                    // 10^9 bytes per second
  double cpu_per_gb = 0, machine_cpu_per_gb = 0;  // seconds per 10^9 bytes
  double wrong = 0, incomplete = 0;
};

// From the samples of all ranks.
Row summarize(uint64_t bytes, uint64_t count, const std::vector<Sample>& ranks);

// The report of one run: prints on rank 0 only, writes JSON when a file was asked for.
class Report {
 public:
  // `system`: "sluice", "gloo" ...; `variant`: what the run was about ("exact, auth").
  Report(std::string system, std::string variant, uint32_t ranks, const Sweep& sweep);
  void print_head() const;
  void add(const Row& row);
  void print_foot() const;
  // False, with a message on stderr, when the file cannot be written.
  bool write_json(const std::string& path) const;
  bool all_right() const;

 private:
  std::string system_, variant_;
  uint32_t ranks_;
  Sweep sweep_;
  std::vector<Row> rows_;
};

}  // namespace sluice::bench
