// From transport.faults of the configuration to the plan of a faulty port (transport/port/faulty).
#pragma once

#include "base/result.h"
#include "config/config.h"
#include "transport/port/faulty/faulty_plan.h"

namespace sluice::daemon {

// Without any fault a plan in which nothing is on. The error names the key whose address is none. Any thread.
Result<port::FaultyPlan> fault_plan(const config::Config& config);

// The seed of the node that is bound to `local`: nodes with one configuration must not have one luck.
uint64_t fault_seed(uint64_t seed, const port::Endpoint& local);

}  // namespace sluice::daemon
