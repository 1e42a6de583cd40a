#include "transport/exchange/lane.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {
namespace {

// Of one shard of a pulse, at most.
uint64_t pulse_blocks(const Settings& settings) {
  return kPulseWords * sizeof(int64_t) / (settings.payload - wire::kVerdictReserve) + 2;
}

// Units that the largest op can need at once: the own shard, and for `exact` early arrivals of every other node. With
// deadlines that adapt, pulses are open beside it.
uint32_t largest_op_units(const Settings& settings) {
  const auto n = static_cast<uint64_t>(settings.members.size());
  const uint64_t block_bytes = settings.payload - wire::kVerdictReserve;
  const uint64_t blocks = settings.max_op_bytes / block_bytes + 1;
  const uint64_t stripe = (blocks + n - 1) / n / settings.lanes + 1;
  const uint64_t units = 2 * stripe / kUnitBlocks + 1;  // 16-bit types: accumulators are twice as wide
  const uint64_t pulses =
      settings.adaptive ? kPulseWindow * ((pulse_blocks(settings) - 1) / kUnitBlocks + 1) : 0;
  return static_cast<uint32_t>(std::min<uint64_t>((units + pulses) * n, UINT32_MAX / 2));
}

uint32_t count_ranks(const Settings& settings, uint32_t node) {
  return static_cast<uint32_t>(std::count(settings.node_of_rank.begin(), settings.node_of_rank.end(), node));
}

wire::ViewHash hash_of(const Settings& s) {
  return wire::view_hash(s.job, s.generation, s.members, s.node_of_rank, s.lanes, s.payload);
}

}  // namespace

uint64_t minimum_pool_bytes(const Settings& settings) {
  return static_cast<uint64_t>(largest_op_units(settings)) *
         Pool::unit_bytes(settings.payload, static_cast<uint32_t>(settings.members.size()));
}

LaneImpl::LaneImpl(const Settings& given, Micros now, std::byte* pool)
    : settings(given),
      job_id(wire::job_id(given.job)),
      epoch(wire::epoch_of(hash_of(given))),
      n(static_cast<uint32_t>(given.members.size())),
      self(given.self),
      peers(n),
      events((2 * kWindow + 2 * kPendingOps) * std::max(1U, count_ranks(given, given.self))),
      traces(4 * kWindow),
      local_ranks_(count_ranks(given, given.self)),
      strangers_(n - 1),
      sealer_(given.sealing, given.job, given.key, hash_of(given), static_cast<uint16_t>(given.self),
              given.members.at(given.self).join_nonce, given.lane),
      opener_(given.sealing, given.job, given.key, hash_of(given), given.members, given.lane),
      pool_(std::max(given.pool_bytes, minimum_pool_bytes(given)), given.payload, n,
            given.pool_bytes >= minimum_pool_bytes(given) ? pool : nullptr),
      reserve_units_(largest_op_units(given)),
      rank_done_(local_ranks_, 0),
      next_submit_(local_ranks_, 0),
      pending_(local_ranks_, Fifo<Pending>(kPendingOps)),
      ops_(kWindow + kPulseWindow),
      control_(8192),
      repairs_(16384),
      tails_(4096),
      headers_(kBurst),
      tags_(kBurst * wire::kTagBytes),
      staging_(static_cast<size_t>(kBurst) * given.payload),
      scratch_(6 * static_cast<size_t>(given.payload)),
      own_(given.payload) {
  SLUICE_ASSERT(n >= 1 && n <= wire::kMaxNodes && self < n && local_ranks_ >= 1);
  SLUICE_ASSERT(settings.payload > wire::kVerdictReserve && settings.payload % 64 == 0);
  SLUICE_ASSERT(settings.max_lag >= 1 && settings.max_lag <= kWindow / 2);
  const uint64_t block_bytes = settings.payload - wire::kVerdictReserve;
  const uint64_t stripe = settings.max_op_bytes / block_bytes / settings.lanes + n + 2;
  for (Op& op : ops_) {
    op.nodes.resize(n);
    op.receivers.resize(local_ranks_);
    op.units.reserve(largest_op_units(settings) / n + 2);
    op.fate_bits.reserve(stripe / 64 + 1);
    for (Receiver& receiver : op.receivers) {
      receiver.bits.reserve(stripe / 64 + 1);
      receiver.owed.units.reserve(stripe / (kUnitBlocks / 2) + 2);
      receiver.holes.units.reserve(stripe / (kUnitBlocks / 2) + 2);
      receiver.taken.reserve(settings.max_lag);
    }
  }
  tags_seen_.resize(static_cast<size_t>(kTagsPerRank) * local_ranks_);
  for (TagState& tag : tags_seen_) {
    tag.carry.units.reserve(stripe / (kUnitBlocks / 2) + 2);
    tag.correction.units.reserve(stripe / (kUnitBlocks / 2) + 2);
    tag.queued.reserve(settings.max_lag);
  }
  for (uint32_t node = 0; node < n; ++node) {
    Peer& peer = peers[node];
    peer.flow.configure(settings.flow_window, settings.flow_window_min);
    peer.ranks = count_ranks(settings, node);
    peer.last_heard = now;
    peer.next_ping = now;  // brings the grants
  }
  settings.key.wipe();  // the sealer and the opener have made their own of it
  first_policy_.incast = static_cast<uint8_t>(std::clamp(settings.incast, 1U, 15U));
  if (settings.adaptive) pulse_words_.resize(2 * kPulseWindow * static_cast<size_t>(n) * kPulseWords);
  last_run_ = phase_began_ = now;
  counters.pool_bytes = pool_.bytes();
}

