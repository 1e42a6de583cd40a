// A network without faults, for the tests of single traps: each adds its trouble itself.
#pragma once

#include "tests/simulation/options.h"
#include "transport/wire/packet.h"

namespace sluice::simulation {

// `ops` calls of `shape` on nodes of one rank each.
inline Options quiet_network(uint32_t nodes, uint32_t ops, const OpShape& shape) {
  Options options;
  options.scenario = "trap";
  options.seed = 17;
  options.ranks_of_node.assign(nodes, 1);
  options.hard_deadline = 10'000;
  options.compute = 2'000;
  options.compute_spread = 0.1;
  options.in_flight = 2;
  options.max_lag = 4;
  options.heal_at = 2;
  options.plan.everywhere.latency = 30;
  options.plan.bits_per_second = 10'000'000'000;
  options.program.assign(ops, shape);
  return options;
}

inline bool is(const wire::Header& header, wire::Type type) {
  return header.type == static_cast<uint8_t>(type);
}

}  // namespace sluice::simulation
