// Trainers that are not equally fast, with carry-over: what share of their work counts in its own op, what joins a later
// one, and that nothing is lost. The checkers of the simulator watch as always.
#include <gtest/gtest.h>

#include <cstdio>
#include <vector>

#include "tests/simulation/run.h"

namespace sluice::simulation {
namespace {

constexpr uint32_t kRanks = 4, kBuckets = 4;
constexpr Micros kCompute = 30'000;

// Steps of a computation of 30 ms and four buckets of 80 KB, on 1 Gbit/s. Deadlines adapt.
Options paced(uint32_t steps, uint64_t seed) {
  Options options;
  options.scenario = "paces";
  options.seed = seed;
  options.ranks_of_node.assign(kRanks, 1);
  options.carry_over = true;
  options.adaptive = true;
  options.hard_deadline = 1'000'000;  // the largest
  options.compute = kCompute;
  options.compute_spread = 0.02;
  options.step_ops = kBuckets;
  options.in_flight = kBuckets;
  options.step_waits = true;
  options.heal_at = 2;
  options.plan.everywhere.latency = 50;
  options.plan.everywhere.jitter = 20;
  options.plan.bits_per_second = 1'000'000'000;
  for (uint32_t op = 0; op < steps * kBuckets; ++op) {
    OpShape shape;
    shape.count = 20'000;
    shape.kind = ReduceKind::kMean;
    shape.op_class = OpClass::kConsistent;
    shape.tag = 1 + op % kBuckets;
    options.program.push_back(shape);
  }
  return options;
}

// Share of the blocks of `rank` that were not in their own op, from step `first` on.
double uncounted(const Options& options, const RunResult& result, uint32_t rank, uint32_t first) {
  const uint32_t blocks = Gradients(options).blocks(options.program[0]);
  uint64_t out = 0, all = 0;
  for (uint32_t op = first * kBuckets; op < options.program.size(); ++op) {
    out += result.carry.elsewhere[rank][op];
    all += blocks;
  }
  return static_cast<double>(out) / static_cast<double>(all);
}

double seconds(const RunResult& result) { return static_cast<double>(result.facts.virtual_us) / 1e6; }

// 30 +- 10 ms: once deadlines have been learnt, as good as nothing is late.
TEST(Paces, JitterOfComputationIsWaitedFor) {
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    Options options = paced(200, seed);
    options.compute_spread = 1.0 / 3;
    const RunResult result = run(options);
    ASSERT_TRUE(result.ok()) << report(options, result);
    double share = 0;
    for (uint32_t rank = 0; rank < kRanks; ++rank) share += uncounted(options, result, rank, 50) / kRanks;
    std::printf("jitter of 10 ms: %.3f %% carried after warm-up, %.1f s\n", 100 * share, seconds(result));
    EXPECT_LE(share, 0.01);
    EXPECT_EQ(result.carry.discarded, 0U);
  }
}

// One rank twice as slow for 300 steps. The window lets nobody run away from it, so waiting for it costs nothing.
TEST(Paces, ARankTwiceAsSlowStillCounts) {
  Options options = paced(300, 1);
  options.slowness = {1, 1, 1, 2};
  const RunResult result = run(options);
  ASSERT_TRUE(result.ok()) << report(options, result);
  const double share = 1 - uncounted(options, result, 3, 0);
  std::printf("twice as slow: %.1f %% counted, %.1f s\n", 100 * share, seconds(result));
  EXPECT_GE(share, 0.45);
  EXPECT_EQ(result.carry.discarded, 0U);
  EXPECT_LE(result.facts.virtual_us, 300 * (2 * kCompute + 5'000));
  for (uint32_t rank = 0; rank < 3; ++rank) EXPECT_LE(uncounted(options, result, rank, 0), 0.01);
}

// The same with a bound below its delay: it falls behind up to max_lag, its work joins later ops, and none is lost.
TEST(Paces, ARankBeyondTheBoundIsCarried) {
  Options options = paced(150, 1);
  options.adaptive = false;
  options.hard_deadline = 20'000;
  options.slowness = {1, 1, 1, 2};
  const RunResult result = run(options);
  ASSERT_TRUE(result.ok()) << report(options, result);
  const double share = 1 - uncounted(options, result, 3, 0);
  std::printf(
      "beyond the bound: %.1f %% counted, %llu of %llu blocks in later ops, %llu carried at the end, %.1f "
      "s\n",
      100 * share, static_cast<unsigned long long>(result.carry.later),
      static_cast<unsigned long long>(result.carry.contributions),
      static_cast<unsigned long long>(result.carry.carried), seconds(result));
  EXPECT_LT(share, 0.9) << "it is in time: the test shows nothing";
  EXPECT_EQ(result.carry.discarded, 0U);
  EXPECT_EQ(result.carry.in_own_op + result.carry.later + result.carry.carried, result.carry.contributions);
  EXPECT_LE(result.facts.virtual_us, 150 * (2 * kCompute + 5'000));
}

// A node that stands still for 5 s: the others go on as far as max_lag lets them, and it counts again afterwards.
TEST(Paces, ATrainerThatStoodStillComesBack) {
  Options options = paced(200, 1);
  options.delays.push_back({3, 100 * kBuckets, 5'000'000});
  const RunResult result = run(options);
  ASSERT_TRUE(result.ok()) << report(options, result);
  const double after = uncounted(options, result, 3, 150);
  std::printf("stood still: %.1f %% carried in all, %.1f %% of the last 50 steps, %.1f s\n",
              100 * uncounted(options, result, 3, 0), 100 * after, seconds(result));
  EXPECT_EQ(result.carry.discarded, 0U);

  EXPECT_LE(after, 0.01);
}

}  // namespace
}  // namespace sluice::simulation
