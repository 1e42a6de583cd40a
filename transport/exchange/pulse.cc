// Pulses: every 50 ops the daemons exchange what they measured, in a small exact op of their own, and make a policy
// record of it (protocol, section 10; the arithmetic is policy.h).
#include <algorithm>
#include <cstring>

#include "transport/exchange/lane_impl.h"

namespace sluice::exchange {

// The newest record that is in force for op `seq`.
const Policy& LaneImpl::policy_for(uint32_t seq) const {
  for (size_t i = policies_.size(); i > 0; --i) {
    if (policies_[i - 1].number != 0 && policies_[i - 1].from <= seq) return policies_[i - 1];
  }
  return first_policy_;
}

Bounds LaneImpl::bounds() const {
  Bounds bounds;
  static_assert(std::size(Bounds{}.hard) == kSizeClasses);
  const Policy& policy = policy_for(peers[self].done);
  bounds.policy = policy.number;
  for (uint32_t c = 0; c < kSizeClasses; ++c) {
    bounds.hard[c] = policy.of_class[c].push + policy.of_class[c].pull;
    bounds.samples[c] = static_cast<uint32_t>(estimators_[c].samples());
  }
  return bounds;
}

// Keeps a record that is newer than all known ones.
bool LaneImpl::adopt(const Policy& policy) {
  if (policy.number <= policies_.back().number) return false;
  std::move(policies_.begin() + 1, policies_.end(), policies_.begin());
  policies_.back() = policy;
  return true;
}

// What holds for an op from the moment it is known: its policy. All nodes take the same record; its number is in every
// packet of the op.
void LaneImpl::set_policy(Op* op) {
  op->bounded = op->op_class != OpClass::kExact;
  op->incast = settings.incast;
  if (!settings.adaptive || is_pulse(op->seq)) return;
  const Policy& policy = policy_for(op->seq);
  op->policy = policy.number;
  op->exit_share = policy.exit_share;
  op->incast = policy.incast;
  op->bounded = false;  // until its size class is known, too
}

// P, Q and t_C, when the size class of the op is known: from the own submit or an ANNOUNCE (one shard does not tell).
void LaneImpl::set_bounds(Op* op, uint32_t size_class) {
  if (!settings.adaptive || is_pulse(op->seq) || op->class_known) return;
  op->class_known = true;
  op->size_class = std::min(size_class, kSizeClasses - 1);
  const auto known = std::find_if(policies_.begin(), policies_.end(),
                                  [&](const Policy& p) { return p.number == op->policy; });
  const Policy& policy = op->policy == 0 || known == policies_.end() ? first_policy_ : *known;
  const ClassPolicy& bounds = policy.of_class[op->size_class];
  if (op->op_class == OpClass::kExact || bounds.push == 0) return;
  op->bounded = true;
  op->push_budget = bounds.push;
  op->pull_budget = bounds.pull;
  op->complete = bounds.complete;
  if (op->quorum != 0) op->wake_at(op->quorum + op->push_budget);
}

// One more completion time of a size class. What was cut off is entered longer than it took (section 4).
void LaneImpl::measure(const Op& op, const Receiver& receiver, bool cut, Micros now) {
  if (is_pulse(op.seq) || op.op_class == OpClass::kExact || op.start == 0) return;
  const auto blocks = static_cast<int64_t>(op.geometry.stripe_blocks());
  if (blocks == 0) return;
  const Micros elapsed = now - std::max(op.start, receiver.admitted);
  Micros sample = elapsed;
  if (cut) {
    sample = receiver.received == 0
                 ? 2 * op.hard()
                 : std::max(elapsed * blocks / static_cast<int64_t>(receiver.received), elapsed * 3 / 2);
  }
  estimators_[op.size_class].add(sample);
  pulse_blocks_ += blocks;
  pulse_lost_ += std::min<int64_t>(blocks, receiver.uncounted + receiver.filled) +
                 (cut && receiver.filled == 0 ? blocks - static_cast<int64_t>(receiver.received) : 0);
}

// Pulse p begins when this node is through with op 50 (p + 1) and the window of pulses has room. True: one has begun.
bool LaneImpl::begin_pulse(Micros now) {
  if (!settings.adaptive || failed || peers[self].done < kPulseEvery * (pulses_begun_ + 1)) return false;
  if (pulses_begun_ >= pulse_base_ + kPulseWindow) return false;  // the last ones are still open somewhere
  const uint32_t seq = pulses_begun_ | wire::kDaemonOps;
  const size_t words = static_cast<size_t>(n) * kPulseWords;
  int64_t* contribution = pulse_words_.data() + 2 * words * (pulses_begun_ % kPulseWindow);
  int64_t* result = contribution + words;
  ++pulses_begun_;

  PulseNode mine;
  for (uint32_t c = 0; c < kSizeClasses; ++c) {
    mine.of_class[c] = {estimators_[c].samples(), estimators_[c].p95(), estimators_[c].complete()};
  }
  mine.blocks = pulse_blocks_;
  mine.lost = pulse_lost_;
  mine.highest = highest_announced_;
  mine.number = policies_.back().number;
  mine.from = policies_.back().from;
  mine.link = static_cast<int64_t>(std::min<uint64_t>(settings.link_bits_per_second, INT64_MAX));
  mine.calm = pulse_calm_ = pulse_lost_ * 10'000 < pulse_blocks_ ? pulse_calm_ + 1 : 0;
  pulse_blocks_ = pulse_lost_ = 0;
  std::fill(contribution, contribution + words, 0);
  encode_pulse(mine, std::span<int64_t, kPulseWords>(contribution + static_cast<size_t>(self) * kPulseWords,
                                                     kPulseWords));

  Pending pending;
  pending.submitted = now;
  pending.submission.op_seq = seq;
  pending.submission.count = words;
  pending.submission.type = ElementType::kI64;
  pending.submission.op_class = OpClass::kExact;
  pending.submission.deadline = std::max(settings.peer_timeout, 20 * settings.peer_interval);
  pending.submission.contribution = reinterpret_cast<const std::byte*>(contribution);
  pending.submission.result = reinterpret_cast<std::byte*>(result);
  if (!admit(now, pending)) {  // no page of the pool: this pulse fails here, and so everywhere
    pulse_skipped_[(pulses_begun_ - 1) % kPulseWindow] = true;
    settle_ = true;
  }
  return true;
}

// A pulse that failed changes nothing and nobody waits for it.
void LaneImpl::pulse_ended(Op* op, bool complete, Micros) {
  Receiver& receiver = op->receivers[0];
  receiver.state = Receiver::State::kDone;
  receiver.told = receiver.resolved = true;
  settle_ = true;
  const uint32_t number = op->seq & ~wire::kDaemonOps;
  if (!complete) return;
  const size_t words = static_cast<size_t>(n) * kPulseWords;
  const int64_t* result = pulse_words_.data() + 2 * words * (number % kPulseWindow) + words;
  std::vector<PulseNode> nodes(n);  // every 50 ops; small
  int64_t newest = 0;
  for (uint32_t node = 0; node < n; ++node) {
    nodes[node] = decode_pulse(
        std::span<const int64_t, kPulseWords>(result + static_cast<size_t>(node) * kPulseWords, kPulseWords));
    newest = std::max(newest, nodes[node].number);
  }
  // A pure function of the result needs the record that was the newest then; who lacks it asks (PING want_policy).
  if (policies_.back().number != newest) return;
  PolicyLimits limits;
  limits.nodes = n;
  limits.warmup_ops = settings.warmup_ops;
  limits.h_factor = settings.h_factor;
  limits.hard_deadline_min = settings.hard_deadline_min;
  limits.hard_deadline_max = settings.hard_deadline;
  adopt(next_policy(number + 1, policies_.back(), nodes, limits));
}

void LaneImpl::settle_pulses() {
  Peer& own = peers[self];
  while (own.pulse_done < pulses_begun_) {
    const Op* op = find(own.pulse_done | wire::kDaemonOps);
    bool& skipped = pulse_skipped_[own.pulse_done % kPulseWindow];
    if (!skipped && (op == nullptr || op->receivers[0].state != Receiver::State::kDone)) break;
    skipped = false;
    ++own.pulse_done;
  }
  uint32_t base = UINT32_MAX;
  for (const Peer& peer : peers) base = std::min(base, peer.pulse_done);
  while (pulse_base_ < base) {
    if (Op* op = find(pulse_base_ | wire::kDaemonOps)) release(op);
    ++pulse_base_;
  }
}

}  // namespace sluice::exchange
