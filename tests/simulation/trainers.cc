// The trainers of a cluster: when they call, what they hand over, and what comes back.
#include <algorithm>
#include <cstdio>

#include "base/assert.h"
#include "tests/simulation/cluster.h"
#include "tests/simulation/hash.h"

namespace sluice::simulation {

namespace {
constexpr size_t kReleasedKept = 128;  // slots that are looked at once more, much later
}  // namespace

// When the rank will call its next op: after its computation at the start of a step, else soon after the call before.
void Cluster::schedule_next_call(Rank* rank) {
  if (rank->next_op >= options_.program.size()) return;
  if (options_.step_waits && rank->next_op % options_.step_ops == 0 && rank->without_result > 0) {
    rank->ready = kNever;  // until the last result
    return;
  }
  // By what the call is and not by when it is made, so that a change of the protocol does not change the trainers.
  Prng luck(mix(options_.seed, static_cast<uint64_t>(rank->id) << 32 | rank->next_op));
  const double slow = options_.slowness.empty() ? 1 : options_.slowness[rank->id];
  const auto spread = static_cast<int64_t>(options_.compute_spread * 1000);
  Micros wait = 0;
  if (rank->next_op % options_.step_ops == 0) {
    wait = static_cast<Micros>(
               static_cast<double>(options_.compute * (1000 + luck.between(-spread, spread))) * slow) /
           1000;
  } else {
    wait = luck.between(0, 20);
  }
  if (!healed_ && luck.chance(options_.late_share)) {
    wait += luck.between(0, options_.late_max);
    ++facts_.late_submits;
  }
  for (const Options::Delay& delay : options_.delays) {
    if (delay.rank == rank->id && delay.op == rank->next_op) wait += delay.wait;
  }
  rank->ready = network_.now() + wait;
}

bool Cluster::submit_ready(Rank* rank) {
  bool any = false;
  Node& node = nodes_[rank->node];
  if (rank->without_resolved >= exchange::kWindow / 2) retire_single_ops(rank);
  while (rank->next_op < options_.program.size() && rank->ready <= network_.now() &&
         rank->without_result < options_.in_flight && rank->without_resolved < exchange::kWindow) {
    const uint32_t op = rank->next_op;
    const OpShape& shape = options_.shape_for(rank->id, op);
    if (const uint32_t tag = gradients_.tag_of(op); shape.retire && tag != Gradients::kNoTag) {
      rank->retiring = !flushed(rank, op, tag);
      if (rank->retiring) return any;
    }
    Call& call = rank->calls[op];
    const size_t bytes = shape.count * element_size(shape.type);
    call.contribution.resize(bytes);
    call.result.assign(bytes, std::byte{0xA5});
    gradients_.fill(shape, op, rank->id, call.contribution.data());
    call.contribution_hash = hash_bytes(call.contribution);
    call.submitted = network_.now();
    call.paused_before = node.paused;
    call.completion.op = op;
    call.completion.rank = rank->id;
    call.completion.node = rank->node;
    call.completion.submitted = call.submitted;

    exchange::Submission submission;
    submission.op_seq = op;
    submission.local_rank = rank->local;
    submission.count = shape.count;
    submission.tag = shape.tag;
    submission.kind = shape.kind;
    submission.type = shape.type;
    submission.op_class = shape.op_class;
    submission.deadline = shape.deadline;
    submission.loss_scale = shape.loss_scale;
    submission.scaled = shape.scaled;
    submission.contribution = call.contribution.data();
    submission.result = call.result.data();
    submission.cookie = mix(rank->id, op);
    if (verbose_)
      std::printf("%10lld rank %u calls op %u\n", static_cast<long long>(network_.now()), rank->id, op);
    Status answer = Status::kOk;
    for (const auto& lane : node.lanes) answer = std::max(answer, lane->submit(network_.now(), submission));
    for (const auto& checker : checkers_) checker->on_submit(network_.now(), rank->id, op, answer);
    ++rank->next_op;
    ++rank->without_result;
    ++rank->without_resolved;
    if (rank->next_op > furthest_) {
      furthest_ = rank->next_op;
      last_progress_ = network_.now();
    }
    schedule_next_call(rank);
    any = true;
  }
  return any;
}

// flush: each rank takes what it owes, and none goes on before all have.
bool Cluster::flushed(Rank* rank, uint32_t op, uint32_t tag) {
  if (rank->taken_before != op) {
    const uint64_t before = rank->taken[tag];
    if (!take_debts(rank, tag, false)) {
      if (rank->taken[tag] != before) nodes_[rank->node].wake = network_.now();
      return false;
    }
    rank->taken[tag] = 0;
    rank->taken_before = op;
    if (++flushed_[op] == ranks_.size()) {
      for (Node& node : nodes_) node.wake = network_.now();
    }
    last_progress_ = network_.now();
  }
  return flushed_[op] == ranks_.size() || nodes_[rank->node].lanes[0]->failed();
}

// tag_retire: what the rank owes under a tag goes to it. False: fates are open on some lane, ask again later.
bool Cluster::take_debts(Rank* rank, uint32_t tag, bool last) {
  const Gradients::Tag& of = gradients_.tags()[tag];
  exchange::Submission what;
  what.local_rank = rank->local;
  what.count = of.shape.count;
  what.tag = of.shape.tag;
  what.kind = of.shape.kind;
  what.type = of.shape.type;
  std::vector<std::byte> owed(of.shape.count * element_size(accumulator_type(of.shape.type)));
  bool all = true;
  for (uint32_t lane = 0; lane < options_.lanes; ++lane) {
    if ((rank->taken[tag] >> lane & 1) != 0) continue;
    auto& of_node = *nodes_[rank->node].lanes[lane];
    if (of_node.failed()) continue;
    if (!of_node.take_carry(network_.now(), what, owed.data())) {
      all = false;
      continue;
    }
    rank->taken[tag] |= uint64_t{1} << lane;
    Taken taken;
    taken.now = network_.now();
    taken.rank = rank->id;
    taken.lane = lane;
    taken.tag = tag;
    taken.last = last;
    taken.owed = owed;
    for (const auto& checker : checkers_) checker->on_taken(taken);
    note(hash_bytes(owed), static_cast<uint64_t>(rank->id) << 32 | tag);
  }
  return all;
}

// Slots that were queued for the next op of a tag which has none: a trainer with many of these retires their tags.
void Cluster::retire_single_ops(Rank* rank) {
  for (const auto& [op, call] : rank->calls) {
    const uint32_t tag = gradients_.tag_of(op);
    if (tag == Gradients::kNoTag || call.lanes_result != options_.lanes) continue;
    if (gradients_.tags()[tag].ops.size() == 1) take_debts(rank, tag, true);
  }
}

// At the end of its program a rank retires all its tags; queued slots are RESOLVED by that. True: it got something.
bool Cluster::retire_at_end(Rank* rank) {
  if (rank->next_op < options_.program.size() || rank->without_result > 0) return false;
  bool any = false;
  const uint64_t all = (uint64_t{1} << options_.lanes) - 1;
  for (uint32_t tag = 0; tag < rank->taken.size(); ++tag) {
    if (rank->taken[tag] == all) continue;
    const uint64_t before = rank->taken[tag];
    take_debts(rank, tag, true);
    any |= rank->taken[tag] != before;
  }
  return any;
}

bool Cluster::take_events(uint32_t index) {
  bool any = false;
  for (uint32_t lane = 0; lane < options_.lanes; ++lane) {
    exchange::Event event;
    while (nodes_[index].lanes[lane]->poll_event(&event)) {
      take_event(index, lane, event);
      any = true;
    }
  }
  return any;
}

void Cluster::take_event(uint32_t index, uint32_t lane, const exchange::Event& event) {
  Node& node = nodes_[index];
  const Micros now = network_.now();
  note(mix(now,
           static_cast<uint64_t>(event.op_seq) << 32 | index << 16 | event.local_rank << 8 | event.events),
       static_cast<uint64_t>(event.status) << 32 | event.blocks_received);
  last_progress_ = now;
  SLUICE_ASSERT(event.local_rank < node.ranks.size());
  Rank& rank = *node.ranks[event.local_rank];
  const auto found = rank.calls.find(event.op_seq);
  if (found == rank.calls.end() || event.cookie != mix(rank.id, event.op_seq)) {
    Completion stray;
    stray.op = event.op_seq;
    stray.rank = rank.id;
    stray.status = event.status;
    if (event.op_seq < options_.program.size()) {
      for (const auto& checker : checkers_) checker->on_result(stray);
    }
    return;
  }
  Call& call = found->second;
  Completion& c = call.completion;
  c.now = now;
  c.paused = node.paused - call.paused_before;
  c.result = call.result;
  if (verbose_) {
    std::printf("%10lld rank %u op %u lane %u:%s%s %s %s\n", static_cast<long long>(now), rank.id,
                event.op_seq, lane, (event.events & kEventResult) != 0 ? " RESULT" : "",
                (event.events & kEventResolved) != 0 ? " RESOLVED" : "", status_name(event.status),
                event.text);
  }
  if ((event.events & kEventResult) != 0) {
    if (event.text[0] != '\0' && event.status >= c.status) c.text = event.text;
    c.status = std::max(c.status, event.status);
    c.blocks_expected += event.blocks_expected;
    c.blocks_received += event.blocks_received;
    c.blocks_skipped += event.blocks_skipped;
    c.blocks_filled += event.blocks_filled;
    c.lag = std::max(c.lag, event.lag);
    c.waited = std::max(c.waited, event.lag + event.quorum);
    c.negative_wait |= event.lag < 0 || event.quorum < 0;
    c.ranges_total += event.ranges_total;
    c.ranges.insert(c.ranges.end(), event.range, event.range + event.ranges);
    facts_.blocks_repaired += event.blocks_repaired;
    if (++call.lanes_result == options_.lanes) {
      for (const auto& checker : checkers_) checker->on_result(c);
      --rank.without_result;
      if (rank.ready == kNever) schedule_next_call(&rank);
      ++facts_.results[static_cast<size_t>(c.status)];
      facts_.lag_max = std::max(facts_.lag_max, c.lag);
      if (c.lag > 1000) ++facts_.results_waited_lag;
    }
  }
  if ((event.events & kEventResolved) != 0) {
    c.blocks_uncounted += event.blocks_uncounted;
    c.resolved_status = std::max(c.resolved_status, event.status);
    if (++call.lanes_resolved == options_.lanes) {
      c.contribution_intact = hash_bytes(call.contribution) == call.contribution_hash;
      for (const auto& checker : checkers_) checker->on_resolved(c);
      --rank.without_resolved;
      release(rank.id, event.op_seq, &call);
      rank.calls.erase(found);
    }
  }
}

// The trainer uses its slots for something else at once; the lanes must neither read nor write them any more. (That
// nobody reads shows in the checker of frozen bytes.)
void Cluster::release(uint32_t rank, uint32_t op, Call* call) {
  Released released;
  released.rank = rank;
  released.op = op;
  released.contribution = std::move(call->contribution);
  released.result = std::move(call->result);
  std::fill(released.contribution.begin(), released.contribution.end(), std::byte{0xEE});
  std::fill(released.result.begin(), released.result.end(), std::byte{0xEE});
  released.hash = hash_bytes(released.contribution, hash_bytes(released.result));
  released_.push_back(std::move(released));
  look_at_released(kReleasedKept);
}

void Cluster::look_at_released(size_t keep) {
  while (released_.size() > keep) {
    const Released& oldest = released_.front();
    const bool untouched = hash_bytes(oldest.contribution, hash_bytes(oldest.result)) == oldest.hash;
    for (const auto& checker : checkers_) checker->on_released(oldest.rank, oldest.op, untouched);
    released_.pop_front();
  }
}

}  // namespace sluice::simulation
