// Arithmetic on blocks of elements, vectorised by Highway with run-time dispatch (one binary runs on every
// CPU).
//
// "Wire" elements are what travels (f32, f16, bf16, f64, i32, i64, u8); "accumulator" elements are what is
// summed: f32 for the 16-bit floats, the type itself otherwise (base/types.h). Pointers need no alignment.
// Conversions round to nearest even; f16 overflow gives infinity; NaN stays NaN. Integers wrap. Any thread;
// nothing allocates.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace sluice::numeric {

// accumulator[i] = wire[i]
void load(ElementType type, const std::byte* wire, std::byte* accumulator, size_t count);

// accumulator[i] += wire[i]
void add(ElementType type, const std::byte* wire, std::byte* accumulator, size_t count);

// wire[i] = accumulator[i] / divisor, divided once and rounded once (protocol, section 5). divisor 1: no
// division. In place is allowed (wire == accumulator): the 16-bit types then end up packed at the front.
// Integer types take divisor 1 only. Division, not multiplication by a reciprocal: equal on every node and
// CPU. The quotient is an accumulator element, the divisor a count below 2^24, which f32 holds exactly.
// Returns true when every written element is finite (always true for integers).
bool finish(ElementType type, const std::byte* accumulator, std::byte* wire, size_t count, double divisor);

// accumulator[i] *= factor, for accumulators of this (accumulator) type; integers take whole factors and wrap. Not on
// the common path: loss scales and filled holes.
void scale(ElementType type, std::byte* accumulator, size_t count, double factor);

// True when every element is finite (always true for integers).
bool all_finite(ElementType type, const std::byte* wire, size_t count);

// Copies past the caches: half the cost where `to` is in none of them (no line is read before it is written), a loss
// where somebody reads it at once. Needs `to` aligned to 64 bytes, else it is an ordinary copy. Call stream_fence()
// before another thread is told of the data.
void stream(const std::byte* from, std::byte* to, size_t bytes);
void stream_fence();

// Name of the instruction set that run-time dispatch chose ("AVX3", "AVX2" ...), for logs and bench reports.
const char* target_name();

}  // namespace sluice::numeric
