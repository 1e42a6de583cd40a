// Gradients of one tag with carry-over: from a block of a result, or of what a rank still owes, one can read back which
// contributions are in it, of which op and which rank.
//
// Each contribution (op of the tag, rank) has a bit of its own: at the positions of its group it is a power of two,
// elsewhere zero. Groups take turns over the positions of a block, and the bit turns with each round: a contribution
// that is in a sum twice gives one set of contributions at one position and another at the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"

namespace sluice::simulation {

// Contributions found in a block, as step x ranks + rank.
struct TagRecovered {
  bool ok = false;
  bool whole = false;  // the block is long enough to name each contribution
  std::vector<uint32_t> in;
  std::string why;  // when not ok
};

class TagCodes {
 public:
  // `steps`: ops of the tag; `bits`: of an integer that type and kind hold exactly.
  TagCodes(ElementType type, ReduceKind kind, uint32_t ranks, uint32_t steps, uint32_t bits)
      : type_(type),
        kind_(kind),
        ranks_(ranks),
        total_(ranks * steps),
        bits_(bits),
        groups_((total_ + bits - 1) / bits) {}

  // Positions that a block needs to name every contribution.
  uint32_t positions() const { return groups_; }

  int64_t value(uint32_t block, uint32_t position, uint32_t step, uint32_t rank) const;

  // A block of a result (divided by all ranks for `mean`, times the loss scale of its op).
  TagRecovered read_result(uint32_t block, uint32_t elements, const std::byte* bytes, float scale) const {
    return read(block, elements, bytes, type_, kind_ == ReduceKind::kMean ? ranks_ : 1, scale);
  }
  // A block of what a rank owes: undivided, unscaled, in accumulators.
  TagRecovered read_owed(uint32_t block, uint32_t elements, const std::byte* bytes) const {
    return read(block, elements, bytes, accumulator_type(type_), 1, 1.0F);
  }

 private:
  TagRecovered read(uint32_t block, uint32_t elements, const std::byte* bytes, ElementType type,
                    uint32_t divisor, float scale) const;

  ElementType type_;
  ReduceKind kind_;
  uint32_t ranks_, total_, bits_, groups_;
};

}  // namespace sluice::simulation
