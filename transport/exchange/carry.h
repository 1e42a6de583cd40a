// Carry-over: what owners did not count, kept by the rank that sent it until a later op of the tag takes it along
// (protocol, section 7). Undivided, in accumulator type, and unscaled when the client states a loss scale.
//
// Memory comes from the lane's pool, unit by unit, where blocks are owed; a tensor that owes nothing holds none.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "transport/exchange/lane.h"
#include "transport/exchange/pool.h"

namespace sluice::exchange {

// A tensor of accumulators, sparse by blocks of the lane's stripe. Which blocks are there: masks(unit)[0]; since which
// step of the tag a block is owed: BlockMeta::counter of its oldest part.
struct CarryTensor {
  uint32_t present = 0;         // blocks
  std::vector<uint32_t> units;  // by stripe / unit_blocks; kNoUnit: none. Capacity for the largest op
};

// A contribution that came wholly late: it waits in its slot for a later op of the tag.
struct QueuedSlot {
  uint32_t op_seq = 0;
  uint64_t cookie = 0;
  const std::byte* contribution = nullptr;
  float loss_scale = 1;
  uint32_t step = 0;  // of the tag
  Micros submitted = 0;
  uint32_t uncounted = 0;       // blocks
  uint32_t discarded = 0;       // of them
  Status result = Status::kOk;  // what RESOLVED says of the op's own result: INCOMPLETE, DIVERGED
};

// What one local rank and one tag have to do with each other from op to op.
struct TagState {
  bool used = false;
  uint32_t local_rank = 0;
  uint32_t fingerprint = 0;
  uint64_t count = 0;
  uint64_t tag = 0;
  ReduceKind kind = ReduceKind::kSum;
  ElementType type = ElementType::kF32;
  uint32_t steps = 0;       // ops of the tag that the rank has submitted
  uint32_t last_seq = 0;    // the last of them
  uint32_t stride = 0;      // ops from the one before it: a step of training; 0: not known
  bool scaled = false;      // its submits have a loss scale: what is owed needs that of the op
  bool blocks = false;      // more is owed in `carry` than rests of rounding
  uint32_t travelling = 0;  // open ops that take debts of it along
  CarryTensor carry;
  std::vector<QueuedSlot> queued;  // capacity: max_lag
  double norm = 0;                 // of the last own contribution, unscaled; 0: none yet
  CarryTensor correction;          // holes of INCOMPLETE results, all of which came; unscaled
  uint64_t late_blocks = 0;        // in it, and in the ops that still lack some

  bool owes() const { return carry.present != 0 || !queued.empty(); }
  // More than rests, which go along with the next submit and are no reason to contribute without one.
  bool owes_blocks() const { return blocks || !queued.empty(); }
};

// Blocks of a carry tensor. `unit_blocks` and `stride` as in the op of the same fingerprint (op.h).
class CarryPages {
 public:
  CarryPages(Pool* pool, uint32_t unit_blocks, uint32_t stride)
      : pool_(pool), unit_blocks_(unit_blocks), stride_(stride) {}

  std::byte* find(const CarryTensor& tensor, uint32_t block) const {
    const uint32_t index = block / unit_blocks_;
    if (index >= tensor.units.size() || tensor.units[index] == kNoUnit) return nullptr;
    const uint32_t unit = tensor.units[index];
    return (pool_->masks(unit)[0] >> (block % unit_blocks_)) & 1 ? data(unit, block) : nullptr;
  }
  uint64_t& since(const CarryTensor& tensor, uint32_t block) const {
    return pool_->blocks(tensor.units[block / unit_blocks_])[block % unit_blocks_].counter;
  }
  // Room for a block that is not there yet; nullptr: the pool has none to spare.
  std::byte* add(CarryTensor* tensor, uint32_t block, uint64_t step, uint32_t keep) const {
    const uint32_t index = block / unit_blocks_;
    if (index >= tensor->units.size()) tensor->units.resize(index + 1, kNoUnit);
    uint32_t& unit = tensor->units[index];
    if (unit == kNoUnit) {
      if (1ULL + keep > pool_->free_units()) return nullptr;
      unit = pool_->take();
    }
    pool_->masks(unit)[0] |= 1ULL << (block % unit_blocks_);
    pool_->blocks(unit)[block % unit_blocks_].counter = step;
    ++tensor->present;
    return data(unit, block);
  }
  void remove(CarryTensor* tensor, uint32_t block) const {
    uint32_t& unit = tensor->units[block / unit_blocks_];
    pool_->masks(unit)[0] &= ~(1ULL << (block % unit_blocks_));
    --tensor->present;
    if (pool_->masks(unit)[0] == 0) {
      pool_->give(unit);
      unit = kNoUnit;
    }
  }
  // A whole unit goes from one tensor to the other, which has none there.
  void move_unit(CarryTensor* to, CarryTensor* from, uint32_t index) const {
    if (index >= to->units.size()) to->units.resize(index + 1, kNoUnit);
    const auto blocks = static_cast<uint32_t>(std::popcount(pool_->masks(from->units[index])[0]));
    to->present += blocks;
    from->present -= blocks;
    std::swap(to->units[index], from->units[index]);
  }
  bool has_unit(const CarryTensor& tensor, uint32_t block) const {
    return block / unit_blocks_ < tensor.units.size() && tensor.units[block / unit_blocks_] != kNoUnit;
  }
  uint32_t unit_index(uint32_t block) const { return block / unit_blocks_; }
  void clear(CarryTensor* tensor) const {
    for (uint32_t& unit : tensor->units) {
      if (unit != kNoUnit) pool_->give(unit);
    }
    tensor->units.clear();
    tensor->present = 0;
  }

 private:
  std::byte* data(uint32_t unit, uint32_t block) const {
    return pool_->data(unit) + static_cast<size_t>(block % unit_blocks_) * stride_;
  }
  Pool* pool_;
  uint32_t unit_blocks_;
  uint32_t stride_;
};

}  // namespace sluice::exchange
