// Random bytes from the system, for keys, join nonces and challenges. (transport/ takes them as arguments.)
#pragma once

#include <sys/random.h>

#include <cerrno>
#include <cstdint>
#include <span>

#include "base/assert.h"

namespace sluice {

// Fills `out` with bytes that nobody can guess. Any thread. Waits only while a machine that has just booted
// has no entropy yet; a system that refuses altogether is a broken invariant, since a key must never be made
// of anything else.
inline void random_bytes(std::span<uint8_t> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    SLUICE_ASSERT(got > 0 || errno == EINTR);
    if (got > 0) out = out.subspan(static_cast<size_t>(got));
  }
}

}  // namespace sluice
