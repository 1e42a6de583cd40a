// exchange: who reduces what. Shards tile the tensor, stripes tile the shards, owners are a bijection; at
// every world size and count that the project promises, up to 1,024 nodes and 2^32 - 1 elements.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "transport/exchange/geometry.h"
#include "transport/wire/packet.h"

namespace sluice::exchange {
namespace {

constexpr uint32_t kWorlds[] = {1, 2, 3, 5, 8, 16, 1000, 1024};
constexpr uint32_t kMaxLanes = 4;

std::vector<uint64_t> counts_for(uint64_t elements) {
  constexpr uint64_t k2to31 = 1ULL << 31;
  return {0,         1,          elements - 1, elements,   elements + 1,
          1'000'007, k2to31 - 1, k2to31,       k2to31 + 1, (1ULL << 32) - 1};
}

// E of f32 and bf16 at the usual payload, of f64 at the smallest one, and a number without factors.
std::vector<uint32_t> block_sizes() {
  return {wire::elements_per_block(1408, ElementType::kF32),
          wire::elements_per_block(1408, ElementType::kBf16),
          wire::elements_per_block(192, ElementType::kF64), 97};
}

class GeometryTest : public testing::TestWithParam<uint32_t> {
 protected:
  template <typename Check>
  void for_each_tensor(Check check) {
    for (const uint32_t elements : block_sizes()) {
      for (const uint64_t count : counts_for(elements)) {
        SCOPED_TRACE("count " + std::to_string(count) + ", E " + std::to_string(elements) + ", nodes " +
                     std::to_string(GetParam()));
        Geometry geometry;
        geometry.count = count;
        geometry.block_elements = elements;
        geometry.nodes = GetParam();
        check(geometry);
        if (HasFatalFailure()) return;
      }
    }
  }
};

// Blocks to look at: all of a small shard, both ends of a large one.
std::vector<uint32_t> some_blocks(uint32_t blocks) {
  constexpr uint32_t kAll = 64;
  std::vector<uint32_t> chosen;
  if (blocks <= kAll) {
    for (uint32_t b = 0; b < blocks; ++b) chosen.push_back(b);
  } else {
    for (uint32_t b = 0; b < 8; ++b) chosen.push_back(b);
    chosen.push_back(blocks / 2);
    for (uint32_t b = blocks - 8; b < blocks; ++b) chosen.push_back(b);
  }
  return chosen;
}

TEST_P(GeometryTest, ShardsTileTheTensor) {
  for_each_tensor([](const Geometry& g) {
    const uint64_t wanted = (g.count + g.block_elements - 1) / g.block_elements;
    ASSERT_EQ(g.blocks(), wanted);
    uint64_t next = 0, elements = 0;
    uint32_t smallest = UINT32_MAX, largest = 0;
    for (uint32_t shard = 0; shard < g.nodes; ++shard) {
      const uint32_t blocks = g.shard_blocks(shard);
      ASSERT_EQ(g.shard_first(shard), next)
          << "shard " << shard << " does not begin where the one before ends";
      next += blocks;
      smallest = std::min(smallest, blocks);
      largest = std::max(largest, blocks);
      for (const uint32_t block : some_blocks(blocks)) {
        const uint64_t first = g.block_first_element(shard, block);
        ASSERT_EQ(first, (g.shard_first(shard) + block) * g.block_elements);
        const uint32_t size = g.elements_of(shard, block);
        ASSERT_GE(size, 1U);
        ASSERT_LE(size, g.block_elements);
        ASSERT_LE(first + size, g.count);
        // Only the last block of the tensor may be short.
        if (size < g.block_elements) {
          ASSERT_EQ(first + size, g.count);
        }
      }
      if (blocks > 0) {
        elements += static_cast<uint64_t>(blocks - 1) * g.block_elements + g.elements_of(shard, blocks - 1);
      }
    }
    ASSERT_EQ(next, g.blocks());
    ASSERT_EQ(elements, g.count);
    ASSERT_LE(largest - smallest, 1U);
  });
}

TEST_P(GeometryTest, StripesTileEachShard) {
  for_each_tensor([](const Geometry& whole) {
    for (uint32_t lanes = 1; lanes <= kMaxLanes; ++lanes) {
      std::vector<uint64_t> first(lanes, 0);
      for (uint32_t shard = 0; shard < whole.nodes; ++shard) {
        uint32_t together = 0;
        for (uint32_t lane = 0; lane < lanes; ++lane) {
          Geometry g = whole;
          g.lanes = lanes;
          g.lane = lane;
          const uint32_t mine = g.lane_blocks(shard);
          ASSERT_EQ(g.stripe_first(shard), first[lane])
              << "lane " << lane << " of " << lanes << ", shard " << shard;
          first[lane] += mine;
          together += mine;
          for (const uint32_t index : some_blocks(mine)) {
            const uint32_t block = g.block_of_stripe(index);
            ASSERT_LT(block, g.shard_blocks(shard));
            ASSERT_EQ(block % lanes, lane);
            ASSERT_EQ(g.stripe_of_block(block), index);
          }
        }
        ASSERT_EQ(together, whole.shard_blocks(shard));
      }
      uint64_t all = 0;
      for (uint32_t lane = 0; lane < lanes; ++lane) {
        Geometry g = whole;
        g.lanes = lanes;
        g.lane = lane;
        ASSERT_EQ(g.stripe_blocks(), first[lane]);
        all += first[lane];
      }
      ASSERT_EQ(all, whole.blocks());
    }
  });
}

TEST_P(GeometryTest, EveryElementLiesInExactlyOneBlock) {
  // By brute force where that is cheap: the map from elements to (shard, block) has neither gap nor overlap.
  for (const uint32_t elements : {1U, 7U, 97U}) {
    for (const uint64_t count : {0ULL, 1ULL, 6ULL, 7ULL, 8ULL, 96ULL, 97ULL, 98ULL, 5000ULL}) {
      Geometry g;
      g.count = count;
      g.block_elements = elements;
      g.nodes = GetParam();
      std::vector<uint8_t> seen(count, 0);
      for (uint32_t shard = 0; shard < g.nodes; ++shard) {
        for (uint32_t block = 0; block < g.shard_blocks(shard); ++block) {
          const uint64_t first = g.block_first_element(shard, block);
          for (uint32_t e = 0; e < g.elements_of(shard, block); ++e) {
            ASSERT_LT(first + e, count);
            ++seen[first + e];
          }
        }
      }
      for (uint64_t e = 0; e < count; ++e) ASSERT_EQ(seen[e], 1) << "element " << e << " of " << count;
    }
  }
}

TEST_P(GeometryTest, EachNodeOwnsOneShardOfEachOp) {
  const uint32_t nodes = GetParam();
  const uint32_t ops[] = {0,
                          1,
                          2,
                          nodes - 1,
                          nodes,
                          nodes + 1,
                          63,
                          64,
                          1'000'003,
                          wire::kDaemonOps - 1,
                          wire::kDaemonOps,
                          wire::kDaemonOps + 5,
                          UINT32_MAX};
  for (const uint32_t op : ops) {
    std::vector<uint8_t> owned(nodes, 0);
    for (uint32_t shard = 0; shard < nodes; ++shard) {
      const uint32_t owner = Geometry::owner(shard, op, nodes);
      ASSERT_LT(owner, nodes);
      ++owned[owner];
      ASSERT_EQ(Geometry::shard_of(owner, op, nodes), shard) << "op " << op;
      // Shards move on by one node from op to op, so that no node always has the short one.
      if (op != UINT32_MAX && op + 1 != wire::kDaemonOps) {
        ASSERT_EQ(Geometry::owner(shard, op + 1, nodes), (owner + 1) % nodes);
      }
    }
    for (uint32_t node = 0; node < nodes; ++node)
      ASSERT_EQ(owned[node], 1) << "node " << node << ", op " << op;
  }
}

TEST_P(GeometryTest, WhatDoesNotFitTheHeaderIsKnown) {
  // The header has 24 bits for a block of a shard and for their number. With f32 at a payload of 1,408 bytes that is
  // enough for 2^32 - 1 elements on a single node; wider elements or smaller payloads need more nodes, and the lane
  // refuses what does not fit. What must never happen is that the arithmetic wraps silently.
  Geometry g;
  g.count = (1ULL << 32) - 1;
  g.nodes = GetParam();
  g.block_elements = wire::elements_per_block(1408, ElementType::kF32);
  EXPECT_TRUE(g.fits_header());
  EXPECT_EQ(static_cast<uint32_t>(wire::Uint24(g.shard_blocks(0))), g.shard_blocks(0));

  g.block_elements = wire::elements_per_block(192, ElementType::kF64);  // 16: the smallest block there is
  const uint64_t wanted = (g.blocks() + g.nodes - 1) / g.nodes;
  EXPECT_EQ(g.shard_blocks(0), wanted);
  EXPECT_EQ(g.fits_header(), GetParam() > 16) << wanted;  // 16 nodes: 2^24 blocks, one too many

  g.block_elements = 1;
  g.count = Geometry::kMaxShardBlocks * g.nodes;
  EXPECT_TRUE(g.fits_header());
  EXPECT_EQ(static_cast<uint32_t>(wire::Uint24(g.shard_blocks(0))), g.shard_blocks(0));
  ++g.count;
  EXPECT_FALSE(g.fits_header());
  EXPECT_NE(static_cast<uint32_t>(wire::Uint24(g.shard_blocks(0))), g.shard_blocks(0));
}

INSTANTIATE_TEST_SUITE_P(Worlds, GeometryTest, testing::ValuesIn(kWorlds),
                         [](const auto& param) { return "Nodes" + std::to_string(param.param); });

}  // namespace
}  // namespace sluice::exchange