// --- Ops ------------------------------------------------------------------------------------------------------------

Op& LaneImpl::slot_of(uint32_t seq) {
  return is_pulse(seq) ? ops_[kWindow + seq % kPulseWindow] : ops_[seq % kWindow];
}

Op* LaneImpl::find(uint32_t seq) {
  Op& op = slot_of(seq);
  return op.open && op.seq == seq ? &op : nullptr;
}

wire::Drop LaneImpl::window_check(uint32_t seq) const {
  const uint32_t number = seq & ~wire::kDaemonOps;
  const uint32_t base = is_pulse(seq) ? pulse_base_ : base_;
  if (number < base) return wire::Drop::kRetired;
  return number - base < (is_pulse(seq) ? kPulseWindow : kWindow) ? wire::Drop::kNone : wire::Drop::kTooEarly;
}

bool LaneImpl::first_in_window(const Op& op) const { return op.seq == base_ || is_pulse(op.seq); }

Op* LaneImpl::open(uint32_t seq, Micros now) {
  SLUICE_ASSERT(window_check(seq) == wire::Drop::kNone);
  Op& slot = slot_of(seq);
  SLUICE_ASSERT(!slot.open);
  // A new op in the memory of the old one: vectors keep their capacity.
  Op fresh;
  fresh.units = std::move(slot.units);
  fresh.units.clear();
  fresh.nodes = std::move(slot.nodes);
  std::fill(fresh.nodes.begin(), fresh.nodes.end(), NodeOp{});
  fresh.receivers = std::move(slot.receivers);
  fresh.fate_bits = std::move(slot.fate_bits);
  fresh.fate_bits.clear();
  for (Receiver& receiver : fresh.receivers) {
    Receiver clean;
    clean.bits = std::move(receiver.bits);
    clean.owed.units = std::move(receiver.owed.units);
    clean.owed.units.clear();
    clean.holes.units = std::move(receiver.holes.units);
    clean.holes.units.clear();
    clean.taken = std::move(receiver.taken);
    clean.taken.clear();
    receiver = std::move(clean);
  }
  slot = std::move(fresh);
  slot.open = true;
  slot.seq = seq;
  if (!is_pulse(seq)) end_ = std::max(end_, seq + 1);
  slot.shard = Geometry::shard_of(self, seq, n);
  slot.opened = now;
  slot.push_budget = settings.hard_deadline / 2;
  slot.pull_budget = settings.hard_deadline - slot.push_budget;
  slot.trace.op_seq = seq;
  ++counters.open_ops;
  return &slot;
}

