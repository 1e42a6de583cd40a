// Carry-over and the fates that feed it (protocol, sections 5 and 7).
//
// At each moment every block that a rank submitted is in exactly one place: in its slot (frozen in an open op, or
// queued), in a carry tensor (of its tag, or travelling with an op), in an owner's sum, or discarded and counted (I3).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/numeric/numeric.h"
#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

namespace {
template <typename T>
double square_of(const std::byte* values, uint32_t elements) {
  double sum = 0;
  for (uint32_t i = 0; i < elements; ++i) {
    T value;
    std::memcpy(&value, values + i * sizeof value, sizeof value);
    sum += static_cast<double>(value) * static_cast<double>(value);
  }
  return sum;
}
// Sum of the squares of accumulators.
double square(ElementType sums, const std::byte* values, uint32_t elements) {
  switch (sums) {
    case ElementType::kF64:
      return square_of<double>(values, elements);
    case ElementType::kI32:
      return square_of<int32_t>(values, elements);
    case ElementType::kI64:
      return square_of<int64_t>(values, elements);
    case ElementType::kU8:
      return square_of<uint8_t>(values, elements);
    default:
      return square_of<float>(values, elements);
  }
}
}  // namespace

TagState* LaneImpl::find_tag(uint32_t local_rank, uint32_t fingerprint) {
  for (TagState& tag : tags_seen_) {
    if (tag.used && tag.local_rank == local_rank && tag.fingerprint == fingerprint) return &tag;
  }
  return nullptr;
}

// The state of (rank, tag); a new one takes the place of the one that was used longest ago and owes nothing. nullptr:
// every place owes something.
TagState* LaneImpl::tag_of(const Submission& submission, uint32_t fingerprint) {
  if (TagState* tag = find_tag(submission.local_rank, fingerprint)) return tag;
  TagState* place = nullptr;
  for (TagState& tag : tags_seen_) {
    if (!tag.used) {
      place = &tag;
      break;
    }
    if (tag.owes() || tag.travelling != 0 || tag.correction.present != 0) continue;
    if (place == nullptr || tag.last_seq < place->last_seq) place = &tag;
  }
  if (place == nullptr) return nullptr;
  place->used = true;
  place->local_rank = submission.local_rank;
  place->fingerprint = fingerprint;
  place->count = submission.count;
  place->tag = submission.tag;
  place->kind = submission.kind;
  place->type = submission.type;
  place->steps = 0;
  place->stride = 0;
  place->scaled = place->blocks = false;
  place->last_seq = submission.op_seq;
  place->norm = 0;
  place->late_blocks = 0;
  place->correction.units.clear();
  place->carry.units.clear();
  place->queued.clear();
  return place;
}

CarryPages LaneImpl::pages_of(const Op& op) { return {&pool_, op.unit_blocks, op.stride}; }

uint32_t LaneImpl::carry_limit(const TagState& tag) const {
  if (settings.carry_max_ops != 0) return settings.carry_max_ops;
  return std::max(8U, 2 * settings.max_lag / std::max(1U, tag.stride));
}

// Is this an op of the tag? (A fingerprint alone is what a packet says.)
bool LaneImpl::fits(const TagState& tag, const Op& op) const {
  return tag.fingerprint == op.fingerprint && tag.type == op.type && tag.kind == op.kind &&
         geometry_of(tag.count, tag.type).shard_blocks(op.shard) == op.shard_blocks;
}

// Pool units that carry-over leaves alone: those of the largest op, and of what is beyond them a share, so that ops of the
// window find room. Rests of rounding leave more than what was not counted.
uint32_t LaneImpl::carry_keeps(uint32_t of_four) const {
  const uint32_t beyond = pool_.units() > reserve_units_ ? pool_.units() - reserve_units_ : 0;
  return reserve_units_ + beyond / 4 * of_four;
}

