// Other nodes: are they there, how fast are they, and how a job ends when one is not (protocol, sections 2, 8 and 9).
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

using wire::Drop;
using wire::Type;

Drop LaneImpl::on_ping(const wire::PacketView& packet, Micros now) {
  wire::Ping body;
  if (!wire::read_payload(packet.payload, &body)) return Drop::kSize;
  if (packet.header.shard != self) return Drop::kNotMine;
  const uint32_t node = packet.header.sender;
  heard(node, body.done, body.base, now);
  hear_policy(node, body, packet.payload.subspan(sizeof body));
  queue_control(
      {.type = Type::kPong, .node = static_cast<uint16_t>(node), .echo = packet.header.stamp, .when = now});
  if (failed) remind(node, now);
  return Drop::kNone;
}

// What a PING or PONG says of grants, pulses and policies.
void LaneImpl::hear_policy(uint32_t node, const wire::Ping& body, std::span<const std::byte> record) {
  Peer& peer = peers[node];
  if (body.grant != 0) peer.flow.granted(body.grant);
  if (body.pulse_done > peer.pulse_done && body.pulse_done <= pulses_begun_ + kPulseWindow) {
    peer.pulse_done = body.pulse_done;
    settle_ = true;
  }
  peer.policy = std::max(peer.policy, body.policy);
  Policy policy;
  if ((body.flags & wire::kRecordFollows) != 0 && decode_policy(record, &policy)) adopt(policy);
}

// A header names a record that is newer than ours: a PING carries our number, its PONG brings the record.
void LaneImpl::ask_policy(uint32_t node, uint8_t number, Micros now) {
  const auto ahead = static_cast<uint8_t>(number - static_cast<uint8_t>(policies_.back().number));
  Peer& peer = peers[node];
  if (ahead == 0 || ahead >= 128 || now - peer.asked_policy < std::max<Micros>(1000, 2 * peer.flow.rtt()))
    return;
  peer.asked_policy = now;
  queue_control({.type = Type::kPing, .node = static_cast<uint16_t>(node)});
}

// A node that goes on working has not heard that the job is over.
void LaneImpl::remind(uint32_t node, Micros now) {
  if (now - peers[node].last_abort < kRepairCap) return;
  peers[node].last_abort = now;
  queue_control({.type = Type::kAbort, .node = static_cast<uint16_t>(node), .op_seq = abort_op_});
}

Drop LaneImpl::on_pong(const wire::PacketView& packet, Micros now) {
  wire::Ping body;
  if (!wire::read_payload(packet.payload, &body)) return Drop::kSize;
  if (packet.header.shard != self) return Drop::kNotMine;
  heard(packet.header.sender, body.done, body.base, now);
  hear_policy(packet.header.sender, body, packet.payload.subspan(sizeof body));
  peers[packet.header.sender].flow.answered(body.echo, body.hold_us, now);
  return Drop::kNone;
}

void LaneImpl::run_peers(Micros now) {
  const Micros lost_after = std::max(settings.peer_timeout, 20 * settings.peer_interval);
  // We were stopped ourselves (SIGSTOP, a paused machine): the silence of others proves nothing.
  if (now - last_run_ > 3 * settings.peer_interval) {
    for (Peer& peer : peers) peer.last_heard = std::max(peer.last_heard, now - settings.peer_interval);
  }
  last_run_ = now;
  for (uint32_t node = 0; node < n; ++node) {
    Peer& peer = peers[node];
    if (node == self || peer.lost) continue;
    if (peer.next_ping <= now) {
      peer.next_ping = now + ping_interval(peer);
      queue_control({.type = Type::kPing, .node = static_cast<uint16_t>(node)});
    }
    if (peer.flow.deadline() <= now) {
      peer.flow.expired(now);
      queue_control({.type = Type::kPing, .node = static_cast<uint16_t>(node)});
    }
    const Micros silent = now - peer.last_heard;
    peer.suspect = silent > 3 * settings.peer_interval;
    // Who has not been met may still be finding out that it may begin, by HELLOs that are lost, too: the join's own time
    // limit, or rank_timeout, ends that.
    if (silent < (peer.met ? lost_after : std::max(lost_after, settings.rank_timeout)) || failed) continue;
    peer.lost = true;
    char name[kNameSize], text[sizeof(Event::text)];
    name_node(name, sizeof name, node);
    std::snprintf(
        text, sizeof text,
        "PEER_LOST: nothing heard from %s for %lld ms. Look whether its sluiced runs and UDP reaches it; the "
        "job must be joined anew",
        name, static_cast<long long>(silent / 1000));
    fail(now, Status::kPeerLost, text, true, std::span(&node, 1));
  }
  if (lag_ping_ <= now && !failed) {
    if (const uint32_t node = slowest(now); node != lag_node_) {
      note_lag(now);
      lag_node_ = node;
      lag_since_ = now;
    }
    // A submit waits for `done` of the slowest: ask them at once, then after a round trip, doubling to 5 ms.
    Micros rtt = 1000;
    for (uint32_t node = 0; node < n; ++node) {
      if (node == self || peers[node].done != base_) continue;
      rtt = std::min(rtt, std::max<Micros>(50, peers[node].flow.rtt()));
      queue_control({.type = Type::kPing, .node = static_cast<uint16_t>(node)});
    }
    lag_interval_ = std::clamp<Micros>(2 * lag_interval_, rtt, 5000);
    lag_ping_ = now + lag_interval_;
  }
}

