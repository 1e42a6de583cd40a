// The owner of one shard of an op (protocol, sections 4, 5 and 15): sums, closes once, finishes each block once.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/numeric/numeric.h"
#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

using wire::Drop;

std::byte* LaneImpl::block_data(const Op& op, uint32_t stripe) {
  return pool_.data(op.units[stripe / op.unit_blocks]) +
         static_cast<size_t>(stripe % op.unit_blocks) * op.stride;
}
BlockMeta& LaneImpl::block_meta(const Op& op, uint32_t stripe) {
  return pool_.blocks(op.units[stripe / op.unit_blocks])[stripe % op.unit_blocks];
}
uint64_t& LaneImpl::sender_mask(const Op& op, uint32_t stripe, uint32_t node) {
  return pool_.masks(op.units[stripe / op.unit_blocks])[node];
}
bool LaneImpl::has_block(const Op& op, uint32_t stripe, uint32_t node) {
  return (sender_mask(op, stripe, node) >> (stripe % op.unit_blocks)) & 1;
}

uint32_t LaneImpl::quorum_ranks_needed() const {
  return static_cast<uint32_t>(
      std::ceil(settings.min_contribution * static_cast<double>(settings.node_of_rank.size())));
}

// A node has a submit of the op, as far as known here.
void LaneImpl::came(Op* op, uint32_t node, Micros now) {
  op->last_node = node;
  op->last_came = now;
}

void LaneImpl::wants_pull(Op* op, uint32_t node, Micros now) {
  NodeOp& x = op->nodes[node];
  if (x.receives) return;
  if (!x.contributes) came(op, node, now);
  x.receives = true;
  if (node != self && op->owner == Op::Owner::kClosed && x.pull_sent < op->lane_blocks) ++op->pulls_open;
}

// What an ANNOUNCE, a PUSH (contributes) or a REQUEST for pulls (receives) says of a node.
void LaneImpl::announced(Op* op, uint32_t node, bool contributes, bool receives, uint16_t ranks, bool frozen,
                         Micros now) {
  NodeOp& x = op->nodes[node];
  if (receives) wants_pull(op, node, now);
  if (!contributes) return;
  if (!x.contributes && !x.receives) came(op, node, now);
  x.contributes = true;
  // {contributes} alone does not count for t_q (section 4): {contributes, receives} or a frozen contribution does.
  count_for_quorum(op, node, ranks, x.receives || frozen, now);
}

// The node holds so many ranks of the op. The half of the nodes, with min_contribution of the ranks, makes t_q.
void LaneImpl::count_for_quorum(Op* op, uint32_t node, uint16_t ranks, bool counts, Micros now) {
  NodeOp& x = op->nodes[node];
  const uint16_t more = ranks > x.ranks ? ranks - x.ranks : 0;
  x.ranks += more;
  if (x.in_quorum) {
    op->quorum_ranks += more;
  } else if (counts) {
    x.in_quorum = true;
    ++op->quorum_nodes;
    op->quorum_ranks += x.ranks;
  }
  if (op->quorum == 0 && op->quorum_nodes >= (n + 1) / 2 && op->quorum_ranks >= quorum_ranks_needed()) {
    op->quorum = now;
    op->quorum_node = node;
    op->trace.quorum = now;
    op->wake_at(now + op->push_budget);
    set_late_wait(op);
    start_clock(op, now);
  }
}

Drop LaneImpl::on_announce(const wire::PacketView& packet, Micros now) {
  const wire::Header& header = packet.header;
  wire::Announce body;
  if (!wire::read_payload(packet.payload, &body)) return Drop::kSize;
  heard(header.sender, body.done, body.base, now);
  if (failed) {
    remind(header.sender, now);
    return Drop::kClosed;
  }
  if (const Drop outside = window_check(header.op_seq); outside != Drop::kNone) return outside;
  if (header.shard != Geometry::shard_of(self, header.op_seq, n)) return Drop::kNotMine;
  if (header.ranks == 0 || header.ranks > peers[header.sender].ranks) return Drop::kSize;
  Op* op = nullptr;
  if (const Drop drop = describe_from(header, now, &op); drop != Drop::kNone) return drop;
  set_bounds(op, body.flags >> wire::kSizeClassShift);
  if (op->scale == 0 && !op->frozen && std::isfinite(body.scale) && body.scale > 0) {
    op->scale = body.scale;
    look_for_debts(op, now);  // what is owed under a loss scale may have waited for this
  }
  const bool contributes = (body.flags & wire::kContributes) != 0;
  if (contributes && !op->nodes[header.sender].contributes) op->exit_at = kNever;  // one more to wait for
  ask_policy(header.sender, header.policy, now);
  announced(op, header.sender, contributes, (body.flags & wire::kReceives) != 0, header.ranks,
            (body.flags & wire::kFrozen) != 0, now);
  NodeOp& x = op->nodes[header.sender];
  if (contributes && op->owner == Op::Owner::kOpen && x.push_timer == kNever &&
      x.received < op->lane_blocks) {
    x.push_timer = now + (op->bounded ? push_budget(*op) / 2 : kPushBudgetUnknown);
    op->wake_at(x.push_timer);
  }
  return Drop::kNone;
}

