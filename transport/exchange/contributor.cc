// The contributor of this node to an op (protocol, sections 4 and 15): announces, freezes, pushes, answers requests.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/numeric/numeric.h"
#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

using wire::Drop;

void LaneImpl::first_admission(Op* op, Micros now) {
  // With its own shard closed the contribution comes too late for everybody: results only (section 7).
  op->wholly_late = op->lane_blocks > 0 && op->owner == Op::Owner::kClosed;
  announced(op, self, !op->wholly_late && !op->frozen, true, op->held, false, now);
  announce_all(op);
  op->announce_again = now + kAgain;
  op->wake_at(op->announce_again);
}

void LaneImpl::announce_to(const Op& op, uint32_t node) {
  queue_control({.type = wire::Type::kAnnounce, .node = static_cast<uint16_t>(node), .op_seq = op.seq});
}

void LaneImpl::announce_all(Op* op) {
  for (uint32_t node = 0; node < n; ++node) {
    if (node != self) announce_to(*op, node);
  }
}

// H begins at the later of admission and t_q (section 4, Start).
void LaneImpl::start_clock(Op* op, Micros now) {
  if (op->op_class == OpClass::kExact || op->start != 0 || op->quorum == 0 || !op->local) return;
  op->start = now;
  if (!op->bounded) return;  // warming up: T stays the bound, start is measured
  for (Receiver& receiver : op->receivers) {
    if (receiver.state != Receiver::State::kWait) continue;
    receiver.bound = now + patience(*op);
    op->wake_at(receiver.bound);
  }
  op->wake_at(now + op->push_budget);
}

// From start to RESULT at the latest: H, and what `consistent` waits longer to have no holes (section 6).
Micros LaneImpl::patience(const Op& op) const {
  return op.op_class == OpClass::kBestEffort ? op.hard() : op.hard() * (1 + settings.pull_patience);
}

void LaneImpl::freeze(Op* op, Micros now) {
  SLUICE_ASSERT(!op->frozen && !op->wholly_late && (op->held > 0 || op->owing));
  op->frozen = true;
  op->local_wait = op->late_wait = kNever;
  op->fate_bits.assign((op->geometry.stripe_blocks() + 63) / 64, 0);
  for (uint32_t rank = 0; rank < local_ranks_; ++rank) {
    Receiver& receiver = op->receivers[rank];
    // What is owed under a loss scale goes with a submit, or when an ANNOUNCE has said the scale of the op.
    const TagState* tag = receiver.tag != nullptr ? receiver.tag : find_tag(rank, op->fingerprint);
    if (op->carries && (op->scale != 0 || tag == nullptr || !tag->scaled)) take_debts(op, rank);
    receiver.in_contribution = receiver.state != Receiver::State::kNone && !receiver.queued;
    receiver.contributes |= receiver.in_contribution;
    if (receiver.contributes) ++op->frozen_ranks;
  }
  if (op->frozen_ranks ==
      0) {  // what was owed went with another op or was discarded: as if nothing had been owed
    op->frozen = op->owing = false;
    return;
  }
  for (uint32_t node = 0; node < n; ++node) {
    if (node == self) continue;
    const uint32_t blocks = op->geometry.lane_blocks(Geometry::shard_of(node, op->seq, n));
    NodeOp& x = op->nodes[node];
    if (x.closed) {  // uncounted at once
      x.push_sent = blocks;
      const uint32_t shard = Geometry::shard_of(node, op->seq, n);
      for (uint32_t stripe = 0; stripe < blocks; ++stripe) {
        set_fate(op, shard, op->geometry.block_of_stripe(stripe), op->geometry.stripe_first(shard) + stripe,
                 false);
      }
    }
    if (x.push_sent < blocks)
      ++op->pushes_open;
    else if (op->frozen_ranks > op->held)
      announce_to(*op, node);
  }
  // It counts for t_q with all that is in it (section 4). The others hear so by PUSH, or else, when ranks without a
  // submit are in it, by that ANNOUNCE.
  count_for_quorum(op, self, op->frozen_ranks, true, now);
  if (op->lane_blocks > 0) {
    if (op->owner == Op::Owner::kOpen) {
      add_own(op, now);
    } else {
      for (uint32_t stripe = 0; stripe < op->lane_blocks; ++stripe) {
        set_fate(op, op->shard, op->geometry.block_of_stripe(stripe),
                 op->geometry.stripe_first(op->shard) + stripe, false);
      }
    }
  }
  settle_fates(op, now);
}