// An op that a peer opened: do our ranks owe something under its tag? Then this node contributes it, submit or not.
void LaneImpl::look_for_debts(Op* op, Micros now) {
  if (!op->carries || op->local || op->owing) return;
  if (op->quorum != 0 && now >= op->quorum + op->push_budget) return;  // its owners have closed
  for (TagState& tag : tags_seen_) {
    // Under a loss scale what is owed waits until the scale of the op is known.
    if (!tag.used || !fits(tag, *op) || !tag.owes_blocks() || (tag.scaled && op->scale == 0)) continue;
    if (!op->shaped) {
      op->shaped = true;
      op->geometry = {.count = tag.count,
                      .block_elements = op->block_elements,
                      .nodes = n,
                      .lanes = settings.lanes,
                      .lane = settings.lane};
      op->trace.tag = tag.tag;
      set_bounds(op, size_class(tag.count * element_size(tag.type)));
    }
    op->owing = op->bounded;  // an op that warms up waits for every submit, which takes the debts along
  }
  if (!op->owing) return;
  // How many ranks will be in it shows at the freeze: until then what they owe may have gone with an earlier op.
  announced(op, self, true, false, 1, false, now);
  announce_all(op);
  op->announce_again = now + kAgain;
  op->wake_at(op->announce_again);
  if (op->quorum != 0) set_late_wait(op);
}

// Something is owed that was not before: ops that are open here already may take it along.
void LaneImpl::offer_debts(Micros now) {
  new_debts_ = false;
  for (uint32_t seq = base_; seq < end_; ++seq) {
    if (Op* op = find(seq); op != nullptr && op->described && !op->disputed) look_for_debts(op, now);
  }
}

void LaneImpl::set_late_wait(Op* op) {
  if (!op->owing || op->frozen) return;
  op->late_wait = op->quorum + op->push_budget / 2;  // t_q + P/2
  op->wake_at(op->late_wait);
}

// Is what a rank owes out of proportion to what it contributes (carry_max_norm)? Both on this lane, unscaled.
bool LaneImpl::too_long(const Op& op, const Receiver& receiver, TagState* tag) {
  if (settings.carry_max_norm <= 0) return false;
  const ElementType sums = accumulator_type(op.type);
  const bool submitted = receiver.state != Receiver::State::kNone && !receiver.queued;
  double own = 0, owed = 0;
  for (uint32_t shard = 0; shard < n; ++shard) {
    for (uint32_t stripe = 0; stripe < op.geometry.lane_blocks(shard); ++stripe) {
      const uint32_t block = op.geometry.block_of_stripe(stripe);
      const uint32_t elements = op.geometry.elements_of(shard, block);
      if (submitted) {
        numeric::load(op.type,
                      receiver.submission.contribution +
                          op.geometry.block_first_element(shard, block) * element_size(op.type),
                      scratch_.data(), elements);
        own += square(sums, scratch_.data(), elements);
      }
      const auto bit = static_cast<uint32_t>(op.geometry.stripe_first(shard) + stripe);
      if (const std::byte* there = pages_of(op).find(tag->carry, bit)) owed += square(sums, there, elements);
    }
  }
  if (submitted) tag->norm = std::sqrt(own) / receiver.submission.loss_scale;
  return tag->norm > 0 && std::sqrt(owed) > settings.carry_max_norm * tag->norm;
}

// At freeze: what this rank owes under the tag travels with the op; what is too old goes.
void LaneImpl::take_debts(Op* op, uint32_t local_rank) {
  Receiver& receiver = op->receivers[local_rank];
  if (receiver.tag == nullptr) {
    receiver.tag = find_tag(local_rank, op->fingerprint);
    if (receiver.tag == nullptr) return;
    if (!fits(*receiver.tag, *op)) {
      receiver.tag = nullptr;
      return;
    }
    ++receiver.tag->travelling;
  }
  TagState* tag = receiver.tag;
  const CarryPages pages = pages_of(*op);
  if (too_long(*op, receiver, tag)) {
    for (uint32_t left = tag->carry.present; left > 0; --left) discard(&receiver);
    pages.clear(&tag->carry);
  }
  if (tag->carry.present != 0) {
    const uint32_t limit = carry_limit(*tag);
    for (uint32_t index = 0; index < tag->carry.units.size(); ++index) {
      for (uint32_t i = 0; i < op->unit_blocks && tag->carry.units[index] != kNoUnit; ++i) {
        const uint32_t block = index * op->unit_blocks + i;
        if (pages.find(tag->carry, block) == nullptr || tag->steps - pages.since(tag->carry, block) <= limit)
          continue;
        pages.remove(&tag->carry, block);
        discard(&receiver);
      }
    }
    std::swap(receiver.owed, tag->carry);
  }
  tag->blocks = false;
  receiver.taken.swap(tag->queued);
  receiver.contributes = receiver.owed.present != 0 || !receiver.taken.empty();
}

