// The oracle of the benchmarks and of the end-to-end tests: contributions that are small integers, so that every
// sum is exact in every element type and in every order of additions. An element that was lost, added twice or put
// in the wrong place shows in the result.
//
// Element i of rank r's contribution in round `seed` is value(i, r, seed), an integer in [0, modulus). Under `mean`
// each contribution is multiplied by the world size, so that the division is exact as well.
//
// Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/types.h"

namespace sluice::bench {

// What every rank contributes to one collective call.
struct Pattern {
  ElementType type = ElementType::kF32;
  ReduceKind kind = ReduceKind::kSum;
  uint32_t world_size = 1;
  uint32_t seed = 0;  // another seed, other values
};

// The largest world size for which sums of this pattern stay exact: u8 and bf16 hold integers to 255 and 256 only.
uint32_t largest_world(ElementType type, ReduceKind kind);

// Writes `count` elements of rank `rank`'s contribution to `data`.
void fill(const Pattern& pattern, uint32_t rank, void* data, uint64_t count);

struct Verdict {
  uint64_t wrong = 0;   // elements that differ from the sum (or mean) over all ranks
  uint64_t first = 0;   // index of the first of them
  double found = 0;     // its value ...
  double expected = 0;  // ... and what it had to be
  uint64_t zeros = 0;   // of the wrong ones, those that are 0: holes of a bounded op
};

// Compares each of the `count` elements of a result with the sum (or mean) of all ranks' contributions.
Verdict check(const Pattern& pattern, const void* data, uint64_t count);

// "3 of 100 wrong, first at 17: 12 instead of 15".
std::string describe(const Verdict& verdict, uint64_t count);

// "f32" ... as --type takes them; false: no such type.
bool parse_type(const std::string& name, ElementType* type);
const char* type_name(ElementType type);

}  // namespace sluice::bench
