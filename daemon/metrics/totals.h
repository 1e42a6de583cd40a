// Sums over all lanes and all jobs there ever were, so that counters never fall when a job ends: what a job had counted
// when it was last seen is kept. Reads what the lanes publish; never makes a lane wait. Any thread (one lock).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "daemon/engine/lane_worker.h"

namespace sluice::daemon {

// Counters of jobs, added up.
struct JobTotals {
  exchange::Counters counters;  // gauges in it (open ops, pool) are those of running jobs
  exchange::Owed owed;          // likewise
  uint64_t durations[3][20] = {};
  double duration_sum[3] = {};
};

struct Snapshot {
  std::vector<LaneStats> lanes;  // by index, as last published
  JobTotals jobs;                // over all lanes and jobs, ended ones included
  JobTotals first_lane;          // the same over lane 0 only: there every op is counted once
};

class Totals {
 public:
  explicit Totals(std::vector<const LaneWorker*> lanes) : lanes_(std::move(lanes)) {}

  // Reads the lanes. Also to be called before a job is taken off the lanes, so that its last counts are seen.
  Snapshot update();

 private:
  const std::vector<const LaneWorker*> lanes_;
  std::mutex mutex_;
  std::vector<std::map<uint64_t, JobTotals>> running_;  // by lane and job id, as last seen
  std::vector<JobTotals> ended_;                        // by lane
};

void add(const JobTotals& from, JobTotals* to);

}  // namespace sluice::daemon
