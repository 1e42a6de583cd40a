// One run of the simulator: options in, facts and violations out.
#pragma once

#include <string>
#include <vector>

#include "tests/simulation/check_results.h"
#include "tests/simulation/cluster.h"
#include "tests/simulation/options.h"

namespace sluice::simulation {

struct RunResult {
  RunFacts facts;
  ResultChecker::Shares shares;
  ConservationChecker::Facts carry;
  uint64_t violations = 0;
  std::vector<std::string> list;  // the first of them

  bool ok() const { return violations == 0; }
};

struct RunHooks {
  Cluster::Filter filter = nullptr;
  void* context = nullptr;
  bool verbose = false;
  uint32_t watched_op = Cluster::kNoOp;
};

// Runs the job, and where it loses a node that comes back, once more in a new view.
RunResult run(const Options& options, const RunHooks& hooks = {});

// For a person: the violations, the options, and the command that runs this seed again.
std::string report(const Options& options, const RunResult& result);

// "swarm 12: lost=31 ...": what struck this seed (faults.h).
std::string log_line(const Options& options, const RunResult& result);

}  // namespace sluice::simulation