void LaneImpl::discard(Receiver* receiver) {
  ++receiver->discarded;
  ++counters.blocks_discarded;
}

// The fate of one block of the frozen contribution, once.
void LaneImpl::set_fate(Op* op, uint32_t shard, uint32_t block, uint64_t bit, bool counted) {
  if (!op->frozen || op->frozen_ranks == 0 || ((op->fate_bits[bit / 64] >> (bit % 64)) & 1) != 0) return;
  op->fate_bits[bit / 64] |= 1ULL << (bit % 64);
  ++op->fates;
  if (counted && op->carries) keep_rounding(op, shard, block, static_cast<uint32_t>(bit));
  const CarryPages pages = pages_of(*op);
  for (Receiver& receiver : op->receivers) {
    if (!receiver.contributes) continue;
    if (!counted) {
      ++receiver.uncounted;
      ++counters.blocks_uncounted;
      for (QueuedSlot& slot : receiver.taken) ++slot.uncounted;
      if (op->carries) carry_block(op, &receiver, shard, block, static_cast<uint32_t>(bit));
    }
    if (pages.find(receiver.owed, static_cast<uint32_t>(bit)) != nullptr) {
      pages.remove(&receiver.owed, static_cast<uint32_t>(bit));
    }
  }
}

// An uncounted block goes to the carry of its rank: slot, queued slots and what it carried already, unscaled.
void LaneImpl::carry_block(Op* op, Receiver* receiver, uint32_t shard, uint32_t block, uint32_t bit) {
  // A rank that is in the op by what it owed of other blocks has nothing in this one.
  if (!receiver->in_contribution && receiver->taken.empty() &&
      pages_of(*op).find(receiver->owed, bit) == nullptr) {
    return;
  }
  TagState* tag = receiver->tag;
  const uint32_t elements = op->geometry.elements_of(shard, block);
  const ElementType sums = accumulator_type(op->type);
  const uint64_t step = collect(*op, *receiver, shard, block, bit, 1.0F, scratch_.data());
  if (tag == nullptr || !numeric::all_finite(sums, scratch_.data(), elements)) {
    discard(receiver);
    return;
  }
  if (owe(tag, pages_of(*op), bit, step, sums, scratch_.data(), elements))
    ++counters.blocks_carried;
  else
    discard(receiver);
}

// A counted block of a 16-bit type that is a sum: what rounding it to the wire type took away is still owed (section 5,
// Dividing), by the first of the ranks that are in it.
void LaneImpl::keep_rounding(Op* op, uint32_t shard, uint32_t block, uint32_t bit) {
  const ElementType sums = accumulator_type(op->type);
  const Receiver* slot = nullptr;
  if (sums == op->type || (parts_of(*op, bit, &slot) == 1 && slot != nullptr)) return;
  const auto keeper = std::find_if(op->receivers.begin(), op->receivers.end(), [](const Receiver& receiver) {
    return receiver.contributes && receiver.tag != nullptr;
  });
  if (keeper == op->receivers.end()) return;
  const uint32_t elements = op->geometry.elements_of(shard, block);
  std::byte* rest = sum_block(*op, shard, block, bit);
  std::byte* sent = scratch_.data();
  std::memcpy(sent, rest, elements * element_size(sums));
  saturate(op->type, sent, elements);
  numeric::finish(op->type, sent, sent, elements, 1.0);
  numeric::load(op->type, sent, scratch_.data() + scratch_.size() / 3, elements);
  sent = scratch_.data() + scratch_.size() / 3;
  numeric::scale(sums, sent, elements, -1.0);
  numeric::add(sums, sent, rest, elements);
  if (scale_of(*op) != 1.0F) numeric::scale(sums, rest, elements, 1.0 / scale_of(*op));
  if (!numeric::all_finite(sums, rest, elements)) return;  // the block is not finite, and was counted as such
  if (square(sums, rest, elements) == 0) return;
  // (Without memory to spare it is lost, as what the owner's own rounding takes away.)
  const CarryPages pages = pages_of(*op);
  CarryTensor& carry = keeper->tag->carry;
  if (std::byte* there = pages.find(carry, bit))
    numeric::add(sums, rest, there, elements);
  else if (std::byte* place = pages.add(&carry, bit, keeper->tag->steps, carry_keeps(3)))
    std::memcpy(place, rest, elements * element_size(sums));
}

