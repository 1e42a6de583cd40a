// Hashes of the simulation: of numbers, so that a choice depends on what it is about and not on when it is made, and
// of bytes, for the trace and for "are these the same bytes" (not against an adversary).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/prng.h"

namespace sluice::simulation {

constexpr uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t state = a;
  uint64_t second = split_mix(&state) ^ b;
  return split_mix(&second);
}

inline uint64_t hash_bytes(std::span<const std::byte> bytes, uint64_t seed = 0) {
  // Four chains, because one chain of multiplications would cost more than the rest of a delivery.
  constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15ULL;
  const auto step = [](uint64_t h, uint64_t word) {
    // Both halves of the product: by the low one alone a flipped top bit could be taken back by two in the next word.
    const unsigned __int128 product = static_cast<unsigned __int128>(h ^ word) * kMultiplier;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  uint64_t chain[4] = {seed, seed + 1, seed + 2, seed + 3};
  size_t i = 0;
  for (; i + 32 <= bytes.size(); i += 32) {
    for (size_t c = 0; c < 4; ++c) {
      uint64_t word;
      std::memcpy(&word, bytes.data() + i + c * 8, 8);
      chain[c] = step(chain[c], word);
    }
  }
  uint64_t h = step(step(chain[0], chain[1]), step(chain[2], chain[3]));
  for (; i < bytes.size(); ++i) h = step(h, static_cast<uint64_t>(bytes[i]));
  return step(h, bytes.size());
}

}  // namespace sluice::simulation
