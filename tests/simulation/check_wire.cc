#include "tests/simulation/check_wire.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/simulation/hash.h"

namespace sluice::simulation {

using wire::Type;

NonceChecker::NonceChecker(const Options& options, Violations* violations)
    : Checker(violations),
      lanes_(options.lanes),
      hash_(static_cast<size_t>(options.nodes()) * options.lanes) {}

void NonceChecker::on_sent(const Sent& sent) {
  if (sent.header.sender != sent.node || sent.header.lane != sent.lane) {
    violation("node " + std::to_string(sent.node) + " lane " + std::to_string(sent.lane) + " sends as node " +
              std::to_string(sent.header.sender) + " lane " + std::to_string(sent.header.lane));
    return;
  }
  auto& hashes = hash_[sent.node * lanes_ + sent.lane];
  const uint64_t counter = sent.header.counter;
  // Counters are used one after the other: a gap of millions would be a counter made up.
  if (counter == 0 || counter > hashes.size() + 1'000'000) {
    violation("node " + std::to_string(sent.node) + " sends counter " + std::to_string(counter) +
              " after at most " + std::to_string(hashes.size()));
    return;
  }
  if (counter >= hashes.size()) hashes.resize(counter + 1 + counter / 2, 0);
  if (hashes[counter] == 0) hashes[counter] = sent.hash;
  if (hashes[counter] != sent.hash) {
    violation("node " + std::to_string(sent.node) + " lane " + std::to_string(sent.lane) +
              " sealed two packets with " + "counter " + std::to_string(counter) + ", the second a " +
              wire::type_name(static_cast<Type>(sent.header.type)) + " of op " +
              std::to_string(sent.header.op_seq));
  }
}

FrozenChecker::FrozenChecker(const Options& options, const Gradients& gradients, Violations* violations)
    : Checker(violations), options_(options), gradients_(gradients) {}

exchange::Geometry FrozenChecker::geometry(uint32_t op) const {
  exchange::Geometry geometry;
  geometry.count = options_.program[op].count;
  geometry.block_elements = gradients_.block_elements(options_.program[op]);
  geometry.nodes = options_.nodes();
  geometry.lanes = options_.lanes;
  return geometry;
}

const FrozenChecker::Verdict* FrozenChecker::verdict(uint32_t op, uint32_t block) const {
  const auto book = books_.find(op);
  if (book == books_.end() || !book->second.pull[block].seen) return nullptr;
  return &book->second.pull[block];
}

void FrozenChecker::on_sent(const Sent& sent) {
  const auto type = static_cast<Type>(sent.header.type);
  if (type != Type::kPush && type != Type::kPull) return;
  const uint32_t op = sent.header.op_seq;
  if ((op & wire::kDaemonOps) != 0) return;  // a pulse of the daemons
  const std::string what = std::string(wire::type_name(type)) + " of op " + std::to_string(op) + " shard " +
                           std::to_string(sent.header.shard) + " block " + std::to_string(sent.header.block) +
                           " from node " + std::to_string(sent.node);
  if (op >= options_.program.size()) return violation(what + ": there is no such op");
  if (options_.mismatch && op == options_.mismatch_op) return;  // the shape is in doubt
  const exchange::Geometry g = geometry(op);
  if (sent.header.shard >= g.nodes || sent.header.block >= g.shard_blocks(sent.header.shard)) {
    return violation(what + ": there is no such block");
  }
  const uint32_t owner = exchange::Geometry::owner(sent.header.shard, op, g.nodes);
  if (owner != (type == Type::kPush ? sent.to : sent.node)) {
    return violation(what + " to node " + std::to_string(sent.to) + ": node " + std::to_string(owner) +
                     " owns it");
  }
  if (sent.header.block % options_.lanes != sent.lane)
    return violation(what + ": is not of lane " + std::to_string(sent.lane));
  Book& book = books_[op];
  if (book.pull.empty()) {
    book.push.resize(g.blocks() * g.nodes, 0);
    book.held.resize(g.nodes, 0);
    book.pull.resize(g.blocks());
  }
  const uint64_t block = g.shard_first(sent.header.shard) + sent.header.block;
  const bool skip = type == Type::kPull && (sent.header.flags & wire::kFlagSkip) != 0;
  if (sent.header.elements != (skip ? 0 : g.elements_of(sent.header.shard, sent.header.block))) {
    return violation(what + ": has " + std::to_string(sent.header.elements) + " elements");
  }
  type == Type::kPush ? push(sent, block, &book) : pull(sent, block, &book);
}

void FrozenChecker::push(const Sent& sent, uint64_t block, Book* book) {
  const uint64_t hash = hash_bytes(sent.payload) | 1;
  uint64_t& before = book->push[sent.node * book->pull.size() + block];
  const std::string what = "node " + std::to_string(sent.node) + " pushed block " + std::to_string(block) +
                           " of op " + std::to_string(sent.header.op_seq);
  if (before != 0 && before != hash) violation(what + " with other bytes than before");
  before = hash;
  uint16_t& held = book->held[sent.node];
  const uint16_t ranks = sent.header.ranks;
  // A node freezes once, on each lane on its own: lanes may differ in the local ranks they hold.
  if (options_.lanes == 1 && held != 0 && held != ranks)
    violation(what + " for another number of ranks than before");
  held = ranks;
  if (ranks == 0 || ranks > options_.ranks_of_node[sent.node]) {
    violation(what + " for " + std::to_string(ranks) + " ranks");
  }
}

void FrozenChecker::pull(const Sent& sent, uint64_t block, Book* book) {
  constexpr uint8_t kForms = wire::kFlagAllCounted | wire::kFlagSkip | wire::kFlagRow;
  const uint8_t flags = sent.header.flags & kForms;
  const uint64_t hash = hash_bytes(sent.payload, mix(flags, sent.header.ranks));
  Verdict& verdict = book->pull[block];
  const std::string what = "node " + std::to_string(sent.node) + " pulled block " + std::to_string(block) +
                           " of op " + std::to_string(sent.header.op_seq);
  if (verdict.seen) {
    if (verdict.hash != hash) violation(what + " with another value or verdict than before");
    return;
  }
  verdict.seen = true;
  verdict.hash = hash;
  verdict.flags = flags;
  verdict.ranks = sent.header.ranks;
  if ((flags & (flags - 1)) != 0) violation(what + " with more than one form of verdict");
  if (gradients_.tag_of(sent.header.op_seq) != Gradients::kNoTag)
    verdict.value.assign(sent.payload.begin(), sent.payload.end());
  if (flags != 0) return;
  const size_t values = sent.header.elements * element_size(options_.program[sent.header.op_seq].type);
  uint16_t count = 0;
  if (sent.payload.size() < values + sizeof count) return violation(what + " without a verdict");
  std::memcpy(&count, sent.payload.data() + values, sizeof count);
  if (count > wire::kMaxListedSenders || sent.payload.size() != values + sizeof count * (1 + count)) {
    return violation(what + " with a list of " + std::to_string(count) + " in " +
                     std::to_string(sent.payload.size()) + " bytes");
  }
  verdict.not_counted.resize(count);
  if (count > 0) {
    std::memcpy(verdict.not_counted.data(), sent.payload.data() + values + sizeof count,
                count * sizeof count);
  }
}

QuorumChecker::QuorumChecker(const Options& options, Violations* violations)
    : Checker(violations),
      options_(options),
      ranks_(options.program.size(), std::vector<uint32_t>(options.nodes(), 0)),
      pulling_(options.program.size(), std::vector<bool>(options.nodes(), false)) {
  for (uint32_t node = 0; node < options.nodes(); ++node) {
    node_of_rank_.insert(node_of_rank_.end(), options.ranks_of_node[node], node);
  }
}

void QuorumChecker::on_submit(Micros /*now*/, uint32_t rank, uint32_t op, Status /*answer*/) {
  ++ranks_[op][node_of_rank_[rank]];
}

void QuorumChecker::on_sent(const Sent& sent) {
  const uint32_t op = sent.header.op_seq;
  if (op >= ranks_.size()) return;
  // A node that owes something under the tag of an op contributes it without a call (protocol, section 7). What it holds
  // its PUSH tells, or its ANNOUNCE once it has frozen.
  bool frozen = static_cast<Type>(sent.header.type) == Type::kPush;
  if (wire::Announce body; static_cast<Type>(sent.header.type) == Type::kAnnounce)
    frozen = wire::read_payload(sent.payload, &body) && (body.flags & wire::kFrozen) != 0;
  if (frozen) ranks_[op][sent.node] = std::max<uint32_t>(ranks_[op][sent.node], sent.header.ranks);
  if (static_cast<Type>(sent.header.type) != Type::kPull || pulling_[op][sent.node]) return;
  pulling_[op][sent.node] = true;
  if (options_.mismatch && op == options_.mismatch_op) return;
  uint32_t nodes = 0, ranks = 0;
  for (const uint32_t of_node : ranks_[op]) {
    nodes += of_node > 0 ? 1 : 0;
    ranks += of_node;
  }
  // What the owner itself owes goes into its own shard unseen; the number that it counts tells of it.
  if (uint32_t& own = ranks_[op][sent.node]; options_.carry_over && sent.header.ranks > ranks) {
    const uint32_t more = std::min(sent.header.ranks - ranks, options_.ranks_of_node[sent.node] - own);
    nodes += own == 0 && more > 0 ? 1 : 0;
    ranks += more;
    own += more;
  }
  const bool exact = options_.program[op].op_class == OpClass::kExact;
  const uint32_t least_nodes = exact ? options_.nodes() : (options_.nodes() + 1) / 2;
  const uint32_t least_ranks =
      exact ? options_.ranks()
            : static_cast<uint32_t>(std::ceil(options_.min_contribution * options_.ranks()));
  if (!exact && nodes == options_.nodes()) return;  // "all in" closes as well, whatever the number of ranks
  if (nodes < least_nodes || ranks < least_ranks) {
    violation("node " + std::to_string(sent.node) + " closed op " + std::to_string(op) + " at " +
              std::to_string(sent.now) + " us, when " + std::to_string(ranks) + " ranks on " +
              std::to_string(nodes) + " nodes had called it");
  }
}

LagChecker::LagChecker(const Options& options, const Gradients& gradients, Violations* violations)
    : Checker(violations),
      options_(options),
      gradients_(gradients),
      resolved_(options.ranks(), std::vector<bool>(options.program.size(), false)),
      done_(options.ranks(), 0) {}

void LagChecker::on_result(const Completion& completion) {
  // A queued slot is RESOLVED by a later op, but has its fate (protocol, section 7).
  if (gradients_.tag_of(completion.op) != Gradients::kNoTag) on_resolved(completion);
}

void LagChecker::on_resolved(const Completion& completion) {
  resolved_[completion.rank][completion.op] = true;
  uint32_t& done = done_[completion.rank];
  while (done < options_.program.size() && resolved_[completion.rank][done]) ++done;
  slowest_ = *std::min_element(done_.begin(), done_.end());
}

void LagChecker::on_sent(const Sent& sent) {
  const auto type = static_cast<Type>(sent.header.type);
  if (type != Type::kAnnounce && type != Type::kPush) return;
  // Lanes admit each on its own, and what a trainer sees is the slowest of them; a job that has ended has no order.
  if (options_.lanes > 1 || options_.ends_early() || (sent.header.op_seq & wire::kDaemonOps) != 0) return;
  if (sent.header.op_seq >= slowest_ + options_.max_lag) {
    violation("node " + std::to_string(sent.node) + " sends " + wire::type_name(type) + " of op " +
              std::to_string(sent.header.op_seq) + " at " + std::to_string(sent.now) +
              " us, when somebody still needs op " + std::to_string(slowest_));
  }
}

DropChecker::DropChecker(const Options& options, Violations* violations)
    : Checker(violations),
      options_(options),
      seen_(static_cast<size_t>(options.nodes()) * options.lanes, std::vector<uint64_t>(kReasons, 0)),
      accepted_(seen_.size(), 0),
      taken_(seen_.size() * options.nodes()) {}

void DropChecker::on_delivered(const Delivered& delivered) {
  const size_t place = delivered.node * options_.lanes + delivered.lane;
  if (delivered.kind == Delivered::Kind::kOlderView && delivered.drop != wire::Drop::kEpoch) {
    violation("node " + std::to_string(delivered.node) + " met a datagram of an older view with '" +
              wire::drop_name(delivered.drop) + "'");
  }
  // Memory of a packet that was freed before it was sent shows in its tag.
  if (delivered.genuine && delivered.drop == wire::Drop::kTag) {
    wire::Header sealed;
    std::memcpy(&sealed, delivered.datagram.data(), sizeof sealed);
    violation("node " + std::to_string(delivered.node) + " cannot verify the " +
              wire::type_name(static_cast<Type>(sealed.type)) + " of op " + std::to_string(sealed.op_seq) +
              " with counter " + std::to_string(sealed.counter) + " that node " +
              std::to_string(delivered.from) + " has sealed");
  }
  if (delivered.kind == Delivered::Kind::kForged && delivered.drop == wire::Drop::kNone) {
    violation("node " + std::to_string(delivered.node) + " took a forged datagram");
  }
  if (delivered.drop == wire::Drop::kNone) {
    ++accepted_[place];
    wire::Header taken;
    if (delivered.genuine) {
      std::memcpy(&taken, delivered.datagram.data(), sizeof taken);
      auto& counters = taken_[place * options_.nodes() + delivered.from];
      if (counters.size() <= taken.counter) counters.resize(taken.counter + 1 + taken.counter / 2);
      // (Of two ranks of a node each takes a PULL once.)
      const bool shared =
          taken.type == static_cast<uint8_t>(Type::kPull) && options_.ranks_of_node[delivered.node] > 1;
      if (counters[taken.counter] && !shared) {
        violation("node " + std::to_string(delivered.node) + " took the same " +
                  wire::type_name(static_cast<Type>(taken.type)) + " of op " + std::to_string(taken.op_seq) +
                  " from node " + std::to_string(delivered.from) + " twice");
      }
      counters[taken.counter] = true;
    }
    wire::Header header;
    std::memcpy(&header, delivered.datagram.data(), std::min(sizeof header, delivered.datagram.size()));
    const auto type = static_cast<Type>(header.type);
    // A PULL is sealed once for all; a REQUEST for pushes, GONE and ABORT say nothing that would be false elsewhere.
    if (delivered.kind == Delivered::Kind::kMisrouted && type != Type::kPull && type != Type::kRequest &&
        type != Type::kGone && type != Type::kAbort) {
      violation("node " + std::to_string(delivered.node) + " took a " + wire::type_name(type) +
                " for another node from node " + std::to_string(delivered.from));
    }
    // (Another control packet may be one that was lost the first time.)
    if (delivered.kind == Delivered::Kind::kAgain &&
        (type == Type::kPush || type == Type::kPull || type == Type::kAnnounce)) {
      violation("node " + std::to_string(delivered.node) + " took an old " + wire::type_name(type) +
                " of op " + std::to_string(header.op_seq) + " from node " + std::to_string(delivered.from) +
                " after the end");
    }
    if (!delivered.genuine && options_.sealing != wire::Sealing::kNone) {
      violation("node " + std::to_string(delivered.node) + " took a datagram that nobody sent: type " +
                std::to_string(header.type) + " op " + std::to_string(header.op_seq) + " counter " +
                std::to_string(header.counter) + ", " + std::to_string(delivered.datagram.size()) + " bytes");
    }
    return;
  }
  const auto reason = static_cast<size_t>(delivered.drop);
  if (reason >= kReasons) return violation("drop without a reason: " + std::to_string(reason));
  ++seen_[place][reason];
}

void DropChecker::at_end(const RunEnd& end) {
  for (const exchange::Lane* lane : end.lanes) {
    const auto& settings = lane->settings();
    const size_t place = settings.self * options_.lanes + settings.lane;
    for (size_t reason = 1; reason < kReasons; ++reason) {
      const uint64_t counted = lane->counters().drops[reason];
      if (counted != seen_[place][reason]) {
        violation("node " + std::to_string(settings.self) + " counts " + std::to_string(counted) +
                  " drops '" + wire::drop_name(static_cast<wire::Drop>(reason)) + "', there were " +
                  std::to_string(seen_[place][reason]));
      }
    }
    const uint64_t received = lane->counters().packets_received;
    uint64_t dropped = 0;
    for (const uint64_t count : seen_[place]) dropped += count;
    if (received != accepted_[place] && received != accepted_[place] + dropped) {
      violation("node " + std::to_string(settings.self) + " counts " + std::to_string(received) +
                " packets received, it took " + std::to_string(accepted_[place]) + " and dropped " +
                std::to_string(dropped));
    }
  }
}

}  // namespace sluice::simulation
