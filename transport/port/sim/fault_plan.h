// What goes wrong in a simulated network: what goes wrong on its links (link_faults.h), and partitions, pauses and
// full cables. All off by default. Pure data. Times are virtual microseconds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"
#include "transport/port/link_faults.h"

namespace sluice::port::sim {

using port::LinkFaults;
// The delay of a calm virtual link: without one, an answer would come before the question was over.
inline constexpr Micros kCalmLatency = 20;

inline constexpr uint32_t kAnyNode = UINT32_MAX;

// Replaces the faults of the links from `from` to `to` (kAnyNode: all); the last rule that fits wins. One rule for one
// link in one direction makes a fault that only one pair of nodes sees, one way.
struct LinkRule {
  uint32_t from = kAnyNode;
  uint32_t to = kAnyNode;
  LinkFaults faults{.latency = kCalmLatency};
};

// From `start` until `end` nothing passes between `group` and the rest: out of the group, into it, or both.
struct Partition {
  Micros start = 0;
  Micros end = kNever;
  std::vector<uint32_t> group;
  bool out = true;
  bool into = true;
};

// From `start` until `end` the node does nothing: what arrives waits in its receive buffer until the end. Whoever
// drives the node must not run it meanwhile (Network::paused).
struct Pause {
  uint32_t node = 0;
  Micros start = 0;
  Micros end = 0;
};

struct FaultPlan {
  LinkFaults everywhere{.latency = kCalmLatency};
  std::vector<LinkRule> rules;
  std::vector<Partition> partitions;
  std::vector<Pause> pauses;

  // Speed of the one cable of every node, each direction; 0: infinite. A sender whose own device has no room for
  // `device_queue_bytes` more is told so (a short send); what exceeds `switch_queue_bytes` in front of a receiver is
  // lost (incast).
  uint64_t bits_per_second = 0;
  uint64_t device_queue_bytes = 256 << 10;
  uint64_t switch_queue_bytes = 256 << 10;

  // Datagrams that a node's receive buffer holds while the node is paused or its owner does not call receive().
  uint32_t receive_buffer = 4096;
};

// A random plan for swarm testing (Groce et al., Swarm testing, ISSTA 2012): every fault is on or off by a coin and
// then of random strength; partitions and pauses fall within 0..horizon. Same arguments, same plan. Loss stays below
// `max_loss`.
FaultPlan swarm_plan(uint64_t seed, uint32_t nodes, Micros horizon, double max_loss = 0.3);

// The knobs that are on, in one line, for the report of a failing seed.
std::string describe(const FaultPlan& plan);

}  // namespace sluice::port::sim
