// The receivers of an op, one per local rank (protocol, sections 6 and 15): collect reduced blocks, end by a bound.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/numeric/numeric.h"
#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

using wire::Drop;

namespace {
// Results of at least this many bytes are beyond a core's own cache, so that their client does not find them there
// however they are written.
constexpr uint64_t kStreamBytes = 4 << 20;

bool waits(const Receiver& receiver) {
  return receiver.state == Receiver::State::kWait || receiver.state == Receiver::State::kLate;
}
bool has(const Receiver& receiver, uint64_t bit) { return (receiver.bits[bit / 64] >> (bit % 64)) & 1; }
}  // namespace

bool LaneImpl::wanted(const Op& op, uint64_t bit) const {
  return std::any_of(op.receivers.begin(), op.receivers.end(),
                     [&](const Receiver& receiver) { return waits(receiver) && !has(receiver, bit); });
}

bool LaneImpl::missing_from(const Op& op, uint32_t node) const {
  if (!op.local) return false;
  const uint32_t shard = Geometry::shard_of(node, op.seq, n);
  const uint64_t first = op.geometry.stripe_first(shard);
  const uint64_t last = first + op.geometry.lane_blocks(shard);
  for (const Receiver& receiver : op.receivers) {
    if (!waits(receiver)) continue;
    for (uint64_t bit = first; bit < last;) {
      if (bit % 64 == 0 && bit + 64 <= last && receiver.bits[bit / 64] == UINT64_MAX) {
        bit += 64;
      } else if (!has(receiver, bit)) {
        return true;
      } else {
        ++bit;
      }
    }
  }
  return false;
}

Drop LaneImpl::on_pull(const wire::PacketView& packet, Micros now) {
  const wire::Header& header = packet.header;
  if (failed) return Drop::kClosed;
  if (const Drop outside = window_check(header.op_seq); outside != Drop::kNone) return outside;
  if (header.shard != Geometry::shard_of(header.sender, header.op_seq, n)) return Drop::kNotMine;
  Op* op = find(header.op_seq);
  if (op == nullptr || !op->local) return Drop::kNotSubmitted;
  if (op->disputed) return Drop::kMismatch;
  const uint32_t block = header.block;
  const uint32_t blocks = op->geometry.shard_blocks(header.shard);
  if (block >= blocks || header.total != blocks) return Drop::kBlock;
  const Stripe here = stripe_of(header.op_seq);
  if (!here.has(block)) return Drop::kNotMine;
  const uint64_t bit = op->geometry.stripe_first(header.shard) + here.index(block);
  // A PULL that leaves the fate to a ROW tells nothing the second time.
  const bool fate_open = (header.flags & wire::kFlagRow) == 0 && op->frozen && op->frozen_ranks > 0 &&
                         !((op->fate_bits[bit / 64] >> (bit % 64)) & 1);
  if (!wanted(*op, bit) && !fate_open) return Drop::kDuplicate;
  // Sizes: the value, then the list of senders that were not counted.
  const bool skip = (header.flags & wire::kFlagSkip) != 0;
  const uint32_t elements = op->geometry.elements_of(header.shard, block);
  const size_t value = skip ? 0 : elements * element_size(op->type);
  if (!skip && header.elements != elements) return Drop::kSize;
  bool uncounted = skip;
  uint32_t listed = 0;
  uint16_t first_listed = 0;
  if (!skip && (header.flags & (wire::kFlagAllCounted | wire::kFlagRow)) == 0) {
    uint16_t count = 0;
    if (packet.payload.size() < value + sizeof count) return Drop::kSize;
    std::memcpy(&count, packet.payload.data() + value, sizeof count);
    if (count == 0 || count > wire::kMaxListedSenders ||
        packet.payload.size() != value + (1 + static_cast<size_t>(count)) * sizeof count) {
      return Drop::kSize;
    }
    listed = count;
    for (uint32_t i = 0; i < count; ++i) {
      uint16_t sender = 0;
      std::memcpy(&sender, packet.payload.data() + value + (1 + i) * sizeof sender, sizeof sender);
      if (sender >= n) return Drop::kSize;
      if (i == 0) first_listed = sender;
      uncounted |= sender == self;
    }
  } else if (packet.payload.size() != value) {
    return Drop::kSize;
  }
  if (!verify(packet, now)) return Drop::kTag;
  ask_policy(header.sender, header.policy, now);
  if (header.fingerprint != op->fingerprint || header.op_class() != op->op_class) {
    mismatch(op, header.sender, now);
    return Drop::kMismatch;
  }
  NodeOp& x = op->nodes[header.sender];
  owner_closed(op, header.sender, now);
  op->late_nodes = std::max(op->late_nodes, listed);
  if (listed > 0)
    op->worst_node = first_listed;
  else if (op->late_nodes == 0)
    op->worst_node = header.sender;
  x.pull_tail_seen |= (header.flags & wire::kFlagTail) != 0;
  x.pull_timer = now + (x.pull_tail_seen ? repair_delay(header.sender) : silence_delay(*op, header.sender));
  x.pull_backoff = 0;
  op->wake_at(x.pull_timer);
  if ((header.flags & wire::kFlagRow) == 0)
    set_fate(op, header.shard, block, bit, !uncounted);
  else
    x.row_wanted = true;
  for (uint32_t rank = 0; rank < local_ranks_; ++rank) {
    Receiver& receiver = op->receivers[rank];
    if (waits(receiver) && !has(receiver, bit)) {
      take_block(op, &receiver, header.shard, block, bit, header.flags, packet.payload.data());
      conclude(op, rank, now);
    }
  }
  settle_fates(op, now);
  return Drop::kNone;
}

