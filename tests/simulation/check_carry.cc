#include "tests/simulation/check_carry.h"

#include <algorithm>

#include "transport/exchange/geometry.h"

namespace sluice::simulation {

ConservationChecker::ConservationChecker(const Options& options, const Gradients& gradients,
                                         Violations* violations)
    : Checker(violations),
      options_(options),
      gradients_(gradients),
      books_(gradients.tags().size()),
      ahead_(options.ranks(), std::vector<uint32_t>(options.program.size(), 0)) {
  for (size_t tag = 0; tag < books_.size(); ++tag) {
    const Gradients::Tag& of = gradients.tags()[tag];
    const size_t blocks = gradients.blocks(of.shape);
    const size_t contributions = of.ops.size() * options.ranks();
    books_[tag].place.assign(blocks * contributions, kNowhere);
    books_[tag].settled.assign(blocks * contributions, 0);
    books_[tag].unreadable.assign(blocks, false);
    for (uint32_t block = 0; block < blocks; ++block) {
      books_[tag].unreadable[block] = gradients.elements_of(of.shape, block) < of.codes.positions();
    }
  }
}

std::string ConservationChecker::what(uint32_t tag, uint32_t block, uint32_t contribution) const {
  const Gradients::Tag& of = gradients_.tags()[tag];
  return "block " + std::to_string(block) + " of rank " + std::to_string(contribution % options_.ranks()) +
         " in op " + std::to_string(of.ops[contribution / options_.ranks()]);
}

void ConservationChecker::put(uint32_t tag, uint32_t block, uint32_t contribution, uint8_t place,
                              uint32_t op) {
  Book& book = books_[tag];
  const size_t contributions = gradients_.tags()[tag].ops.size() * options_.ranks();
  const size_t index = block * contributions + contribution;
  if (book.place[index] != kNowhere) {
    violation(what(tag, block, contribution) + " is in " +
              (place == kApplied ? "op " + std::to_string(op) : std::string("what its rank owes")) +
              " and also in " +
              (book.place[index] == kApplied ? "op " + std::to_string(book.settled[index])
                                             : std::string("what its rank owes")));
  }
  book.place[index] = place;
  book.settled[index] = op;
}

void ConservationChecker::applied(uint32_t op, uint32_t block, const Recovered& value) {
  const uint32_t tag = gradients_.tag_of(op);
  if (tag == Gradients::kNoTag) return;
  for (const uint32_t contribution : value.in) {
    // What is owed may join an op before its own that its node has not frozen yet (section 7): within max_lag.
    if (gradients_.tags()[tag].ops[contribution / options_.ranks()] >= op + options_.max_lag) {
      violation("op " + std::to_string(op) + " has " + what(tag, block, contribution) +
                ", which comes later");
    }
    put(tag, block, contribution, kApplied, op);
  }
}

void ConservationChecker::on_taken(const Taken& taken) {
  const Gradients::Tag& of = gradients_.tags()[taken.tag];
  const size_t size = element_size(accumulator_type(of.shape.type));
  exchange::Geometry g;
  g.count = of.shape.count;
  g.block_elements = gradients_.block_elements(of.shape);
  g.nodes = options_.nodes();
  g.lanes = options_.lanes;
  for (uint32_t shard = 0; shard < g.nodes; ++shard) {
    for (uint32_t i = taken.lane; i < g.shard_blocks(shard); i += options_.lanes) {
      const auto block = static_cast<uint32_t>(g.shard_first(shard) + i);
      const std::byte* bytes = taken.owed.data() + static_cast<size_t>(block) * g.block_elements * size;
      const TagRecovered found = of.codes.read_owed(block, gradients_.elements_of(of.shape, block), bytes);
      if (!found.ok) {
        violation("rank " + std::to_string(taken.rank) + " owes under tag " + std::to_string(taken.tag) +
                  " what no contributions add up to: " + found.why);
        continue;
      }
      for (const uint32_t contribution : found.in) {
        if (contribution % options_.ranks() != taken.rank) {
          violation("rank " + std::to_string(taken.rank) + " owes " + what(taken.tag, block, contribution));
        }
        put(taken.tag, block, contribution, kCarried, 0);
        ++facts_.carried;
        if (taken.last && options_.pool_ops >= exchange::kWindow &&
            should_be_drained(taken.tag, contribution)) {
          violation("I6: " + what(taken.tag, block, contribution) +
                    " is still owed, though the network is well since before op " +
                    std::to_string(first_ok_));
        }
      }
    }
  }
}

// Has the tag had four more ops, of those that nobody had called when the rank called this one and the network was well?
// (A rank may be behind the others by as much as it likes within max_lag; its last ones have no op to go with.)
bool ConservationChecker::should_be_drained(uint32_t tag, uint32_t contribution) const {
  const Gradients::Tag& of = gradients_.tags()[tag];
  const uint32_t op = of.ops[contribution / options_.ranks()];
  const uint32_t after =
      std::max(first_ok_, ahead_[contribution % options_.ranks()][op] + 1 + 2 * options_.in_flight);
  if (first_ok_ == UINT32_MAX || op >= first_ok_) return false;
  return std::count_if(of.ops.begin(), of.ops.end(), [&](uint32_t later) { return later >= after; }) >= 4;
}

void ConservationChecker::on_submit(Micros /*now*/, uint32_t rank, uint32_t op, Status /*answer*/) {
  furthest_ = std::max(furthest_, op);
  ahead_[rank][op] = furthest_;
}

void ConservationChecker::on_heal(Micros /*now*/, uint32_t last_op_submitted) {
  first_ok_ = last_op_submitted + 1 + 2 * options_.in_flight;
}

void ConservationChecker::at_end(const RunEnd& end) {
  if (!end.finished || options_.ends_early()) return;
  std::vector<uint64_t> counted(options_.nodes(), 0), missing(options_.nodes(), 0);
  for (const exchange::Lane* lane : end.lanes) {
    counted[lane->settings().self] += lane->counters().blocks_discarded;
  }
  std::vector<uint32_t> node_of_rank;
  for (uint32_t node = 0; node < options_.nodes(); ++node) {
    node_of_rank.insert(node_of_rank.end(), options_.ranks_of_node[node], node);
  }
  std::vector<std::string> example(options_.nodes());
  facts_.elsewhere.assign(options_.ranks(), std::vector<uint32_t>(options_.program.size()));
  bool unreadable = false;
  for (uint32_t tag = 0; tag < books_.size(); ++tag) {
    const Gradients::Tag& of = gradients_.tags()[tag];
    const size_t contributions = of.ops.size() * options_.ranks();
    for (uint32_t block = 0; block < books_[tag].unreadable.size(); ++block) {
      if (books_[tag].unreadable[block]) {
        unreadable = true;
        continue;
      }
      for (uint32_t contribution = 0; contribution < contributions; ++contribution) {
        ++facts_.contributions;
        const size_t index = block * contributions + contribution;
        const uint8_t place = books_[tag].place[index];
        const uint32_t own = of.ops[contribution / options_.ranks()];
        const bool in_own_op = place == kApplied && books_[tag].settled[index] == own;
        if (place == kApplied) ++(in_own_op ? facts_.in_own_op : facts_.later);
        if (!in_own_op) ++facts_.elsewhere[contribution % options_.ranks()][own];
        if (place != kNowhere) continue;
        const uint32_t node = node_of_rank[contribution % options_.ranks()];
        if (missing[node]++ == 0) example[node] = what(tag, block, contribution);
      }
    }
  }
  for (uint32_t node = 0; node < options_.nodes(); ++node) {
    facts_.discarded += missing[node];
    // One block that is discarded may hold several contributions; blocks that cannot be read may have been discarded.
    if ((missing[node] > 0 && counted[node] == 0) || (counted[node] > missing[node] && !unreadable)) {
      violation("node " + std::to_string(node) + " has discarded " + std::to_string(counted[node]) +
                " blocks, " + std::to_string(missing[node]) + " are nowhere" +
                (missing[node] > 0 ? ", among them " + example[node] : ""));
    }
  }
}

}  // namespace sluice::simulation
