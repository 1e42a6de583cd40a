#include "tests/simulation/options.h"

#include <fmt/format.h>

#include <algorithm>

namespace sluice::simulation {
namespace {

const char* class_name(OpClass op_class) {
  switch (op_class) {
    case OpClass::kExact:
      return "exact";
    case OpClass::kConsistent:
      return "consistent";
    case OpClass::kBestEffort:
      return "best_effort";
  }
  return "?";
}

std::string describe(const OpShape& shape) {
  return fmt::format("{} {} {} x {}{}{}{}", class_name(shape.op_class),
                     shape.kind == ReduceKind::kSum ? "sum" : "mean", element_type_name(shape.type),
                     shape.count, shape.deadline == 0 ? "" : fmt::format(" within {} us", shape.deadline),
                     !shape.scaled ? "" : fmt::format(" scale {}", shape.loss_scale),
                     shape.retire ? " after retire" : "");
}

}  // namespace

uint64_t Options::largest_op_bytes() const {
  uint64_t largest = 0;
  for (const OpShape& shape : program)
    largest = std::max<uint64_t>(largest, shape.count * element_size(shape.type));
  if (mismatch)
    largest = std::max<uint64_t>(largest, mismatch_shape.count * element_size(mismatch_shape.type));
  return largest;
}

std::string describe(const Options& o) {
  std::string text = fmt::format("scenario {} seed {}: {} nodes, ranks", o.scenario, o.seed, o.nodes());
  for (const uint32_t ranks : o.ranks_of_node) text += fmt::format(" {}", ranks);
  text += fmt::format(", {} lanes, payload {}, sealing {}\n", o.lanes, o.payload,
                      o.sealing == wire::Sealing::kNone ? "none" : "auth");
  text += fmt::format(
      "  H {} us, patience {}, T {} us, rank_timeout {} us, min_contribution {}, max_lag {}, incast {}, flow "
      "window {}-{}, "
      "pool for {} ops\n",
      o.hard_deadline, o.pull_patience, o.op_timeout, o.rank_timeout, o.min_contribution, o.max_lag, o.incast,
      o.flow_window_min, o.flow_window, o.pool_ops);
  text += fmt::format(
      "  carry_over {} (max ops {}), fill_own {}, adaptive {} (min {} us, warm-up {}, factor {})\n",
      o.carry_over, o.carry_max_ops, o.fill_own, o.adaptive, o.hard_deadline_min, o.warmup_ops, o.h_factor);
  text += fmt::format(
      "  trainers: {} ops in flight, {} per step, compute {} us +- {}, late {:.3f} of ops up to {} us\n",
      o.in_flight, o.step_ops, o.compute, o.compute_spread, o.late_share, o.late_max);
  text += fmt::format("  network: {}\n", port::sim::describe(o.plan));
  text += fmt::format("  misroute {:.4f}, forge {:.4f}, burst {}, heals at {} of the program\n", o.misroute,
                      o.forge, o.burst, o.heal_at);
  if (o.older_view > 0) text += fmt::format("  datagrams of an older view {:.4f}\n", o.older_view);
  if (o.crash) {
    text += fmt::format("  node {} crashes at {} us{}\n", o.crash_node, o.crash_at,
                        o.rejoin ? " and comes back in a new view" : "");
  }
  if (o.abort) text += fmt::format("  node {} ends the job at {} us\n", o.abort_node, o.abort_at);
  if (o.mismatch) {
    text += fmt::format("  rank {} calls op {} as {} (tag {:x})\n", o.mismatch_rank, o.mismatch_op,
                        describe(o.mismatch_shape), o.mismatch_shape.tag);
  }
  text += fmt::format("  program of {} ops:", o.program.size());
  constexpr size_t kShown = 40;
  for (size_t op = 0; op < std::min(kShown, o.program.size()); ++op) {
    text += fmt::format("{}{} {}", op % 4 == 0 ? "\n    " : "; ", op, describe(o.program[op]));
  }
  return text + (o.program.size() > kShown ? " ...\n" : "\n");
}

}  // namespace sluice::simulation