void LaneImpl::take_block(Op* op, Receiver* receiver, uint32_t shard, uint32_t block, uint64_t bit,
                          uint8_t flags, const std::byte* data) {
  const bool skip = (flags & wire::kFlagSkip) != 0;
  receiver->bits[bit / 64] |= 1ULL << (bit % 64);
  ++receiver->received;
  if (skip) ++receiver->skipped;
  if (receiver->state != Receiver::State::kWait) {  // too late for the result: its slot is the client's
    keep_hole(*op, receiver, shard, block, bit, flags, data);
    return;
  }
  const size_t size = element_size(op->type);
  std::byte* to = receiver->submission.result + op->geometry.block_first_element(shard, block) * size;
  const size_t bytes = op->geometry.elements_of(shard, block) * size;
  if (skip)
    std::memset(to, 0, bytes);
  else if (op->trace.bytes >= kStreamBytes)
    numeric::stream(data, to, bytes);
  else
    std::memcpy(to, data, bytes);
}

// Nothing of this rank keeps the op open here: its result is in, and so are the fates of what it contributed (a queued
// slot has its fate with the op that takes it along).
bool LaneImpl::ended(const Op& op, const Receiver& receiver) const {
  return receiver.state == Receiver::State::kDone &&
         (op.op_class == OpClass::kBestEffort || !receiver.contributes ||
          op.fates == op.geometry.stripe_blocks());
}

