// Reproducible pseudo-randomness for simulations, fault injection and jitter: the same seed gives the same sequence
// with every compiler and C++ library (the distributions of <random> do not). Not for keys: base/random.h is.
#pragma once

#include <bit>
#include <cstdint>

#include "base/assert.h"

namespace sluice {

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014): one step, also good
// for turning numbers that differ little into seeds that differ much.
constexpr uint64_t split_mix(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// xoshiro256** 1.0 (Blackman, Vigna: Scrambled linear pseudorandom number generators, 2021). One thread.
class Prng {
 public:
  explicit Prng(uint64_t seed) {
    for (uint64_t& word : state_) word = split_mix(&seed);
  }

  uint64_t next() {
    const uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // 0 .. bound-1. Bias below 2^-32 for bounds below 2^32, which no simulation can see.
  uint64_t below(uint64_t bound) {
    SLUICE_ASSERT(bound > 0);
    return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }
  // low .. high, both included.
  int64_t between(int64_t low, int64_t high) {
    SLUICE_ASSERT(low <= high);
    const uint64_t width = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;
    return static_cast<int64_t>(static_cast<uint64_t>(low) + (width == 0 ? next() : below(width)));
  }
  // True with this probability; draws nothing when the answer is certain.
  bool chance(double probability) {
    if (probability <= 0) return false;
    if (probability >= 1) return true;
    return static_cast<double>(next() >> 11) * 0x1p-53 < probability;
  }
  // Spread over the octaves of low .. high like a log-uniform variable: each doubling is equally likely, uniform within.
  // In integers, because log() and pow() differ in the last bit between C libraries. 1 <= low <= high.
  int64_t log_between(int64_t low, int64_t high) {
    SLUICE_ASSERT(low >= 1 && low <= high);
    const int octaves = std::bit_width(static_cast<uint64_t>(high / low));
    const int octave = static_cast<int>(below(static_cast<uint64_t>(octaves)));
    const int64_t from = low << octave;
    const int64_t to = octave == octaves - 1 ? high : (low << (octave + 1)) - 1;
    return between(from, to);
  }

 private:
  uint64_t state_[4];
};

}  // namespace sluice