// The live node that holds up admission now. Whoever is suspect holds up everybody that needs something of it. Of those
// with the smallest `done` it is one that has not come to that op, and of these the one that has been silent longest: the
// others may only wait for it in turn.
uint32_t LaneImpl::slowest(Micros now) const {
  const Op& slot = ops_[base_ % kWindow];
  const Op* op = slot.open && slot.seq == base_ ? &slot : nullptr;
  uint32_t found = UINT32_MAX;
  bool found_came = false;
  Micros found_silent = 0;
  for (uint32_t node = 0; node < n; ++node) {
    const Micros silent = now - peers[node].last_heard;
    if (node == self || !peers[node].suspect || silent <= found_silent) continue;
    found = node;
    found_silent = silent;
  }
  if (found != UINT32_MAX) return found;
  for (uint32_t node = 0; node < n; ++node) {
    if (peers[node].done != base_) continue;
    const bool came = op != nullptr && (op->nodes[node].contributes || op->nodes[node].receives);
    const Micros silent = node == self ? -1 : now - peers[node].last_heard;
    if (found != UINT32_MAX && (came != found_came ? came : silent <= found_silent)) continue;
    found = node;
    found_came = came;
    found_silent = silent;
  }
  return found;
}

// Adds what has passed since the last look to the submits that wait. On the way: every lag_interval_, 5 ms at most.
void LaneImpl::note_lag(Micros now) {
  if (lag_ping_ == kNever) return;
  for (Fifo<Pending>& pending : pending_) {
    for (size_t i = 0; i < pending.size(); ++i) {
      Pending& one = pending.at(i);
      const Micros waited = now - std::max(lag_since_, one.submitted);
      if (waited < one.waited || lag_node_ == UINT32_MAX) continue;
      one.waited = waited;
      one.waited_for = lag_node_;
    }
  }
}

// --- The end of a job -------------------------------------------------------------------------------------------------

void LaneImpl::name_node(char* text, size_t size, uint32_t node) const {
  size_t used = static_cast<size_t>(std::snprintf(text, size, "node %u (rank", node));
  uint32_t listed = 0;
  for (size_t rank = 0; rank < settings.node_of_rank.size() && used + 16 < size; ++rank) {
    if (settings.node_of_rank[rank] != node) continue;
    if (listed == 4) {
      used += static_cast<size_t>(std::snprintf(text + used, size - used, " ..."));
      break;
    }
    used +=
        static_cast<size_t>(std::snprintf(text + used, size - used, "%s%zu", listed == 0 ? " " : ",", rank));
    ++listed;
  }
  used = std::min(used, size - 2);
  const bool known = node < settings.node_names.size() && !settings.node_names[node].empty();
  // At most a name of 63 and an address of 63 characters, see Settings.
  const int place = std::snprintf(text + used, size - used, "%s%s)", known ? "; " : "",
                                  known ? settings.node_names[node].c_str() : "");
  if (static_cast<size_t>(place) >= size - used) text[size - 2] = ')';
}

void LaneImpl::tell_all(Status reason, std::span<const uint32_t> named) {
  abort_reason_ = reason;
  abort_named_count_ = 0;
  for (const uint32_t node : named) {
    if (abort_named_count_ == std::size(abort_named_)) break;
    abort_named_[abort_named_count_++] = static_cast<uint16_t>(node);
  }
  for (uint32_t node = 0; node < n; ++node) {
    if (node != self) queue_control({.type = Type::kAbort, .node = static_cast<uint16_t>(node)});
  }
}