// Adds a block to what is owed under a tag. False: the pool has no page to spare.
bool LaneImpl::owe(TagState* tag, const CarryPages& pages, uint32_t bit, uint64_t step, ElementType sums,
                   const std::byte* values, uint32_t elements) {
  const bool first = !tag->owes_blocks();
  if (std::byte* there = pages.find(tag->carry, bit)) {
    numeric::add(sums, values, there, elements);
    pages.since(tag->carry, bit) = std::min(pages.since(tag->carry, bit), step);
  } else if (std::byte* place = pages.add(&tag->carry, bit, step, carry_keeps(2))) {
    std::memcpy(place, values, elements * element_size(sums));
  } else {
    return false;
  }
  tag->blocks = true;
  new_debts_ |= first;
  return true;
}

// What a rank has in one block of the frozen contribution, in accumulators, at loss scale `scale`. Returns the step of
// its oldest part.
uint64_t LaneImpl::collect(const Op& op, const Receiver& receiver, uint32_t shard, uint32_t block,
                           uint32_t bit, float scale, std::byte* sum) {
  const size_t offset = op.geometry.block_first_element(shard, block) * element_size(op.type);
  const uint32_t elements = op.geometry.elements_of(shard, block);
  const ElementType sums = accumulator_type(op.type);
  std::byte* part = scratch_.data() + scratch_.size() / 3;
  uint64_t step = receiver.tag != nullptr ? receiver.tag->steps : 0;
  bool first = true;
  const auto put = [&](const std::byte* data, ElementType type, float from) {
    if (first && from == scale) {
      numeric::load(type, data, sum, elements);
    } else {
      numeric::load(type, data, part, elements);
      if (from != scale) numeric::scale(sums, part, elements, static_cast<double>(scale) / from);
      if (first)
        std::memcpy(sum, part, elements * element_size(sums));
      else
        numeric::add(sums, part, sum, elements);
    }
    first = false;
  };
  if (receiver.in_contribution)
    put(receiver.submission.contribution + offset, op.type, receiver.submission.loss_scale);
  for (const QueuedSlot& slot : receiver.taken) {
    put(slot.contribution + offset, op.type, slot.loss_scale);
    step = std::min<uint64_t>(step, slot.step);
  }
  const CarryPages pages = pages_of(op);
  if (const std::byte* owed = pages.find(receiver.owed, bit)) {
    put(owed, sums, 1.0F);
    step = std::min(step, pages.since(receiver.owed, bit));
  }
  if (first) std::memset(sum, 0, elements * element_size(sums));
  return step;
}

// The holes of an INCOMPLETE result are in while its slot still waits: RESOLVED, which comes with the slot's fate, will say
// what became of them.
void LaneImpl::note_result(uint32_t local_rank, uint32_t op_seq, Status status) {
  const auto note = [&](std::vector<QueuedSlot>* slots) {
    for (QueuedSlot& slot : *slots) {
      if (slot.op_seq == op_seq) slot.result = status;
    }
  };
  for (TagState& tag : tags_seen_) {
    if (tag.used && tag.local_rank == local_rank) note(&tag.queued);
  }
  for (Op& op : ops_) {
    if (op.open) note(&op.receivers[local_rank].taken);
  }
}

// All fates are known: slots that travelled with the op are free.
void LaneImpl::settle_fates(Op* op, Micros now) {
  if (!op->frozen || op->frozen_ranks == 0 || op->fates != op->geometry.stripe_blocks() || op->fates_told)
    return;
  op->fates_told = true;
  for (uint32_t rank = 0; rank < local_ranks_; ++rank) {
    Receiver& receiver = op->receivers[rank];
    for (const QueuedSlot& slot : receiver.taken) resolve_queued(rank, slot, Status::kOk, now);
    receiver.taken.clear();
    SLUICE_ASSERT(receiver.owed.present == 0);
    conclude(op, rank, now);
  }
  settle_ = true;
}

