// What a lane costs per packet, without ports and without the simulator's checkers.
#pragma once

namespace sluice::simulation {

// Prints a table; returns the exit code.
int run_bench();

}  // namespace sluice::simulation
