// Which node sums which row of a sparse tensor, and where in its shard: a seeded bijection of the rows, without a table
// (design, section 7; ZEN, OSDI'25, keeps one of the size of the tensor).
//
// Rows are taken in groups of as many as there are shards. Each group is turned by an amount drawn from the seed and its
// number; row r of it goes to shard (r + turn) mod shards, at position = number of the group. So
//   * neighbours never share a shard: the heavy head of a vocabulary that is sorted by frequency spreads evenly, and so
//     does any cluster; the turns keep a pattern with a period of `shards` from meeting one shard only;
//   * shards differ by at most one row;
//   * positions ascend with the rows, so rows that are sorted need no sorting by position, and gap coding works.
// Wide rows in C chunks are `rows * C` rows of a C-th of the width: chunks of one row are neighbours.
#pragma once

#include <cstdint>

#include "base/assert.h"

namespace sluice::codec {

struct RowPlace {
  uint32_t shard = 0, position = 0;
};

class RowMap {
 public:
  // rows: below 2^32; shards: 1 to 1,024; the seed is equal on all ranks of a job.
  RowMap(uint32_t rows, uint32_t shards, uint64_t seed)
      : rows_(rows),
        shards_(shards),
        reciprocal_(UINT64_MAX / shards + 1),
        full_(rows / shards),
        rest_(rows % shards),
        seed_(static_cast<uint32_t>(seed ^ seed >> 32)) {
    SLUICE_ASSERT(shards >= 1 && shards <= 1024);
  }

  uint32_t rows() const { return rows_; }
  uint32_t shards() const { return shards_; }
  uint32_t seed() const { return seed_; }  // what is left of it
  uint32_t shard_rows(uint32_t shard) const { return full_ + (shard < rest_ ? 1 : 0); }

  RowPlace place(uint32_t row) const {
    const uint32_t group = divide(row);
    const uint32_t size = group < full_ ? shards_ : rest_;
    const uint32_t shard = row - group * shards_ + turn(group, size);
    return {shard < size ? shard : shard - size, group};
  }
  // position < shard_rows(shard)
  uint32_t row(uint32_t shard, uint32_t position) const {
    const uint32_t size = position < full_ ? shards_ : rest_;
    const uint32_t by = turn(position, size);
    return position * shards_ + (shard >= by ? shard - by : shard + size - by);
  }

 private:
  // Lemire, Kaser, Kurz: Faster remainder by direct computation, 2019: exact for 32 bits.
  uint32_t divide(uint32_t row) const {
    return shards_ == 1 ? row
                        : static_cast<uint32_t>(static_cast<unsigned __int128>(reciprocal_) * row >> 64);
  }
  // 0 .. size-1. The finalizer of MurmurHash3 (public domain), then a multiplication in place of a remainder.
  uint32_t turn(uint32_t group, uint32_t size) const {
    uint32_t x = group ^ seed_;
    x = (x ^ x >> 16) * 0x85ebca6bU;
    x = (x ^ x >> 13) * 0xc2b2ae35U;
    x ^= x >> 16;
    return static_cast<uint32_t>(static_cast<uint64_t>(x) * size >> 32);
  }

  uint32_t rows_, shards_;
  uint64_t reciprocal_;
  uint32_t full_, rest_;  // groups, and rows of the last one that is not full
  uint32_t seed_;
};

}  // namespace sluice::codec
