// What time does to a lane (protocol, sections 4 and 6): repairs and reminders, deadlines, rank_timeout.
#include <algorithm>
#include <cstdio>

#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

// P for the repair timers: a bounded op must have time for several repairs before it, and a generous bound is no reason to
// wait long for a lost packet.
Micros LaneImpl::push_budget(const Op& op) const {
  return op.bounded ? std::min(op.push_budget, kPushBudgetUnknown) : kPushBudgetUnknown;
}

// Blocks of a node came, its tail did not: after this much silence what is missing is asked for (P/2 after the first
// packet at the latest, since P/4 follow the last one).
Micros LaneImpl::silence_delay(const Op& op, uint32_t node) const {
  const Micros quiet = kPushBudgetUnknown / 2;
  return std::max(op.bounded ? std::min(op.push_budget / 4, quiet) : quiet, 4 * peers[node].flow.rtt());
}

// The longest repair interval, unless 8 RTT are longer.
Micros LaneImpl::repair_cap(const Op& op) const {
  return op.bounded ? std::clamp(op.push_budget / 4, kLeastRepairCap, kRepairCap) : kRepairCap;
}

// Between two reminders of a node from which nothing came. Once H runs there is no time to lose; before, the wait may
// be as long as the slowest half of the nodes.
Micros LaneImpl::remind_delay(const Op& op, uint8_t* step) const {
  if (op.start != 0) return repair_cap(op);
  const Micros delay = repair_cap(op) << std::min<uint8_t>(*step, 16);
  if (*step < 16) ++*step;
  return std::min(delay, kRepairCap);
}

Micros LaneImpl::repair_delay(uint32_t node) const {
  return std::max<Micros>(kAgain, peers[node].flow.rtt() * 3 / 2);
}

Micros LaneImpl::backoff(const Op& op, uint32_t node, uint8_t* step) const {
  const Micros delay = repair_delay(node) << std::min<uint8_t>(*step, 16);
  if (*step < 16) ++*step;
  return std::min(delay, std::max<Micros>(repair_cap(op), 8 * peers[node].flow.rtt()));
}

void LaneImpl::run_timers(Op* op, Micros now) {
  op->timer = kNever;
  if (op->disputed) return;
  if (op->announce_again <= now) {
    op->announce_again = kNever;
    announce_all(op);
  }
  if (std::min(op->local_wait, op->late_wait) <= now && !op->frozen) freeze(op, now);
  if (op->bounded && op->described) {
    if (op->owner == Op::Owner::kOpen && op->quorum != 0) {
      const Micros end = std::min(op->quorum + op->push_budget, op->exit_at);
      if (now >= end)
        close(op, now);
      else
        op->wake_at(end);
    }
    const Micros began = op->start != 0 ? op->start : op->frozen && !op->local ? op->quorum : 0;
    if (began != 0 && !op->push_stopped) {
      const Micros end = began + op->push_budget + op->pull_budget / 2;  // H - R, R = Q/2
      if (now >= end)
        op->push_stopped = true;
      else
        op->wake_at(end);
    }
  }
  for (uint32_t rank = 0; rank < local_ranks_ && !failed; ++rank) {
    Receiver& receiver = op->receivers[rank];
    if (receiver.state != Receiver::State::kWait) continue;
    if (receiver.bound <= now)
      receiver_bound(op, rank, now);
    else
      op->wake_at(receiver.bound);
  }
  if (failed) return;
  for (uint32_t node = 0; node < n; ++node) {
    if (node == self) continue;
    NodeOp& x = op->nodes[node];
    if (x.push_timer <= now) {
      x.push_timer = kNever;
      if (op->owner == Op::Owner::kOpen && op->described && x.received < op->lane_blocks) {
        queue_request(op, node, true, x.received == 0);
        x.push_timer = now + (x.received == 0 ? remind_delay(*op, &x.push_backoff)
                                              : backoff(*op, node, &x.push_backoff));
      }
    }
    if (x.pull_timer <= now) {
      x.pull_timer = kNever;
      if (missing_from(*op, node)) {
        if (!x.closed) {  // not known closed: it may not even know that we wait
          queue_control(
              {.type = wire::Type::kAnnounce, .node = static_cast<uint16_t>(node), .op_seq = op->seq});
        }
        queue_request(op, node, false, !x.closed);
        x.pull_timer =
            now + (x.closed ? backoff(*op, node, &x.pull_backoff) : remind_delay(*op, &x.pull_backoff));
      } else if (const uint32_t block = x.row_wanted ? open_fate(*op, node) : UINT32_MAX;
                 block != UINT32_MAX) {
        queue_control({.type = wire::Type::kRequestRow,
                       .node = static_cast<uint16_t>(node),
                       .block = block / 8 * 8,
                       .op_seq = op->seq});
        x.pull_timer = now + backoff(*op, node, &x.pull_backoff);
      }
    }
    op->wake_at(std::min(x.push_timer, x.pull_timer));
  }
  op->wake_at(op->announce_again);
  op->wake_at(op->frozen ? kNever : std::min(op->local_wait, op->late_wait));
}

