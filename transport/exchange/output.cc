// What goes out, in which order (protocol, sections 4, 6 and 9): control packets, repairs, then first sends of the
// oldest op, pushes before pulls, in runs to one node, within that node's window.
#include <algorithm>
#include <cstring>

#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

using wire::Type;

struct LaneImpl::Out {
  std::span<Outgoing> packets;
  size_t limit;
  size_t count = 0;
  bool full() const { return count >= limit; }
  size_t room() const { return limit - count; }
};

wire::Header LaneImpl::header(Type type, const Op* op) const {
  wire::Header h;
  h.type = static_cast<uint8_t>(type);
  h.sender = static_cast<uint16_t>(self);
  h.lane = static_cast<uint8_t>(settings.lane);
  h.job = job_id;
  h.epoch = epoch;
  if (op != nullptr) {
    h.op_seq = op->seq;
    h.policy = static_cast<uint8_t>(op->policy);
    h.fingerprint = op->fingerprint;
    h.flags = static_cast<uint8_t>(static_cast<uint8_t>(op->op_class) << wire::kFlagClassShift);
    if (type == Type::kAnnounce || type == Type::kPush || type == Type::kRequest) {
      // Bits 4-7 say how to sum, so that an owner without a submit of its own can.
      h.flags |=
          static_cast<uint8_t>(static_cast<uint8_t>(op->kind) << 4 | static_cast<uint8_t>(op->type) << 5);
    }
  }
  return h;
}

bool LaneImpl::reachable(const Op& op, uint32_t node) const {
  // A peer drops what lies beyond its own window; of pulses it says only `done`, and those are few.
  return !peers[node].lost && (is_pulse(op.seq) || op.seq - peers[node].base < kWindow);
}

void LaneImpl::queue_control(const Control& control) {
  control_.push(control);
}  // full: it is repeated anyway

void LaneImpl::queue_request(Op* op, uint32_t node, bool push, bool everything) {
  if (!peers[node].lost) {
    queue_control({.type = Type::kRequest,
                   .node = static_cast<uint16_t>(node),
                   .push = push,
                   .everything = everything,
                   .op_seq = op->seq});
  }
}

