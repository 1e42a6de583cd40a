#include "tests/simulation/check_results.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "tests/simulation/hash.h"

namespace sluice::simulation {

ResultChecker::ResultChecker(const Options& options, const Gradients& gradients, const FrozenChecker* wire,
                             ConservationChecker* ledger, Violations* violations)
    : Checker(violations), options_(options), gradients_(gradients), wire_(wire), ledger_(ledger) {}

std::string ResultChecker::where(const Completion& completion) const {
  return "op " + std::to_string(completion.op) + " rank " + std::to_string(completion.rank) + " (" +
         status_name(completion.status) + ", " + std::to_string(completion.now) + " us)";
}

ResultChecker::Book& ResultChecker::book(uint32_t op) {
  Book& book = books_[op];
  if (book.ranks.empty()) {
    const OpShape& shape = options_.program[op];
    const uint32_t blocks = gradients_.blocks(shape);
    book.values.resize(shape.count * element_size(shape.type));
    book.have.resize(blocks);
    book.counted.resize(blocks);
    book.known.resize(blocks);
    if (gradients_.tag_of(op) != Gradients::kNoTag) book.in.resize(blocks);
    book.whole.resize(blocks);
    book.ranks.resize(options_.ranks());
  }
  return book;
}

void ResultChecker::on_result(const Completion& completion) {
  if (options_.mismatch && completion.op == options_.mismatch_op) {
    // A consistent op may have ended before the rank that differs has called it.
    if (!is_error(completion.status) && options_.program[completion.op].op_class == OpClass::kExact &&
        options_.mismatch_shape.op_class == OpClass::kExact && completion.blocks_expected > 0) {
      violation(where(completion) + ": the shapes of the ranks differ");
    }
    return;
  }
  if (completion.result.empty() && options_.program[completion.op].count > 0) return;  // a stray event
  Book& book = this->book(completion.op);
  Rank& rank = book.ranks[completion.rank];
  rank.result = true;
  rank.skipped = completion.blocks_skipped;
  rank.error = is_error(completion.status);
  if (rank.error) return;
  rank.result_hash = hash_bytes(completion.result);
  const OpShape& shape = options_.program[completion.op];
  const uint32_t blocks = gradients_.blocks(shape);
  if (completion.blocks_expected != blocks) {
    violation(where(completion) + ": expected " + std::to_string(completion.blocks_expected) + " blocks of " +
              std::to_string(blocks));
  }
  if (completion.status == Status::kIncomplete) {
    rank.missing = missing_blocks(completion);
  } else if (completion.status == Status::kApproximated) {
    rank.missing = filled_blocks(completion);
  } else if (completion.blocks_received != blocks) {
    violation(where(completion) + ": received " + std::to_string(completion.blocks_received) + " blocks of " +
              std::to_string(blocks));
  }
  for (uint32_t block = 0; block < blocks; ++block) {
    if (rank.missing.empty() || !rank.missing[block]) take_block(completion, block, &book);
  }
}

// The blocks that an INCOMPLETE result lacks, from its ranges; checked against its counts, and for zeros.
std::vector<bool> ResultChecker::missing_blocks(const Completion& completion) {
  const OpShape& shape = options_.program[completion.op];
  const uint32_t elements = gradients_.block_elements(shape);
  const uint32_t blocks = gradients_.blocks(shape);
  const size_t size = element_size(shape.type);
  const exchange::Geometry g = wire_->geometry(completion.op);
  std::vector<bool> missing(blocks, false);
  for (const auto& range : completion.ranges) {
    const uint64_t end = range.first + range.count;
    if (range.first % elements != 0 || range.count == 0 || end > shape.count ||
        (end % elements != 0 && end != shape.count)) {
      violation(where(completion) + ": missing range [" + std::to_string(range.first) + ", " +
                std::to_string(end) + ") is not made of blocks");
      continue;
    }
    for (uint64_t block = range.first / elements; block * elements < end; ++block) {
      missing[block] = true;
      uint32_t shard = 0;
      while (shard + 1 < g.nodes && g.shard_first(shard + 1) <= block) ++shard;
      const uint32_t owner = exchange::Geometry::owner(shard, completion.op, g.nodes);
      if (owner != range.owner) {
        violation(where(completion) + ": missing block " + std::to_string(block) + " is said to be node " +
                  std::to_string(range.owner) + "'s, it is node " + std::to_string(owner) + "'s");
      }
    }
  }
  const auto zero = [&](uint32_t block) {
    const auto bytes = completion.result.subspan(static_cast<size_t>(block) * elements * size,
                                                 gradients_.elements_of(shape, block) * size);
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
  };
  for (uint32_t block = 0; block < blocks; ++block) {
    if (missing[block] && !zero(block)) {
      violation(where(completion) + ": missing block " + std::to_string(block) + " is not zero");
    }
  }
  const auto listed = static_cast<uint32_t>(std::count(missing.begin(), missing.end(), true));
  const uint32_t holes = completion.blocks_expected - completion.blocks_received;
  if (completion.ranges_total == completion.ranges.size()) {
    if (listed != holes) {
      violation(where(completion) + ": lists " + std::to_string(listed) + " missing blocks, counts " +
                std::to_string(holes));
    }
  } else {
    // Not all ranges are listed: any block of zeros may be one of the rest.
    uint32_t zeros = 0;
    for (uint32_t block = 0; block < blocks; ++block) {
      if (!zero(block)) continue;
      ++zeros;
      missing[block] = true;
    }
    if (listed >= holes || zeros < holes) {
      violation(where(completion) + ": " + std::to_string(holes) + " missing blocks, " +
                std::to_string(listed) + " listed, " + std::to_string(zeros) + " zero");
    }
  }
  if (holes == 0) violation(where(completion) + ": nothing is missing");
  return missing;
}

// The blocks of an APPROXIMATED result that look filled: the own contribution, for `sum` times the number of ranks, or
// zero. All others are results like any other.
std::vector<bool> ResultChecker::filled_blocks(const Completion& completion) {
  const OpShape& shape = options_.program[completion.op];
  const uint32_t blocks = gradients_.blocks(shape);
  const uint32_t holes = completion.blocks_expected - completion.blocks_received;
  if (holes == 0 || completion.blocks_filled != holes) {
    violation(where(completion) + ": " + std::to_string(holes) + " holes, " +
              std::to_string(completion.blocks_filled) + " filled");
  }
  const size_t size = element_size(shape.type);
  const int64_t times = shape.kind == ReduceKind::kSum ? options_.ranks() : 1;
  std::vector<bool> filled(blocks, false);
  uint32_t like = 0;
  std::byte want[8];
  for (uint32_t block = 0; block < blocks; ++block) {
    const std::byte* at =
        completion.result.data() + static_cast<size_t>(block) * gradients_.block_elements(shape) * size;
    bool same = true;
    for (uint32_t i = 0; same && i < gradients_.elements_of(shape, block); ++i) {
      const int64_t own =
          options_.fill_own ? times * gradients_.value(shape, completion.op, block, i, completion.rank) : 0;
      encode(shape.type, own, 1, want);
      same = std::memcmp(want, at + i * size, size) == 0;
    }
    filled[block] = same;
    like += same ? 1 : 0;
  }
  if (like < holes) {
    violation(where(completion) + ": " + std::to_string(holes) + " holes, but only " + std::to_string(like) +
              " blocks follow the rule that fills them");
  }
  return filled;
}

void ResultChecker::take_block(const Completion& completion, uint32_t block, Book* book) {
  const OpShape& shape = options_.program[completion.op];
  const size_t size = element_size(shape.type);
  const size_t first = static_cast<size_t>(block) * gradients_.block_elements(shape) * size;
  const size_t bytes = gradients_.elements_of(shape, block) * size;
  if (book->have[block]) {
    if (std::memcmp(book->values.data() + first, completion.result.data() + first, bytes) != 0) {
      violation(where(completion) + ": block " + std::to_string(block) +
                " differs from what another rank got");
    }
    return;
  }
  std::memcpy(book->values.data() + first, completion.result.data() + first, bytes);
  book->have[block] = true;
  first_value(completion.op, block, book);
}

void ResultChecker::first_value(uint32_t op, uint32_t block, Book* book) {
  const OpShape& shape = options_.program[op];
  const size_t first =
      static_cast<size_t>(block) * gradients_.block_elements(shape) * element_size(shape.type);
  const Recovered found = gradients_.recover(shape, op, block, book->values.data() + first);
  const std::string what = "op " + std::to_string(op) + " block " + std::to_string(block);
  if (!found.ok) return violation(what + ": no set of ranks has this sum: " + found.why);
  book->counted[block] = found.ranks;
  book->known[block] = found.known;
  book->whole[block] = found.whole;
  if (gradients_.tag_of(op) != Gradients::kNoTag) {
    book->in[block] = found.in;
    if (found.whole) ledger_->applied(op, block, found);
    return;  // how many ranks are counted the wire tells: some bring debts only, of some blocks
  }
  const auto counted = static_cast<uint32_t>(found.ranks.count());
  if (shape.op_class == OpClass::kExact) {
    if ((found.ranks & found.known) != found.known) {
      violation(what + " of an exact op has " + std::to_string(counted) + " ranks of " +
                std::to_string(options_.ranks()));
    }
  } else if (found.whole && counted != 0) {
    const auto least = static_cast<uint32_t>(std::ceil(options_.min_contribution * options_.ranks()));
    if (counted < least) {
      violation(what + " has " + std::to_string(counted) + " ranks, below " + std::to_string(least) +
                " it must be skipped");
    }
  }
}

void ResultChecker::on_resolved(const Completion& completion) {
  if (options_.mismatch && completion.op == options_.mismatch_op) return;
  Book& book = this->book(completion.op);
  Rank& rank = book.ranks[completion.rank];
  rank.fates_known =
      !is_error(completion.resolved_status) && completion.resolved_status != Status::kApproximated;
  rank.uncounted = completion.blocks_uncounted;
  if (rank.result && !rank.error && hash_bytes(completion.result) != rank.result_hash) {
    violation(where(completion) + ": the result slot was written after RESULT");
  }
  if (++book.resolved == options_.ranks()) finish(completion.op, &book);
}

void ResultChecker::compare_with_wire(uint32_t op, uint32_t block, const Book& book) {
  const FrozenChecker::Verdict* verdict = wire_->verdict(op, block);
  if (verdict == nullptr || !book.have[block] || !book.whole[block]) return;
  if (gradients_.tag_of(op) != Gradients::kNoTag) return compare_debts_with_wire(op, block, book, *verdict);
  const RankSet& counted = book.counted[block];
  const std::string what = "op " + std::to_string(op) + " block " + std::to_string(block);
  if (verdict->ranks != counted.count()) {
    violation(what + ": its PULL counts " + std::to_string(verdict->ranks) + " ranks, the value has " +
              std::to_string(counted.count()));
  }
  if (verdict->flags == wire::kFlagRow) return;
  if ((verdict->flags == wire::kFlagSkip) != counted.none()) violation(what + ": skip and value disagree");
  if (counted.none()) return;
  uint32_t first = 0;
  for (uint32_t node = 0; node < options_.nodes(); ++node) {
    bool in = false;
    for (uint32_t i = 0; i < options_.ranks_of_node[node]; ++i) in = in || counted[first + i];
    first += options_.ranks_of_node[node];
    const auto& list = verdict->not_counted;
    const bool out = std::find(list.begin(), list.end(), node) != list.end();
    if (in == out) {
      violation(what + ": node " + std::to_string(node) + (in ? " is in the value" : " is not in the value") +
                ", its verdict says otherwise");
    }
  }
}

// With carry-over a node is counted also for what it owes only, which may be nothing in this block.
void ResultChecker::compare_debts_with_wire(uint32_t op, uint32_t block, const Book& book,
                                            const FrozenChecker::Verdict& verdict) {
  const std::string what = "op " + std::to_string(op) + " block " + std::to_string(block);
  RankSet ranks;
  for (const uint32_t contribution : book.in[block]) ranks[contribution % options_.ranks()] = true;
  if ((verdict.flags & wire::kFlagSkip) != 0) {
    if (ranks.any()) violation(what + " is skipped and has a value");
    return;
  }
  const auto least = static_cast<uint32_t>(std::ceil(options_.min_contribution * options_.ranks()));
  if (verdict.ranks < least || verdict.ranks < ranks.count()) {
    violation(what + ": its PULL counts " + std::to_string(verdict.ranks) + " ranks, the value has " +
              std::to_string(ranks.count()) + ", the least is " + std::to_string(least));
  }
  uint32_t first = 0;
  for (uint32_t node = 0; node < options_.nodes(); ++node) {
    bool in = false;
    for (uint32_t i = 0; i < options_.ranks_of_node[node]; ++i) in = in || ranks[first + i];
    first += options_.ranks_of_node[node];
    const auto& list = verdict.not_counted;
    if (in && std::find(list.begin(), list.end(), node) != list.end()) {
      violation(what + ": node " + std::to_string(node) + " is in the value, its verdict says otherwise");
    }
  }
}

void ResultChecker::finish(uint32_t op, Book* book) {
  const OpShape& shape = options_.program[op];
  const uint32_t blocks = gradients_.blocks(shape);
  const bool carries = gradients_.tag_of(op) != Gradients::kNoTag;
  for (uint32_t block = 0; carries && block < blocks; ++block) {
    // Everybody had given up waiting for it: what its owner published counts all the same.
    const FrozenChecker::Verdict* verdict = wire_->verdict(op, block);
    if (book->have[block] || verdict == nullptr || (verdict->flags & wire::kFlagSkip) != 0) continue;
    const Recovered found = gradients_.recover(shape, op, block, verdict->value.data());
    if (!found.ok)
      violation("op " + std::to_string(op) + " block " + std::to_string(block) + " as sent: " + found.why);
    if (found.whole) ledger_->applied(op, block, found);
  }
  // Of a node's ranks, the same ones are in every block that counts the node (on each lane: it freezes on its own).
  std::vector<RankSet> frozen(static_cast<size_t>(options_.nodes()) * options_.lanes);
  const exchange::Geometry g = wire_->geometry(op);
  uint32_t shard = 0;
  for (uint32_t block = 0; block < blocks; ++block) {
    while (shard + 1 < g.nodes && g.shard_first(shard + 1) <= block) ++shard;
    const auto lane = static_cast<uint32_t>((block - g.shard_first(shard)) % options_.lanes);
    compare_with_wire(op, block, *book);
    if (!book->have[block] || !book->whole[block]) continue;
    ++shares_.blocks;
    shares_.pairs += options_.ranks();
    shares_.uncounted += options_.ranks() - book->counted[block].count();
    if (book->counted[block].none()) ++shares_.skipped;
    uint32_t first = 0;
    for (uint32_t node = 0; node < options_.nodes(); ++node) {
      RankSet mine;
      for (uint32_t i = 0; i < options_.ranks_of_node[node]; ++i)
        mine[first + i] = book->counted[block][first + i];
      first += options_.ranks_of_node[node];
      if (mine.none()) continue;
      RankSet& before = frozen[node * options_.lanes + lane];
      if (before.any() && before != mine) {
        violation("op " + std::to_string(op) + " block " + std::to_string(block) + ": node " +
                  std::to_string(node) + " has other ranks in it than in the block before");
      }
      before = mine;
    }
  }
  for (uint32_t r = 0; r < book->ranks.size(); ++r) {
    const Rank& rank = book->ranks[r];
    if (rank.error) continue;
    // A contribution that is nowhere in its own op may have been queued; then its blocks are counted where it went.
    // (So on each lane of its own.)
    bool queued = carries && options_.lanes == 1;
    for (uint32_t block = 0; queued && block < blocks; ++block) {
      queued = !(book->have[block] && book->counted[block][r]);
    }
    uint32_t skipped = 0, uncounted = 0, unknown = 0;
    for (uint32_t block = 0; block < blocks; ++block) {
      const bool missing = !rank.missing.empty() && rank.missing[block];
      if (!book->have[block] || !book->known[block][r]) {
        ++unknown;
        continue;
      }
      // (With carry-over a value may be of debts only.)
      const bool skip =
          book->whole[block] && book->counted[block].none() && (!carries || book->in[block].empty());
      if (!missing && carries && skip) ++unknown;  // or counted nodes that owed nothing in this block
      if (!book->counted[block][r]) ++uncounted;
      if (!missing && !carries && skip) ++skipped;
      if (missing && skip) ++unknown;  // zero either way, where not all ranges were listed
      if (!book->whole[block]) ++unknown;
    }
    const std::string what = "op " + std::to_string(op) + " rank " + std::to_string(r);
    if (rank.skipped < skipped || rank.skipped > skipped + unknown) {
      violation(what + " reports " + std::to_string(rank.skipped) + " skipped blocks, there are " +
                std::to_string(skipped));
    }
    if (rank.fates_known && !queued && !(carries && options_.lanes > 1) &&
        (rank.uncounted < uncounted || rank.uncounted > uncounted + unknown)) {
      violation(what + " reports " + std::to_string(rank.uncounted) + " uncounted blocks, there are " +
                std::to_string(uncounted));
    }
  }
  book->values = {};
  book->counted = {};
  book->in = {};
  book->known = {};
  book->ranks[0].missing = {};
}

void ResultChecker::at_end(const RunEnd& end) {
  for (auto& [op, book] : books_) {
    if (book.resolved < options_.ranks() && end.finished && !options_.ends_early()) {
      violation("op " + std::to_string(op) + " is not resolved on all ranks");
    }
  }
}

EventChecker::EventChecker(const Options& options, Violations* violations)
    : Checker(violations), options_(options), states_(options.program.size() * options.ranks(), 0) {}

void EventChecker::on_submit(Micros now, uint32_t rank, uint32_t op, Status answer) {
  if (answer != Status::kOk) {
    violation("op " + std::to_string(op) + " of rank " + std::to_string(rank) + " was refused at " +
              std::to_string(now) + " us: " + status_name(answer));
  }
  state(rank, op) |= kSubmitted;
}

void EventChecker::on_result(const Completion& c) {
  const std::string what = "op " + std::to_string(c.op) + " rank " + std::to_string(c.rank);
  uint8_t& state = this->state(c.rank, c.op);
  if ((state & kSubmitted) == 0) violation(what + ": RESULT of an op that was not submitted");
  if ((state & kResult) != 0) violation(what + ": two RESULTs");
  state |= kResult;
  ++results_;
  const OpClass op_class = options_.shape_for(c.rank, c.op).op_class;
  bool allowed = c.status == Status::kOk ||
                 (c.status == Status::kIncomplete && op_class == OpClass::kConsistent) ||
                 (c.status == Status::kApproximated && op_class == OpClass::kBestEffort);
  if (options_.crash) allowed = allowed || c.status == Status::kPeerLost || c.status == Status::kAborted;
  if (options_.abort) allowed = allowed || c.status == Status::kAborted;
  if (options_.mismatch) allowed = allowed || c.status == Status::kMismatch || c.status == Status::kAborted;
  if (!allowed) {
    violation(what + ": " + status_name(c.status) + " at " + std::to_string(c.now) + " us: " + c.text);
  }
  if (is_error(c.status) && c.text.empty())
    violation(what + ": " + status_name(c.status) + " without a text");
  if (is_error(c.status)) state |= kError;
}

void EventChecker::on_resolved(const Completion& c) {
  const std::string what = "op " + std::to_string(c.op) + " rank " + std::to_string(c.rank);
  uint8_t& state = this->state(c.rank, c.op);
  if ((state & kResult) == 0) violation(what + ": RESOLVED before RESULT");
  if ((state & kResolved) != 0) violation(what + ": two RESOLVEDs");
  if (c.status == Status::kIncomplete && !is_error(c.resolved_status) &&
      c.resolved_status != Status::kIncomplete && c.resolved_status != Status::kDiverged) {
    violation(what + ": INCOMPLETE, then RESOLVED as " + status_name(c.resolved_status));
  }
  if (!c.contribution_intact) violation(what + ": somebody has written to the contribution");
  state |= kResolved;
}

void EventChecker::on_released(uint32_t rank, uint32_t op, bool untouched) {
  if (!untouched) {
    violation("op " + std::to_string(op) + " rank " + std::to_string(rank) +
              ": a slot was written to after RESOLVED");
  }
}

void EventChecker::at_end(const RunEnd& end) {
  if (!end.finished) return;
  uint32_t first = 0;
  for (uint32_t node = 0; node < options_.nodes(); ++node) {
    const bool live = std::find(end.live_nodes.begin(), end.live_nodes.end(), node) != end.live_nodes.end();
    for (uint32_t i = 0; i < options_.ranks_of_node[node]; ++i, ++first) {
      if (!live) continue;
      for (uint32_t op = 0; op < options_.program.size(); ++op) {
        if ((state(first, op) & ~kError) == (kSubmitted | kResult | kResolved)) continue;
        violation("op " + std::to_string(op) + " rank " + std::to_string(first) +
                  ": not all of submit, RESULT, RESOLVED");
      }
    }
  }
}

void TimeChecker::on_result(const Completion& c) {
  constexpr Micros kAllowance = 5'000;
  const Micros took = c.now - c.submitted - c.paused;
  const OpShape& shape = options_.shape_for(c.rank, c.op);
  const bool exact = shape.op_class == OpClass::kExact;
  const Micros given = shape.deadline != 0 ? shape.deadline
                       : exact             ? options_.op_timeout
                                           : options_.hard_deadline;
  const uint32_t patience = shape.op_class == OpClass::kConsistent ? options_.pull_patience : 0;
  Micros bound = exact ? c.lag + given : c.waited + given * (1 + patience);
  // While a size class warms up its ops end as `exact` ones; such an op has no holes.
  const bool has_holes = c.status == Status::kIncomplete || c.status == Status::kApproximated;
  if (options_.adaptive && !has_holes) bound = std::max(bound, c.lag + options_.op_timeout);
  const std::string what =
      "op " + std::to_string(c.op) + " rank " + std::to_string(c.rank) + " (" + status_name(c.status) + ")";
  if (took > bound + kAllowance) {
    violation(what + ": RESULT after " + std::to_string(took) + " us, " + std::to_string(took - bound) +
              " above its bound (lag " + std::to_string(c.lag) + ", with quorum " + std::to_string(c.waited) +
              ")");
  }
  if (c.waited > options_.rank_timeout + c.paused + kAllowance) {
    violation(what + ": waited " + std::to_string(c.waited) + " us to begin, above rank_timeout");
  }
  if (c.negative_wait || c.waited > took + c.paused) {
    violation(what + ": waited " + std::to_string(c.waited) + " us to begin of " + std::to_string(took) +
              " us");
  }
}

void TimeChecker::at_end(const RunEnd& end) {
  if (!end.finished) violation("stalled at " + std::to_string(end.now) + " us: " + end.stuck);
}

void HealChecker::on_heal(Micros /*now*/, uint32_t last_op_submitted) {
  last_before_ = last_op_submitted;
  // A round is what a rank has in flight at a time.
  first_ok_ = last_op_submitted + 1 + 2 * options_.in_flight;
}

void HealChecker::on_result(const Completion& c) {
  // An owner whose pool is full cannot take part in an op: the others may find it incomplete, well network or not.
  if (options_.pool_ops < exchange::kWindow) return;
  if (c.op >= first_ok_ && c.status != Status::kOk && c.status != Status::kCorrected &&
      !options_.ends_early()) {
    violation("op " + std::to_string(c.op) + " rank " + std::to_string(c.rank) + " is " +
              status_name(c.status) + " though the network is well since op " + std::to_string(last_before_));
  }
}

FailureChecker::FailureChecker(const Options& options, Violations* violations)
    : Checker(violations), options_(options), first_(options.ranks(), kNever) {}

void FailureChecker::on_submit(Micros now, uint32_t rank, uint32_t op, Status /*answer*/) {
  if (options_.mismatch && op == options_.mismatch_op) first_[rank] = std::min(first_[rank], now);
}

void FailureChecker::on_result(const Completion& c) {
  if (!is_error(c.status)) return;
  ++errors_;
  last_error_ = c.now;
  if (options_.crash && c.status == Status::kPeerLost &&
      c.text.find("node " + std::to_string(options_.crash_node) + " ") == std::string::npos) {
    violation("op " + std::to_string(c.op) + " rank " + std::to_string(c.rank) + " does not name node " +
              std::to_string(options_.crash_node) + ": " + c.text);
  }
  if (options_.mismatch && c.status == Status::kMismatch) {
    // "both sides printed": "1000 elements, tag 00000000000000ff"
    const auto said = [&](const OpShape& shape) {
      char words[64];
      std::snprintf(words, sizeof words, "%s, %llu elements, tag %016llx", element_type_name(shape.type),
                    static_cast<unsigned long long>(shape.count), static_cast<unsigned long long>(shape.tag));
      return c.text.find(words) != std::string::npos;
    };
    both_sides_ =
        both_sides_ || (said(options_.program[options_.mismatch_op]) && said(options_.mismatch_shape));
    if (c.text.rfind("MISMATCH: ", 0) != 0 ||
        c.text.find("op " + std::to_string(options_.mismatch_op) + " ") == std::string::npos) {
      if (c.text.find("op " + std::to_string(options_.mismatch_op) + ":") == std::string::npos) {
        violation("op " + std::to_string(c.op) + " rank " + std::to_string(c.rank) + " does not name op " +
                  std::to_string(options_.mismatch_op) + ": " + c.text);
      }
    }
    last_text_ = c.text;
  }
}

void FailureChecker::at_end(const RunEnd& end) {
  if (!options_.ends_early()) return;
  constexpr Micros kAllowance = 1'000'000;
  const Micros lost_after = std::max(options_.peer_timeout, 20 * options_.peer_interval);
  Micros known = options_.crash_at + lost_after;  // by then somebody knows, and tells the others
  if (options_.abort) known = options_.abort_at;
  if (options_.mismatch) {
    known = 0;
    for (const Micros first : first_) known = std::max(known, first == kNever ? 0 : first);
  }
  // An op that a trainer calls after the end of its job fails at once: only what was open counts, roughly.
  const Micros program =
      static_cast<Micros>(options_.program.size()) * (2 * options_.compute + options_.late_max);
  Micros paused = 0;
  for (const auto& pause : options_.plan.pauses) paused += pause.end - pause.start;
  if (errors_ > 0 && last_error_ > known + kAllowance + paused + program) {
    violation("the last error came at " + std::to_string(last_error_) + " us, it was due by " +
              std::to_string(known));
  }
  uint64_t failed = 0;
  for (const exchange::Lane* lane : end.lanes) failed += lane->failed() ? 1 : 0;
  if (errors_ > 0 && end.finished && failed != end.lanes.size()) {
    violation(std::to_string(failed) + " of " + std::to_string(end.lanes.size()) +
              " lanes know that the job has ended");
  }
  // (Who reduces nothing may be done before it hears of another.)
  const bool empty =
      options_.mismatch && options_.program[options_.mismatch_op].count + options_.mismatch_shape.count == 0;
  // The words of the other side may be lost, or come before an op is admitted here, or to another lane.
  const auto& f = options_.plan.everywhere;
  const bool calm = f.loss + f.corrupt + f.truncate + f.reorder + f.tail_probability == 0 &&
                    options_.plan.rules.empty() && options_.plan.pauses.empty() &&
                    options_.pool_ops >= exchange::kWindow && options_.lanes == 1;
  if (options_.mismatch && !empty && calm && errors_ > 0 && !both_sides_)
    violation("nobody prints both sides: " + last_text_);
  if (options_.mismatch && !empty && errors_ == 0 && end.finished)
    violation("nobody noticed that the shapes differ");
}

void PoolChecker::at_end(const RunEnd& end) {
  if (!end.finished) return;
  for (const exchange::Lane* lane : end.lanes) {
    if (lane->failed()) continue;
    if (!lane->idle() || !lane->drained() || lane->counters().open_ops != 0 ||
        lane->counters().pool_used_bytes != 0) {
      violation("node " + std::to_string(lane->settings().self) + " lane " +
                std::to_string(lane->settings().lane) + (lane->idle() ? "" : " is not idle,") +
                (lane->drained() ? "" : " is not drained,") + " has " +
                std::to_string(lane->counters().open_ops) + " ops open and " +
                std::to_string(lane->counters().pool_used_bytes) + " bytes in use");
    }
  }
}

}  // namespace sluice::simulation
