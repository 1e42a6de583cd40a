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
#include <vector>

#include "base/types.h"
#include "tests/simulation/options.h"
#include "tests/simulation/tag_codes.h"

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
  std::vector<uint32_t> in;  // carry-over: all contributions of the tag that are in it (tag_codes.h)
};

class Gradients {
 public:
  Gradients(uint64_t seed, uint32_t ranks, uint32_t payload)
      : seed_(seed), ranks_(ranks), payload_(payload) {}

  // Of a whole run. With carry-over the ops of a tag share a code that tells one op's contributions from another's.
  explicit Gradients(const Options& options);

  // The ops of one tag that carry.
  struct Tag {
    OpShape shape;
    std::vector<uint32_t> ops;  // in order
    TagCodes codes;
  };
  const std::vector<Tag>& tags() const { return tags_; }
  // The tag of an op that carries, and which of its ops this is; kNoTag: it does not carry.
  static constexpr uint32_t kNoTag = UINT32_MAX;
  uint32_t tag_of(uint32_t op) const { return op < tag_of_.size() ? tag_of_[op] : kNoTag; }
  uint32_t step_of(uint32_t op) const { return step_of_[op]; }

  uint32_t block_elements(const OpShape& shape) const;
  uint32_t blocks(const OpShape& shape) const;
  // Elements of one block of the tensor.
  uint32_t elements_of(const OpShape& shape, uint32_t block) const;

  // The contribution of one rank: shape.count elements.
  void fill(const OpShape& shape, uint32_t op, uint32_t rank, std::byte* out) const;

  // One element of it, of an op that does not carry.
  int64_t value(const OpShape& shape, uint32_t op, uint32_t block, uint32_t position, uint32_t rank) const;

  // Which ranks are in this reduced block (all its elements)? A block of zeros is the empty set: it was skipped.
  Recovered recover(const OpShape& shape, uint32_t op, uint32_t block, const std::byte* bytes) const;

  // The block that `counted` gives.
  void expected(const OpShape& shape, uint32_t op, uint32_t block, const RankSet& counted,
                std::byte* out) const;

 private:
  bool explain(const OpShape& shape, uint32_t op, uint32_t block, const std::byte* bytes, uint32_t divisor,
               Recovered* out) const;

  uint64_t seed_;
  uint32_t ranks_;
  uint32_t payload_;
  std::vector<Tag> tags_;
  std::vector<uint32_t> tag_of_, step_of_;  // by op
};

// Bits of an integer that sums, and quotients by a number of ranks, tell apart.
uint32_t exact_bits(ElementType type, ReduceKind kind);

// Reference encoding of integers and quotients, rounded to nearest even (exported for the test of the oracle).
// `divisor` 1: the sum itself.
void encode(ElementType type, int64_t sum, uint32_t divisor, std::byte* out);
// The value as a real number, and as an integer (exact for integer types).
double decode(ElementType type, const std::byte* bytes);
int64_t decode_integer(ElementType type, const std::byte* bytes);

}  // namespace sluice::simulation