void LaneImpl::emit_control(Out* out, const Control& control, Micros now) {
  const size_t slot = out->count;
  wire::Header& h = headers_[slot];
  std::byte* payload = staging_.data() + slot * settings.payload;
  size_t length = 0;
  const auto put = [&](const auto& body) {
    std::memcpy(payload + length, &body, sizeof body);
    length += sizeof body;
  };
  Peer& peer = peers[control.node];
  Op* op = find(control.op_seq);
  const uint32_t done = peers[self].done;
  const auto put_ping = [&](wire::Ping body) {
    const Policy& newest = policies_.back();
    const bool record =
        peer.policy < newest.number;  // it lacks our newest record: told until it says that it has it
    body.done = done;
    body.base = base_;
    body.pulse_done = peers[self].pulse_done;
    body.policy = newest.number;
    // Seldom do more than 8 send to one at a time (incast I; trap 13): each gets that part of the buffer.
    body.grant =
        std::max<uint32_t>(2 * settings.payload, settings.receive_budget / std::clamp(n - 1, 1U, 8U));
    body.flags = record ? wire::kRecordFollows : 0;
    put(body);
    if (record) {
      encode_policy(newest, payload + length);
      length += kPolicyRecordBytes;
    }
  };
  switch (control.type) {
    case Type::kAnnounce: {
      if (op == nullptr || !op->shaped) return;  // it is over
      h = header(Type::kAnnounce, op);
      h.shard = static_cast<uint16_t>(Geometry::shard_of(control.node, op->seq, n));
      h.total = op->geometry.shard_blocks(h.shard);
      h.ranks = op->frozen_ranks != 0 ? op->frozen_ranks : std::max<uint16_t>(op->held, 1);
      put(wire::Announce{
          .age_us = static_cast<uint32_t>(op->local ? now - op->trace.submitted : 0),
          .done = done,
          .base = base_,
          .flags = op->size_class << wire::kSizeClassShift | (op->local ? wire::kReceives : 0) |
                   (op->frozen && op->frozen_ranks != 0 ? wire::kFrozen : 0) |
                   (op->wholly_late || (op->frozen && op->frozen_ranks == 0) ? 0 : wire::kContributes),
          .scale = op->scale});
      break;
    }
    case Type::kPing:
      h = header(Type::kPing, nullptr);
      h.shard = control.node;
      put_ping(wire::Ping{});
      break;
    case Type::kPong:
      h = header(Type::kPong, nullptr);
      h.shard = control.node;
      put_ping(wire::Ping{.echo = control.echo, .hold_us = static_cast<uint32_t>(now - control.when)});
      break;
    case Type::kGone:
      h = header(Type::kGone, nullptr);
      h.op_seq = control.op_seq;
      put(wire::Gone{.base = is_pulse(control.op_seq) ? pulse_base_ : base_});
      break;
    case Type::kAbort: {
      h = header(Type::kAbort, nullptr);
      h.op_seq = abort_op_;
      wire::Abort body;
      body.reason = static_cast<uint16_t>(abort_reason_);
      body.count = abort_named_count_;
      if (abort_op_known_) {
        h.flags = static_cast<uint8_t>(static_cast<uint8_t>(abort_class_) << wire::kFlagClassShift);
        body.kind = abort_body_.kind;
        body.element_type = abort_body_.element_type;
        body.wire_type = abort_body_.wire_type;
        body.elements = abort_body_.elements;
        body.tag = abort_body_.tag;
      }
      put(body);
      for (uint16_t i = 0; i < abort_named_count_; ++i) put(abort_named_[i]);
      break;
    }
    case Type::kRequestRow:
      if (op == nullptr || failed) return;
      h = header(Type::kRequestRow, op);
      h.shard = static_cast<uint16_t>(Geometry::shard_of(control.node, op->seq, n));
      h.block = control.block;
      put(wire::Request{.done = done, .base = base_});
      break;
    case Type::kRow: {
      if (op == nullptr || failed) return;
      h = header(Type::kRow, op);
      h.shard = static_cast<uint16_t>(op->shard);
      h.total = op->shard_blocks;
      h.block = control.block;
      h.ranks = control.node;  // whose row it is
      put(wire::Request{.done = done, .base = base_});
      const uint32_t bytes = std::min<uint32_t>((op->shard_blocks - control.block + 7) / 8,
                                                static_cast<uint32_t>(settings.payload - length));
      std::memset(payload + length, 0, bytes);
      for (uint32_t i = 0; i < 8 * bytes && control.block + i < op->shard_blocks; ++i) {
        const uint32_t block = control.block + i;
        if (!stripe_of(op->seq).has(block)) continue;
        const uint32_t stripe = stripe_of(op->seq).index(block);
        // The row of a skipped block is 0: nobody was counted.
        if (!has_block(*op, stripe, control.node) || block_meta(*op, stripe).ranks < quorum_ranks_needed())
          continue;
        payload[length + i / 8] |= static_cast<std::byte>(1U << (i % 8));
      }
      length += bytes;
      break;
    }
    case Type::kRequest: {
      if (op == nullptr || !op->described || failed) return;
      h = header(Type::kRequest, op);
      const uint32_t owner = control.push ? self : control.node;
      h.shard = static_cast<uint16_t>(Geometry::shard_of(owner, op->seq, n));
      h.total = control.push ? op->shard_blocks : op->geometry.shard_blocks(h.shard);
      put(wire::Request{.done = done, .base = base_});
      if (control.everything) break;
      const size_t bytes = request_bitmap(op, control, &h, payload + length, settings.payload - length);
      if (bytes == 0) return;  // it came meanwhile
      length += bytes;
      break;
    }
    default:
      return;
  }
  h.stamp = static_cast<uint32_t>(now);
  h.counter = new_counter();
  Outgoing& packet = out->packets[slot];
  packet = {.node = control.node,
            .payload_length = static_cast<uint32_t>(length),
            .header = reinterpret_cast<const std::byte*>(&h),
            .payload = payload,
            .tag = nullptr};
  if (settings.sealing != wire::Sealing::kNone) {
    std::byte* tag = tags_.data() + slot * wire::kTagBytes;
    sealer_.seal({packet.header, wire::kHeaderBytes}, {payload, length}, h.counter, tag);
    packet.tag = tag;
  }
  if (control.type == Type::kPing) peer.flow.probed(h.stamp, now);
  if (control.type != Type::kAbort && control.type != Type::kGone) peer.next_ping = now + ping_interval(peer);
  ++out->count;
}