Drop LaneImpl::on_abort(const wire::PacketView& packet, Micros now) {
  wire::Abort body;
  if (!wire::read_payload(packet.payload, &body) ||
      packet.payload.size() != sizeof body + 2ULL * body.count) {
    return Drop::kSize;
  }
  if (failed) return Drop::kNone;
  const uint32_t node = packet.header.sender;
  char name[kNameSize], text[sizeof(Event::text)];
  name_node(name, sizeof name, node);
  auto status = static_cast<Status>(body.reason);
  if (body.reason < 16 || body.reason > 22) status = Status::kAborted;
  if (status == Status::kMismatch) return on_mismatch_abort(packet, body, now);
  char about[kNameSize] = "";
  uint16_t first = wire::kNoSender;
  if (body.count > 0) {
    std::memcpy(&first, packet.payload.data() + sizeof body, sizeof first);
    if (first < n) name_node(about, sizeof about, first);
  }
  if (status == Status::kPeerLost && first < n && first != node) {
    std::snprintf(text, sizeof text, "PEER_LOST: %s is gone, says %s; the job must be joined anew", about,
                  name);
  } else if (status == Status::kPeerLost) {
    std::snprintf(text, sizeof text,
                  "PEER_LOST: a process of %s is gone, says its daemon; the job must be joined anew", name);
  } else if (status == Status::kViewChanged) {
    std::snprintf(text, sizeof text, "VIEW_CHANGED: %s has left this view; the job must be joined anew",
                  name);
  } else {
    std::snprintf(text, sizeof text, "%s: %s ended the job (%s%s%s)", status_name(Status::kAborted), name,
                  status_name(status), about[0] != '\0' ? ", because of " : "", about);
    status = Status::kAborted;
  }
  fail(now, status, text, false);
  return Drop::kNone;
}

// Ends every open op and all later ones. The slots of the local ranks are theirs again when the events are out.
void LaneImpl::fail(Micros now, Status status, const char* text, bool tell, std::span<const uint32_t> named) {
  if (failed) return;
  note_lag(now);
  failed = true;
  new_debts_ = slots_wait_ = false;
  failure = status;
  mismatch_at_ = kNever;
  std::snprintf(failure_text, sizeof failure_text, "%s", text);
  if (tell) tell_all(status, named);
  for (uint32_t i = 0; i < kWindow; ++i) {
    Op* op = in_order(i);
    if (op == nullptr) continue;
    for (uint32_t rank = 0; rank < local_ranks_; ++rank) {
      Receiver& receiver = op->receivers[rank];
      for (const QueuedSlot& slot : receiver.taken) resolve_queued(rank, slot, status, now);
      receiver.taken.clear();
      if (receiver.state == Receiver::State::kNone || receiver.resolved || (receiver.queued && receiver.told))
        continue;
      const bool told = receiver.told;
      receiver.diverged |= receiver.state == Receiver::State::kLate;  // its ranges are in the event
      receiver.state = Receiver::State::kDone;
      receiver.told = receiver.resolved = true;
      const auto what =
          static_cast<uint8_t>((told ? 0 : kEventResult) | (receiver.queued ? 0 : kEventResolved));
      Event event = make_event(*op, rank, what, status, now);
      std::snprintf(event.text, sizeof event.text, "%s", text);
      op->trace.status = status;
      push_event(event);
    }
  }
  for (TagState& tag : tags_seen_) {  // undecided: dropped with the view
    if (tag.used) drop_debts(&tag, now, status);
  }
  for (uint32_t rank = 0; rank < local_ranks_; ++rank) {
    for (; !pending_[rank].empty(); pending_[rank].pop()) {
      const Pending& pending = pending_[rank].front();
      Event event;
      event.op_seq = pending.submission.op_seq;
      event.local_rank = rank;
      event.cookie = pending.submission.cookie;
      event.events = kEventResult | kEventResolved;
      event.status = status;
      event.total = event.lag = now - pending.submitted;
      event.worst_node = pending.waited_for;
      std::snprintf(event.text, sizeof event.text, "%s", text);
      push_event(event);
    }
  }
  repairs_.clear();
  tails_.clear();
  lag_ping_ = kNever;
  lag_node_ = UINT32_MAX;
  unfinished_ = false;
  settle_ = true;
}

PeerState LaneImpl::peer_state(uint32_t node) const {
  const Peer& peer = peers[node];
  PeerState state = peer.state;
  state.last_heard = peer.last_heard;
  state.rtt = peer.flow.rtt();
  state.done = peer.done;
  state.in_flight = peer.flow.in_flight();
  state.window = peer.flow.window();
  state.suspect = peer.suspect;
  state.lost = peer.lost;
  return state;
}

}  // namespace sluice::exchange
