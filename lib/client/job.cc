#include "lib/client/job.h"

#include <poll.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/clock.h"
#include "base/ipc/doorbell.h"
#include "lib/client/error_text.h"

namespace sluice::client {
namespace {

// Longest sleep between two looks at the socket: how long the death of a daemon can go unnoticed by one who waits.
constexpr Micros kSlice = 100 * kMicrosPerMilli;
// How often one who polls with a time-out of 0 looks at it.
constexpr Micros kPollInterval = 10 * kMicrosPerMilli;
// Spinning before sleeping: about what two system calls cost, so it can at most double the cost of a short wait.
constexpr int64_t kSpinNanos = 5000;
constexpr int kAbortTimeoutMs = 1000;
constexpr Micros kTakeSlack = 500 * kMicrosPerMilli;    // for the daemon to say that it gave up
constexpr Micros kFlushLeast = 1000 * kMicrosPerMilli;  // for the sum, when taking used up the time
constexpr Micros kFatesUsually =
    100 * kMicrosPerMilli;           // after its result the fate of an op is known by then
constexpr int kByeTimeoutMs = 1000;  // at least, for the daemon's answer to LEAVE
// The top bit of op_seq is the daemons' own (protocol, section 3).
constexpr uint64_t kMaxOps = uint64_t{1} << 31;

std::string number(uint64_t value) { return std::to_string(value); }

}  // namespace

Job::Job(Joined joined, const JoinRequest& request)
    : joined_(std::move(joined)),
      request_(request),
      arena_(joined_.arena_bytes - kReserve),
      reserve_offset_(arena_.size()),
      ops_(joined_.lanes) {
  for (uint32_t lane = 0; lane < joined_.lanes; ++lane) {
    writers_[lane] = ipc::descriptor_writer(submit_page(), control(), lane);
    readers_[lane] = ipc::completion_reader(submit_page(), control(), lane);
  }
}

const ipc::ControlPage& Job::control() const {
  return *reinterpret_cast<const ipc::ControlPage*>(joined_.control.data());
}
ipc::SubmitPage& Job::submit_page() const {
  return *reinterpret_cast<ipc::SubmitPage*>(joined_.submit.data());
}

// --- Buffers ---------------------------------------------------------------------------------------------------------

void* Job::allocate(size_t bytes) {
  const auto offset = arena_.allocate(bytes);
  if (!offset) {
    fail(SLUICE_ERROR_NO_MEMORY, "sluice_alloc: " + number(bytes) + " bytes do not fit into the arena of " +
                                     number(arena_.size()) + " bytes (" + number(arena_.free_bytes()) +
                                     " free, " + number(arena_.largest_free()) +
                                     " in one piece); join with arena_bytes of at least " +
                                     number(arena_.size() + bytes) + " or free buffers first");
    return nullptr;
  }
  return arena_data() + *offset;
}

void Job::release(void* buffer) {
  const auto* at = static_cast<const std::byte*>(buffer);
  if (at < arena_data() || at >= arena_data() + arena_.size() ||
      !arena_.release(static_cast<uint64_t>(at - arena_data()))) {
    fail(SLUICE_ERROR_INVALID, "sluice_free: not a buffer of sluice_alloc of this job, or freed already");
  }
}

std::optional<uint64_t> Job::offset_of(const void* pointer, uint64_t bytes) const {
  if (bytes == 0) return 0;  // never looked at
  const auto from = reinterpret_cast<uintptr_t>(pointer);
  const auto base = reinterpret_cast<uintptr_t>(arena_data());
  if (from < base || from % ArenaAllocator::kGranule != 0) return std::nullopt;
  const uint64_t offset = from - base;
  if (offset > arena_.size() || bytes > arena_.size() - offset) return std::nullopt;
  return offset;
}

std::optional<uint64_t> Job::take_temporary(const char* call, uint64_t bytes) {
  auto offset = arena_.allocate(bytes);
  if (!offset) {
    fail(SLUICE_ERROR_NO_MEMORY,
         std::string(call) + ": needs " + number(bytes) + " bytes of the arena for the time of the call; " +
             number(arena_.largest_free()) + " are free in one piece of " + number(arena_.size()) +
             "; join with a larger arena_bytes or free buffers first");
  }
  return offset;
}

int Job::check_size(const char* call, uint64_t count, uint64_t element_bytes) const {
  if (count <= request_.max_op_bytes / element_bytes) return SLUICE_SUCCESS;
  return fail(SLUICE_ERROR_NO_MEMORY,
              std::string(call) + ": " + number(count) + " elements of " + number(element_bytes) +
                  " bytes are more than max_op_bytes = " + number(request_.max_op_bytes) +
                  " of this job; join with a larger max_op_bytes on every rank");
}

// --- Submitting ------------------------------------------------------------------------------------------------------

int Job::submit(const Call& call, sluice_op* handle) {
  int error = SLUICE_SUCCESS;
  {
    const std::lock_guard lock(mutex_);
    OpTable::Op* op = nullptr;
    if (!lost_) {
      drain();  // may forget what nobody waits for
      if (!lost_ && next_ < kMaxOps) op = ops_.open(next_, call.tag);
    }
    if (lost_) {
      error = fail(SLUICE_ERROR_DAEMON_LOST, lost_text_);
    } else if (next_ >= kMaxOps) {
      error =
          fail(SLUICE_ERROR_FULL, "this job has made 2^31 calls, which is all it can; leave and join again");
    } else if (op == nullptr) {
      error = fail(SLUICE_ERROR_FULL, number(ipc::kWindow) + " calls are open; wait for op " +
                                          number(OpTable::handle_of(next_ - ipc::kWindow)) + " first");
    } else {
      ipc::Descriptor d;
      d.request = static_cast<uint32_t>(ipc::Request::kAllreduce);
      d.op_seq = op->op_seq;
      d.count = call.count;
      d.tag = call.tag;
      d.contribution = call.contribution;
      d.result = call.result;
      if (call.small_slots) {
        d.contribution = reserve_offset_ + (next_ % ipc::kWindow) * 2 * ArenaAllocator::kGranule;
        d.result = d.contribution + ArenaAllocator::kGranule;
        std::memset(arena_data() + d.contribution, 0, ArenaAllocator::kGranule);
      }
      d.deadline_us = call.deadline_us;
      d.kind = static_cast<uint8_t>(call.kind);
      d.element_type = static_cast<uint8_t>(call.type);
      d.wire_type = d.element_type;
      d.op_class = static_cast<uint8_t>(call.op_class);
      if (call.loss_scale != 0) {
        d.loss_scale = call.loss_scale;
        d.flags |= ipc::kFlagScaled;
      }
      d.cookie = OpTable::handle_of(next_);
      op->temporary = call.temporary;
      op->count = call.count;
      op->type = call.type;
      op->kind = call.kind;
      for (uint32_t lane = 0; lane < joined_.lanes; ++lane) {
        // The window keeps at most 64 descriptors in a ring of 256: a full one is a daemon that moved its index back.
        if (writers_[lane].push(d) != ipc::RingState::kOk) {
          lose_locked("the submit ring of lane " + number(lane) + " is broken");
          break;
        }
      }
      *handle = OpTable::handle_of(next_);
      ++next_;
    }
  }
  if (error != SLUICE_SUCCESS) {
    if (call.temporary) arena_.release(*call.temporary);
    return error;
  }
  for (uint32_t lane = 0; lane < joined_.lanes; ++lane) {
    ipc::ring_lane(control(), lane, joined_.event_fds[lane].get());
  }
  return SLUICE_SUCCESS;
}

// --- Waiting ---------------------------------------------------------------------------------------------------------

void Job::drain() {
  for (uint32_t lane = 0; lane < joined_.lanes && !lost_; ++lane) {
    ipc::Completion completion;
    ipc::RingState state = ipc::RingState::kEmpty;
    while ((state = readers_[lane].peek(&completion)) == ipc::RingState::kOk) {
      if (completion.events == ipc::kEventCarry) {
        readers_[lane].advance();
        const auto found = takes_.find(completion.op_seq);
        if (found == takes_.end() || completion.lane != lane) {
          lose_locked("lane " + number(lane) + " answered a request for carry-over that nobody made");
          return;
        }
        Take& take = found->second;
        take.lanes |= 1U << lane;
        take.status = worse(take.status, static_cast<Status>(completion.status));
        if (take.detached && take.lanes == (1U << joined_.lanes) - 1) {
          if (take.slot) arena_.release(*take.slot);
          takes_.erase(found);
        }
        continue;
      }
      ipc::Report report;
      const bool reported = ipc::read_report(control(), lane, completion.op_seq, &report);
      readers_[lane].advance();
      if (!ops_.apply(lane, completion, reported ? &report : nullptr)) {
        lose_locked("lane " + number(lane) + " reported an impossible completion of op " +
                    number(completion.op_seq));
        return;
      }
    }
    if (state == ipc::RingState::kBroken) {
      lose_locked("the completion ring of lane " + number(lane) + " is broken");
      return;
    }
  }
  ops_.for_each_open([this](OpTable::Op& op) {
    if ((ops_.events(op) & SLUICE_EVENT_RESOLVED) == 0 || op.lost) return;
    if (op.temporary) arena_.release(*op.temporary);
    op.temporary.reset();
    if (op.detached) ops_.forget(&op);
  });
}

void Job::lose_locked(std::string_view why) {
  if (lost_) return;
  lost_ = true;
  lost_text_ = "rank " + number(request_.rank) + " of job '" + request_.job +
               "' lost its daemon: " + std::string(why) + "; leave, then open and join again";
  ops_.fail_all(lost_text_);
}

void Job::lose(std::string_view why) {
  {
    const std::lock_guard lock(mutex_);
    drain();  // what it finished before it went is finished
    lose_locked(why);
  }
  // Others sleep on the word that nobody bumps any more. Waking needs no write access to it.
  ::syscall(SYS_futex, &control().wake.value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void Job::watch_socket(Micros interval) {
  const Micros now = monotonic_micros();
  if (now - socket_seen_.load(std::memory_order_relaxed) < interval) return;
  const std::unique_lock guard(socket_mutex_, std::try_to_lock);
  if (!guard.owns_lock()) return;
  socket_seen_.store(now, std::memory_order_relaxed);
  pollfd entry{joined_.channel.fd(), POLLIN, 0};
  if (::poll(&entry, 1, 0) <= 0) return;
  auto received = joined_.channel.receive(0);
  if (received.ok()) {
    if (received->message.type != static_cast<uint32_t>(ipc::MessageType::kBye)) return;
    lose(received->message.text[0] != '\0' ? std::string("it said goodbye: ") + received->message.text
                                           : std::string("it was shut down"));
    return;
  }
  if (received.error().code == ETIMEDOUT) return;
  const auto& gone = control().gone;
  if (gone.value.load(std::memory_order_acquire) == 0) {
    lose("it died or was killed");
    return;
  }
  const size_t length = ::strnlen(gone.text, sizeof(gone.text));
  lose("it let this process go: " + std::string(gone.text, length));
}

template <typename Done>
int Job::wait_until(Micros end, Done done) {
  for (;;) {
    const uint32_t seen = ipc::wake_seen(control());
    {
      const std::lock_guard lock(mutex_);
      drain();
      if (done()) return SLUICE_SUCCESS;
    }
    const Micros left = end - monotonic_micros();
    watch_socket(left <= 0 ? kPollInterval : kSlice);
    if (left <= 0) {
      const std::lock_guard lock(mutex_);
      return done() ? SLUICE_SUCCESS : SLUICE_ERROR_TIMEOUT;
    }
    const int64_t spin_end = monotonic_nanos() + kSpinNanos;
    while (ipc::wake_seen(control()) == seen && monotonic_nanos() < spin_end) ipc::cpu_relax();
    if (ipc::wake_seen(control()) == seen) {
      ipc::wait_for_wake(control(), submit_page(), seen, std::min(left, kSlice));
    }
  }
}

int Job::wait(sluice_op handle, int timeout_ms, uint32_t wanted, sluice_report* report) {
  bool known = true;
  const int outcome = wait_until(Timer(timeout_ms).end(), [&] {
    OpTable::Op* op = ops_.find(handle);
    known = op != nullptr && !op->detached;
    if (!known) return true;
    const uint32_t events = ops_.events(*op);
    if ((events & wanted) != wanted) return false;
    if (report != nullptr) ops_.fill(*op, report);
    if ((events & SLUICE_EVENT_RESOLVED) != 0) ops_.forget(op);
    return true;
  });
  if (!known) {
    return fail(SLUICE_ERROR_INVALID,
                "op " + number(handle) + " is not open: it was waited for already, or is of another job");
  }
  if (outcome == SLUICE_ERROR_TIMEOUT) {
    fail(outcome, "op " + number(handle) + " was not done within " +
                      number(static_cast<uint64_t>(timeout_ms)) +
                      " ms; it goes on and can be waited for again");
  }
  return outcome;
}

// --- Barrier, leave, abort, facts -------------------------------------------------------------------------------------

int Job::barrier(int timeout_ms) {
  Call call;
  call.count = 1;
  call.type = ElementType::kI32;
  call.small_slots = true;
  sluice_op handle = 0;
  if (const int error = submit(call, &handle); error != SLUICE_SUCCESS) return error;
  return wait_plain("sluice_barrier", "not every rank came", handle, Timer(timeout_ms).end(), std::nullopt);
}

int Job::wait_plain(const char* call, const char* late, sluice_op handle, Micros end,
                    std::optional<uint64_t> slots) {
  Status status = Status::kOk;
  std::string text;
  const Micros begin = monotonic_micros();
  const int outcome = wait_until(end, [&] {
    OpTable::Op* op = ops_.find(handle);
    if ((ops_.events(*op) & SLUICE_EVENT_RESOLVED) == 0) return false;
    status = ops_.status(*op);
    text = op->text;
    ops_.forget(op);
    return true;
  });
  if (outcome == SLUICE_ERROR_TIMEOUT) {
    const std::lock_guard lock(mutex_);
    if (OpTable::Op* op = ops_.find(handle)) {
      op->detached = true;
      op->temporary = slots;
    }
    return fail(outcome, std::string(call) + ": " + late + " within " +
                             number(static_cast<uint64_t>(std::max<Micros>(0, end - begin) / 1000)) + " ms");
  }
  if (status == Status::kDaemonLost) return fail(SLUICE_ERROR_DAEMON_LOST, std::string(call) + ": " + text);
  if (is_error(status)) {
    return fail(SLUICE_ERROR_FAILED,
                std::string(call) + ": " + status_name(status) + (text.empty() ? "" : ": " + text));
  }
  return SLUICE_SUCCESS;
}

// --- Carry-over -------------------------------------------------------------------------------------------------------

int Job::check_tag(const char* call, int kind, int type, uint64_t count, TagName* name) const {
  if (type < 0 || type >= kElementTypes) {
    return fail(SLUICE_ERROR_INVALID,
                std::string(call) + ": there is no element type " + std::to_string(type));
  }
  if (kind != SLUICE_SUM && kind != SLUICE_MEAN) {
    return fail(SLUICE_ERROR_INVALID, std::string(call) + ": there is no kind " + std::to_string(kind));
  }
  name->type = static_cast<ElementType>(type);
  name->kind = static_cast<ReduceKind>(kind);
  name->count = count;
  if (name->kind == ReduceKind::kMean && !is_float(name->type)) {
    return fail(SLUICE_ERROR_INVALID, std::string(call) + ": SLUICE_MEAN is for floating-point types");
  }
  return check_size(call, count, element_size(name->type));
}

int Job::take_carry(const char* call, const TagName& name, std::optional<uint64_t> slot, Micros end,
                    uint32_t flags) {
  uint32_t key = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!lost_) drain();
    int error = SLUICE_SUCCESS;
    if (lost_) {
      error = fail(SLUICE_ERROR_DAEMON_LOST, lost_text_);
    } else if (takes_.size() >= ipc::kMaxTakes) {
      error =
          fail(SLUICE_ERROR_FULL, std::string(call) + ": " + number(ipc::kMaxTakes) + " such calls are open");
    }
    if (error != SLUICE_SUCCESS) {
      if (slot) arena_.release(*slot);
      return error;
    }
    key = next_take_++;
    takes_[key].slot = slot;
    ipc::Descriptor d;
    d.request = static_cast<uint32_t>(ipc::Request::kTakeCarry);
    d.op_seq = key;
    d.cookie = key;
    d.count = name.count;
    d.tag = name.tag;
    d.kind = static_cast<uint8_t>(name.kind);
    d.element_type = d.wire_type = static_cast<uint8_t>(name.type);
    d.op_class = static_cast<uint8_t>(OpClass::kConsistent);
    d.result = slot.value_or(0);
    d.flags = slot ? flags : ipc::kFlagDrop;
    d.deadline_us = static_cast<uint32_t>(std::clamp<Micros>(end - monotonic_micros(), 0, UINT32_MAX));
    for (uint32_t lane = 0; lane < joined_.lanes; ++lane) {
      if (writers_[lane].push(d) == ipc::RingState::kOk) continue;
      lose_locked("the submit ring of lane " + number(lane) + " is broken");
      break;
    }
  }
  for (uint32_t lane = 0; lane < joined_.lanes; ++lane)
    ipc::ring_lane(control(), lane, joined_.event_fds[lane].get());
  Status status = Status::kOk;
  bool lost = false;
  // The daemon gives up at `end` and says so a little later.
  const int outcome = wait_until(end + kTakeSlack, [&] {
    lost = lost_;
    const Take& take = takes_[key];
    status = take.status;
    return lost || take.lanes == (1U << joined_.lanes) - 1;
  });
  const std::lock_guard lock(mutex_);
  if (outcome != SLUICE_SUCCESS && !lost) {
    takes_[key].detached = true;
    return fail(SLUICE_ERROR_TIMEOUT, std::string(call) + ": the daemon did not answer");
  }
  takes_.erase(key);
  if (!lost && status == Status::kOk) return SLUICE_SUCCESS;
  if (slot) arena_.release(*slot);
  if (lost) return fail(SLUICE_ERROR_DAEMON_LOST, lost_text_);
  if (status == Status::kOpTimeout) {
    return fail(SLUICE_ERROR_TIMEOUT,
                std::string(call) + ": calls of tag " + number(name.tag) +
                    " whose fate is open stayed so; the other ranks must have made them, too");
  }
  return fail(SLUICE_ERROR_FAILED, std::string(call) + ": " + status_name(status));
}

int Job::tag_retire(uint64_t tag, int kind, int type, uint64_t count, void* out, int timeout_ms) {
  return take(0, "sluice_tag_retire", tag, kind, type, count, out, timeout_ms);
}

int Job::take_correction(uint64_t tag, int kind, int type, uint64_t count, void* out, int timeout_ms) {
  return take(ipc::kFlagCorrection, "sluice_take_correction", tag, kind, type, count, out, timeout_ms);
}

int Job::take(uint32_t flags, const char* call, uint64_t tag, int kind, int type, uint64_t count, void* out,
              int timeout_ms) {
  TagName name;
  name.tag = tag;
  if (const int error = check_tag(call, kind, type, count, &name); error != SLUICE_SUCCESS) return error;
  const Micros end = Timer(timeout_ms).end();
  if (out == nullptr) return take_carry(call, name, std::nullopt, end);
  const uint64_t bytes = count * element_size(accumulator_type(name.type));
  const auto slot = take_temporary(call, bytes);
  if (!slot) return SLUICE_ERROR_NO_MEMORY;
  if (const int error = take_carry(call, name, slot, end, flags); error != SLUICE_SUCCESS) return error;
  std::memcpy(out, arena_data() + *slot, bytes);
  arena_.release(*slot);
  return SLUICE_SUCCESS;
}

int Job::flush(uint64_t tag, int kind, int type, uint64_t count, void* out, int timeout_ms) {
  constexpr const char* kName = "sluice_flush";
  if (out == nullptr) return fail(SLUICE_ERROR_INVALID, std::string(kName) + ": `out` is NULL");
  TagName name;
  name.tag = tag;
  if (const int error = check_tag(kName, kind, type, count, &name); error != SLUICE_SUCCESS) return error;
  const Micros end = Timer(timeout_ms).end();
  const ElementType sums = accumulator_type(name.type);
  const uint64_t bytes = count * element_size(sums);
  // The sum may be larger than one op, since accumulators may be wider than elements: it is made in parts.
  const uint64_t most = request_.max_op_bytes / ArenaAllocator::kGranule * ArenaAllocator::kGranule;
  const uint64_t part = std::min(bytes, most);
  const uint64_t apart =
      (part + ArenaAllocator::kGranule - 1) / ArenaAllocator::kGranule * ArenaAllocator::kGranule;
  const auto pair = take_temporary(kName, 2 * apart);
  if (!pair) return SLUICE_ERROR_NO_MEMORY;
  auto slot = take_temporary(kName, bytes);
  int error = slot ? take_carry(kName, name, slot, end) : int{SLUICE_ERROR_NO_MEMORY};
  if (error != SLUICE_SUCCESS) slot = std::nullopt;  // take_carry has given it back, or keeps it
  // Whatever happens here, the other ranks wait for this one's part of the sum: it is nothing where nothing could be
  // taken, and then what is owed stays with the daemon.
  const bool nothing = error == SLUICE_ERROR_TIMEOUT;
  const std::string trouble = nothing ? last_error() : "";
  if (nothing) error = SLUICE_SUCCESS;
  const Micros sum_end = std::max(end, monotonic_micros() + kFlushLeast);
  std::byte* const contribution = arena_data() + *pair;
  for (uint64_t at = 0; error == SLUICE_SUCCESS && at < bytes; at += part) {
    Call call;
    const uint64_t size = std::min(part, bytes - at);
    call.count = size / element_size(sums);
    call.type = sums;
    call.kind = name.kind;
    call.tag = tag;
    call.contribution = *pair;
    call.result = *pair + apart;
    if (slot)
      std::memcpy(contribution, arena_data() + *slot + at, size);
    else
      std::memset(contribution, 0, size);
    sluice_op handle = 0;
    error = submit(call, &handle);
    if (error == SLUICE_SUCCESS) error = wait_plain(kName, "the sum was not made", handle, sum_end, pair);
    if (error == SLUICE_SUCCESS) std::memcpy(static_cast<std::byte*>(out) + at, contribution + apart, size);
  }
  if (slot) arena_.release(*slot);
  if (error != SLUICE_ERROR_TIMEOUT) arena_.release(*pair);
  if (error == SLUICE_SUCCESS && nothing)
    return fail(SLUICE_ERROR_TIMEOUT, trouble + "; the sum was made without this rank's part");
  return error;
}

// What is still unresolved a moment after every result is in waits for later calls of its tag, which will not come.
void Job::drop_queued(Micros end) {
  if (wait_until(end, [&] { return ops_.all_have_result(); }) != SLUICE_SUCCESS) return;
  if (wait_until(std::min(end, monotonic_micros() + kFatesUsually), [&] { return ops_.all_resolved(); }) ==
      SLUICE_SUCCESS)
    return;
  std::set<TagName> tags;
  {
    const std::lock_guard lock(mutex_);
    ops_.for_each_open([&](const OpTable::Op& op) {
      if ((ops_.events(op) & SLUICE_EVENT_RESOLVED) == 0) tags.insert({op.tag, op.kind, op.type, op.count});
    });
  }
  for (const TagName& tag : tags) take_carry("sluice_leave", tag, std::nullopt, end);
}

int Job::leave(int timeout_ms) {
  const Timer timer(timeout_ms);
  drop_queued(timer.end());
  if (wait_until(timer.end(), [&] { return ops_.all_resolved(); }) != SLUICE_SUCCESS) {
    return fail(SLUICE_ERROR_TIMEOUT,
                "sluice_leave: calls were still open after " + number(static_cast<uint64_t>(timeout_ms)) +
                    " ms; the other ranks see rank " + number(request_.rank) + " as lost");
  }
  {
    const std::lock_guard lock(mutex_);
    if (lost_) return fail(SLUICE_ERROR_DAEMON_LOST, lost_text_);
  }
  const std::lock_guard receiving(socket_mutex_);
  const std::lock_guard sending(send_mutex_);
  ipc::Message message;
  message.type = static_cast<uint32_t>(ipc::MessageType::kLeave);
  message.rank = request_.rank;
  ipc::set_text(message.job, request_.job);
  const int patience = std::max(timer.left_ms(), kByeTimeoutMs);
  auto sent = joined_.channel.send(message, patience);
  if (sent.ok()) {
    auto answer = joined_.channel.receive(patience);
    if (answer.ok()) return SLUICE_SUCCESS;
    sent = Result<void>(answer.error());
  }
  return fail(sent.error().code == ETIMEDOUT ? SLUICE_ERROR_TIMEOUT : SLUICE_ERROR_DAEMON_LOST,
              "sluice_leave: " + sent.error().message);
}

int Job::abort() {
  const std::lock_guard sending(send_mutex_);
  if (aborted_) return SLUICE_SUCCESS;
  ipc::Message message;
  message.type = static_cast<uint32_t>(ipc::MessageType::kAbort);
  message.code = static_cast<uint32_t>(Status::kAborted);
  message.rank = request_.rank;
  ipc::set_text(message.job, request_.job);
  auto sent = joined_.channel.send(message, kAbortTimeoutMs);
  if (!sent.ok()) {
    return fail(sent.error().code == ECONNRESET  ? SLUICE_ERROR_DAEMON_LOST
                : sent.error().code == ETIMEDOUT ? SLUICE_ERROR_TIMEOUT
                                                 : SLUICE_ERROR_SYSTEM,
                "sluice_abort: " + sent.error().message);
  }
  aborted_ = true;
  return SLUICE_SUCCESS;
}

void Job::info(sluice_job_info* info) const {
  info->rank = request_.rank;
  info->world_size = request_.world_size;
  info->nodes = joined_.nodes;
  info->node = joined_.node;
  info->lanes = joined_.lanes;
  info->payload_bytes = joined_.payload;
  info->arena_bytes = arena_.size();
  info->max_op_bytes = request_.max_op_bytes;
  info->carry_over = joined_.carry_over ? 1 : 0;
  info->corrects = joined_.corrects ? 1 : 0;
  std::snprintf(info->node_name, sizeof(info->node_name), "%s", joined_.node_name.c_str());
  std::snprintf(info->node_address, sizeof(info->node_address), "%s", joined_.node_address.c_str());
}

}  // namespace sluice::client
