#include "daemon/metrics/totals.h"

#include <algorithm>
#include <cstddef>

namespace sluice::daemon {
namespace {

void add(const exchange::Counters& from, exchange::Counters* to) {
  for (size_t i = 0; i < std::size(from.ops); ++i) to->ops[i] += from.ops[i];
  for (size_t i = 0; i < std::size(from.drops); ++i) to->drops[i] += from.drops[i];
  to->packets_sent += from.packets_sent;
  to->bytes_sent += from.bytes_sent;
  to->packets_received += from.packets_received;
  to->bytes_received += from.bytes_received;
  to->blocks_repaired += from.blocks_repaired;
  to->blocks_resent += from.blocks_resent;
  to->blocks_skipped += from.blocks_skipped;
  to->blocks_uncounted += from.blocks_uncounted;
  to->nonfinite_blocks += from.nonfinite_blocks;
  to->blocks_carried += from.blocks_carried;
  to->blocks_discarded += from.blocks_discarded;
  to->blocks_undecided += from.blocks_undecided;
  to->blocks_filled += from.blocks_filled;
  to->blocks_corrected += from.blocks_corrected;
  to->slots_queued += from.slots_queued;
  to->requests_sent += from.requests_sent;
  to->contributions_late += from.contributions_late;
  to->open_ops += from.open_ops;
  to->pool_used_bytes += from.pool_used_bytes;
  to->pool_bytes += from.pool_bytes;
}

JobTotals totals_of(const JobStats& stats) {
  JobTotals totals;
  totals.counters = stats.counters;
  totals.owed = stats.owed;
  std::copy(&stats.durations[0][0], &stats.durations[0][0] + 3 * 20, &totals.durations[0][0]);
  std::copy(std::begin(stats.duration_sum), std::end(stats.duration_sum), std::begin(totals.duration_sum));
  return totals;
}

}  // namespace

void add(const JobTotals& from, JobTotals* to) {
  add(from.counters, &to->counters);
  to->owed.blocks += from.owed.blocks;
  to->owed.slots += from.owed.slots;
  for (size_t c = 0; c < 3; ++c) {
    for (size_t i = 0; i < 20; ++i) to->durations[c][i] += from.durations[c][i];
    to->duration_sum[c] += from.duration_sum[c];
  }
}

Snapshot Totals::update() {
  Snapshot snapshot;
  const std::lock_guard lock(mutex_);
  running_.resize(lanes_.size());
  ended_.resize(lanes_.size());
  snapshot.lanes.resize(lanes_.size());
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    LaneStats& stats = snapshot.lanes[lane];
    lanes_[lane]->stats(&stats);
    auto& running = running_[lane];
    // Jobs that the lane has no more are ended; their gauges end with them.
    for (auto job = running.begin(); job != running.end();) {
      const bool there = std::any_of(stats.jobs.begin(), stats.jobs.end(), [&](const JobStats& candidate) {
        return candidate.job_id == job->first;
      });
      if (there) {
        ++job;
        continue;
      }
      job->second.owed = {};
      job->second.counters.open_ops = 0;
      job->second.counters.pool_used_bytes = 0;
      job->second.counters.pool_bytes = 0;
      add(job->second, &ended_[lane]);
      job = running.erase(job);
    }
    for (const JobStats& job : stats.jobs) running[job.job_id] = totals_of(job);

    JobTotals all = ended_[lane];
    for (const auto& [id, totals] : running) add(totals, &all);
    add(all, &snapshot.jobs);
    if (lane == 0) snapshot.first_lane = all;
  }
  return snapshot;
}

}  // namespace sluice::daemon
