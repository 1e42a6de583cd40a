// The open ops of a job and the merging of what the lanes say about them.
//
// One descriptor goes to every lane, and every lane answers for its stripe of the blocks: an op has had its RESULT when
// all lanes have said so, and likewise RESOLVED. Counts are added, times are the largest, the status is the worst.
// Ops live in kWindow slots by op_seq, as in the daemon (protocol, section 3): op k takes the slot of op k - 64, which
// must have been waited for. No locks, no system calls: the job holds its lock around every call.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ipc/layout.h"
#include "lib/client/sluice.h"

namespace sluice::client {

class OpTable {
 public:
  struct Op {
    bool open = false;
    uint32_t op_seq = 0;
    uint64_t tag = 0;
    // What the tensor is, with the tag: names what the daemon owes of it.
    uint64_t count = 0;
    ElementType type = ElementType::kF32;
    ReduceKind kind = ReduceKind::kSum;
    // Nobody waits for it any more (a barrier whose caller gave up): forgotten when it is resolved.
    bool detached = false;
    // A slot of the arena that the library took for this op; the job frees it once the op is resolved.
    std::optional<uint64_t> temporary;

    uint32_t lanes_result = 0;    // bit per lane
    uint32_t lanes_resolved = 0;  // likewise
    std::array<ipc::Completion, ipc::kMaxLanes> lane{};
    std::array<Status, ipc::kMaxLanes> status{};  // the worst that the lane has said
    bool lost = false;                            // the daemon went away first
    std::string text;                             // the first that is not empty
    std::vector<sluice_range> missing;            // at most what a report holds
    std::array<uint32_t, ipc::kMaxLanes> missing_total{};
  };

  explicit OpTable(uint32_t lanes);

  // Takes the slot of op number `sequence`. nullptr when the op of 64 calls ago still holds it.
  Op* open(uint64_t sequence, uint64_t tag);
  // The op with this handle, or nullptr when it was never made or has been forgotten.
  Op* find(sluice_op handle);
  void forget(Op* op);

  // A handle is never 0: op number + 1.
  static sluice_op handle_of(uint64_t sequence) { return sequence + 1; }

  // Takes in one completion of `lane`, with the report that belongs to it if the lane wrote one. False when the
  // completion is impossible (another lane's, unknown events, of an op that was never submitted): a broken daemon.
  bool apply(uint32_t lane, const ipc::Completion& completion, const ipc::Report* report);

  // Every open op that is not resolved ends with DAEMON_LOST and `text`.
  void fail_all(std::string_view text);

  uint32_t events(
      const Op& op) const;  // SLUICE_EVENT_RESULT | SLUICE_EVENT_RESOLVED, as far as all lanes say so
  Status status(const Op& op) const;
  void fill(const Op& op, sluice_report* report) const;  // all fields but `size`

  bool all_have_result() const;
  bool all_resolved() const;

  template <typename Function>
  void for_each_open(Function function) {
    for (Op& op : ops_) {
      if (op.open) function(op);
    }
  }

 private:
  const uint32_t lanes_;
  const uint32_t all_lanes_;  // bit per lane
  std::array<Op, ipc::kWindow> ops_;
  std::array<uint64_t, ipc::kWindow> sequence_{};
  uint64_t opened_ = 0;  // op numbers below it have been made
};

// The worse of two outcomes. Any error is worse than any result; among errors the cause is worse than its consequences
// (ABORTED, VIEW_CHANGED), so that a report says why and not only that an op ended.
Status worse(Status a, Status b);

}  // namespace sluice::client
