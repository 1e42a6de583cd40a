// sluice-sim: runs the protocol of Sluice over a virtual network, seed by seed, and checks its promises.
//
//   sluice-sim --seeds 1..2000 --scenario swarm --jobs 2     many seeds
//   sluice-sim --seed 42 --scenario swarm --verbose          one seed, every event of it
//
// Exit code: 0 when no seed violates a promise, 1 when one does, 2 for a wrong command line.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/simulation/run.h"
#include "tests/simulation/swarm.h"
#include "tools/sluice_sim/bench.h"

namespace sluice::simulation {
namespace {

constexpr uint64_t kTwiceEvery = 50;  // seeds that run twice, for equal hashes

struct Summary {
  uint64_t seeds = 0, failed = 0, datagrams = 0, virtual_us = 0, twice = 0;
  RunFacts sum;
  ResultChecker::Shares shares;
  uint64_t seeds_with_loss = 0;

  void add(const RunResult& result) {
    const RunFacts& f = result.facts;
    ++seeds;
    if (!result.ok()) ++failed;
    datagrams += f.datagrams;
    virtual_us += static_cast<uint64_t>(f.virtual_us);
    for (size_t i = 0; i < std::size(f.drops); ++i) sum.drops[i] += f.drops[i];
    for (size_t i = 0; i < std::size(f.results); ++i) sum.results[i] += f.results[i];
    for (size_t i = 0; i < std::size(f.by_type); ++i) sum.by_type[i] += f.by_type[i];
    sum.misrouted += f.misrouted;
    sum.forged += f.forged;
    sum.source_mismatch += f.source_mismatch;
    sum.pauses += f.pauses;
    sum.late_submits += f.late_submits;
    sum.blocks_repaired += f.blocks_repaired;
    sum.results_waited_lag += f.results_waited_lag;
    sum.lag_max = std::max(sum.lag_max, f.lag_max);
    auto& n = sum.network;
    const auto& m = f.network;
    n.lost += m.lost;
    n.lost_in_burst += m.lost_in_burst;
    n.duplicated += m.duplicated;
    n.replayed += m.replayed;
    n.reordered += m.reordered;
    n.corrupted += m.corrupted;
    n.truncated += m.truncated;
    n.switch_overflow += m.switch_overflow;
    n.receive_overflow += m.receive_overflow;
    n.partitioned += m.partitioned;
    n.delivered += m.delivered;
    shares.pairs += result.shares.pairs;
    shares.uncounted += result.shares.uncounted;
    shares.blocks += result.shares.blocks;
    shares.skipped += result.shares.skipped;
  }
};

double percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : 100 * static_cast<double>(part) / static_cast<double>(whole);
}

void print(const Summary& s, double seconds) {
  const auto& n = s.sum.network;
  fmt::print("{} seeds, {} failed, {} run twice; {:.1f} s, virtual time {:.1f} s ({:.1f} x real)\n", s.seeds,
             s.failed, s.twice, seconds, static_cast<double>(s.virtual_us) / 1e6,
             static_cast<double>(s.virtual_us) / 1e6 / seconds);
  fmt::print("datagrams: {} sent, {} delivered\n  by type:", s.datagrams, n.delivered);
  for (size_t type = 1; type < wire::kTypes; ++type) {
    if (s.sum.by_type[type] != 0)
      fmt::print(" {} {}", wire::type_name(static_cast<wire::Type>(type)), s.sum.by_type[type]);
  }
  fmt::print(
      "\nfaults: lost {} lost_in_burst {} duplicated {} reordered {} replayed {} corrupted {} truncated {} "
      "switch_overflow {} receive_overflow {} partitioned {} misrouted {} forged {} source_mismatch {} "
      "pauses {} "
      "late_submits {}\n",
      n.lost, n.lost_in_burst, n.duplicated, n.reordered, n.replayed, n.corrupted, n.truncated,
      n.switch_overflow, n.receive_overflow, n.partitioned, s.sum.misrouted, s.sum.forged,
      s.sum.source_mismatch, s.sum.pauses, s.sum.late_submits);
  fmt::print("drops:");
  for (size_t reason = 1; reason < std::size(s.sum.drops); ++reason) {
    if (s.sum.drops[reason] != 0)
      fmt::print(" {} {}", wire::drop_name(static_cast<wire::Drop>(reason)), s.sum.drops[reason]);
  }
  fmt::print("\nresults:");
  for (size_t status = 0; status < std::size(s.sum.results); ++status) {
    if (s.sum.results[status] != 0)
      fmt::print(" {} {}", status_name(static_cast<Status>(status)), s.sum.results[status]);
  }
  fmt::print("; blocks repaired {}, RESULTs after more than 1 ms of lag_wait {} (longest {} us)\n",
             s.sum.blocks_repaired, s.sum.results_waited_lag, s.sum.lag_max);
  fmt::print("contributions not counted {:.3f} %, blocks skipped {:.3f} %\n",
             percent(s.shares.uncounted, s.shares.pairs), percent(s.shares.skipped, s.shares.blocks));
}

struct Job {
  std::string scenario;
  uint64_t first = 0, last = 0;
  unsigned jobs = 1;
  bool verbose = false, keep_going = false, log = false;
  uint32_t watched_op = Cluster::kNoOp;
};

int run_seeds(const Job& job) {
  std::atomic<uint64_t> next{job.first};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  Summary summary;
  const auto started = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  };
  double last_line = 0;
  const bool to_terminal = isatty(STDERR_FILENO) != 0;
  const auto work = [&] {
    while (!stop) {
      const uint64_t seed = next++;
      if (seed > job.last) return;
      const Options options = draw(job.scenario, seed);
      RunResult result = run(options, {.verbose = job.verbose, .watched_op = job.watched_op});
      const bool twice = seed % kTwiceEvery == 0;
      if (twice && run(options).facts.hash != result.facts.hash) {
        ++result.violations;
        result.list.push_back("determinism: a second run of this seed went another way");
      }
      const std::lock_guard lock(mutex);
      summary.add(result);
      summary.twice += twice ? 1 : 0;
      if (job.log) fmt::print("{}\n", log_line(options, result));
      if (!result.ok()) {
        fmt::print("\nseed {} of {}: {}", seed, job.scenario, report(options, result));
        if (!job.keep_going) stop = true;
      }
      if (to_terminal && elapsed() - last_line > 1 && !job.verbose) {
        last_line = elapsed();
        fmt::print(stderr, "\r{} of {} seeds, {} failed, {:.0f} s ", summary.seeds, job.last - job.first + 1,
                   summary.failed, elapsed());
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < job.jobs; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (to_terminal) fmt::print(stderr, "\r");
  if (job.verbose && job.first == job.last) fmt::print("{}", describe(draw(job.scenario, job.first)));
  print(summary, elapsed());
  return summary.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace sluice::simulation

int main(int argc, char** argv) {
  using namespace sluice::simulation;
  CLI::App app{"Runs the protocol of Sluice over a virtual network, seed by seed, and checks its promises."};
  Job job;
  job.scenario = "swarm";
  job.jobs = 1;
  std::string seeds = "1..100";
  uint64_t seed = 0;
  bool bench = false, list = false;
  app.add_option("--scenario", job.scenario, "What a seed is drawn from; see --list");
  auto* range = app.add_option("--seeds", seeds, "A..B, both included (default 1..100)");
  auto* one = app.add_option("--seed", seed, "One seed")->excludes(range);
  app.add_option("--jobs", job.jobs, "Seeds that run at the same time")->check(CLI::Range(1, 256));
  app.add_flag("--verbose", job.verbose, "Print the events of each seed");
  app.add_option("--packets", job.watched_op, "Print the packets of this op as well");
  app.add_flag("--keep-going", job.keep_going, "Do not stop at the first seed that fails");
  app.add_flag("--log", job.log, "Print a line for each seed: what struck it");
  app.add_flag("--bench", bench, "Print what the lanes cost per packet, and nothing else");
  app.add_flag("--list", list, "Print the scenarios, and nothing else");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (list) {
    for (const Scenario& scenario : scenarios()) fmt::print("{:10} {}\n", scenario.name, scenario.what);
    return 0;
  }
  if (bench) return run_bench();
  if (find_scenario(job.scenario) == nullptr) {
    fmt::print(stderr, "sluice-sim: no scenario '{}'; --list names them\n", job.scenario);
    return 2;
  }
  if (one->count() > 0) {
    job.first = job.last = seed;
  } else if (std::sscanf(seeds.c_str(), "%" SCNu64 "..%" SCNu64, &job.first, &job.last) != 2 ||
             job.first > job.last) {
    fmt::print(stderr, "sluice-sim: --seeds takes A..B with A <= B, not '{}'\n", seeds);
    return 2;
  }
  return run_seeds(job);
}