// Bits of the missing blocks from the first one on; no more than half a window's worth, so that the answers cannot
// flood us. Returns bytes; 0: nothing is missing.
size_t LaneImpl::request_bitmap(Op* op, const Control& control, wire::Header* h, std::byte* bits,
                                size_t capacity) {
  const uint32_t stripes = control.push ? op->lane_blocks : op->geometry.lane_blocks(h->shard);
  const uint64_t first_bit = control.push ? 0 : op->geometry.stripe_first(h->shard);
  const uint32_t at_most = std::max<uint32_t>(32, settings.flow_window / 2 / settings.payload);
  uint32_t asked = 0, from = 0;
  size_t bytes = 0;
  for (uint32_t stripe = 0; stripe < stripes && asked < at_most; ++stripe) {
    const bool missing =
        control.push ? !has_block(*op, stripe, control.node) : wanted(*op, first_bit + stripe);
    if (!missing) continue;
    const uint32_t block = stripe_of(op->seq).block(stripe);
    if (asked == 0) from = block / 8 * 8;
    const size_t byte = (block - from) / 8;
    if (byte >= capacity) break;
    if (byte >= bytes) {
      std::memset(bits + bytes, 0, byte + 1 - bytes);
      bytes = byte + 1;
    }
    bits[byte] |= static_cast<std::byte>(1U << (block % 8));
    ++asked;
  }
  h->block = from;
  if (asked > 0) {
    ++counters.requests_sent;
    counters.blocks_repaired += asked;
    peers[control.node].state.blocks_repaired += asked;
    op->repaired += asked;
  }
  return bytes;
}

void LaneImpl::count_out(uint32_t node, size_t bytes, bool data, Micros now) {
  ++counters.packets_sent;
  counters.bytes_sent += bytes;
  ++peers[node].state.packets_sent;
  peers[node].state.bytes_sent += bytes;
  if (data) peers[node].flow.sent(static_cast<uint32_t>(bytes), now);
}

void LaneImpl::emit_push(Out* out, Op* op, uint32_t owner, uint32_t stripe, bool tail, Micros now) {
  const size_t slot = out->count;
  wire::Header& h = headers_[slot];
  h = header(Type::kPush, op);
  const uint32_t shard = Geometry::shard_of(owner, op->seq, n);
  const uint32_t block = op->geometry.block_of_stripe(stripe);
  const uint32_t elements = op->geometry.elements_of(shard, block);
  if (tail) h.flags |= wire::kFlagTail;
  h.shard = static_cast<uint16_t>(shard);
  h.elements = static_cast<uint16_t>(elements);
  h.block = block;
  h.total = op->geometry.shard_blocks(shard);
  h.ranks = op->frozen_ranks;
  h.stamp = static_cast<uint32_t>(now);
  h.counter = new_counter();
  const size_t length = elements * element_size(op->type);
  const std::byte* payload = own_block(*op, shard, block, staging_.data() + slot * settings.payload);
  Outgoing& packet = out->packets[slot];
  packet = {.node = owner,
            .payload_length = static_cast<uint32_t>(length),
            .header = reinterpret_cast<const std::byte*>(&h),
            .payload = payload,
            .tag = nullptr};
  if (settings.sealing != wire::Sealing::kNone) {
    std::byte* tag_bytes = tags_.data() + slot * wire::kTagBytes;
    sealer_.seal({packet.header, wire::kHeaderBytes}, {payload, length}, h.counter, tag_bytes);
    packet.tag = tag_bytes;
  }
  count_out(owner, packet_bytes(length), true, now);
  op->bytes_sent += packet_bytes(length);
  ++out->count;
}

