// Corrections (protocol, sections 1, 6 and 15): blocks that come after a result was told as INCOMPLETE.
//
// The slot of such a result is the client's. Its holes are kept here, op by op, in accumulator type and without the loss
// scale; when an op has none left they join the correction of the tag, which is added to the first result of the tag that
// is complete after that, on this rank only. Memory is the lane's pool, bounded per rank and tag.
#include <algorithm>
#include <cstring>

#include "base/numeric/numeric.h"
#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

CarryPages LaneImpl::pages_of(ElementType type) {
  const bool wide = element_size(accumulator_type(type)) > element_size(type);
  return {&pool_, wide ? kUnitBlocks / 2 : kUnitBlocks, wide ? 2 * settings.payload : settings.payload};
}
Geometry LaneImpl::geometry_of(uint64_t count, ElementType type) const {
  return {.count = count,
          .block_elements = wire::elements_per_block(settings.payload, type),
          .nodes = n,
          .lanes = settings.lanes,
          .lane = settings.lane};
}

// What an op has kept goes: it is over, or it can no longer be made whole.
void LaneImpl::drop_holes(const Op& op, Receiver* receiver) {
  if (receiver->tag != nullptr) receiver->tag->late_blocks -= receiver->holes.present;
  pages_of(op).clear(&receiver->holes);
  receiver->correctable = false;
}

// The owner's block for a hole. Nothing is added for a skipped one: it is zero, as the slot is.
void LaneImpl::keep_hole(const Op& op, Receiver* receiver, uint32_t shard, uint32_t block, uint64_t bit,
                         uint8_t flags, const std::byte* data) {
  if (!receiver->correctable || (flags & wire::kFlagSkip) != 0) return;
  const uint32_t elements = op.geometry.elements_of(shard, block);
  const ElementType sums = accumulator_type(op.type);
  TagState* tag = receiver->tag;
  const uint64_t room = settings.correction_bytes == 0
                            ? 2 * op.geometry.stripe_blocks()
                            : settings.correction_bytes / (op.block_elements * element_size(sums));
  // What is not finite cannot be added and taken away again: the others have seen it in its own op.
  std::byte* place = (flags & wire::kFlagNonfinite) == 0 && tag->late_blocks < room
                         ? pages_of(op).add(&receiver->holes, static_cast<uint32_t>(bit), 0, carry_keeps(2))
                         : nullptr;
  if (place == nullptr) {
    drop_holes(op, receiver);
    return;
  }
  ++tag->late_blocks;
  numeric::load(op.type, data, place, elements);
  const float scale = receiver->submission.loss_scale;
  if (scale != 1.0F) numeric::scale(sums, place, elements, 1.0 / scale);
}

// All holes of an INCOMPLETE result are in: they join what waits under the tag. Takes no page, so it cannot fail.
void LaneImpl::keep_correction(const Op& op, Receiver* receiver) {
  if (!receiver->correctable) return;
  TagState* tag = receiver->tag;
  const CarryPages pages = pages_of(op);
  for (uint32_t shard = 0; shard < n && receiver->holes.present != 0; ++shard) {
    for (uint32_t stripe = 0; stripe < op.geometry.lane_blocks(shard); ++stripe) {
      const auto bit = static_cast<uint32_t>(op.geometry.stripe_first(shard) + stripe);
      const std::byte* value = pages.find(receiver->holes, bit);
      if (value == nullptr) continue;
      if (!pages.has_unit(tag->correction, bit)) {
        pages.move_unit(&tag->correction, &receiver->holes, pages.unit_index(bit));
        continue;
      }
      const uint32_t elements = op.geometry.elements_of(shard, op.geometry.block_of_stripe(stripe));
      const ElementType sums = accumulator_type(op.type);
      if (std::byte* there = pages.find(tag->correction, bit)) {
        numeric::add(sums, value, there, elements);
        --tag->late_blocks;
      } else {
        std::memcpy(pages.add(&tag->correction, bit, 0, 0), value, elements * element_size(sums));
      }
      pages.remove(&receiver->holes, bit);
    }
  }
}

// A result of the tag is complete: it takes along what waits.
void LaneImpl::add_correction(const Op& op, Receiver* receiver) {
  TagState* tag = receiver->tag;
  if (op.op_class != OpClass::kConsistent || tag == nullptr || tag->correction.present == 0) return;
  const CarryPages pages = pages_of(op);
  const ElementType sums = accumulator_type(op.type);
  std::byte* part = scratch_.data() + scratch_.size() / 3;
  for (uint32_t shard = 0; shard < n; ++shard) {
    for (uint32_t stripe = 0; stripe < op.geometry.lane_blocks(shard); ++stripe) {
      const auto bit = static_cast<uint32_t>(op.geometry.stripe_first(shard) + stripe);
      const std::byte* value = pages.find(tag->correction, bit);
      if (value == nullptr) continue;
      const uint32_t block = op.geometry.block_of_stripe(stripe);
      const uint32_t elements = op.geometry.elements_of(shard, block);
      std::byte* to =
          receiver->submission.result + op.geometry.block_first_element(shard, block) * element_size(op.type);
      std::memcpy(part, value, elements * element_size(sums));
      const float scale = receiver->submission.loss_scale;
      if (scale != 1.0F) numeric::scale(sums, part, elements, scale);
      numeric::load(op.type, to, scratch_.data(), elements);
      numeric::add(sums, part, scratch_.data(), elements);
      numeric::finish(op.type, scratch_.data(), to, elements, 1.0);
      ++receiver->corrected;
    }
  }
  counters.blocks_corrected += receiver->corrected;
  tag->late_blocks -= tag->correction.present;
  pages.clear(&tag->correction);
}

// tag_retire: what waits goes to the caller.
bool LaneImpl::take_correction(Micros, const Submission& what, std::byte* out) {
  const uint32_t fingerprint = wire::fingerprint(what.kind, what.type, what.type, what.count, what.tag);
  const ElementType sums = accumulator_type(what.type);
  TagState* tag = find_tag(what.local_rank, fingerprint);
  if (tag != nullptr && tag->travelling != 0) return false;  // holes or fates are open
  const Geometry geometry = geometry_of(what.count, what.type);
  const CarryPages pages = pages_of(what.type);
  for (uint32_t shard = 0; shard < n; ++shard) {  // the blocks of this lane only
    for (uint32_t stripe = 0; stripe < geometry.lane_blocks(shard); ++stripe) {
      const auto bit = static_cast<uint32_t>(geometry.stripe_first(shard) + stripe);
      const std::byte* value = tag == nullptr ? nullptr : pages.find(tag->correction, bit);
      const uint32_t block = geometry.block_of_stripe(stripe);
      std::byte* to = out + geometry.block_first_element(shard, block) * element_size(sums);
      const size_t bytes = geometry.elements_of(shard, block) * element_size(sums);
      if (value != nullptr)
        std::memcpy(to, value, bytes);
      else
        std::memset(to, 0, bytes);
    }
  }
  if (tag == nullptr) return true;
  tag->late_blocks -= tag->correction.present;
  pages.clear(&tag->correction);
  return true;
}

}  // namespace sluice::exchange
