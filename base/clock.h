// The machine's monotonic clock in microseconds (base/types.h, Micros). Only who owns a loop reads it; wire/
// and exchange/ get the time as an argument. Any thread; no system call where the vDSO serves it.
#pragma once

#include <time.h>

#include "base/types.h"

namespace sluice {

inline constexpr Micros kMicrosPerSecond = 1'000'000;
inline constexpr Micros kMicrosPerMilli = 1'000;

// CLOCK_MONOTONIC: does not jump with the wall clock and stands still while the machine is suspended.
inline Micros monotonic_micros() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<Micros>(now.tv_sec) * kMicrosPerSecond + now.tv_nsec / 1000;
}

// The same in nanoseconds, for measuring short stretches of code.
inline int64_t monotonic_nanos() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace sluice