bool LaneImpl::describe(Op* op, OpClass op_class, ReduceKind kind, ElementType type, uint32_t fingerprint,
                        uint32_t shard_blocks, uint32_t describer) {
  const uint32_t lane_blocks =
      Geometry::lane_blocks(shard_blocks, stripe_of(op->seq).lanes, stripe_of(op->seq).lane);
  const bool wide = element_size(accumulator_type(type)) > element_size(type);
  const uint32_t unit_blocks = wide ? kUnitBlocks / 2 : kUnitBlocks;
  const uint32_t units = (lane_blocks + unit_blocks - 1) / unit_blocks;
  const uint32_t keep = first_in_window(*op) ? 0 : reserve_units_;
  if (static_cast<uint64_t>(units) + keep > pool_.free_units()) return false;
  for (uint32_t i = 0; i < units; ++i) op->units.push_back(pool_.take());
  counters.pool_used_bytes = pool_.used_bytes();
  op->described = true;
  op->op_class = op_class;
  op->kind = kind;
  op->type = type;
  op->fingerprint = fingerprint;
  op->describer = describer;
  op->shard_blocks = shard_blocks;
  op->lane_blocks = lane_blocks;
  op->block_elements = wire::elements_per_block(settings.payload, type);
  op->unit_blocks = unit_blocks;
  op->stride = wide ? 2 * settings.payload : settings.payload;
  set_policy(op);
  op->carries = op_class == OpClass::kConsistent && settings.carry_over && wire::tagged(fingerprint);
  op->trace.op_class = op_class;
  if (lane_blocks == 0) {  // nothing to sum or serve; the op is here for its quorum only
    op->owner = Op::Owner::kClosed;
    op->nodes_in = n;
  } else if (op_class == OpClass::kExact) {
    for (uint32_t node = 0; node < n; ++node) {
      if (node != self) op->nodes[node].push_timer = op->opened + kPushBudgetUnknown + peers[node].flow.rtt();
    }
    op->wake_at(op->opened + kPushBudgetUnknown);
  }
  return true;
}

void LaneImpl::release(Op* op) {
  for (uint32_t unit : op->units) {
    const uint32_t* early = pool_.early(unit);
    for (uint32_t node = 0; node < n; ++node) {
      if (early[node] != kNoUnit) pool_.give(early[node]);
    }
    pool_.give(unit);
  }
  op->units.clear();
  for (Receiver& receiver : op->receivers) {
    if (receiver.tag == nullptr) continue;
    pages_of(*op).clear(&receiver.owed);
    drop_holes(*op, &receiver);
    --receiver.tag->travelling;
    receiver.tag = nullptr;
  }
  counters.pool_used_bytes = pool_.used_bytes();
  if (op->local && !is_pulse(op->seq)) {
    if (traces.full()) traces.pop();
    traces.push(op->trace);
  }
  op->open = false;
  --counters.open_ops;
}

// Opens and describes the op that a verified ANNOUNCE, PUSH or REQUEST (for my shard) speaks of.
wire::Drop LaneImpl::describe_from(const wire::Header& header, Micros now, Op** out) {
  const auto type = static_cast<ElementType>(header.flags >> 5);
  const auto kind = static_cast<ReduceKind>((header.flags >> 4) & 1);
  const auto op_class = header.op_class();
  if (static_cast<uint8_t>(type) >= kElementTypes || op_class > OpClass::kBestEffort ||
      (kind == ReduceKind::kMean && !is_float(type)) ||
      (is_pulse(header.op_seq) && op_class != OpClass::kExact)) {
    return wire::Drop::kState;
  }
  if (static_cast<uint64_t>(header.total) * (settings.payload - wire::kVerdictReserve) >
          settings.max_op_bytes + settings.payload ||
      (is_pulse(header.op_seq) && header.total > pulse_blocks(settings))) {
    return wire::Drop::kSize;
  }
  Op* op = find(header.op_seq);
  const bool fresh = op == nullptr;
  if (fresh) op = open(header.op_seq, now);
  if (op->disputed) return wire::Drop::kMismatch;
  if (!op->described) {
    if (!describe(op, op_class, kind, type, header.fingerprint, header.total, header.sender)) {
      if (fresh) release(op);
      return wire::Drop::kNoMemory;
    }
    look_for_debts(op, now);
  } else if (op->fingerprint != header.fingerprint || op->op_class != op_class || op->type != type ||
             op->kind != kind || op->shard_blocks != header.total) {
    mismatch(op, header.sender, now);
    return wire::Drop::kMismatch;
  }
  *out = op;
  return wire::Drop::kNone;
}

// --- Submit ----------------------------------------------------------------------------------------------------------