void LaneImpl::tick(Micros now) {
  run_peers(now);
  if (mismatch_at_ <= now) fail(now, Status::kMismatch, mismatch_text_, false);
  while (!tails_.empty() && tails_.front().when <= now) {
    const Repair& repair = tails_.front();
    if (Op* op = find(repair.op_seq)) {
      if (repairs_.push(repair))
        ++(repair.push ? op->nodes[repair.node].push_repairs : op->nodes[repair.node].pull_repairs);
    }
    tails_.pop();
  }
  for (uint32_t i = 0; i < kWindow + kPulseWindow && !failed; ++i) {
    Op* op = in_order(i);
    if (op != nullptr && op->timer <= now) run_timers(op, now);
  }
  for (Fifo<Pending>& pending : pending_) {
    if (failed || pending.empty() || now < pending.front().submitted + settings.rank_timeout) continue;
    char text[sizeof(Event::text)];
    char slow[kNameSize] = "memory of the pool";
    uint32_t holder = self;
    for (uint32_t node = 0; node < n; ++node) {
      if (peers[node].done < peers[holder].done) holder = node;
    }
    name_node(slow, sizeof slow, holder);
    std::snprintf(
        text, sizeof text,
        "RANK_TIMEOUT: op %u waited %lld ms to begin; %s still needs op %u. Look whether that process is "
        "alive, or raise exchange.rank_timeout",
        pending.front().submission.op_seq, static_cast<long long>((now - pending.front().submitted) / 1000),
        slow, peers[holder].done);
    fail(now, Status::kRankTimeout, text, true, std::span(&holder, 1));
  }
  settle(now);
}

Micros LaneImpl::next_timer() const {
  if (unfinished_ || settle_ || (new_debts_ && !failed)) return 0;
  Micros next = std::min(lag_ping_, mismatch_at_);
  if (!tails_.empty()) next = std::min(next, tails_.front().when);
  for (uint32_t seq = base_; seq < end_; ++seq) {
    const Op& op = ops_[seq % kWindow];
    if (op.open) next = std::min(next, op.timer);
  }
  for (uint32_t i = kWindow; i < kWindow + kPulseWindow; ++i) {
    if (ops_[i].open) next = std::min(next, ops_[i].timer);
  }
  for (const Fifo<Pending>& pending : pending_) {
    if (!pending.empty()) next = std::min(next, pending.front().submitted + settings.rank_timeout);
  }
  for (uint32_t node = 0; node < n; ++node) {
    if (node == self || peers[node].lost) continue;
    next = std::min({next, peers[node].next_ping, peers[node].flow.deadline()});
  }
  return next;
}

}  // namespace sluice::exchange