// Says RESULT and RESOLVED when they are due.
void LaneImpl::conclude(Op* op, uint32_t local_rank, Micros now) {
  Receiver& receiver = op->receivers[local_rank];
  if (receiver.state == Receiver::State::kNone) return;
  const bool late = receiver.state == Receiver::State::kLate;
  if (receiver.state != Receiver::State::kDone && is_pulse(op->seq)) {
    if (receiver.received == op->geometry.stripe_blocks()) pulse_ended(op, true, now);
    return;
  }
  if (receiver.state != Receiver::State::kDone) {
    if (receiver.received != op->geometry.stripe_blocks()) return;
    if (!op->frozen) freeze(op, now);  // every owner closed before this node froze: all of it is uncounted
    if (receiver.state == Receiver::State::kDone) return;  // freezing came back here
    receiver.state = Receiver::State::kDone;
    receiver.diverged = late && !receiver.correctable;
    if (late && receiver.queued)
      note_result(local_rank, op->seq, receiver.diverged ? Status::kDiverged : Status::kIncomplete);
    if (late) {
      keep_correction(*op, &receiver);
    } else {
      add_correction(*op, &receiver);
    }
    settle_ = true;
  }
  const bool fates = ended(*op, receiver) && !receiver.queued && !receiver.resolved;
  uint8_t what = 0;
  if (!receiver.told) {
    receiver.told = true;
    what |= kEventResult;
    op->trace.result = now;
    op->trace.status = receiver.corrected != 0 ? Status::kCorrected : Status::kOk;
    measure(*op, receiver, false, now);
  }
  if (fates) {
    receiver.resolved = true;
    what |= kEventResolved;
  }
  if (what == 0) return;
  settle_ = true;
  // The holes of an INCOMPLETE result came too late to be used: DIVERGED; it stays INCOMPLETE when they wait for a
  // later op of the tag.
  Status status = receiver.corrected != 0 && (what & kEventResult) != 0 ? Status::kCorrected : Status::kOk;
  if (receiver.ranges_total != 0) status = receiver.diverged ? Status::kDiverged : Status::kIncomplete;
  Event event = make_event(*op, local_rank, what, status, now);
  if ((what & kEventResult) != 0) tell_wait(op, &event);
  if (receiver.diverged) {
    char here[96];
    describe_op(here, sizeof here, *op);
    std::snprintf(event.text, sizeof event.text,
                  "DIVERGED: %s: the holes of this result stay zero: resync its ranges", here);
  }
  push_event(event);
}

// `best_effort`: holes take the own contribution (sum: N times it) or zero. Approximated, counted, no further fates.
void LaneImpl::fill_holes(Op* op, Receiver* receiver) {
  const size_t size = element_size(op->type);
  for (uint32_t shard = 0; shard < n; ++shard) {
    const uint32_t blocks = op->geometry.lane_blocks(shard);
    for (uint32_t stripe = 0; stripe < blocks; ++stripe) {
      if (has(*receiver, op->geometry.stripe_first(shard) + stripe)) continue;
      const uint32_t block = op->geometry.block_of_stripe(stripe);
      const uint64_t first = op->geometry.block_first_element(shard, block);
      const uint32_t elements = op->geometry.elements_of(shard, block);
      std::byte* to = receiver->submission.result + first * size;
      if (settings.fill_own) {
        numeric::load(op->type, receiver->submission.contribution + first * size, scratch_.data(), elements);
        if (op->kind == ReduceKind::kSum) {
          numeric::scale(accumulator_type(op->type), scratch_.data(), elements,
                         static_cast<double>(settings.node_of_rank.size()));
        }
        numeric::finish(op->type, scratch_.data(), to, elements, 1.0);
      } else {
        std::memset(to, 0, elements * size);
      }
      ++receiver->filled;
      ++counters.blocks_filled;
    }
  }
}