Status LaneImpl::submit(Micros now, const Submission& submission) {
  if (submission.local_rank >= local_ranks_ || submission.op_seq != next_submit_[submission.local_rank] ||
      submission.op_seq >= wire::kDaemonOps || submission.op_class > OpClass::kBestEffort ||
      static_cast<uint8_t>(submission.type) >= kElementTypes ||
      (submission.kind == ReduceKind::kMean && !is_float(submission.type))) {
    return Status::kInvalid;
  }
  const uint64_t size = element_size(submission.type);
  if (submission.count > settings.max_op_bytes / size) return Status::kNoMemory;
  Geometry geometry;
  geometry.count = submission.count;
  geometry.block_elements = wire::elements_per_block(settings.payload, submission.type);
  geometry.nodes = n;
  if (!geometry.fits_header()) return Status::kInvalid;
  if (pending_[submission.local_rank].full()) return Status::kInvalid;
  ++next_submit_[submission.local_rank];
  if (failed) {
    Event event;
    event.op_seq = submission.op_seq;
    event.local_rank = submission.local_rank;
    event.cookie = submission.cookie;
    event.events = kEventResult | kEventResolved;
    event.status = failure;
    std::snprintf(event.text, sizeof event.text, "%s", failure_text);
    push_event(event);
    return Status::kOk;
  }
  pending_[submission.local_rank].push({submission, now});
  pump_pending(now);
  settle(now);
  return Status::kOk;
}

// May this op be admitted (section 3, admission)? base_ is the smallest `done` of all live nodes, the own one included.
// Classes without catch-up stay within a step, the ops between two of one tag: the last op of the tag is done everywhere.
bool LaneImpl::within_lag(const Submission& submission) {
  if (submission.op_seq - base_ >= settings.max_lag) return false;
  if (submission.op_class == OpClass::kExact ||
      (submission.op_class == OpClass::kConsistent && settings.carry_over && submission.tag != 0)) {
    return true;
  }
  const TagState* tag = find_tag(
      submission.local_rank,
      wire::fingerprint(submission.kind, submission.type, submission.type, submission.count, submission.tag));
  return tag == nullptr || tag->last_seq < base_;
}

void LaneImpl::pump_pending(Micros now) {
  bool waits = false;
  for (Fifo<Pending>& pending : pending_) {
    while (!failed && !pending.empty()) {
      if (!within_lag(pending.front().submission)) break;
      note_lag(now);
      if (!admit(now, pending.front())) break;
      pending.pop();
    }
    waits |= !pending.empty();
  }
  if (!waits) {
    lag_ping_ = kNever;
  } else if (lag_ping_ == kNever) {
    lag_ping_ = now;
    lag_interval_ = 0;
    lag_node_ = slowest(now);
    lag_since_ = now;
  }
}

