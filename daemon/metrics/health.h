// Is the daemon alive, and does it make progress? Feeds the watchdog, /healthz and /readyz. Any thread (one lock).
//
//   alive   every loop (control, each lane) has turned in the last kStuckAfter
//   ready   alive, not stopping, and no job has a round that is overdue: rounds open and none ended for longer than the
//           longest a consistent round may take
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/types.h"
#include "daemon/control/control.h"
#include "daemon/metrics/totals.h"

namespace sluice::daemon {

class Health {
 public:
  static constexpr Micros kStuckAfter = 5'000'000;
  static constexpr Micros kShortestOverdue = 5'000'000;

  struct Verdict {
    std::vector<std::string> stuck;    // loops that do not turn: not alive
    std::vector<std::string> waiting;  // why it is not ready although it is alive
    bool alive() const { return stuck.empty(); }
    bool ready() const { return stuck.empty() && waiting.empty(); }
  };

  // Looks once more; `control_loops` as Control::loops().
  Verdict look(Micros now, uint64_t control_loops, const Snapshot& snapshot, const ControlStats& control);

 private:
  struct Seen {
    uint64_t value = 0;
    Micros since = 0;
  };
  // How long `value` of `name` has been the same.
  Micros unchanged(const std::string& name, uint64_t value, Micros now);

  std::mutex mutex_;
  std::map<std::string, Seen> seen_;
};

}  // namespace sluice::daemon