// Slots that have waited for long go to the carry-over, and back to their client: its window may be full of them, and
// their tag may never come again.
void LaneImpl::fold_old_slots(Micros now) {
  slots_wait_ = false;
  for (TagState& tag : tags_seen_) {
    if (!tag.used || tag.queued.empty()) continue;
    const auto old = [this](const QueuedSlot& slot) { return base_ >= slot.op_seq + kLongestQueued; };
    for (QueuedSlot& slot : tag.queued) {
      if (old(slot)) fold_slot(&tag, &slot, now);
    }
    tag.queued.erase(std::remove_if(tag.queued.begin(), tag.queued.end(), old), tag.queued.end());
    slots_wait_ |= !tag.queued.empty();
  }
}

void LaneImpl::fold_slot(TagState* tag, QueuedSlot* slot, Micros now) {
  const Geometry geometry = geometry_of(tag->count, tag->type);
  const ElementType sums = accumulator_type(tag->type);
  for (uint32_t shard = 0; shard < n; ++shard) {
    for (uint32_t stripe = 0; stripe < geometry.lane_blocks(shard); ++stripe) {
      const uint32_t block = geometry.block_of_stripe(stripe);
      const uint32_t elements = geometry.elements_of(shard, block);
      numeric::load(tag->type,
                    slot->contribution + geometry.block_first_element(shard, block) * element_size(tag->type),
                    scratch_.data(), elements);
      if (slot->loss_scale != 1.0F) numeric::scale(sums, scratch_.data(), elements, 1.0 / slot->loss_scale);
      const auto bit = static_cast<uint32_t>(geometry.stripe_first(shard) + stripe);
      ++slot->uncounted;
      ++counters.blocks_uncounted;
      if (numeric::all_finite(sums, scratch_.data(), elements) &&
          owe(tag, pages_of(*tag), bit, slot->step, sums, scratch_.data(), elements)) {
        ++counters.blocks_carried;
      } else {
        ++slot->discarded;
        ++counters.blocks_discarded;
      }
    }
  }
  resolve_queued(tag->local_rank, *slot, Status::kOk, now);
}

// RESOLVED of a slot that was queued; while its own op has no result it comes with that, never before.
void LaneImpl::resolve_queued(uint32_t local_rank, const QueuedSlot& slot, Status status, Micros now) {
  if (Op* own = find(slot.op_seq); own != nullptr && own->receivers[local_rank].queued) {
    Receiver& receiver = own->receivers[local_rank];
    if (!receiver.told || (status == Status::kOk && receiver.ranges_total != 0)) {
      receiver.queued = false;
      receiver.uncounted += slot.uncounted;
      receiver.discarded += slot.discarded;
      if (receiver.told) conclude(own, local_rank, now);  // with the last hole of its result
      return;
    }
    receiver.resolved = true;
  }
  Event event;
  event.op_seq = slot.op_seq;
  event.local_rank = local_rank;
  event.cookie = slot.cookie;
  event.events = kEventResolved;
  event.status = status == Status::kOk ? slot.result : status;
  event.blocks_uncounted = slot.uncounted;
  event.blocks_discarded = slot.discarded;
  event.total = now - slot.submitted;
  push_event(event);
}

// tag_retire and flush (section 7): what the rank owes under the tag, queued slots included, goes to the caller.
bool LaneImpl::take_carry(Micros now, const Submission& what, std::byte* out) {
  const uint32_t fingerprint = wire::fingerprint(what.kind, what.type, what.type, what.count, what.tag);
  const ElementType sums = accumulator_type(what.type);
  TagState* tag = find_tag(what.local_rank, fingerprint);
  if (tag != nullptr && tag->travelling != 0) return false;  // fates are open
  if (out == nullptr) {
    if (tag != nullptr) drop_debts(tag, now);
    return true;
  }
  const Geometry geometry{.count = what.count,
                          .block_elements = wire::elements_per_block(settings.payload, what.type),
                          .nodes = n,
                          .lanes = settings.lanes,
                          .lane = settings.lane};
  for (uint32_t shard = 0; shard < n; ++shard) {
    for (uint32_t stripe = 0; stripe < geometry.lane_blocks(shard); ++stripe) {
      const auto bit = static_cast<uint32_t>(geometry.stripe_first(shard) + stripe);
      const uint32_t block = geometry.block_of_stripe(stripe);
      const uint64_t first = geometry.block_first_element(shard, block);
      const uint32_t elements = geometry.elements_of(shard, block);
      std::byte* to = out + first * element_size(sums);
      const std::byte* owed = tag == nullptr ? nullptr : pages_of(*tag).find(tag->carry, bit);
      if (owed != nullptr)
        std::memcpy(to, owed, elements * element_size(sums));
      else
        std::memset(to, 0, elements * element_size(sums));
      if (tag == nullptr) continue;
      for (const QueuedSlot& slot : tag->queued) {
        const std::byte* data = slot.contribution + first * element_size(what.type);
        numeric::load(what.type, data, scratch_.data(), elements);
        if (slot.loss_scale != 1.0F) numeric::scale(sums, scratch_.data(), elements, 1.0 / slot.loss_scale);
        numeric::add(sums, scratch_.data(), to, elements);
      }
    }
  }
  if (tag == nullptr) return true;
  pages_of(*tag).clear(&tag->carry);
  tag->blocks = false;
  for (const QueuedSlot& slot : tag->queued) resolve_queued(what.local_rank, slot, Status::kOk, now);
  tag->queued.clear();
  return true;
}

