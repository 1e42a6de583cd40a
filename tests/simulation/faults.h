// What struck a run: every kind of fault and every reason of a drop, by number of times. Seeds run in several
// processes; each writes a line per seed, and CI asserts over all lines that nothing was left out.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "tests/simulation/cluster.h"
#include "tests/simulation/options.h"

namespace sluice::simulation {

// clang-format off
enum class Fault : uint8_t {
  // Of the network.
  kLost, kLostInBurst, kDuplicated, kReordered, kTail, kReplayed, kCorrupted, kTruncated, kPartitioned,
  kPartitionedOneWay, kSwitchOverflow, kReceiveOverflow, kDeviceFull, kMisrouted, kForged, kOlderView,
  // Of nodes and trainers.
  kPause, kLongPause, kLate, kLagWait, kPoolExhausted, kCrash, kRejoin, kAbort, kMismatch, kStampWraps,
  kCount
};
// clang-format on
inline constexpr size_t kFaults = static_cast<size_t>(Fault::kCount);
inline constexpr size_t kDrops = static_cast<size_t>(wire::Drop::kCount);
const char* fault_name(Fault fault);

class Struck {
 public:
  Struck() = default;
  Struck(const Options& options, const RunFacts& facts);

  // "lost=31 forged=2 drop.tag=2": what has happened at all.
  std::string text() const;
  // Adds what such a text says. False: it is none.
  bool add(std::string_view text);

  uint64_t runs_with(Fault fault) const { return runs_[static_cast<size_t>(fault)]; }
  uint64_t drops(wire::Drop reason) const { return drops_[static_cast<size_t>(reason)]; }

 private:
  std::array<uint64_t, kFaults> faults_{}, runs_{};
  std::array<uint64_t, kDrops> drops_{};
};

}  // namespace sluice::simulation
