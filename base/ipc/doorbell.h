// Who sleeps and how the other side wakes it, without a system call while both are awake.
//
//   client -> lane   ControlPage::lane_sleeps[lane] and an eventfd that the lane polls
//   lane -> client   ControlPage::wake, a futex word, and SubmitPage::client_waits
//
// No wake-up is lost. Both directions are the same pattern: the sleeper says "I sleep soon" (S = 1) and then
// looks for work (W) once more; the waker publishes work (W) and then looks whether somebody sleeps (S). Each
// side writes its own word and then reads the other's, and between the two stands a sequentially consistent
// fence. The two fences have an order. If the waker's comes first, the sleeper's look sees the work and does
// not sleep; if the sleeper's comes first, the waker sees S = 1 and wakes. Release and acquire alone would
// allow both to read the old values (a store may wait in the store buffer past the next load, on x86 too),
// and the wake-up would be lost.
//
// A wake-up too many is possible and harmless: whoever wakes looks at its rings and sleeps again. A peer that
// never clears or never sets its flag costs the other side a system call or itself a delay; it can do no
// other harm, and every sleep is bounded by a time-out all the same.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/ipc/layout.h"
#include "base/types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice::ipc {

// ThreadSanitizer does not model fences (GCC says so with -Wtsan). The code is right without its knowledge of
// them: the fences order flag against flag, and all data are ordered by acquire and release accesses.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif
inline void full_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void release_fence() { std::atomic_thread_fence(std::memory_order_release); }
inline void acquire_fence() { std::atomic_thread_fence(std::memory_order_acquire); }
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

// One turn of a spin loop.
inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// --- Client -> lane
// --------------------------------------------------------------------------------------------------

// Client, after it pushed one or more descriptors to `lane`: wakes the lane if it sleeps. `event_fd` is the
// lane's, nonblocking (a full counter means that it is signalled already). Returns whether a system call was
// made.
inline bool ring_lane(const ControlPage& control, uint32_t lane, int event_fd) {
  full_fence();
  if (control.lane_sleeps[lane].value.load(std::memory_order_relaxed) == 0) return false;
  const uint64_t one = 1;
  // A failed write means a full counter or a descriptor of a dead daemon: either way there is nothing to do
  // here.
  return ::write(event_fd, &one, sizeof(one)) == static_cast<ssize_t>(sizeof(one)) || errno == EAGAIN;
}

// Lane, before it sleeps. In this order:
//   for every client: lane_sleeps_soon(control, lane);
//   full_fence();
//   for every client: reader.look() == kEmpty, otherwise do not sleep;
//   poll(event_fd, at most ...);
//   for every client: lane_awake(control, lane); read(event_fd) to clear its counter;
inline void lane_sleeps_soon(ControlPage& control, uint32_t lane) {
  control.lane_sleeps[lane].value.store(1, std::memory_order_relaxed);
}
inline void lane_awake(ControlPage& control, uint32_t lane) {
  control.lane_sleeps[lane].value.store(0, std::memory_order_relaxed);
}

// --- Lane -> client
// --------------------------------------------------------------------------------------------------

// Lane, after a batch of completions for this client. The word is bumped always, because a client may be
// between its look and its sleep; the futex call is made only when somebody waits. Returns whether it was
// made.
inline bool wake_client(ControlPage& control, const SubmitPage& submit) {
  control.wake.value.fetch_add(1, std::memory_order_release);
  full_fence();
  if (submit.client_waits.value.load(std::memory_order_relaxed) == 0) return false;
  // No FUTEX_PRIVATE_FLAG: the word is shared between processes.
  ::syscall(SYS_futex, &control.wake.value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  return true;
}

// Client. In this order:
//   const uint32_t seen = wake_seen(control);
//   look at the completion rings; done when the wanted one is there;
//   wait_for_wake(control, submit, seen, timeout);
//   again.
// Every completion that was pushed before the bump that gave `seen` is visible to that look (acquire).
inline uint32_t wake_seen(const ControlPage& control) {
  return control.wake.value.load(std::memory_order_acquire);
}

// Sleeps until the word differs from `seen`, at most `timeout` microseconds. May return early; the caller
// looks again. Any number of threads of a client may wait at once (client_waits counts them). The kernel's
// own comparison of the word with `seen` is the sleeper's second look.
inline void wait_for_wake(const ControlPage& control, SubmitPage& submit, uint32_t seen, Micros timeout) {
  submit.client_waits.value.fetch_add(1, std::memory_order_relaxed);
  full_fence();
  const Micros bounded = std::max<Micros>(timeout, 0);
  const timespec relative{static_cast<time_t>(bounded / 1'000'000),
                          static_cast<long>(bounded % 1'000'000) * 1000};
  // FUTEX_WAIT works on a read-only mapping of a shared file.
  ::syscall(SYS_futex, &control.wake.value, FUTEX_WAIT, seen, &relative, nullptr, 0);
  submit.client_waits.value.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace sluice::ipc