CarryPages LaneImpl::pages_of(const TagState& tag) {
  const bool wide = element_size(accumulator_type(tag.type)) > element_size(tag.type);
  return {&pool_, wide ? kUnitBlocks / 2 : kUnitBlocks, wide ? 2 * settings.payload : settings.payload};
}

// What is owed under the tag is given up: undecided.
void LaneImpl::drop_debts(TagState* tag, Micros now, Status status) {
  const Geometry geometry{.count = tag->count,
                          .block_elements = wire::elements_per_block(settings.payload, tag->type),
                          .nodes = n,
                          .lanes = settings.lanes,
                          .lane = settings.lane};
  counters.blocks_undecided += tag->carry.present + tag->queued.size() * geometry.stripe_blocks();
  pages_of(*tag).clear(&tag->carry);
  tag->blocks = false;
  for (const QueuedSlot& slot : tag->queued) resolve_queued(tag->local_rank, slot, status, now);
  tag->queued.clear();
}

// A local rank goes, and its memory with it.
bool LaneImpl::forget_rank(Micros now, uint32_t local_rank) {
  SLUICE_ASSERT(local_rank < local_ranks_);
  if (failed) return true;  // nothing is open
  if (!pending_[local_rank].empty()) return false;
  for (const Op& op : ops_) {
    if (!op.open || is_pulse(op.seq)) continue;
    const Receiver& receiver = op.receivers[local_rank];
    if (receiver.state == Receiver::State::kWait) return false;  // its result
    // Its contribution: read by an uncounted fate, and as long as an owner may ask for it.
    if (!receiver.contributes || op.fates == op.geometry.stripe_blocks()) continue;
    if (op.carries) return false;
    for (uint32_t node = 0; node < n && !op.push_stopped; ++node) {
      const bool owns = op.geometry.lane_blocks(Geometry::shard_of(node, op.seq, n)) > 0;
      if (node != self && owns && !op.nodes[node].closed) return false;
    }
  }
  for (TagState& tag : tags_seen_) {
    if (tag.used && tag.local_rank == local_rank) drop_debts(&tag, now);
  }
  return true;
}

// The own submit came too late for this op: it waits in its slot for the next op of the tag.
void LaneImpl::queue_slot(Op* op, uint32_t local_rank) {
  Receiver& receiver = op->receivers[local_rank];
  if (op->geometry.stripe_blocks() == 0) return;  // nothing of it is here
  ++counters.contributions_late;
  TagState* tag = receiver.tag;
  if (!op->carries || tag == nullptr || tag->queued.size() == tag->queued.capacity()) {
    receiver.uncounted = static_cast<uint32_t>(op->geometry.stripe_blocks());  // lost, counted
    counters.blocks_uncounted += receiver.uncounted;
    if (op->carries) {
      receiver.discarded = receiver.uncounted;
      counters.blocks_discarded += receiver.discarded;
    }
    return;
  }
  receiver.queued = slots_wait_ = true;
  new_debts_ |= !tag->owes_blocks();
  ++counters.slots_queued;
  tag->queued.push_back({.op_seq = op->seq,
                         .cookie = receiver.submission.cookie,
                         .contribution = receiver.submission.contribution,
                         .loss_scale = receiver.submission.loss_scale,
                         .step = tag->steps,
                         .submitted = receiver.submitted});
}

}  // namespace sluice::exchange
