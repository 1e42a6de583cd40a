// What /metrics says: from snapshots to metric families of prometheus-cpp. A pure function, any thread.
//
// Rules (Prometheus naming and instrumentation guides): one prefix; base units; counters end in _total; every known
// series is there from the start, with 0; no generated names. Series per job end with the job and are bounded by
// memory.jobs_max; series per peer by metrics.peer_series for each job, the rest summed under peer="other".
#pragma once

#include <prometheus/metric_family.h>

#include <cstdint>
#include <vector>

#include "daemon/control/control.h"
#include "daemon/control/facts.h"
#include "daemon/metrics/totals.h"
#include "transport/port/faulty/faulty_port.h"

namespace sluice::daemon {

struct Sources {
  const Snapshot& snapshot;
  const ControlStats& control;
  const NodeFacts& facts;
  uint32_t peer_series = 16;  // per job
  uint64_t scrapes = 0;
  Micros now = 0;                               // monotonic
  double now_unix = 0;                          // seconds, for timestamps
  const port::FaultCounters* faults = nullptr;  // nullptr: none are injected
};

std::vector<prometheus::MetricFamily> metric_families(const Sources& sources);

}  // namespace sluice::daemon
