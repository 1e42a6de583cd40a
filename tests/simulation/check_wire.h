// Checkers of what is on the wire.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "tests/simulation/checker.h"
#include "transport/exchange/geometry.h"

namespace sluice::simulation {

// I8: under one key no counter seals two different packets.
class NonceChecker : public Checker {
 public:
  NonceChecker(const Options& options, Violations* violations);
  const char* name() const override { return "I8 nonces"; }
  void on_sent(const Sent& sent) override;

 private:
  uint32_t lanes_;
  std::vector<std::vector<uint64_t>> hash_;  // per (sender, lane): by counter
};

// I1, on the wire: what a node pushes for a block never changes, what an owner pulls for a block never changes, and
// only the owner pulls. Keeps the verdicts for the checker of results.
class FrozenChecker : public Checker {
 public:
  struct Verdict {
    bool seen = false;
    uint8_t flags = 0;  // wire::kFlagAllCounted, kFlagSkip, kFlagRow; none of them: the list holds
    uint16_t ranks = 0;
    uint64_t hash = 0;
    std::vector<uint16_t> not_counted;
    std::vector<std::byte> value;  // of an op that carries
  };

  FrozenChecker(const Options& options, const Gradients& gradients, Violations* violations);
  const char* name() const override { return "I1 frozen bytes"; }
  void on_sent(const Sent& sent) override;

  // The verdict that the owner has sent for a block of the tensor; null: none was sent.
  const Verdict* verdict(uint32_t op, uint32_t block) const;
  exchange::Geometry geometry(uint32_t op) const;

 private:
  struct Book {
    std::vector<uint64_t> push;  // hash per (node, block); 0: not seen
    std::vector<uint16_t> held;  // ranks per node; 0: not seen
    std::vector<Verdict> pull;   // per block
  };
  void push(const Sent& sent, uint64_t block, Book* book);
  void pull(const Sent& sent, uint64_t block, Book* book);

  const Options& options_;
  const Gradients& gradients_;
  std::map<uint32_t, Book> books_;
};

// Nobody closes for a minority (protocol, section 4, t_q): when an owner sends its first PULL of an op, half of the nodes
// have called it, with min_contribution of the ranks; all of them in an exact op.
class QuorumChecker : public Checker {
 public:
  QuorumChecker(const Options& options, Violations* violations);
  const char* name() const override { return "quorum"; }
  void on_submit(Micros now, uint32_t rank, uint32_t op, Status answer) override;
  void on_sent(const Sent& sent) override;

 private:
  const Options& options_;
  std::vector<uint32_t> node_of_rank_;
  std::vector<std::vector<uint32_t>>
      ranks_;  // by op and node: that have called it, or are in what the node pushes
  std::vector<std::vector<bool>> pulling_;  // owners that have sent a PULL
};

// No node runs ahead of the slowest by max_lag ops or more (protocol, section 3, Admission): it announces and pushes
// nothing of an op that it must not have admitted.
class LagChecker : public Checker {
 public:
  LagChecker(const Options& options, const Gradients& gradients, Violations* violations);
  const char* name() const override { return "lag"; }
  void on_result(const Completion& completion) override;
  void on_resolved(const Completion& completion) override;
  void on_sent(const Sent& sent) override;

 private:
  const Options& options_;
  const Gradients& gradients_;
  std::vector<std::vector<bool>> resolved_;  // by rank and op
  std::vector<uint32_t> done_;               // lowest op of each rank without RESOLVED
  uint32_t slowest_ = 0;
};

// I7: what was not sent by a member is dropped, no datagram is taken twice, and each drop has a reason that is counted.
class DropChecker : public Checker {
 public:
  DropChecker(const Options& options, Violations* violations);
  const char* name() const override { return "I7 drops"; }
  void on_delivered(const Delivered& delivered) override;
  void at_end(const RunEnd& end) override;

 private:
  static constexpr size_t kReasons = static_cast<size_t>(wire::Drop::kCount);
  const Options& options_;
  std::vector<std::vector<uint64_t>> seen_;  // per (node, lane): by reason
  std::vector<uint64_t> accepted_;
  std::vector<std::vector<bool>> taken_;  // per (node, from, lane): by counter
};

}  // namespace sluice::simulation