bool LaneImpl::admit(Micros now, const Pending& pending) {
  const Submission& submission = pending.submission;
  const uint32_t fingerprint =
      wire::fingerprint(submission.kind, submission.type, submission.type, submission.count, submission.tag);
  Geometry geometry;
  geometry.count = submission.count;
  geometry.block_elements = wire::elements_per_block(settings.payload, submission.type);
  geometry.nodes = n;
  geometry.lanes = stripe_of(submission.op_seq).lanes;
  geometry.lane = stripe_of(submission.op_seq).lane;

  Op* op = find(submission.op_seq);
  const bool fresh = op == nullptr;
  if (fresh) op = open(submission.op_seq, now);
  const uint32_t shard_blocks = geometry.shard_blocks(op->shard);
  if (!op->described) {
    if (!describe(op, submission.op_class, submission.kind, submission.type, fingerprint, shard_blocks,
                  self)) {
      if (fresh) release(op);
      return false;
    }
  }
  const bool first = !op->local;
  if (!is_pulse(submission.op_seq)) highest_announced_ = std::max(highest_announced_, submission.op_seq);
  if (first) {
    op->local = op->shaped = true;
    if (!op->frozen) op->scale = submission.loss_scale;
    op->geometry = geometry;
    set_bounds(op, size_class(submission.count * element_size(submission.type)));
    if (submission.deadline > 0) {
      op->push_budget = submission.deadline / 2;
      op->pull_budget = submission.deadline - op->push_budget;
    }
    op->trace.tag = submission.tag;
    op->trace.bytes = submission.count * element_size(submission.type);
    op->trace.submitted = pending.submitted;
    op->trace.admitted = now;
  }
  Receiver& receiver = op->receivers[submission.local_rank];
  receiver.state = Receiver::State::kWait;
  receiver.submission = submission;
  receiver.submitted = pending.submitted;
  receiver.admitted = now;
  receiver.lag_node = pending.waited_for;
  receiver.bits.assign((geometry.stripe_blocks() + 63) / 64, 0);
  if (op->op_class != OpClass::kExact) {
    if (receiver.tag == nullptr) {
      receiver.tag = tag_of(submission, fingerprint);
      if (receiver.tag != nullptr) ++receiver.tag->travelling;
    }
    if (TagState* tag = receiver.tag) {
      if (++tag->steps > 1) tag->stride = submission.op_seq - tag->last_seq;
      tag->last_seq = submission.op_seq;
      tag->scaled |= submission.scaled || submission.loss_scale != 1.0F;
    }
  }
  if (op->fingerprint != fingerprint || op->op_class != submission.op_class ||
      op->shard_blocks != shard_blocks || op->geometry.count != submission.count) {
    if (op->held > 0)
      mismatch_here(op, submission, now);
    else
      mismatch(op, op->describer, now);
    return true;
  }

  ++op->held;
  if (first) {
    first_admission(op, now);
    for (uint32_t node = 0; node < n; ++node) {
      if (node != self) through(op, node, now);
    }
  } else if (!op->frozen && op->op_class != OpClass::kExact) {
    // One rank more that may count for the quorum: the others hear of it with the next ANNOUNCE.
    announced(op, self, !op->wholly_late, true, op->held, false, now);
    op->announce_again = std::min(op->announce_again, now + kAgain);
    op->wake_at(op->announce_again);
  }
  if (failed) return true;
  if (!op->bounded) {
    receiver.bound = now + (op->op_class == OpClass::kExact && submission.deadline > 0 ? submission.deadline
                                                                                       : settings.op_timeout);
    start_clock(op, now);
  } else if (op->start != 0) {
    receiver.bound = now + patience(*op);
  } else {
    receiver.bound = pending.submitted + settings.rank_timeout;
    start_clock(op, now);
  }
  op->wake_at(receiver.bound);
  for (uint32_t node = 0; node < n; ++node) {
    NodeOp& x = op->nodes[node];
    if (node == self || !missing_from(*op, node)) continue;
    const Micros when = x.closed ? now : now + push_budget(*op) + peers[node].flow.rtt();
    x.pull_timer = std::min(x.pull_timer, when);
    op->wake_at(x.pull_timer);
  }
  if (op->frozen || op->wholly_late) {
    queue_slot(op, submission.local_rank);
    op->frozen = true;
  } else if (op->held == local_ranks_ || is_pulse(op->seq)) {
    freeze(op, now);
  } else if (op->bounded && op->local_wait == kNever) {
    op->local_wait = now + op->push_budget / 4;
    op->wake_at(op->local_wait);
  }
  // What the own shard has finished already goes to this rank by a function call.
  if (op->owner == Op::Owner::kClosed) {
    for (uint32_t i = 0; i < op->finished; ++i) {
      deliver_own(op, &receiver, (op->pull_start + i) % op->lane_blocks, now);
    }
  }
  conclude(op, submission.local_rank, now);
  return true;
}

// --- Packets in -------------------------------------------------------------------------------------------------------

bool LaneImpl::verify(const wire::PacketView& packet, Micros now) {
  return opener_.open(packet.header.sender, packet.header.counter, packet.header_bytes, packet.payload,
                      packet.tag, now);
}