// A PULL is sealed once for all receivers, and sent again byte for byte.
void LaneImpl::emit_pull(Out* out, Op* op, uint32_t node, uint32_t stripe, Micros now) {
  const size_t slot = out->count;
  wire::Header& h = headers_[slot];
  BlockMeta& meta = block_meta(*op, stripe);
  h = header(Type::kPull, op);
  h.flags |= meta.flags;
  if ((stripe + op->lane_blocks - op->pull_start) % op->lane_blocks + kTailBlocks >= op->lane_blocks)
    h.flags |= wire::kFlagTail;
  h.shard = static_cast<uint16_t>(op->shard);
  h.elements = (meta.flags & wire::kFlagSkip) != 0 ? 0 : meta.elements;
  h.block = stripe_of(op->seq).block(stripe);
  h.total = op->shard_blocks;
  h.ranks = (meta.flags & wire::kFlagSkip) != 0 ? 0 : meta.ranks;
  const std::byte* payload = block_data(*op, stripe);
  // Sealed anew in a new phase: its receivers soon forget the key of the old one.
  const bool fresh = meta.counter == 0 || (meta.counter >> 32) != (last_counter_ >> 32);
  if (fresh) meta.counter = new_counter();
  h.counter = meta.counter;
  Outgoing& packet = out->packets[slot];
  packet = {.node = node,
            .payload_length = meta.payload,
            .header = reinterpret_cast<const std::byte*>(&h),
            .payload = payload,
            .tag = nullptr};
  if (settings.sealing != wire::Sealing::kNone) {
    if (fresh)
      sealer_.seal({packet.header, wire::kHeaderBytes}, {payload, meta.payload}, meta.counter, meta.tag);
    packet.tag = meta.tag;
  }
  count_out(node, packet_bytes(meta.payload), true, now);
  op->bytes_sent += packet_bytes(meta.payload);
  ++out->count;
}

// After a run: what was sent before this PING is in flight until its PONG comes.
void LaneImpl::emit_probe(Out* out, uint32_t node, Micros now) {
  if (!out->full() && peers[node].flow.probe_due()) {
    emit_control(out, {.type = Type::kPing, .node = static_cast<uint16_t>(node)}, now);
  }
}

void LaneImpl::emit_repairs(Out* out, Micros now) {
  uint32_t last = UINT32_MAX;
  for (size_t turns = repairs_.size(); turns > 0 && out->room() > 1; --turns) {
    const Repair repair = repairs_.front();
    repairs_.pop();
    Op* op = find(repair.op_seq);
    if (op == nullptr || op->disputed) continue;
    NodeOp& x = op->nodes[repair.node];
    if (!peers[repair.node].flow.room(packet_bytes(settings.payload)) || !reachable(*op, repair.node)) {
      repairs_.push(repair);
      continue;
    }
    if (last != repair.node && last != UINT32_MAX) emit_probe(out, last, now);
    last = repair.node;
    if (repair.push) {
      --x.push_repairs;
      if (x.closed || op->push_stopped || op->frozen_ranks == 0) continue;
      const uint32_t blocks = op->geometry.lane_blocks(Geometry::shard_of(repair.node, op->seq, n));
      emit_push(out, op, repair.node, repair.stripe, x.push_sent >= blocks, now);
    } else {
      --x.pull_repairs;
      emit_pull(out, op, repair.node, repair.stripe, now);
    }
    ++counters.blocks_resent;
  }
  if (last != UINT32_MAX) emit_probe(out, last, now);
}