// Bytes of one block of the frozen contribution of this node: the slot itself, or the sum of local ranks, queued slots
// and carry in rank order, made anew each time (none of them changes until the block's fate is known, so neither do
// these bytes).
const std::byte* LaneImpl::own_block(const Op& op, uint32_t shard, uint32_t block, std::byte* staging) {
  const auto bit =
      static_cast<uint32_t>(op.geometry.stripe_first(shard) + op.geometry.stripe_of_block(block));
  const Receiver* only = nullptr;
  if (parts_of(op, bit, &only) == 1 && only != nullptr) {
    return only->submission.contribution +
           op.geometry.block_first_element(shard, block) * element_size(op.type);
  }
  const uint32_t elements = op.geometry.elements_of(shard, block);
  std::byte* total = sum_block(op, shard, block, bit);
  if (op.carries) saturate(op.type, total, elements);
  numeric::finish(op.type, total, staging, elements, 1.0);
  return staging;
}

// How many parts a block of the frozen contribution is the sum of; `slot`: a local rank whose slot is one of them.
size_t LaneImpl::parts_of(const Op& op, uint32_t bit, const Receiver** slot) {
  size_t parts = 0;
  for (const Receiver& receiver : op.receivers) {
    if (!receiver.contributes) continue;
    if (receiver.in_contribution) *slot = &receiver;
    parts += (receiver.in_contribution ? 1 : 0) + receiver.taken.size() +
             (receiver.owed.present != 0 && pages_of(op).find(receiver.owed, bit) != nullptr ? 1 : 0);
  }
  return parts;
}

// The loss scale at which this node contributes: that of the ranks which have submitted, the same for all of them, or
// that of the others' ranks.
float LaneImpl::scale_of(const Op& op) {
  for (const Receiver& receiver : op.receivers) {
    if (receiver.in_contribution) return receiver.submission.loss_scale;
  }
  return op.scale != 0 ? op.scale : 1.0F;
}

// The block in accumulators, before it is rounded to the wire type: the last third of the scratch.
std::byte* LaneImpl::sum_block(const Op& op, uint32_t shard, uint32_t block, uint32_t bit) {
  const uint32_t elements = op.geometry.elements_of(shard, block);
  std::byte* total = scratch_.data() + scratch_.size() / 3 * 2;
  bool first = true;
  for (const Receiver& receiver : op.receivers) {
    if (!receiver.contributes) continue;
    const float scale = op.carries ? scale_of(op) : receiver.submission.loss_scale;
    collect(op, receiver, shard, block, bit, scale, first ? total : scratch_.data());
    if (!first) numeric::add(accumulator_type(op.type), scratch_.data(), total, elements);
    first = false;
  }
  SLUICE_ASSERT(!first);
  return total;
}

// What the wire type cannot hold stays behind (in the carry-over). What is not finite already goes as it is.
void LaneImpl::saturate(ElementType type, std::byte* sums, uint32_t elements) {
  if (type != ElementType::kF16 && type != ElementType::kBf16) return;
  const float largest = type == ElementType::kF16 ? 65504.0F : 0x1.fep127F;
  for (uint32_t i = 0; i < elements; ++i) {
    float value = 0;
    std::memcpy(&value, sums + i * sizeof value, sizeof value);
    if (!std::isfinite(value) || std::fabs(value) <= largest) continue;
    value = std::copysign(largest, value);
    std::memcpy(sums + i * sizeof value, &value, sizeof value);
  }
}

// Where sending starts in the stripe of an owner's shard (section 4). With carry-over it is drawn per (op, shard), so
// that ranges complete early; without, per sender, so that what a deadline cuts off is not the same for all.
uint32_t LaneImpl::push_start(const Op& op, uint32_t owner) const {
  const uint32_t shard = Geometry::shard_of(owner, op.seq, n);
  const uint32_t blocks = owner == self ? op.lane_blocks : op.geometry.lane_blocks(shard);
  if (blocks == 0) return 0;
  uint64_t x = (static_cast<uint64_t>(epoch) << 32 | op.seq) +
               0x9e3779b97f4a7c15ULL * (shard * 2048ULL + (op.carries ? 0 : self + 1));
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return static_cast<uint32_t>((x ^ (x >> 31)) % blocks);
}

// A PULL of this owner was seen: what it has not got by now it will not count.
void LaneImpl::owner_closed(Op* op, uint32_t node, Micros now) {
  NodeOp& x = op->nodes[node];
  if (x.closed) return;
  x.closed = true;
  if (op->quorum == 0) {  // the first PULL stands for a t_q that was not heard
    op->quorum = now;
    op->quorum_node = node;
    op->trace.quorum = now;
    start_clock(op, now);
  }
  if (!op->frozen || op->frozen_ranks == 0) return;
  const uint32_t blocks = op->geometry.lane_blocks(Geometry::shard_of(node, op->seq, n));
  if (x.push_sent < blocks) {
    x.push_sent = blocks;
    --op->pushes_open;
  }
}

