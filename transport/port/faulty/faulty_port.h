// A decorator that makes any port misbehave, by a seeded plan: for tests and experiments on real devices, never for
// production. Two queues with equal plans that see equal sequences of datagrams do the same to them; each peer has, in
// each direction, dice of its own, so that traffic with one does not change the luck of another.
//
// Contract (port.h) with faults on:
// - Time is read (FaultyOptions::clock) at receive(), send() and arm(). Datagrams that are held on their way out leave at
//   the next receive() or send() after their time, those on their way in come with the next receive(): an owner that
//   calls neither keeps them held. Where something may be held, fd() is a descriptor of this port that also becomes
//   readable when the next one is due, and when a full device has room again; POLLOUT is never set on it. Without an
//   inner descriptor the owner polls, as it must anyway, and arm() is false when one is due.
// - What is held, doubled, kept for replay or damaged is copied, so payload memory is the owner's again when the inner
//   port would give it back, or earlier. reap() counts the packets given to this queue's send().
// - Memory for copies is taken when the queue opens, hold_bytes per direction. When it is full, or a datagram is longer
//   than `longest_held`, datagrams pass as they are (duplicates and replays do not happen), counted as kUnheld.
// - A peer that is removed gets what is still held for it.
// - QueueCounters are the inner queue's: what the device saw. A lost datagram is not in tx_datagrams, but is in
//   rx_datagrams.
// Without any fault (FaultyPlan::any() false) every call goes straight through.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/clock.h"
#include "transport/port/faulty/faulty_plan.h"
#include "transport/port/port.h"

namespace sluice::port {

enum class Fault : uint8_t {
  kLost,         // independently
  kLostInBurst,  // while the link was bad
  kCut,          // by a partition
  kDuplicated,
  kReplayed,
  kDelayed,    // held for the delay of its link
  kReordered,  // held for longer than that, on purpose
  kCorrupted,
  kTruncated,
  kRefused,  // calls of send() that were cut short
  kUnheld,   // the fault could not happen, for want of memory
  kCount
};
inline constexpr size_t kFaults = static_cast<size_t>(Fault::kCount);
const char* fault_name(Fault fault);  // "lost", "lost_in_burst" ...

// What fired, by direction.
struct FaultCounters {
  std::array<uint64_t, kFaults> send{};
  std::array<uint64_t, kFaults> receive{};
  uint64_t total(Fault fault) const {
    return send[static_cast<size_t>(fault)] + receive[static_cast<size_t>(fault)];
  }
};

struct FaultyOptions {
  FaultyPlan plan;
  // Copies of each queue and direction, if the plan needs any.
  size_t hold_bytes = 16 << 20;
  // The longest datagram that can be held; jumbo frames fit. Less when the inner port cannot carry that much.
  uint32_t longest_held = 9216;
  // Must not allocate: lanes call it.
  std::function<Micros()> clock = monotonic_micros;
};

class FaultyPort : public Port {
 public:
  // Sums over all queues, those that were closed included. Any thread.
  virtual FaultCounters fault_counters() const = 0;
};

// The capabilities are the inner port's, except kind ("faulty(udp)") and a note that says what is on.
std::unique_ptr<FaultyPort> make_faulty_port(std::unique_ptr<Port> inner, FaultyOptions options);

}  // namespace sluice::port
