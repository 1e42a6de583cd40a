#include "daemon/metrics/health.h"

#include <fmt/format.h>

#include <algorithm>

namespace sluice::daemon {

Micros Health::unchanged(const std::string& name, uint64_t value, Micros now) {
  const auto [entry, added] = seen_.try_emplace(name, Seen{value, now});
  if (entry->second.value != value) entry->second = {value, now};
  return now - entry->second.since;
}

Health::Verdict Health::look(Micros now, uint64_t control_loops, const Snapshot& snapshot,
                             const ControlStats& control) {
  Verdict verdict;
  const std::lock_guard lock(mutex_);
  const auto check_loop = [&](const std::string& name, uint64_t loops) {
    const Micros still = unchanged(name, loops, now);
    if (still > kStuckAfter)
      verdict.stuck.push_back(fmt::format("{} has not turned for {} s", name, still / 1'000'000));
  };
  check_loop("control", control_loops);
  for (size_t lane = 0; lane < snapshot.lanes.size(); ++lane) {
    check_loop(fmt::format("lane {}", lane), snapshot.lanes[lane].loops);
  }
  if (control.stopping) verdict.waiting.push_back("the daemon is stopping");
  std::vector<std::string> present;
  for (const JobFacts& job : control.jobs) {
    if (job.phase != JobPhase::kRunning || job.failed) continue;
    for (size_t lane = 0; lane < snapshot.lanes.size(); ++lane) {
      for (const JobStats& stats : snapshot.lanes[lane].jobs) {
        if (stats.job_id != job.id) continue;
        const std::string name = fmt::format("job {} lane {}", job.id, lane);
        present.push_back(name);
        uint64_t ended = 0;
        for (const uint64_t count : stats.counters.ops) ended += count;
        // Idle is progress: the clock starts with the first open round.
        if (stats.counters.open_ops == 0) seen_.erase(name);
        const Micros still = stats.counters.open_ops == 0 ? 0 : unchanged(name, ended, now);
        const Micros bound =
            std::max(kShortestOverdue, job.deadline * (1 + static_cast<Micros>(job.pull_patience)));
        if (still > bound) {
          verdict.waiting.push_back(fmt::format("job '{}' has {} rounds open and none ended for {} s",
                                                job.name, stats.counters.open_ops, still / 1'000'000));
        }
      }
    }
  }
  std::erase_if(seen_, [&](const auto& entry) {
    return entry.first.starts_with("job ") &&
           std::find(present.begin(), present.end(), entry.first) == present.end();
  });
  return verdict;
}

}  // namespace sluice::daemon
