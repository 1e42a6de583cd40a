// State of one op on one lane of one node: the three roles of protocol section 15 side by side.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/exchange/carry.h"
#include "transport/exchange/geometry.h"
#include "transport/exchange/lane.h"
#include "transport/exchange/pool.h"

namespace sluice::exchange {

// What this op and one other node (or this one) have to do with each other.
struct NodeOp {
  // The node as a sender to my shard.
  uint32_t received = 0;  // blocks of it that my shard has
  uint16_t ranks = 0;     // that it holds, as announced
  bool contributes = false;
  bool receives = false;
  bool in_quorum = false;
  bool tail_seen = false;
  uint8_t push_backoff = 0;
  Micros push_timer = kNever;  // when missing blocks are asked for
  // The node as a receiver of my shard.
  uint32_t pull_sent = 0;     // blocks sent, in send order
  uint32_t pull_repairs = 0;  // answers in the repair queue
  Micros pull_started = 0;
  // The node as the owner of a shard that I push to.
  uint32_t push_sent = 0;
  uint32_t push_repairs = 0;
  Micros push_started = 0;
  // The node as the owner of a shard that I receive.
  bool closed = false;  // a PULL of it was seen
  bool pull_tail_seen = false;
  bool row_wanted = false;  // more senders were not counted than a PULL lists: ask for the own row
  uint8_t pull_backoff = 0;
  Micros pull_timer = kNever;
};

struct Receiver {
  enum class State : uint8_t { kNone, kWait, kLate, kDone };
  State state = State::kNone;
  bool in_contribution = false;  // this rank's slot is part of what the node froze
  bool contributes = false;      // its slot, queued slots or carry are
  bool queued = false;           // its slot waits for a later op of the tag (wholly late)
  bool told = false;             // RESULT went out
  bool resolved = false;         // RESOLVED went out
  bool diverged = false;         // its holes were filled too late for the result
  TagState* tag = nullptr;       // carry-over on: what it owes under this tag
  CarryTensor owed;              // carry that travels with this op
  // An INCOMPLETE result: its ranges, and (while `correctable`) the blocks that came after it.
  bool correctable = false;
  uint32_t corrected = 0;  // blocks of its result to which something was added
  CarryTensor holes;
  uint32_t ranges_total = 0, ranges = 0;
  MissingRange range[kEventRanges];
  std::vector<QueuedSlot> taken;  // queued slots that travel with this op; capacity: max_lag
  uint64_t received = 0;          // blocks of this lane's stripe
  uint32_t skipped = 0;
  uint32_t uncounted = 0;
  uint32_t discarded = 0;
  uint32_t filled = 0;
  Micros submitted = 0;
  Micros admitted = 0;
  uint32_t lag_node = UINT32_MAX;  // whom admission waited for
  Micros bound = kNever;           // exact: T; consistent: start + H + patience
  Submission submission;
  std::vector<uint64_t> bits;  // blocks of the stripe over the whole tensor; capacity for the largest op
};

struct Op {
  enum class Owner : uint8_t { kOpen, kClosed };
  bool open = false;
  bool disputed = false;  // ranks do not agree what it is: nothing of it goes on until the job has failed
  uint32_t seq = 0;

  // Known from the first packet or submit that describes the op.
  bool described = false;
  OpClass op_class = OpClass::kExact;
  ReduceKind kind = ReduceKind::kSum;
  ElementType type = ElementType::kF32;
  uint32_t fingerprint = 0;
  uint32_t describer = 0;     // the node that described it first
  uint32_t shard = 0;         // mine
  uint32_t shard_blocks = 0;  // of my shard, all lanes
  uint32_t lane_blocks = 0;   // of my shard, this lane
  uint32_t block_elements = 0;
  uint32_t unit_blocks = kUnitBlocks;  // blocks in one unit: 64, or 32 where accumulators are twice as wide
  uint32_t stride = 0;                 // bytes of one block in a unit

  bool carries = false;  // consistent with carry-over, and has a tag

  bool local = false;  // a local rank was admitted
  // Known from the first local submit, or from what is owed under the tag.
  bool shaped = false;
  Geometry geometry;
  // P and Q of this op: from its policy or its submit. Not bounded (exact, or a class that warms up): T alone ends it.
  bool bounded = true;
  Micros push_budget = 0, pull_budget = 0;
  Micros complete = 0;       // t_C of its class; 0: not known
  uint32_t exit_share = 10;  // x
  uint32_t incast = 8;       // I
  uint32_t policy = 0;       // number of its policy
  uint32_t size_class = 0;
  bool class_known = false;
  Micros hard() const { return push_budget + pull_budget; }

  // Owner.
  Owner owner = Owner::kOpen;
  std::vector<uint32_t> units;
  uint32_t nodes_in = 0;  // nodes whose blocks are all here
  uint32_t quorum_nodes = 0, quorum_ranks = 0;
  Micros opened = 0;
  Micros quorum = 0;  // t_q as heard here; 0: not yet
  Micros closed = 0;
  Micros exit_at = kNever;  // early exit, unless something new arrives
  uint32_t pull_start = 0;  // stripe index that is sent first
  uint32_t finished = 0;    // blocks finished, in send order
  uint32_t pulls_open = 0;  // receivers whose shard is not sent completely

  // Contributor.
  bool frozen = false;
  bool wholly_late = false;
  bool push_stopped = false;
  float scale = 0;     // loss scale of the op, as a submit or an ANNOUNCE says; 0: not known. Fixed at freeze
  bool owing = false;  // opened by a peer, and a local rank owes under its tag
  Micros late_wait = kNever;  // when what is owed goes in without a submit
  uint64_t fates = 0;         // blocks of the frozen contribution whose fate is known
  std::vector<uint64_t> fate_bits;
  bool fates_told = false;
  uint16_t held = 0;          // local ranks that have submitted
  uint16_t frozen_ranks = 0;  // local ranks in the frozen contribution
  Micros start = 0;           // of H; 0: not yet
  Micros announce_again = kNever;
  Micros local_wait = kNever;
  uint32_t pushes_open = 0;  // owners that have not been sent everything

  std::vector<Receiver> receivers;  // one per local rank
  std::vector<NodeOp> nodes;
  uint32_t ranks_done = 0;

  Micros timer = kNever;  // earliest thing to do
  uint32_t repaired = 0;
  uint64_t bytes_sent = 0;
  uint32_t late_nodes = 0;
  uint32_t worst_node = UINT32_MAX;   // whose blocks came last
  uint32_t quorum_node = UINT32_MAX;  // that made t_q
  uint32_t last_node = UINT32_MAX;    // that came to the op last of those that have come, and when
  Micros last_came = 0;
  Trace trace;

  void wake_at(Micros when) { timer = when < timer ? when : timer; }
};

}  // namespace sluice::exchange