void LaneImpl::emit_pushes(Out* out, Op* op, Micros now) {
  if (!op->frozen || op->frozen_ranks == 0 || op->push_stopped || op->pushes_open == 0) return;
  uint32_t active = 0;
  for (uint32_t s = 1; s < n && active < op->incast; ++s) {
    const uint32_t owner = (self + s) % n;
    NodeOp& x = op->nodes[owner];
    const uint32_t blocks = op->geometry.lane_blocks(Geometry::shard_of(owner, op->seq, n));
    Peer& peer = peers[owner];
    if (x.push_sent >= blocks || peer.suspect || !reachable(*op, owner)) continue;
    ++active;
    const uint32_t start = push_start(*op, owner);
    if (x.push_sent == 0) x.push_started = now;
    if (op->trace.first_push == 0) op->trace.first_push = now;
    for (uint32_t run = 0; run < kRun && out->room() > 1 && x.push_sent < blocks; ++run) {
      if (!peer.flow.room(packet_bytes(settings.payload))) break;
      const bool tail = x.push_sent + kTailBlocks >= blocks;
      const uint32_t stripe = (start + x.push_sent) % blocks;
      emit_push(out, op, owner, stripe, tail, now);
      if (++x.push_sent == blocks) {
        tails_.push({.op_seq = op->seq,
                     .stripe = stripe,
                     .node = static_cast<uint16_t>(owner),
                     .push = true,
                     .when = now + kAgain});
        if (--op->pushes_open == 0) op->trace.push_sent = now;
      }
    }
    emit_probe(out, owner, now);
  }
}

void LaneImpl::emit_pulls(Out* out, Op* op, Micros now) {
  if (op->owner != Op::Owner::kClosed || op->pulls_open == 0) return;
  for (uint32_t s = 1; s < n; ++s) {
    const uint32_t node = (self + s) % n;
    NodeOp& x = op->nodes[node];
    Peer& peer = peers[node];
    if (!x.receives || x.pull_sent >= op->lane_blocks || peer.suspect || !reachable(*op, node)) continue;
    if (x.pull_sent == 0) x.pull_started = now;
    for (uint32_t run = 0; run < kRun && out->room() > 1 && x.pull_sent < op->lane_blocks; ++run) {
      if (!peer.flow.room(packet_bytes(settings.payload))) break;
      if (x.pull_sent == op->finished) finish_some(op, kRun - run, now);
      const uint32_t stripe = (op->pull_start + x.pull_sent) % op->lane_blocks;
      emit_pull(out, op, node, stripe, now);
      if (++x.pull_sent == op->lane_blocks) {
        tails_.push({.op_seq = op->seq,
                     .stripe = stripe,
                     .node = static_cast<uint16_t>(node),
                     .push = false,
                     .when = now + kAgain});
        if (--op->pulls_open == 0) op->trace.pull_sent = now;
      }
    }
    emit_probe(out, node, now);
  }
}

size_t LaneImpl::poll_send(Micros now, std::span<Outgoing> packets) {
  SLUICE_ASSERT(packets.size() >= kLeastBurst);  // less would never send data, and say that there is none
  settle(now);
  if (now - phase_began_ >= kPhaseAge) {
    sealer_.next_phase();
    phase_began_ = now;
  }
  Out out{.packets = packets, .limit = std::min<size_t>(packets.size(), kBurst)};
  while (!control_.empty() && !out.full()) {
    const Control control = control_.front();
    control_.pop();
    const size_t before = out.count;
    emit_control(&out, control, now);
    if (out.count != before)
      count_out(control.node, packet_bytes(out.packets[before].payload_length), false, now);
  }
  if (!failed) {
    emit_repairs(&out, now);
    unfinished_ = false;
    for (uint32_t i = 0; i < kWindow + kPulseWindow && out.room() > 1; ++i) {
      Op* op = in_order(i);
      if (op == nullptr || !op->described || op->disputed) continue;
      size_t before = 0;
      do {
        before = out.count;
        emit_pushes(&out, op, now);
        emit_pulls(&out, op, now);
      } while (out.count != before && out.room() > 1);
    }
    // Closed shards are finished a piece at a time also when nobody can take their blocks now.
    for (uint32_t i = 0; i < kWindow + kPulseWindow; ++i) {
      Op* op = in_order(i);
      if (op == nullptr || op->disputed || op->owner != Op::Owner::kClosed || op->finished >= op->lane_blocks)
        continue;
      unfinished_ |= finish_some(op, kBurst - static_cast<uint32_t>(out.count), now);
    }
  }
  // Memory that these packets point to stays as it is until they are sent: what has ended goes with the next call.
  if (out.count == 0) settle(now);
  return out.count;
}

}  // namespace sluice::exchange
