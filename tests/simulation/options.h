// What one run of the simulator does: every knob, drawn from a seed (swarm.h) or set by a test. Two runs with equal
// options are equal to the last packet.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"
#include "transport/port/sim/fault_plan.h"
#include "transport/wire/seal.h"

namespace sluice::simulation {

// One collective call of the job's program. All ranks make the same calls in the same order.
struct OpShape {
  uint64_t count = 0;
  ElementType type = ElementType::kF32;
  ReduceKind kind = ReduceKind::kSum;
  OpClass op_class = OpClass::kExact;
  uint64_t tag = 0;
  Micros deadline = 0;   // H or T of this op; 0: the job's
  float loss_scale = 1;  // under AMP; a power of two
  bool scaled = false;   // the trainers have a loss scale, be it 1
  bool retire = false;   // before this op every rank takes what it owes under its tag (tag_retire, flush)
};

struct Options {
  std::string scenario;
  uint64_t seed = 0;

  // --- the job ---
  std::vector<uint32_t> ranks_of_node{1};  // local ranks of each node
  uint32_t lanes = 1;
  uint32_t payload = 1408;
  wire::Sealing sealing = wire::Sealing::kNone;
  Micros hard_deadline = 20'000;  // H
  Micros op_timeout = 30'000'000;
  Micros rank_timeout = 30'000'000;
  Micros peer_interval = 100'000;
  Micros peer_timeout = 2'000'000;
  uint32_t pull_patience = 4;
  double min_contribution = 0.5;
  uint32_t max_lag = 32;
  uint32_t incast = 2;
  uint32_t flow_window = 512 * 1024;
  uint32_t flow_window_min = 32 * 1024;
  uint32_t pool_ops =
      64;  // how many times the pool has what the largest op needs; 1: the least that is allowed

  bool carry_over = false;
  uint32_t carry_max_ops = 0;
  bool fill_own = true;
  bool adaptive = false;
  Micros hard_deadline_min = 10'000;
  uint32_t warmup_ops = 20;
  double h_factor = 5;

  // --- the program and its trainers ---
  std::vector<OpShape> program;
  uint32_t in_flight = 2;       // ops that a rank has submitted without their result
  uint32_t step_ops = 1;        // ops between two computations
  bool step_waits = false;      // a computation begins when all results of the step before are in
  Micros compute = 500;         // mean time of a computation
  double compute_spread = 0.2;  // +- share of it
  double late_share = 0;        // ops of one rank that are submitted late ...
  Micros late_max = 0;          // ... by up to this much
  struct Delay {
    uint32_t rank = 0, op = 0;
    Micros wait = 0;
  };
  std::vector<Delay> delays;     // this rank calls this op so much later (also when the network is well)
  std::vector<double> slowness;  // factor on compute, per rank; empty: 1

  // --- the network ---
  Micros clock = 1'000'000;  // when the run begins, on the clock of all nodes
  port::sim::FaultPlan plan;
  uint32_t burst = 8;   // packets that a node takes from a lane at a time
  double misroute = 0;  // a datagram also reaches a node that it was not sent to
  // With a datagram comes one that nobody sent: fields changed, tag made up; sealing `none`: a PUSH of
  // another policy or of no type.
  double forge = 0;
  double older_view = 0;  // with a datagram comes one of the view before this one
  double heal_at =
      0.6;  // of the program: faults, pauses and delays end when the first rank has come so far; > 1: never

  // --- scenarios of their own ---
  bool crash = false;  // one node stops for good ...
  uint32_t crash_node = 0;
  Micros crash_at = 0;
  bool rejoin =
      false;  // the node comes back without its memory: all of it again, in a view of the next generation
  uint64_t generation = 1;
  uint32_t started_anew = UINT32_MAX;  // node that has another join nonce than in the view before
  bool abort = false;                  // a node ends the job (its client has died)
  uint32_t abort_node = 0;
  Micros abort_at = 0;
  bool mismatch = false;  // one rank calls an op with another shape
  uint32_t mismatch_rank = 0;
  uint32_t mismatch_op = 0;
  OpShape mismatch_shape;

  uint32_t nodes() const { return static_cast<uint32_t>(ranks_of_node.size()); }
  uint32_t ranks() const {
    uint32_t all = 0;
    for (const uint32_t n : ranks_of_node) all += n;
    return all;
  }
  // What a rank calls.
  const OpShape& shape_for(uint32_t rank, uint32_t op) const {
    return mismatch && rank == mismatch_rank && op == mismatch_op ? mismatch_shape : program[op];
  }
  bool ends_early() const { return crash || abort || mismatch; }
  uint64_t largest_op_bytes() const;
};

// Everything on a few lines, for a person who has to understand a failing seed.
std::string describe(const Options& options);

}  // namespace sluice::simulation
