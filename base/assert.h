// Invariants. SLUICE_ASSERT stays on in release builds: a broken invariant must stop the process before it
// can hand out a wrong sum. It is never used on input: what comes from a client, a peer or a file is checked,
// counted and refused instead.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace sluice {

[[noreturn]] inline void assertion_failed(const char* what, const char* file, int line) {
  std::fprintf(stderr, "sluice: invariant broken: %s (%s:%d)\n", what, file, line);
  std::abort();
}

}  // namespace sluice

#define SLUICE_ASSERT(condition)                             \
  (__builtin_expect(!!(condition), 1) ? static_cast<void>(0) \
                                      : ::sluice::assertion_failed(#condition, __FILE__, __LINE__))
