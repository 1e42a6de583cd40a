#include "transport/port/sim/fault_plan.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/prng.h"

namespace sluice::port::sim {
namespace {

// A probability with one to three significant orders below `most`, so that rare and frequent faults both occur.
double strength(Prng* random, double most) {
  return most * static_cast<double>(random->log_between(1, 1000)) / 1000.0;
}

LinkFaults random_faults(Prng* random, double max_loss) {
  LinkFaults faults;
  faults.latency = random->log_between(1, 500);
  if (random->chance(0.5)) faults.jitter = random->log_between(1, 500);
  if (random->chance(0.3)) {
    faults.tail_probability = strength(random, 0.1);
    faults.tail_max = random->log_between(1'000, 100'000);
  }
  if (random->chance(0.5)) faults.loss = strength(random, max_loss);
  if (random->chance(0.3)) {
    faults.burst_enter = strength(random, max_loss / 10);
    faults.burst_leave = 0.02 + strength(random, 0.5);
  }
  if (random->chance(0.3)) faults.duplicate = strength(random, 0.3);
  if (random->chance(0.4)) {
    faults.reorder = strength(random, 0.5);
    faults.reorder_delay = random->log_between(10, 5'000);
  }
  if (random->chance(0.2)) faults.replay = strength(random, 0.05);
  if (random->chance(0.2)) faults.corrupt = strength(random, 0.05);
  if (random->chance(0.2)) faults.truncate = strength(random, 0.05);
  return faults;
}

std::string node_name(uint32_t node) { return node == kAnyNode ? "*" : std::to_string(node); }

}  // namespace

FaultPlan swarm_plan(uint64_t seed, uint32_t nodes, Micros horizon, double max_loss) {
  SLUICE_ASSERT(nodes > 0 && horizon > 0);
  Prng random(seed);
  FaultPlan plan;
  plan.everywhere = random_faults(&random, max_loss);
  if (random.chance(0.3)) {  // one link, one direction, worse than the others
    LinkRule rule;
    rule.from = static_cast<uint32_t>(random.below(nodes));
    rule.to = static_cast<uint32_t>(random.below(nodes));
    rule.faults = random_faults(&random, max_loss);
    rule.faults.loss = max_loss;
    plan.rules.push_back(rule);
  }
  if (random.chance(0.3)) {  // one node that everybody finds slow
    LinkRule rule;
    rule.from = static_cast<uint32_t>(random.below(nodes));
    rule.faults = plan.everywhere;
    rule.faults.latency += random.log_between(100, 20'000);
    plan.rules.push_back(rule);
  }
  for (uint64_t i = random.chance(0.3) ? 1 + random.below(3) : 0; i > 0 && nodes > 1; --i) {
    Partition partition;
    partition.start = random.between(0, horizon);
    partition.end = partition.start + random.log_between(1, std::max<Micros>(1, horizon / 4));
    for (uint32_t node = 0; node < nodes; ++node) {
      if (random.chance(0.5)) partition.group.push_back(node);
    }
    partition.out = random.chance(0.8);
    partition.into = !partition.out || random.chance(0.6);
    plan.partitions.push_back(partition);
  }
  for (uint64_t i = random.chance(0.4) ? 1 + random.below(4) : 0; i > 0; --i) {
    Pause pause;
    pause.node = static_cast<uint32_t>(random.below(nodes));
    pause.start = random.between(0, horizon);
    pause.end = pause.start + random.log_between(1, std::max<Micros>(1, horizon / 4));
    plan.pauses.push_back(pause);
  }
  if (random.chance(0.4)) {
    plan.bits_per_second = static_cast<uint64_t>(random.log_between(50'000'000, 100'000'000'000));
    plan.device_queue_bytes = static_cast<uint64_t>(random.log_between(64 << 10, 4 << 20));
    plan.switch_queue_bytes = static_cast<uint64_t>(random.log_between(64 << 10, 4 << 20));
  }
  if (random.chance(0.3)) plan.receive_buffer = static_cast<uint32_t>(random.log_between(64, 8192));
  return plan;
}

std::string describe(const FaultPlan& plan) {
  std::string text = describe(plan.everywhere);
  if (text.empty()) text = "no delay";
  for (const LinkRule& rule : plan.rules) {
    text += fmt::format("; link {}->{}: {}", node_name(rule.from), node_name(rule.to), describe(rule.faults));
  }
  for (const Partition& partition : plan.partitions) {
    std::string group;
    for (const uint32_t node : partition.group) group += (group.empty() ? "" : ",") + std::to_string(node);
    text += fmt::format("; partition {}-{} of {{{}}}{}{}", partition.start, partition.end, group,
                        partition.out ? " out" : "", partition.into ? " into" : "");
  }
  for (const Pause& pause : plan.pauses) {
    text += fmt::format("; node {} pauses {}-{}", pause.node, pause.start, pause.end);
  }
  if (plan.bits_per_second != 0) {
    text += fmt::format("; {} bit/s, device queue {}, switch queue {}", plan.bits_per_second,
                        plan.device_queue_bytes, plan.switch_queue_bytes);
  }
  text += fmt::format("; receive buffer {}", plan.receive_buffer);
  return text;
}

}  // namespace sluice::port::sim
