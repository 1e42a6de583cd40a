// Checkers of what trainers get.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "tests/simulation/check_carry.h"
#include "tests/simulation/check_wire.h"
#include "tests/simulation/checker.h"

namespace sluice::simulation {

// I1 and I2: results of one op are equal on all ranks, block by block; every block is the exact sum (or mean) of a set
// of ranks: all of them in `exact`, at least min_contribution in `consistent`, else it is zero and skipped. The set is
// read out of the values and must agree with the verdict on the wire and with what the completions report.
class ResultChecker : public Checker {
 public:
  ResultChecker(const Options& options, const Gradients& gradients, const FrozenChecker* wire,
                ConservationChecker* ledger, Violations* violations);
  const char* name() const override { return "I1 I2 results"; }
  void on_result(const Completion& completion) override;
  void on_resolved(const Completion& completion) override;
  void at_end(const RunEnd& end) override;

  struct Shares {  // of (rank, block) pairs and of blocks, over the ops that are finished
    uint64_t pairs = 0, uncounted = 0, blocks = 0, skipped = 0;
  };
  const Shares& shares() const { return shares_; }

 private:
  struct Rank {
    bool result = false, error = false;
    bool fates_known = false;  // RESOLVED, and not by an error
    uint64_t result_hash = 0;
    uint32_t skipped = 0, uncounted = 0;
    std::vector<bool> missing;  // blocks; empty: none
  };
  struct Book {
    std::vector<std::byte> values;  // what the first rank got
    std::vector<bool> have;         // blocks of `values`
    std::vector<RankSet> counted, known;
    std::vector<std::vector<uint32_t>> in;  // carry-over: by block, all contributions of the tag
    std::vector<bool> whole;
    std::vector<Rank> ranks;
    uint32_t resolved = 0;
  };
  Book& book(uint32_t op);
  void take_block(const Completion& completion, uint32_t block, Book* book);
  std::vector<bool> missing_blocks(const Completion& completion);
  std::vector<bool> filled_blocks(const Completion& completion);
  void compare_debts_with_wire(uint32_t op, uint32_t block, const Book& book,
                               const FrozenChecker::Verdict& verdict);
  void first_value(uint32_t op, uint32_t block, Book* book);
  void finish(uint32_t op, Book* book);
  void compare_with_wire(uint32_t op, uint32_t block, const Book& book);
  std::string where(const Completion& completion) const;

  const Options& options_;
  const Gradients& gradients_;
  const FrozenChecker* wire_;
  ConservationChecker* ledger_;
  std::map<uint32_t, Book> books_;
  Shares shares_;
};

// Each op of each rank has exactly one RESULT and one RESOLVED, in this order, with a status that its class allows; the
// slots are left alone: the contribution always, both once they are the trainer's again.
class EventChecker : public Checker {
 public:
  EventChecker(const Options& options, Violations* violations);
  const char* name() const override { return "events"; }
  void on_submit(Micros now, uint32_t rank, uint32_t op, Status answer) override;
  void on_result(const Completion& completion) override;
  void on_resolved(const Completion& completion) override;
  void on_released(uint32_t rank, uint32_t op, bool untouched) override;
  void at_end(const RunEnd& end) override;

 private:
  enum : uint8_t { kSubmitted = 1, kResult = 2, kResolved = 4, kError = 8 };
  uint8_t& state(uint32_t rank, uint32_t op) { return states_[rank * options_.program.size() + op]; }
  const Options& options_;
  std::vector<uint8_t> states_;
  uint64_t results_ = 0;
};

// I4: each RESULT comes in time; and nothing waits for ever.
class TimeChecker : public Checker {
 public:
  TimeChecker(const Options& options, Violations* violations) : Checker(violations), options_(options) {}
  const char* name() const override { return "I4 time"; }
  void on_result(const Completion& completion) override;
  void at_end(const RunEnd& end) override;

 private:
  const Options& options_;
};

// I6: from the third round after the network has healed, every op is OK on every rank.
class HealChecker : public Checker {
 public:
  HealChecker(const Options& options, Violations* violations) : Checker(violations), options_(options) {}
  const char* name() const override { return "I6 healing"; }
  void on_heal(Micros now, uint32_t last_op_submitted) override;
  void on_result(const Completion& completion) override;

 private:
  const Options& options_;
  uint32_t last_before_ = 0, first_ok_ = UINT32_MAX;
};

// A job that loses a node, or whose ranks do not agree, ends: on every lane, in time, and with a text that names the node.
class FailureChecker : public Checker {
 public:
  FailureChecker(const Options& options, Violations* violations);
  const char* name() const override { return "failure"; }
  void on_submit(Micros now, uint32_t rank, uint32_t op, Status answer) override;
  void on_result(const Completion& completion) override;
  void at_end(const RunEnd& end) override;

 private:
  const Options& options_;
  std::vector<Micros> first_;  // when each rank called the op in question
  uint64_t errors_ = 0;
  Micros last_error_ = 0;
  bool both_sides_ = false;
  std::string last_text_;
};

// I5: at the end every slot and page is back on every lane.
class PoolChecker : public Checker {
 public:
  explicit PoolChecker(Violations* violations) : Checker(violations) {}
  const char* name() const override { return "I5 pools"; }
  void at_end(const RunEnd& end) override;
};

}  // namespace sluice::simulation
