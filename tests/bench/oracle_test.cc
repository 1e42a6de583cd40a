// The oracle is what all end-to-end tests believe, so it is held against an independent sum (base/numeric), and each
// kind of damage must show.
#include "tools/sluice_bench/oracle.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/numeric/numeric.h"
#include "tools/sluice_bench/measure.h"

namespace sluice::bench {
namespace {

constexpr uint64_t kCount = 10'007;

// The sum (or mean) of all ranks' contributions, by the arithmetic that the daemon uses.
std::vector<std::byte> reduced(const Pattern& pattern) {
  const size_t wide = element_size(accumulator_type(pattern.type));
  std::vector<std::byte> sum(kCount * wide), one(kCount * element_size(pattern.type));
  for (uint32_t rank = 0; rank < pattern.world_size; ++rank) {
    fill(pattern, rank, one.data(), kCount);
    if (rank == 0) {
      numeric::load(pattern.type, one.data(), sum.data(), kCount);
    } else {
      numeric::add(pattern.type, one.data(), sum.data(), kCount);
    }
  }
  numeric::finish(pattern.type, sum.data(), one.data(), kCount,
                  pattern.kind == ReduceKind::kMean ? pattern.world_size : 1);
  return one;
}

class OracleTest : public testing::TestWithParam<uint8_t> {
 protected:
  Pattern pattern(uint32_t world = 4, ReduceKind kind = ReduceKind::kSum) const {
    return {static_cast<ElementType>(GetParam()), kind, world, 7};
  }
};

TEST_P(OracleTest, AgreesWithTheSumOfAllRanks) {
  for (const uint32_t world : {1U, 2U, 3U, 4U, 16U, 36U}) {
    for (const ReduceKind kind : {ReduceKind::kSum, ReduceKind::kMean}) {
      const Pattern wanted = pattern(world, kind);
      if (kind == ReduceKind::kMean && !is_float(wanted.type)) continue;
      if (world > largest_world(wanted.type, kind)) continue;
      const Verdict verdict = check(wanted, reduced(wanted).data(), kCount);
      EXPECT_EQ(verdict.wrong, 0) << type_name(wanted.type) << " world " << world << ": "
                                  << describe(verdict, kCount);
    }
  }
}

TEST_P(OracleTest, SeesALostRank) {
  Pattern fewer = pattern(3), wanted = pattern(4);
  const auto result = reduced(fewer);
  EXPECT_GT(check(wanted, result.data(), kCount).wrong, kCount / 2);
}

TEST_P(OracleTest, SeesAnotherRound) {
  Pattern other = pattern();
  other.seed = 8;
  EXPECT_GT(check(pattern(), reduced(other).data(), kCount).wrong, kCount / 2);
}

TEST_P(OracleTest, SeesAShiftByOneElement) {
  auto result = reduced(pattern());
  const size_t size = element_size(pattern().type);
  std::memmove(result.data(), result.data() + size, (kCount - 1) * size);
  EXPECT_GT(check(pattern(), result.data(), kCount).wrong, kCount / 2);
}

TEST_P(OracleTest, CountsExactlyTheDamagedElements) {
  auto result = reduced(pattern());
  const size_t size = element_size(pattern().type);
  for (const size_t i : {5UL, 6UL, kCount - 1}) result[i * size] ^= std::byte{1};
  const Verdict verdict = check(pattern(), result.data(), kCount);
  EXPECT_EQ(verdict.wrong, 3);
  EXPECT_EQ(verdict.first, 5);
}

INSTANTIATE_TEST_SUITE_P(Types, OracleTest, testing::Range<uint8_t>(0, kElementTypes),
                         [](const auto& type) { return type_name(static_cast<ElementType>(type.param)); });

TEST(Measure, SizesAreReadAsNcclTestsReadsThem) {
  EXPECT_EQ(parse_size("8"), 8);
  EXPECT_EQ(parse_size("1K"), 1024);
  EXPECT_EQ(parse_size("25M"), 26'214'400);
  EXPECT_EQ(parse_size("25MiB"), 26'214'400);
  EXPECT_EQ(parse_size("1G"), 1'073'741'824);
  for (const char* wrong : {"", "x", "1X", "-1", "1K1"}) EXPECT_EQ(parse_size(wrong), 0) << wrong;
}

TEST(Measure, SweepIncludesBothEnds) {
  Sweep sweep;
  sweep.begin = 1024;
  sweep.end = 8192;
  sweep.factor = 2;
  EXPECT_EQ(sizes(sweep), (std::vector<uint64_t>{1024, 2048, 4096, 8192}));
}

TEST(Measure, RowTakesTheSlowestRankAndCountsASharedDaemonOnce) {
  Sample fast, slow;
  fast.duration = {0.1, 0.1};
  slow.duration = {0.2, 0.3};
  fast.wall = 0.2;
  slow.wall = 0.5;
  fast.cpu_own = slow.cpu_own = 1;
  fast.cpu_daemon = slow.cpu_daemon = 2;
  fast.daemon_key = slow.daemon_key = 1;
  const std::vector<double> packed = pack(slow);
  const Row row = summarize(1'000'000'000, 250'000'000, {fast, unpack(packed.data(), packed.size())});
  EXPECT_DOUBLE_EQ(row.mean_s, 0.25);
  EXPECT_DOUBLE_EQ(row.p50_s, 0.2);
  EXPECT_DOUBLE_EQ(row.p99_s, 0.3);
  EXPECT_DOUBLE_EQ(row.algbw, 4);
  EXPECT_DOUBLE_EQ(row.busbw, 4);                       // 2 (N - 1) / N = 1 for two ranks
  EXPECT_DOUBLE_EQ(row.cpu_per_gb, (1 + 1 + 2) / 2.0);  // two calls of 1 GB
}

}  // namespace
}  // namespace sluice::bench