// REQUEST: for pulls of my shard, or for pushes to the sender's shard.
Drop LaneImpl::on_request(const wire::PacketView& packet, Micros now) {
  const wire::Header& header = packet.header;
  wire::Request body;
  if (!wire::read_payload(packet.payload, &body)) return Drop::kSize;
  const uint32_t node = header.sender;
  heard(node, body.done, body.base, now);
  if (failed) return Drop::kClosed;
  const auto bitmap = packet.payload.subspan(sizeof body);
  if (window_check(header.op_seq) == Drop::kRetired) {
    queue_control({.type = wire::Type::kGone, .node = static_cast<uint16_t>(node), .op_seq = header.op_seq});
    return Drop::kNone;
  }
  if (window_check(header.op_seq) != Drop::kNone) return Drop::kTooEarly;
  const bool mine = header.shard == Geometry::shard_of(self, header.op_seq, n);
  if (!mine && header.shard != Geometry::shard_of(node, header.op_seq, n)) return Drop::kNotMine;
  if (header.block % 8 != 0 || bitmap.size() > settings.payload) return Drop::kBlock;

  Op* op = find(header.op_seq);
  uint32_t blocks = 0, sent = 0, start = 0;
  if (mine) {
    if (const Drop drop = describe_from(header, now, &op); drop != Drop::kNone) return drop;
    announced(op, node, false, true, 0, false, now);
    if (op->owner != Op::Owner::kClosed) return Drop::kNone;  // nothing to send yet
    blocks = op->lane_blocks;
    start = op->pull_start;
  } else {
    if (op == nullptr || !op->frozen || op->frozen_ranks == 0)
      return Drop::kNone;  // nothing was frozen: not ours to answer
    if (op->nodes[node].closed || op->push_stopped) return Drop::kNone;
    blocks = op->geometry.lane_blocks(header.shard);
    start = push_start(*op, node);
  }
  if (blocks == 0) return Drop::kNone;
  NodeOp& x = op->nodes[node];
  sent = mine ? x.pull_sent : x.push_sent;
  uint32_t& open_repairs = mine ? x.pull_repairs : x.push_repairs;
  if (open_repairs > 0) return Drop::kNone;  // the last answer is still under way
  if (bitmap.empty()) {                      // "all": from the start, at most once per round trip
    Micros& started = mine ? x.pull_started : x.push_started;
    if (sent < blocks || now < started + std::max<Micros>(repair_delay(node), 1000)) return Drop::kNone;
    started = now;
    peers[node].flow.lost(now);
    (mine ? x.pull_sent : x.push_sent) = 0;
    ++(mine ? op->pulls_open : op->pushes_open);
    return Drop::kNone;
  }
  const Stripe here = stripe_of(header.op_seq);
  bool any = false;
  for (size_t i = 0; i < bitmap.size(); ++i) {
    for (auto bits = static_cast<uint8_t>(bitmap[i]); bits != 0; bits &= static_cast<uint8_t>(bits - 1)) {
      const uint32_t block =
          header.block + static_cast<uint32_t>(8 * i) + static_cast<uint32_t>(std::countr_zero(bits));
      if (!here.has(block) || here.index(block) >= blocks) continue;
      const uint32_t stripe = here.index(block);
      if ((stripe + blocks - start) % blocks >= sent) continue;  // its first sending is still to come
      if (!repairs_.push(
              {.op_seq = op->seq, .stripe = stripe, .node = static_cast<uint16_t>(node), .push = !mine}))
        break;
      ++open_repairs;
      any = true;
    }
  }
  if (any) peers[node].flow.lost(now);
  return Drop::kNone;
}

// REQUEST_ROW: which blocks of the sender did my shard count? For verdicts too long for a PULL (section 5).
Drop LaneImpl::on_request_row(const wire::PacketView& packet, Micros now) {
  const wire::Header& header = packet.header;
  wire::Request body;
  if (!wire::read_payload(packet.payload, &body)) return Drop::kSize;
  const auto node = static_cast<uint16_t>(header.sender);
  heard(node, body.done, body.base, now);
  if (failed) return Drop::kClosed;
  if (window_check(header.op_seq) == Drop::kRetired) {
    queue_control({.type = wire::Type::kGone, .node = node, .op_seq = header.op_seq});
    return Drop::kNone;
  }
  if (header.shard != Geometry::shard_of(self, header.op_seq, n)) return Drop::kNotMine;
  const Op* op = find(header.op_seq);
  if (op == nullptr || op->owner != Op::Owner::kClosed) return Drop::kNone;
  if (header.block % 8 != 0 || header.block >= std::max(1U, op->shard_blocks)) return Drop::kBlock;
  queue_control({.type = wire::Type::kRow, .node = node, .block = header.block, .op_seq = op->seq});
  return Drop::kNone;
}

}  // namespace sluice::exchange