Drop LaneImpl::on_push(const wire::PacketView& packet, Micros now) {
  const wire::Header& header = packet.header;
  if (failed) return Drop::kClosed;  // unverified: PING will remind the sender
  if (const Drop outside = window_check(header.op_seq); outside != Drop::kNone) return outside;
  if (header.shard != Geometry::shard_of(self, header.op_seq, n)) return Drop::kNotMine;
  const uint32_t block = header.block;
  if (block >= header.total) return Drop::kBlock;
  if (!stripe_of(header.op_seq).has(block)) return Drop::kNotMine;
  if (header.ranks == 0 || header.ranks > peers[header.sender].ranks) return Drop::kSize;
  const uint32_t stripe = stripe_of(header.op_seq).index(block);
  Op* op = find(header.op_seq);
  if (op != nullptr && op->described) {
    if (op->owner == Op::Owner::kClosed) {
      ++peers[header.sender].state.blocks_late;
      return Drop::kLate;
    }
    if (header.total == op->shard_blocks && has_block(*op, stripe, header.sender)) return Drop::kDuplicate;
  }
  if (!verify(packet, now)) return Drop::kTag;
  if (const Drop drop = describe_from(header, now, &op); drop != Drop::kNone) return drop;
  if (header.policy != static_cast<uint8_t>(op->policy)) {  // made under other bounds: its sender carries it
    ask_policy(header.sender, header.policy, now);
    return Drop::kPolicy;
  }
  const bool last = block + 1 == op->shard_blocks;
  if (header.elements == 0 || header.elements > op->block_elements ||
      (!last && header.elements != op->block_elements) ||
      packet.payload.size() != header.elements * element_size(op->type) ||
      (op->shaped && header.elements != op->geometry.elements_of(op->shard, block))) {
    return Drop::kSize;
  }
  if (!add_block(op, header.sender, stripe, header.elements, header.ranks, packet.payload.data())) {
    return Drop::kNoMemory;
  }
  NodeOp& x = op->nodes[header.sender];
  ++x.received;
  announced(op, header.sender, true, false, header.ranks, true, now);
  x.tail_seen |= (header.flags & wire::kFlagTail) != 0;
  look_for_exit(op, now);
  if (x.received == op->lane_blocks) {
    x.push_timer = kNever;
    node_complete(op, header.sender, now);
  } else {
    // While blocks keep coming nothing is asked for; after the tail what is missing is lost or overtaken.
    x.push_timer = now + (x.tail_seen ? repair_delay(header.sender) : silence_delay(*op, header.sender));
    x.push_backoff = 0;
    op->wake_at(x.push_timer);
  }
  return Drop::kNone;
}

// Early exit (section 4): after t_q, once the tails of all announced contributors and of at least half of the nodes are
// here, a shard waits only a share of t_C for what is missing, and begins anew with each block that still comes. For a
// trainer that is late, and of which nothing is heard yet, it waits until t_q + P/2.
void LaneImpl::look_for_exit(Op* op, Micros now) {
  if (!op->bounded || op->complete == 0 || op->quorum == 0 || op->owner != Op::Owner::kOpen) return;
  uint32_t tails = 0;
  Micros slowest = 0;
  bool silent = false;  // a node has announced nothing yet
  for (uint32_t node = 0; node < n; ++node) {
    const NodeOp& x = op->nodes[node];
    silent |= !x.contributes && !x.receives;
    const bool seen = x.tail_seen || (op->lane_blocks > 0 && x.received == op->lane_blocks);
    if (x.contributes && !seen) return;
    tails += seen ? 1 : 0;
    if (node != self) slowest = std::max(slowest, peers[node].flow.rtt_high());
  }
  if (2 * tails < n) return;
  op->exit_at = now + std::max(op->complete * op->exit_share / 100, 3 * slowest);
  if (silent) op->exit_at = std::max(op->exit_at, op->quorum + op->push_budget / 2);
  op->wake_at(op->exit_at);
}

