// Who reduces what: blocks, shards, owners, stripes of lanes (protocol, sections 4, 11 and 13). Pure arithmetic.
//
// A tensor of `count` elements is cut into blocks of E elements (the last one may be short). Shard s is a contiguous
// range of whole blocks; sizes differ by at most one block. Shard s of op k belongs to node (s + k) mod n. Block b of
// a shard is served by lane b mod lanes.
#pragma once

#include <cstdint>

#include "base/assert.h"

namespace sluice::exchange {

// The blocks of a shard that a lane serves: every `lanes`-th, from block `lane` on, numbered 0, 1, ...
struct Stripe {
  uint32_t lanes = 1;
  uint32_t lane = 0;
  bool has(uint32_t block) const { return block % lanes == lane; }
  uint32_t index(uint32_t block) const { return block / lanes; }
  uint32_t block(uint32_t index) const { return index * lanes + lane; }
};

struct Geometry {
  uint64_t count = 0;           // elements of the tensor
  uint32_t block_elements = 1;  // E
  uint32_t nodes = 1;
  uint32_t lanes = 1;
  uint32_t lane = 0;

  uint64_t blocks() const { return count / block_elements + (count % block_elements != 0 ? 1 : 0); }

  // --- shards, in blocks of the whole tensor ---
  uint64_t shard_first(uint32_t shard) const {
    const uint64_t all = blocks();
    const uint64_t extra = all % nodes;
    return shard * (all / nodes) + (shard < extra ? shard : extra);
  }
  uint32_t shard_blocks(uint32_t shard) const {
    const uint64_t all = blocks();
    return static_cast<uint32_t>(all / nodes + (shard < all % nodes ? 1 : 0));
  }
  // First element and number of elements of block b of a shard.
  uint64_t block_first_element(uint32_t shard, uint32_t block) const {
    return (shard_first(shard) + block) * block_elements;
  }
  uint32_t elements_of(uint32_t shard, uint32_t block) const {
    const uint64_t first = block_first_element(shard, block);
    SLUICE_ASSERT(first < count);
    const uint64_t left = count - first;
    return left < block_elements ? static_cast<uint32_t>(left) : block_elements;
  }

  // `block` and `total` have 24 bits in the header; total counts to the end, so one less than 2^24 blocks fit a shard.
  static constexpr uint64_t kMaxShardBlocks = (1U << 24) - 1;
  bool fits_header() const { return (blocks() + nodes - 1) / nodes <= kMaxShardBlocks; }

  // --- stripe of this lane: its blocks of a shard are numbered 0 .. lane_blocks-1 ---
  static uint32_t lane_blocks(uint32_t shard_blocks, uint32_t lanes, uint32_t lane) {
    return shard_blocks / lanes + (lane < shard_blocks % lanes ? 1 : 0);
  }
  uint32_t lane_blocks(uint32_t shard) const { return lane_blocks(shard_blocks(shard), lanes, lane); }
  uint32_t block_of_stripe(uint32_t index) const { return index * lanes + lane; }
  uint32_t stripe_of_block(uint32_t block) const { return block / lanes; }
  // Blocks of this lane in the shards before this one: where its bits start in a bitmap over the whole tensor.
  uint64_t stripe_first(uint32_t shard) const {
    const uint64_t all = blocks();
    const auto small = static_cast<uint32_t>(all / nodes);
    const uint64_t extra = all % nodes;
    const uint64_t large = shard < extra ? shard : extra;
    return large * lane_blocks(small + 1, lanes, lane) + (shard - large) * lane_blocks(small, lanes, lane);
  }
  uint64_t stripe_blocks() const { return stripe_first(nodes); }

  static uint32_t owner(uint32_t shard, uint32_t op_seq, uint32_t nodes) {
    return static_cast<uint32_t>((static_cast<uint64_t>(shard) + op_seq) % nodes);
  }
  // The shard that `node` owns in this op.
  static uint32_t shard_of(uint32_t node, uint32_t op_seq, uint32_t nodes) {
    return static_cast<uint32_t>((static_cast<uint64_t>(node) + nodes - op_seq % nodes) % nodes);
  }
};

}  // namespace sluice::exchange
