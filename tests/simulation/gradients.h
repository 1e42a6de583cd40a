// Integer-valued gradients from which one can read back who is in a sum.
//
// In every block the even positions carry, per rank, a power of two of its own: the sum of any set of ranks is exact in
// every element type and names the set. The odd positions carry small numbers that depend on op, element and rank: a
// block that was added twice, at the wrong place or for the wrong op shows there. Types with few exact bits split the
// ranks into groups that take turns over the even positions.
//
// Everything here is computed with plain integers and a reference rounding of its own: nothing of base/numeric.
#pragma once

#include <bitset>
#include <cstdint>
#include <span>
#include <string>

#include "base/types.h"
#include "tests/simulation/options.h"

namespace sluice::simulation {

inline constexpr uint32_t kMaxRanks = 256;
using RankSet = std::bitset<kMaxRanks>;

// What a block of a result says about the ranks in it.
struct Recovered {
  bool ok = false;     // some set of ranks explains every element
  bool whole = false;  // the block is long enough to name each rank; else `ranks` holds those that it names
  RankSet ranks;       // in the sum
  RankSet known;       // ranks about which the block says something
  std::string why;     // when not ok
};

class Gradients {
 public:
  Gradients(uint64_t seed, uint32_t ranks, uint32_t payload)
      : seed_(seed), ranks_(ranks), payload_(payload) {}

  uint32_t block_elements(const OpShape& shape) const;
  uint32_t blocks(const OpShape& shape) const;
  // Elements of one block of the tensor.
  uint32_t elements_of(const OpShape& shape, uint32_t block) const;

  // The contribution of one rank: shape.count elements.
  void fill(const OpShape& shape, uint32_t op, uint32_t rank, std::byte* out) const;

  // Which ranks are in this reduced block (all its elements)? A block of zeros is the empty set: it was skipped.
  Recovered recover(const OpShape& shape, uint32_t op, uint32_t block, const std::byte* bytes) const;

  // The block that `counted` gives.
  void expected(const OpShape& shape, uint32_t op, uint32_t block, const RankSet& counted,
                std::byte* out) const;

 private:
  int64_t value(const OpShape& shape, uint32_t op, uint32_t block, uint32_t position, uint32_t rank) const;
  bool explain(const OpShape& shape, uint32_t op, uint32_t block, const std::byte* bytes, uint32_t divisor,
               Recovered* out) const;

  uint64_t seed_;
  uint32_t ranks_;
  uint32_t payload_;
};

// Reference encoding of integers and quotients, rounded to nearest even (exported for the test of the oracle).
// `divisor` 1: the sum itself.
void encode(ElementType type, int64_t sum, uint32_t divisor, std::byte* out);
// The value as a real number, and as an integer (exact for integer types).
double decode(ElementType type, const std::byte* bytes);
int64_t decode_integer(ElementType type, const std::byte* bytes);

}  // namespace sluice::simulation