// Adds one block of one node, once (I1). False: no memory for an early arrival; the block will be asked for again.
bool LaneImpl::add_block(Op* op, uint32_t node, uint32_t stripe, uint32_t elements, uint16_t ranks,
                         const std::byte* data) {
  BlockMeta& meta = block_meta(*op, stripe);
  std::byte* sum = block_data(*op, stripe);
  SLUICE_ASSERT(!has_block(*op, stripe, node));
  if (op->op_class == OpClass::kExact && meta.next != node) {
    uint32_t& early = pool_.early(op->units[stripe / op->unit_blocks])[node];
    if (early == kNoUnit) {
      const uint32_t keep = first_in_window(*op) ? 0 : reserve_units_;
      if (1 + keep > pool_.free_units()) return false;
      early = pool_.take();
      counters.pool_used_bytes = pool_.used_bytes();
    }
    std::memcpy(pool_.data(early) + static_cast<size_t>(stripe % op->unit_blocks) * op->stride, data,
                elements * element_size(op->type));
  } else if (meta.ranks == 0) {
    numeric::load(op->type, data, sum, elements);
  } else {
    numeric::add(op->type, data, sum, elements);
  }
  sender_mask(*op, stripe, node) |= 1ULL << (stripe % op->unit_blocks);
  meta.elements = static_cast<uint16_t>(elements);
  if (op->op_class == OpClass::kExact) {
    if (meta.next == node) {
      meta.ranks += ranks;
      ++meta.next;
      advance_ordered(op, stripe);
    }
  } else {
    meta.ranks += ranks;
  }
  return true;
}

// `exact`: adds what is here already and whose turn has come. Rank order makes equal inputs give equal bits.
void LaneImpl::advance_ordered(Op* op, uint32_t stripe) {
  BlockMeta& meta = block_meta(*op, stripe);
  std::byte* sum = block_data(*op, stripe);
  while (meta.next < n) {
    const uint32_t node = meta.next;
    const std::byte* data = nullptr;
    if (node == self) {
      if (!op->frozen) return;
      data = own_block(*op, op->shard, op->geometry.block_of_stripe(stripe), own_.data());
      sender_mask(*op, stripe, node) |= 1ULL << (stripe % op->unit_blocks);
      meta.elements =
          static_cast<uint16_t>(op->geometry.elements_of(op->shard, op->geometry.block_of_stripe(stripe)));
    } else {
      if (!has_block(*op, stripe, node)) return;
      data = pool_.data(pool_.early(op->units[stripe / op->unit_blocks])[node]) +
             static_cast<size_t>(stripe % op->unit_blocks) * op->stride;
    }
    if (meta.ranks == 0)
      numeric::load(op->type, data, sum, meta.elements);
    else
      numeric::add(op->type, data, sum, meta.elements);
    meta.ranks += static_cast<uint16_t>(peers[node].ranks);  // exact: every rank of a node is in
    ++meta.next;
  }
}

// The own contribution to the own shard: a function call, at freeze.
void LaneImpl::add_own(Op* op, Micros now) {
  if (op->owner == Op::Owner::kClosed) return;
  for (uint32_t stripe = 0; stripe < op->lane_blocks; ++stripe) {
    if (op->op_class == OpClass::kExact) {
      advance_ordered(op, stripe);
      continue;
    }
    const uint32_t block = op->geometry.block_of_stripe(stripe);
    add_block(op, self, stripe, op->geometry.elements_of(op->shard, block), op->frozen_ranks,
              own_block(*op, op->shard, block, own_.data()));
  }
  op->nodes[self].received = op->lane_blocks;
  look_for_exit(op, now);
  node_complete(op, self, now);
}

void LaneImpl::node_complete(Op* op, uint32_t node, Micros now) {
  if (op->late_nodes == 0) op->worst_node = node;
  ++op->nodes_in;
  SLUICE_ASSERT(op->nodes_in <= n);
  if (op->nodes_in == n) close(op, now);
}

