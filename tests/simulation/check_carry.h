// I3, conservation: with carry-over each contribution, block by block, ends in exactly one place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/simulation/checker.h"

namespace sluice::simulation {

// applied + carried + discarded + undecided = submitted, per tag. Applied: named by the value of a block of an op, as a
// rank got it or as its owner sent it. Carried: in what a rank took at the end, or at a tag_retire. Discarded: what is
// in neither, which a node must have counted. Undecided: only in a job that ends early. Also I6: what was owed when the
// network healed is drained by the fourth op of the tag after it and after the rank called it.
class ConservationChecker : public Checker {
 public:
  ConservationChecker(const Options& options, const Gradients& gradients, Violations* violations);
  const char* name() const override { return "I3 conservation"; }
  void on_taken(const Taken& taken) override;
  void on_submit(Micros now, uint32_t rank, uint32_t op, Status answer) override;
  void on_heal(Micros now, uint32_t last_op_submitted) override;
  void at_end(const RunEnd& end) override;

  // The value of a block of an op, once.
  void applied(uint32_t op, uint32_t block, const Recovered& value);

  struct Facts {
    uint64_t contributions = 0;  // blocks of one rank in one op
    uint64_t in_own_op = 0, later = 0, carried = 0, discarded = 0;
    std::vector<std::vector<uint32_t>>
        elsewhere;  // by rank and op: blocks of its own that are not in that op
  };
  const Facts& facts() const { return facts_; }

 private:
  enum : uint8_t { kNowhere, kApplied, kCarried };
  struct Book {
    std::vector<uint8_t> place;     // by block and contribution
    std::vector<uint32_t> settled;  // the op that applied it
    std::vector<bool> unreadable;   // blocks too short to name everybody
  };
  std::string what(uint32_t tag, uint32_t block, uint32_t contribution) const;
  bool should_be_drained(uint32_t tag, uint32_t contribution) const;
  void put(uint32_t tag, uint32_t block, uint32_t contribution, uint8_t place, uint32_t op);

  const Options& options_;
  const Gradients& gradients_;
  std::vector<Book> books_;  // by tag
  std::vector<std::vector<uint32_t>>
      ahead_;  // by rank and op: the furthest op that anybody had called by then
  uint32_t furthest_ = 0;
  uint32_t first_ok_ = UINT32_MAX;
  Facts facts_;
};

}  // namespace sluice::simulation