wire::Drop LaneImpl::on_packet(Micros now, std::span<const std::byte> datagram) {
  using wire::Drop;
  using wire::Type;
  wire::PacketView packet;
  const auto judge = [&]() -> Drop {
    const Drop malformed = wire::parse(datagram, settings.sealing != wire::Sealing::kNone, &packet);
    if (malformed != Drop::kNone) return malformed;
    const wire::Header& header = packet.header;
    if (header.job != job_id) return Drop::kJob;
    if (header.epoch != epoch) return Drop::kEpoch;
    if (header.sender >= n || header.sender == self) return Drop::kSender;
    if (header.lane != settings.lane) return Drop::kNotMine;
    Peer& peer = peers[header.sender];
    const auto type = static_cast<Type>(header.type);
    if (type != Type::kPush && type != Type::kPull) {  // control packets: replay window, then tag
      if (!peer.replay.would_accept(header.counter)) return Drop::kReplay;
      if (!verify(packet, now)) return Drop::kTag;
      peer.replay.accept(header.counter);
    }
    switch (type) {
      case Type::kPush:
        return on_push(packet, now);
      case Type::kPull:
        return on_pull(packet, now);
      case Type::kAnnounce:
        return on_announce(packet, now);
      case Type::kRequest:
        return on_request(packet, now);
      case Type::kPing:
        return on_ping(packet, now);
      case Type::kPong:
        return on_pong(packet, now);
      case Type::kRequestRow:
        return on_request_row(packet, now);
      case Type::kRow:
        return on_row(packet, now);
      case Type::kGone:
        return on_gone(packet, now);
      case Type::kAbort:
        return on_abort(packet, now);
      default:
        return Drop::kType;
    }
  };
  const Drop drop = judge();
  if (drop == Drop::kNone) {
    Peer& peer = peers[packet.header.sender];
    peer.last_heard = now;
    peer.suspect = false;
    if (!peer.met) {
      peer.met = true;
      --strangers_;
    }
    ++counters.packets_received;
    counters.bytes_received += datagram.size();
    ++peer.state.packets_received;
    peer.state.bytes_received += datagram.size();
  } else {
    ++counters.drops[static_cast<size_t>(drop)];
  }
  settle(now);
  return drop;
}

// `done` and `base` of another node; both only grow.
void LaneImpl::heard(uint32_t node, uint32_t done, uint32_t base, Micros now) {
  Peer& peer = peers[node];
  if (base > peer.base) peer.base = base;
  if (done > peer.done) {
    settle_ |= peer.done == base_;
    const uint32_t before = peer.done;
    peer.done = done;
    for (uint32_t seq = std::max(before, base_); seq < std::min(done, end_); ++seq)
      through(find(seq), node, now);
  }
}

// A node that is through with an op has called it on all its ranks, whatever has been heard of that (section 4, t_q).
void LaneImpl::through(Op* op, uint32_t node, Micros now) {
  if (op == nullptr || !op->described || op->op_class == OpClass::kExact || peers[node].done <= op->seq)
    return;
  count_for_quorum(op, node, static_cast<uint16_t>(peers[node].ranks), true, now);
}

// Moves `done` and `base`, retires ops, admits what waited. Only at the end of a call: ops go away here.
void LaneImpl::settle(Micros now) {
  if (new_debts_ && !failed) offer_debts(now);
  while (settle_) {
    settle_ = false;
    if (failed) {
      for (Op& op : ops_) {
        if (op.open) release(&op);
      }
      for (TagState& tag : tags_seen_) {
        if (!tag.used) continue;
        pages_of(tag.type).clear(&tag.carry);
        pages_of(tag.type).clear(&tag.correction);
      }
      return;
    }
    uint32_t own = UINT32_MAX;
    for (uint32_t rank = 0; rank < local_ranks_; ++rank) {
      for (;;) {
        const Op* op = find(rank_done_[rank]);
        if (op == nullptr || !ended(*op, op->receivers[rank])) break;
        ++rank_done_[rank];
      }
      own = std::min(own, rank_done_[rank]);
    }
    if (own != peers[self].done) {
      peers[self].done = peers[self].base = own;
      // Nothing follows that would carry the news: say it soon.
      bool quiet = true;
      for (uint32_t rank = 0; rank < local_ranks_; ++rank) quiet &= rank_done_[rank] == next_submit_[rank];
      if (quiet) {
        for (Peer& peer : peers) peer.next_ping = std::min(peer.next_ping, now + 1000);
      }
    }
    uint32_t base = UINT32_MAX;
    for (const Peer& peer : peers) base = std::min(base, peer.done);
    SLUICE_ASSERT(base >= base_);
    if (base != base_) {
      while (base_ != base) {
        if (Op* op = find(base_)) release(op);
        ++base_;
      }
      peers[self].base = base_;
      if (slots_wait_) fold_old_slots(now);
      pump_pending(now);
    }
    settle_pulses();
    while (begin_pulse(now)) {  // also when only the window of pulses has moved
    }
  }
  counters.pool_used_bytes = pool_.used_bytes();
}

}  // namespace sluice::exchange
