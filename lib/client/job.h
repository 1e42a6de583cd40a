// A rank's membership in a job: submits collective calls to the lanes and waits for their outcome.
//
// One lock guards rings and op table; it is held for the copying of a few cache lines. Whoever waits drains the rings
// for everybody, then sleeps on the shared futex word, which the lanes bump: so any number of threads may wait for
// different ops, and the one who happens to run takes in what came for all of them. Sleeps last at most kSlice; between
// them the socket is looked at, so that a dead daemon is noticed within that time by anybody who waits.
//
// Thread safety: every public member may be called by any thread, except that nothing may be called after or during
// leave(). Functions return a sluice_error and leave the text with fail().
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "base/ipc/layout.h"
#include "base/ipc/ring.h"
#include "lib/client/arena.h"
#include "lib/client/connection.h"
#include "lib/client/fork_guard.h"
#include "lib/client/ops.h"
#include "lib/client/sluice.h"

namespace sluice::client {

// One collective call. Offsets are of the arena.
struct Call {
  uint64_t count = 0;
  ElementType type = ElementType::kF32;
  ReduceKind kind = ReduceKind::kSum;
  uint64_t contribution = 0;
  uint64_t result = 0;
  OpClass op_class = OpClass::kExact;
  uint64_t tag = 0;
  uint32_t deadline_us = 0;
  float loss_scale = 0;  // 0: none
  // A slot of the arena that is freed when the op is resolved (and by submit itself when it fails).
  std::optional<uint64_t> temporary;
  // Takes both slots from the job's own reserve (64 bytes each) instead of `contribution` and `result`.
  bool small_slots = false;
};

// What names a tensor from step to step.
struct TagName {
  uint64_t tag = 0;
  ReduceKind kind = ReduceKind::kSum;
  ElementType type = ElementType::kF32;
  uint64_t count = 0;
  bool operator<(const TagName& other) const {
    return std::tie(tag, kind, type, count) < std::tie(other.tag, other.kind, other.type, other.count);
  }
};

class Job {
 public:
  // What the library keeps of the arena for itself, so that a barrier works when the caller has used up the rest.
  static constexpr uint64_t kReserve = ipc::kWindow * 2 * ArenaAllocator::kGranule;

  // `joined.arena_bytes` includes kReserve.
  Job(Joined joined, const JoinRequest& request);

  void* allocate(size_t bytes);  // nullptr with fail() done
  void release(void* buffer);

  int allreduce(const void* contribution, void* result, uint64_t count, int type, int kind,
                const sluice_op_options& options, sluice_op* handle);
  int broadcast(void* buffer, uint64_t bytes, uint32_t root, sluice_op* handle);
  int all_gather(const void* contribution, void* result, uint64_t bytes, sluice_op* handle);
  int barrier(int timeout_ms);
  int tag_retire(uint64_t tag, int kind, int type, uint64_t count, void* out, int timeout_ms);
  int take_correction(uint64_t tag, int kind, int type, uint64_t count, void* out, int timeout_ms);
  int flush(uint64_t tag, int kind, int type, uint64_t count, void* out, int timeout_ms);

  // Waits for the events in `wanted` (SLUICE_EVENT_*). A resolved op is forgotten. `report` may be nullptr.
  int wait(sluice_op handle, int timeout_ms, uint32_t wanted, sluice_report* report);

  int leave(int timeout_ms);
  int abort();
  void info(sluice_job_info* info) const;

  const ForkGuard& fork_guard() const { return fork_guard_; }

 private:
  int submit(const Call& call, sluice_op* handle);
  // Checks that [pointer, pointer + bytes) is 64-byte aligned memory of the arena; gives its offset.
  std::optional<uint64_t> offset_of(const void* pointer, uint64_t bytes) const;
  int check_size(const char* call, uint64_t count, uint64_t element_bytes) const;
  // A kTakeCarry to every lane, and the wait for all of them. `slot`: offset for the accumulators; nullopt: what is owed is
  // dropped. When the daemon does not answer in time, `slot` stays taken until it does.
  int take(uint32_t flags, const char* call, uint64_t tag, int kind, int type, uint64_t count, void* out,
           int timeout_ms);
  int take_carry(const char* call, const TagName& name, std::optional<uint64_t> slot, Micros end,
                 uint32_t flags = 0);
  int check_tag(const char* call, int kind, int type, uint64_t count, TagName* name) const;
  // Waits for an op whose outcome has no report. On time-out it is left to itself, and so are `slots`.
  int wait_plain(const char* call, const char* late, sluice_op handle, Micros end,
                 std::optional<uint64_t> slots);
  void drop_queued(Micros end);
  // A temporary slot of `bytes`, or nullopt with fail() done.
  std::optional<uint64_t> take_temporary(const char* call, uint64_t bytes);

  void drain();  // mutex_ held
  void lose(std::string_view why);
  void lose_locked(std::string_view why);  // mutex_ held
  // Looks at the socket if nobody has for `interval`; the job is lost when the daemon has closed it.
  void watch_socket(Micros interval);
  // Calls done() under the lock after each drain until it is true (SLUICE_SUCCESS) or the time is over.
  template <typename Done>
  int wait_until(Micros end, Done done);

  std::byte* arena_data() const { return joined_.arena.data(); }
  const ipc::ControlPage& control() const;
  ipc::SubmitPage& submit_page() const;

  const ForkGuard fork_guard_;
  Joined joined_;
  const JoinRequest request_;
  ArenaAllocator arena_;
  const uint64_t reserve_offset_;

  // A kTakeCarry under way.
  struct Take {
    uint32_t lanes = 0;  // bit per lane that has answered
    Status status = Status::kOk;
    std::optional<uint64_t> slot;
    bool detached = false;  // nobody waits for it any more
  };

  std::mutex mutex_;  // guards the eight below
  OpTable ops_;
  std::map<uint32_t, Take> takes_;  // by number
  uint32_t next_take_ = 0;
  uint64_t next_ = 0;  // number of the next op
  bool lost_ = false;
  std::string lost_text_;
  std::array<ipc::DescriptorWriter, ipc::kMaxLanes> writers_;
  std::array<ipc::CompletionReader, ipc::kMaxLanes> readers_;

  std::mutex socket_mutex_;  // guards receiving
  std::mutex send_mutex_;    // guards sending and aborted_
  bool aborted_ = false;
  std::atomic<Micros> socket_seen_{0};
};

}  // namespace sluice::client
