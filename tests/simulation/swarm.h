// Scenarios: from a name and a seed to options. Swarm testing (Groce et al., ISSTA 2012): each seed also draws which
// faults exist at all, because a run with everything at once hides what a few of them do together.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tests/simulation/options.h"

namespace sluice::simulation {

// Seeds of the swarm that CI runs; the other scenarios run a share of it.
inline constexpr uint64_t kCiSeeds = 2000;

struct Scenario {
  const char* name;
  const char* what;
  Options (*draw)(uint64_t seed);
};

// All of them, for --help and for tests.
const std::vector<Scenario>& scenarios();

// nullptr: there is no such scenario.
const Scenario* find_scenario(std::string_view name);

// Options of a scenario that must exist.
Options draw(std::string_view scenario, uint64_t seed);

// The command that runs one seed again.
std::string replay_command(const Options& options);

}  // namespace sluice::simulation
