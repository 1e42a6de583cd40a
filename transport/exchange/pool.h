// Memory of one lane for accumulators and early arrivals: equal units, allocated once, handed out in O(1).
//
// A unit serves up to 64 blocks of one shard: 64 x payload bytes of data, and what must be known per block and per
// sender (UnitMeta). Its memory is touched only when it is used. Reserve: any op may take a unit only while enough is
// left for the largest op; the op at `base` may take the last ones, so that it can always be finished (protocol,
// section 3, Memory; trap 17).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "base/assert.h"
#include "transport/wire/packet.h"

namespace sluice::exchange {

inline constexpr uint32_t kUnitBlocks = 64;
inline constexpr uint32_t kNoUnit = UINT32_MAX;

// Per block of a unit, at the owner.
struct BlockMeta {
  uint64_t counter = 0;  // of the sealed PULL; 0: not sealed yet
  std::byte tag[wire::kTagBytes] = {};
  uint16_t ranks = 0;     // counted so far
  uint16_t next = 0;      // exact: the node whose contribution is added next
  uint16_t elements = 0;  // in this block, once known
  uint16_t payload = 0;   // bytes of the finished PULL payload
  uint8_t flags = 0;      // wire::kFlag* of the finished block
};

class Pool {
 public:
  // In `given`, which has `bytes` and is 64-byte aligned, or in memory of its own.
  Pool(uint64_t bytes, uint32_t payload, uint32_t nodes, std::byte* given = nullptr)
      : nodes_(nodes),
        data_offset_(meta_bytes(nodes)),
        unit_bytes_(unit_bytes(payload, nodes)),
        memory_(given) {
    units_ = static_cast<uint32_t>(bytes / unit_bytes_);
    if (given == nullptr) {
      own_.reset(static_cast<std::byte*>(::operator new (unit_bytes_* units_ + 1, std::align_val_t{64})));
      memory_ = own_.get();
    }
    free_.reserve(units_);
    for (uint32_t unit = units_; unit > 0; --unit) free_.push_back(unit - 1);
  }

  static size_t meta_bytes(uint32_t nodes) {
    const size_t bytes = kUnitBlocks * sizeof(BlockMeta) + nodes * (sizeof(uint64_t) + sizeof(uint32_t));
    return (bytes + 63) / 64 * 64;
  }
  static size_t unit_bytes(uint32_t payload, uint32_t nodes) {
    return meta_bytes(nodes) + static_cast<size_t>(kUnitBlocks) * payload;
  }

  uint32_t units() const { return units_; }
  uint32_t free_units() const { return static_cast<uint32_t>(free_.size()); }
  uint64_t used_bytes() const { return (units_ - free_.size()) * unit_bytes_; }
  uint64_t bytes() const { return units_ * unit_bytes_; }

  // A unit with clear meta (data is not cleared); kNoUnit when none is left.
  uint32_t take() {
    if (free_.empty()) return kNoUnit;
    const uint32_t unit = free_.back();
    free_.pop_back();
    std::byte* start = memory_ + unit * unit_bytes_;
    new (start) BlockMeta[kUnitBlocks];
    std::memset(masks(unit), 0, nodes_ * sizeof(uint64_t));
    std::memset(early(unit), 0xff, nodes_ * sizeof(uint32_t));
    return unit;
  }
  void give(uint32_t unit) {
    SLUICE_ASSERT(unit < units_ && free_.size() < units_);
    free_.push_back(unit);
  }

  BlockMeta* blocks(uint32_t unit) { return reinterpret_cast<BlockMeta*>(memory_ + unit * unit_bytes_); }
  // Which blocks of the unit (bit = block) each sender has delivered.
  uint64_t* masks(uint32_t unit) { return reinterpret_cast<uint64_t*>(blocks(unit) + kUnitBlocks); }
  // Exact: the unit that holds blocks of a sender which came before their turn; kNoUnit: none.
  uint32_t* early(uint32_t unit) { return reinterpret_cast<uint32_t*>(masks(unit) + nodes_); }
  std::byte* data(uint32_t unit) { return memory_ + unit * unit_bytes_ + data_offset_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
  };
  uint32_t nodes_;
  size_t data_offset_;
  size_t unit_bytes_;
  uint32_t units_ = 0;
  std::unique_ptr<std::byte, Free> own_;
  std::byte* memory_;
  std::vector<uint32_t> free_;
};

}  // namespace sluice::exchange