// The rank's bound has passed: INCOMPLETE with zeros in the holes (consistent), an error that names the missing (exact).
void LaneImpl::receiver_bound(Op* op, uint32_t local_rank, Micros now) {
  Receiver& receiver = op->receivers[local_rank];
  char what[96];
  describe_op(what, sizeof what, *op);
  if (is_pulse(op->seq)) return pulse_ended(op, false, now);
  if (op->op_class == OpClass::kBestEffort && op->bounded && op->start != 0) {
    fill_holes(op, &receiver);
    measure(*op, receiver, true, now);
    receiver.state = Receiver::State::kDone;
    receiver.told = receiver.resolved = true;
    op->push_stopped = true;  // the slot is the client's again
    op->trace.result = now;
    op->trace.status = Status::kApproximated;
    settle_ = true;
    Event event = make_event(*op, local_rank, kEventResult | kEventResolved, Status::kApproximated, now);
    tell_wait(op, &event);
    push_event(event);
    return;
  }
  if (op->op_class == OpClass::kConsistent && op->bounded && op->start != 0) {
    measure(*op, receiver, true, now);
    receiver.told = true;
    receiver.state = Receiver::State::kLate;
    receiver.bound = kNever;
    receiver.correctable = settings.on_incomplete == OnIncomplete::kCorrect && receiver.tag != nullptr &&
                           receiver.submission.tag != 0;
    const size_t size = element_size(op->type);
    for (uint32_t shard = 0; shard < n; ++shard) {
      const uint32_t blocks = op->geometry.lane_blocks(shard);
      const uint32_t owner = Geometry::owner(shard, op->seq, n);
      for (uint32_t stripe = 0; stripe < blocks; ++stripe) {
        if (has(receiver, op->geometry.stripe_first(shard) + stripe)) continue;
        const uint32_t block = op->geometry.block_of_stripe(stripe);
        const uint64_t first = op->geometry.block_first_element(shard, block);
        const uint32_t elements = op->geometry.elements_of(shard, block);
        std::memset(receiver.submission.result + first * size, 0, elements * size);
        MissingRange* last = receiver.ranges > 0 ? &receiver.range[receiver.ranges - 1] : nullptr;
        if (last != nullptr && last->owner == owner && last->first + last->count == first) {
          last->count += elements;
          continue;
        }
        ++receiver.ranges_total;
        if (receiver.ranges < kEventRanges) receiver.range[receiver.ranges++] = {first, elements, owner};
      }
    }
    Event event = make_event(*op, local_rank, kEventResult, Status::kIncomplete, now);
    tell_wait(op, &event);
    char slow[kNameSize] = "";
    if (event.ranges > 0) name_node(slow, sizeof slow, event.range[0].owner);
    std::snprintf(event.text, sizeof event.text,
                  "INCOMPLETE: %s: %u of %u blocks came by the deadline; first hole: %u elements from %llu "
                  "on, owned by "
                  "%s. Holes are zero: %s, or raise the deadline",
                  what, event.blocks_received, event.blocks_expected,
                  event.ranges > 0 ? event.range[0].count : 0,
                  static_cast<unsigned long long>(event.ranges > 0 ? event.range[0].first : 0), slow,
                  receiver.correctable ? "they follow with a later op of the tag" : "resync these ranges");
    op->trace.result = now;
    op->trace.status = Status::kIncomplete;
    push_event(event);
    return;
  }
  // Exact, or consistent that never began.
  std::vector<uint32_t> missing;  // an error path: the job ends here, so this may allocate
  for (uint32_t node = 0; node < n; ++node) {
    const NodeOp& x = op->nodes[node];
    // Exact: who has not pushed everything to me; the others only wait for somebody in turn.
    const bool silent =
        !op->bounded ? op->owner == Op::Owner::kOpen && x.received < op->lane_blocks : !x.in_quorum;
    if (node != self && silent) missing.push_back(node);
  }
  if (missing.empty()) {
    for (uint32_t node = 0; node < n; ++node) {
      if (node != self && missing_from(*op, node)) missing.push_back(node);
    }
  }
  char names[288] = "nobody else";
  size_t used = 0;
  for (size_t i = 0; i < missing.size() && used + 32 < sizeof names; ++i) {
    char name[kNameSize];
    name_node(name, sizeof name, missing[i]);
    const auto length = static_cast<size_t>(
        std::snprintf(names + used, sizeof names - used, "%s%s", i == 0 ? "" : ", ", name));
    if (used + length >= sizeof names - 16) {  // whole names only; the first one fits always
      std::snprintf(names + used, sizeof names - used, " and %zu more", missing.size() - i);
      break;
    }
    used += length;
  }
  const bool exact = !op->bounded;
  char text[sizeof(Event::text)];
  std::snprintf(text, sizeof text,
                "%s: %s did not %s within %lld ms; waiting for %s. Look at these processes, or raise %s",
                exact ? "OP_TIMEOUT" : "RANK_TIMEOUT", what, exact ? "end" : "begin",
                static_cast<long long>((now - receiver.submitted) / 1000), names,
                exact ? "exchange.op_timeout" : "exchange.rank_timeout");
  fail(now, exact ? Status::kOpTimeout : Status::kRankTimeout, text, true, missing);
}

