// What a lane tells: events, whether it is through, counters; and the thin outside of the class.
#include <algorithm>
#include <cstdio>

#include "base/numeric/numeric.h"
#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

void LaneImpl::push_event(const Event& event) {
  numeric::stream_fence();  // a result that was streamed comes before the word of it
  ++counters.ops[static_cast<size_t>(event.status)];
  SLUICE_ASSERT(events.push(event));
}

Event LaneImpl::make_event(const Op& op, uint32_t local_rank, uint8_t what, Status status, Micros now) const {
  const Receiver& receiver = op.receivers[local_rank];
  Event event;
  event.op_seq = op.seq;
  event.local_rank = local_rank;
  event.cookie = receiver.submission.cookie;
  event.events = what;
  event.status = status;
  event.blocks_expected = op.local ? static_cast<uint32_t>(op.geometry.stripe_blocks()) : 0;
  event.blocks_received = static_cast<uint32_t>(receiver.received);
  event.blocks_skipped = receiver.skipped;
  event.blocks_uncounted = receiver.uncounted;
  event.blocks_repaired = op.repaired;
  event.blocks_filled = receiver.filled;
  event.blocks_discarded = receiver.discarded;
  event.blocks_corrected = receiver.corrected;
  event.ranges_total = receiver.ranges_total;
  event.ranges = receiver.ranges;
  std::copy(receiver.range, receiver.range + receiver.ranges, event.range);
  event.total = now - receiver.submitted;
  event.lag = receiver.admitted - receiver.submitted;
  const Micros began = !op.bounded ? op.last_came : op.start != 0 ? op.start : now;
  event.quorum = std::max<Micros>(0, began - receiver.admitted);
  event.push = op.trace.push_sent > receiver.admitted ? op.trace.push_sent - receiver.admitted : 0;
  event.bytes_sent = op.bytes_sent;
  event.late_nodes = op.late_nodes;
  // Whatever took longest has a node that it waited for.
  const Micros rest = event.total - event.lag - event.quorum;
  event.worst_node = op.worst_node;
  if (event.lag >= std::max(event.quorum, rest) && receiver.lag_node != UINT32_MAX)
    event.worst_node = receiver.lag_node;
  else if (event.quorum > rest)
    event.worst_node = op.bounded ? op.quorum_node : op.last_node;
  return event;
}

// A result waited for a node to take part: counted, and said when it was long. `event` is its RESULT.
void LaneImpl::tell_wait(Op* op, Event* event) {
  op->trace.waited_for = event->worst_node;
  const Micros waited = std::max(event->lag, event->quorum);
  if (event->worst_node >= n || waited < event->total - event->lag - event->quorum) return;
  PeerState& state = peers[event->worst_node].state;
  ++state.ops_waited;
  state.waited += waited;
  if (waited < kSayWait || event->worst_node == self) return;
  char name[kNameSize], what[96];
  name_node(name, sizeof name, event->worst_node);
  describe_op(what, sizeof what, *op);
  std::snprintf(event->text, sizeof event->text, "%s waited %lld of its %lld ms for %s", what,
                static_cast<long long>(waited / 1000), static_cast<long long>(event->total / 1000), name);
}

// All nodes begin together: those that others wait for PING often, yet no port gets more than 50,000 a second.
Micros LaneImpl::ping_interval(const Peer& peer) const {
  return peer.met ? settings.peer_interval
                  : std::min(settings.peer_interval, std::max<Micros>(1000, Micros{n} * 20));
}

bool LaneImpl::drained() const {
  if (failed) return true;
  for (uint32_t rank = 0; rank < local_ranks_; ++rank) {
    if (rank_done_[rank] != next_submit_[rank]) return false;
  }
  return base_ >= peers[self].done;
}

bool LaneImpl::idle() const {
  bool none = pool_.free_units() == pool_.units() && counters.open_ops == 0;
  for (const Fifo<Pending>& pending : pending_) none &= pending.empty();
  return none;
}

Lane::Lane(const Settings& settings, Micros now, std::byte* pool)
    : impl_(std::make_unique<LaneImpl>(settings, now, pool)) {}
Lane::~Lane() = default;
Status Lane::submit(Micros now, const Submission& submission) { return impl_->submit(now, submission); }
bool Lane::take_correction(Micros now, const Submission& what, std::byte* out) {
  return impl_->take_correction(now, what, out);
}
bool Lane::take_carry(Micros now, const Submission& what, std::byte* out) {
  return impl_->take_carry(now, what, out);
}
bool Lane::forget_rank(Micros now, uint32_t local_rank) { return impl_->forget_rank(now, local_rank); }
wire::Drop Lane::on_packet(Micros now, std::span<const std::byte> datagram) {
  return impl_->on_packet(now, datagram);
}
void Lane::tick(Micros now) { impl_->tick(now); }
Micros Lane::next_timer() const { return impl_->next_timer(); }
size_t Lane::poll_send(Micros now, std::span<Outgoing> out) { return impl_->poll_send(now, out); }
bool Lane::poll_event(Event* event) {
  if (impl_->events.empty()) return false;
  *event = impl_->events.front();
  impl_->events.pop();
  return true;
}
void Lane::fail(Micros now, Status status, const char* text, bool quietly) {
  const uint32_t named = impl_->self;
  impl_->fail(now, status, text, !quietly, std::span(&named, 1));
  impl_->settle(now);
}
bool Lane::met() const { return impl_->met(); }
bool Lane::failed() const { return impl_->failed; }
Status Lane::failure() const { return impl_->failure; }
const char* Lane::failure_text() const { return impl_->failure_text; }
bool Lane::drained() const { return impl_->drained(); }
bool Lane::idle() const { return impl_->idle(); }
const Settings& Lane::settings() const { return impl_->settings; }
uint32_t Lane::job_id() const { return impl_->job_id; }
uint32_t Lane::epoch() const { return impl_->epoch; }
const Counters& Lane::counters() const { return impl_->counters; }
Owed Lane::owed() const {
  Owed owed;
  for (const TagState& tag : impl_->tags_seen_) {
    if (!tag.used) continue;
    owed.blocks += tag.carry.present;
    owed.slots += tag.queued.size();
  }
  return owed;
}
Bounds Lane::bounds() const { return impl_->bounds(); }
PeerState Lane::peer(uint32_t node) const { return impl_->peer_state(node); }
bool Lane::poll_trace(Trace* trace) {
  if (impl_->traces.empty()) return false;
  *trace = impl_->traces.front();
  impl_->traces.pop();
  return true;
}

}  // namespace sluice::exchange
