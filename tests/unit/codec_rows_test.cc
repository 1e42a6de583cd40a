// Rows of sparse gradients on the host: the map of rows to shards, partition, coalescing.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <numeric>
#include <set>

#include "base/numeric/numeric.h"
#include "base/prng.h"
#include "gpu/host/rows.h"

namespace sluice::codec {
namespace {

TEST(RowMap, IsABijectionWithEvenShards) {
  for (const uint32_t shards : {1U, 2U, 3U, 4U, 7U, 16U, 100U, 1024U}) {
    for (const uint32_t rows : {0U, 1U, 2U, 5U, 99U, 1024U, 10'007U}) {
      const RowMap map(rows, shards, 0x1234'5678'9ABC'DEF0ULL + rows);
      std::vector<uint32_t> seen(shards, 0);
      uint32_t sum = 0;
      for (uint32_t shard = 0; shard < shards; ++shard) {
        sum += map.shard_rows(shard);
        EXPECT_LE(map.shard_rows(0) - map.shard_rows(shard), 1U);
      }
      EXPECT_EQ(sum, rows);
      for (uint32_t row = 0; row < rows; ++row) {
        const RowPlace place = map.place(row);
        ASSERT_LT(place.shard, shards);
        // Each shard's positions come one after the other as the rows ascend.
        ASSERT_EQ(place.position, seen[place.shard]++) << row;
        ASSERT_LT(place.position, map.shard_rows(place.shard));
        ASSERT_EQ(map.row(place.shard, place.position), row);
      }
    }
  }
}

TEST(RowMap, LargestRows) {
  for (const uint32_t shards : {1U, 3U, 7U, 641U, 1000U, 1023U, 1024U}) {
    const RowMap map(UINT32_MAX, shards, 5);
    for (uint32_t row = UINT32_MAX - 5000; row < UINT32_MAX; ++row) {
      const RowPlace place = map.place(row);
      ASSERT_LT(place.position, map.shard_rows(place.shard)) << row;
      ASSERT_EQ(map.row(place.shard, place.position), row);
    }
  }
}

// Clusters and periods are what plain `row mod n` and ranges fail at (ZEN, section 2.1: skewness).
TEST(RowMap, SpreadsClustersAndPeriods) {
  constexpr uint32_t kRows = 1 << 20, kShards = 16;
  const RowMap map(kRows, kShards, 77);
  const auto imbalance = [&](const std::vector<uint32_t>& rows) {
    std::vector<uint32_t> counts(kShards);
    EXPECT_EQ(count_rows<int64_t>(map, std::vector<int64_t>(rows.begin(), rows.end()), counts.data()),
              kAllValid);
    return static_cast<double>(*std::max_element(counts.begin(), counts.end())) * kShards /
           static_cast<double>(rows.size());
  };
  std::vector<uint32_t> head(9'000), stride(kRows / kShards), wide(kRows / 256);
  std::iota(head.begin(), head.end(), 0);
  for (uint32_t i = 0; i < stride.size(); ++i) stride[i] = i * kShards;
  for (uint32_t i = 0; i < wide.size(); ++i) wide[i] = i * 256;
  EXPECT_LE(imbalance(head), 1.01);
  EXPECT_LE(imbalance(stride), 1.05);
  EXPECT_LE(imbalance(wide), 1.20);  // 256 rows a shard: luck alone gives 1.15
}

template <typename Id>
class Partition : public testing::Test {};
using Ids = testing::Types<int32_t, int64_t>;
TYPED_TEST_SUITE(Partition, Ids);

// Also that the vectors do what RowMap says: sizes about the batch, shards that are and are not powers of two.
TYPED_TEST(Partition, PutsEachRowWhereTheMapSays) {
  Prng random(3);
  for (const uint32_t shards : {1U, 2U, 3U, 5U, 8U, 16U, 127U, 1024U}) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{257}, size_t{3001}}) {
      const uint32_t rows = count % 2 == 0 ? 2'000'000'011U : 3 * shards + 1;
      const RowMap map(rows, shards, random.next());
      std::vector<TypeParam> ids(count);
      for (TypeParam& id : ids) id = static_cast<TypeParam>(random.below(rows));
      std::vector<uint32_t> counts(shards), next(shards), positions(count), source(count);
      ASSERT_EQ(count_rows<TypeParam>(map, ids, counts.data()), kAllValid);
      std::exclusive_scan(counts.begin(), counts.end(), next.begin(), 0U);
      const std::vector<uint32_t> first = next;
      scatter_rows<TypeParam>(map, ids, next.data(), positions.data(), source.data());
      for (uint32_t shard = 0; shard < shards; ++shard) {
        ASSERT_EQ(next[shard], first[shard] + counts[shard]);
        for (uint32_t i = first[shard]; i < next[shard]; ++i) {
          ASSERT_EQ(static_cast<TypeParam>(map.row(shard, positions[i])), ids[source[i]]);
          ASSERT_TRUE(i == first[shard] || source[i - 1] < source[i]) << "the order of the ids is kept";
        }
      }
    }
  }
}

TYPED_TEST(Partition, FindsTheFirstIdThatIsNoRow) {
  const RowMap map(1000, 4, 1);
  std::vector<uint32_t> counts(4);
  for (const size_t at : {size_t{0}, size_t{255}, size_t{256}, size_t{700}}) {
    for (const TypeParam bad : {TypeParam{1000}, TypeParam{-1}, std::numeric_limits<TypeParam>::max(),
                                std::numeric_limits<TypeParam>::min()}) {
      std::vector<TypeParam> ids(800, 999);
      ids[at] = bad;
      ids[750] = bad;
      EXPECT_EQ(count_rows<TypeParam>(map, ids, counts.data()), at);
    }
  }
  // The low 32 bits alone would be a row.
  if constexpr (sizeof(TypeParam) == 8) {
    const std::vector<TypeParam> ids{TypeParam{1} << 32};
    EXPECT_EQ(count_rows<TypeParam>(map, ids, counts.data()), 0U);
  }
}

TYPED_TEST(Partition, KnowsAscendingIds) {
  EXPECT_TRUE(ascending<TypeParam>({}));
  EXPECT_TRUE(ascending<TypeParam>(std::vector<TypeParam>{5}));
  EXPECT_TRUE(ascending<TypeParam>(std::vector<TypeParam>{1, 2, 9}));
  EXPECT_FALSE(ascending<TypeParam>(std::vector<TypeParam>{1, 1}));
  EXPECT_FALSE(ascending<TypeParam>(std::vector<TypeParam>{2, 1}));
}

TYPED_TEST(Partition, CoalescesLikeAMap) {
  Prng random(9);
  for (const size_t count : {size_t{0}, size_t{1}, size_t{2}, size_t{100}, size_t{5000}}) {
    for (const uint32_t rows : {1U, 50U, 1'000'000U}) {
      constexpr size_t kWidth = 5;
      std::vector<TypeParam> ids(count);
      std::vector<float> values(count * kWidth);
      for (TypeParam& id : ids) id = static_cast<TypeParam>(random.below(rows));
      for (float& value : values) value = static_cast<float>(random.below(1000));
      std::map<TypeParam, std::vector<float>> expected;
      for (size_t i = 0; i < count; ++i) {
        auto& row = expected[ids[i]];
        row.resize(kWidth);
        for (size_t k = 0; k < kWidth; ++k) row[k] += values[i * kWidth + k];
      }
      const Coalesced<TypeParam> found = coalesce<TypeParam>(ids);
      ASSERT_EQ(found.ids.size(), expected.size());
      ASSERT_TRUE(ascending<TypeParam>(found.ids));
      std::vector<float> sums(found.ids.size() * kWidth);
      sum_rows(ElementType::kF32, found.first, found.source,
               reinterpret_cast<const std::byte*>(values.data()), kWidth,
               reinterpret_cast<std::byte*>(sums.data()), nullptr);
      size_t row = 0;
      for (const auto& [id, sum] : expected) {
        ASSERT_EQ(found.ids[row], id);
        ASSERT_EQ(std::memcmp(sum.data(), &sums[row * kWidth], kWidth * 4), 0) << "row " << id;
        ++row;
      }
    }
  }
}

TEST(SumRows, RoundsHalfFloatsOnce) {
  // 256 + 1 + 1 = 258: bf16 has 8 bits, so 256 + 1 rounded at once would stay 256, and the sum with it.
  const std::vector<float> floats{256, 1, 1};
  std::vector<uint16_t> values(3);
  numeric::finish(ElementType::kBf16, reinterpret_cast<const std::byte*>(floats.data()),
                  reinterpret_cast<std::byte*>(values.data()), 3, 1);
  const std::vector<uint32_t> first{0, 3}, source{0, 1, 2};
  uint16_t sum = 0;
  float scratch = 0, wide = 0;
  sum_rows(ElementType::kBf16, first, source, reinterpret_cast<const std::byte*>(values.data()), 1,
           reinterpret_cast<std::byte*>(&sum), reinterpret_cast<std::byte*>(&scratch));
  numeric::load(ElementType::kBf16, reinterpret_cast<const std::byte*>(&sum),
                reinterpret_cast<std::byte*>(&wide), 1);
  EXPECT_EQ(wide, 258.0F);
}

TEST(GatherRows, CopiesInOrder) {
  const std::vector<uint64_t> values{10, 11, 12};
  const std::vector<uint32_t> source{2, 0, 2};
  std::vector<uint64_t> out(3);
  gather_rows(source, reinterpret_cast<const std::byte*>(values.data()), 8,
              reinterpret_cast<std::byte*>(out.data()));
  EXPECT_EQ(out, (std::vector<uint64_t>{12, 10, 12}));
}

}  // namespace
}  // namespace sluice::codec