// ROW: the fates of this node's blocks in one shard, from `block` on.
Drop LaneImpl::on_row(const wire::PacketView& packet, Micros now) {
  const wire::Header& header = packet.header;
  if (header.ranks != self) return Drop::kNotMine;
  if (header.shard != Geometry::shard_of(header.sender, header.op_seq, n)) return Drop::kNotMine;
  wire::Request body;
  if (!wire::read_payload(packet.payload, &body)) return Drop::kSize;
  heard(header.sender, body.done, body.base, now);
  Op* op = window_check(header.op_seq) != Drop::kNone ? nullptr : find(header.op_seq);
  if (failed || op == nullptr || !op->shaped || header.block % 8 != 0) return Drop::kState;
  if (op->disputed) return Drop::kMismatch;
  const auto bitmap = packet.payload.subspan(sizeof body);
  const uint32_t blocks = op->geometry.shard_blocks(header.shard);
  const Stripe here = stripe_of(header.op_seq);
  for (uint32_t i = 0; i < 8 * bitmap.size() && header.block + i < blocks; ++i) {
    const uint32_t block = header.block + i;
    if (!here.has(block)) continue;
    const bool counted = ((static_cast<uint8_t>(bitmap[i / 8]) >> (i % 8)) & 1) != 0;
    set_fate(op, header.shard, block, op->geometry.stripe_first(header.shard) + here.index(block), counted);
  }
  for (uint32_t rank = 0; rank < local_ranks_; ++rank) conclude(op, rank, now);
  settle_fates(op, now);
  return Drop::kNone;
}

// The first block of a shard whose fate is open; UINT32_MAX: none.
uint32_t LaneImpl::open_fate(const Op& op, uint32_t node) const {
  if (!op.frozen || op.frozen_ranks == 0 || op.fates == op.geometry.stripe_blocks()) return UINT32_MAX;
  const uint32_t shard = Geometry::shard_of(node, op.seq, n);
  const uint64_t first = op.geometry.stripe_first(shard);
  for (uint32_t stripe = 0; stripe < op.geometry.lane_blocks(shard); ++stripe) {
    const uint64_t bit = first + stripe;
    if (((op.fate_bits[bit / 64] >> (bit % 64)) & 1) == 0) return op.geometry.block_of_stripe(stripe);
  }
  return UINT32_MAX;
}

// "What you ask for is gone": for an op that is open here that is a fault of the other side.
Drop LaneImpl::on_gone(const wire::PacketView& packet, Micros now) {
  wire::Gone body;
  if (!wire::read_payload(packet.payload, &body)) return Drop::kSize;
  const Op* op = find(packet.header.op_seq);
  if (op == nullptr || !missing_from(*op, packet.header.sender)) return Drop::kNone;
  ++counters.gone_open;
  if (is_pulse(op->seq)) return Drop::kNone;  // changes nothing, and nobody waits for it
  char name[kNameSize], what[96], text[sizeof(Event::text)];
  name_node(name, sizeof name, packet.header.sender);
  describe_op(what, sizeof what, *op);
  std::snprintf(text, sizeof text,
                "VIEW_CHANGED: %s: %s has retired this op while it is open here; the job must be joined anew",
                what, name);
  fail(now, Status::kViewChanged, text, true, {});
  return Drop::kNone;
}

}  // namespace sluice::exchange