// Once per op: from here on the sum and its verdict are frozen.
void LaneImpl::close(Op* op, Micros now) {
  SLUICE_ASSERT(op->owner == Op::Owner::kOpen);
  op->owner = Op::Owner::kClosed;
  op->closed = now;
  op->trace.closed = now;
  op->pull_start = push_start(*op, self);
  for (uint32_t node = 0; node < n; ++node) {
    op->nodes[node].push_timer = kNever;
    if (node != self && op->nodes[node].receives) ++op->pulls_open;
    if (op->nodes[node].received < op->lane_blocks) ++op->late_nodes;
  }
  unfinished_ = true;
}

// Finishes up to `blocks` more blocks in send order; false when none is left.
bool LaneImpl::finish_some(Op* op, uint32_t blocks, Micros now) {
  for (; blocks > 0 && op->finished < op->lane_blocks; --blocks) {
    finish_block(op, (op->pull_start + op->finished) % op->lane_blocks, now);
    ++op->finished;
  }
  return op->finished < op->lane_blocks;
}

// Value and verdict of one block, once (section 5): skip, or divide once and round once.
void LaneImpl::finish_block(Op* op, uint32_t stripe, Micros now) {
  BlockMeta& meta = block_meta(*op, stripe);
  std::byte* data = block_data(*op, stripe);
  const uint32_t bit = stripe % op->unit_blocks;
  if (op->shaped) {
    meta.elements =
        static_cast<uint16_t>(op->geometry.elements_of(op->shard, op->geometry.block_of_stripe(stripe)));
  }
  // (Of a pulse each node is one contributor, however many ranks it has: `exact` never skips.)
  if (op->op_class != OpClass::kExact && (meta.ranks < quorum_ranks_needed() || meta.ranks == 0)) {
    meta.flags = wire::kFlagSkip;
    meta.payload = 0;
    ++counters.blocks_skipped;
  } else {
    SLUICE_ASSERT(op->op_class != OpClass::kExact || meta.next == n);
    // With carry-over every rank's part comes in the end, so the divisor is all ranks; otherwise who was counted.
    const auto ranks =
        op->carries ? static_cast<double>(settings.node_of_rank.size()) : static_cast<double>(meta.ranks);
    const double divisor = op->kind == ReduceKind::kMean ? ranks : 1.0;
    const bool finite = numeric::finish(op->type, data, data, meta.elements, divisor);
    size_t bytes = meta.elements * element_size(op->type);
    meta.flags = finite ? 0 : wire::kFlagNonfinite;
    if (!finite) ++counters.nonfinite_blocks;
    const uint64_t* masks = pool_.masks(op->units[stripe / op->unit_blocks]);
    uint16_t list[1 + wire::kMaxListedSenders];
    uint32_t missing = 0;
    for (uint32_t node = 0; node < n; ++node) {
      if ((masks[node] >> bit) & 1) continue;
      if (missing < wire::kMaxListedSenders) list[1 + missing] = static_cast<uint16_t>(node);
      ++missing;
    }
    if (missing == 0) {
      meta.flags |= wire::kFlagAllCounted;
    } else if (missing <= wire::kMaxListedSenders) {
      list[0] = static_cast<uint16_t>(missing);
      std::memcpy(data + bytes, list, (1 + missing) * sizeof(uint16_t));
      bytes += (1 + missing) * sizeof(uint16_t);
    } else {
      meta.flags |= wire::kFlagRow;
    }
    meta.payload = static_cast<uint16_t>(bytes);
  }
  if (op->shaped) {
    set_fate(op, op->shard, op->geometry.block_of_stripe(stripe),
             op->geometry.stripe_first(op->shard) + stripe,
             (meta.flags & wire::kFlagSkip) == 0 && has_block(*op, stripe, self));
  }
  for (Receiver& receiver : op->receivers) deliver_own(op, &receiver, stripe, now);
  settle_fates(op, now);
}

// A finished block of the own shard to a local rank that waits for it.
void LaneImpl::deliver_own(Op* op, Receiver* receiver, uint32_t stripe, Micros now) {
  if (op->disputed) return;
  if (receiver->state != Receiver::State::kWait && receiver->state != Receiver::State::kLate) return;
  const uint64_t bit = op->geometry.stripe_first(op->shard) + stripe;
  if ((receiver->bits[bit / 64] >> (bit % 64)) & 1) return;
  take_block(op, receiver, op->shard, op->geometry.block_of_stripe(stripe), bit,
             block_meta(*op, stripe).flags, block_data(*op, stripe));
  conclude(op, static_cast<uint32_t>(receiver - op->receivers.data()), now);
}

}  // namespace sluice::exchange
