// The single-producer single-consumer rings of layout.h: descriptors from client to lane, completions from
// lane to client, and the reports that go with completions.
//
// Each end keeps its own index privately and uses the shared word as output only, so a peer that scribbles
// over the shared page can confuse nobody but itself. Each end checks the other's index: a distance of more
// than kRingEntries is a broken peer and comes back as RingState::kBroken; nothing is read or written then.
// An index that moves backwards within the ring only hides entries.
//
// Memory order. The writer fills the slot and then stores its index with release; the reader loads that index
// with acquire and then copies the slot: it sees the whole entry, and everything that the writer did before
// (payload in the arena). The reader stores its own index with release only after its copy is done, and the
// writer loads it with acquire before it fills the slot again: no entry is overwritten while it is read.
// Nothing here wakes anybody; that is doorbell.h. Entries are copied word by word with relaxed atomic
// accesses: each shared word is read exactly once, and a peer that writes at the same time causes a wrong
// value, which validation of the copy refuses, and not undefined behaviour.
//
// Threads: each ring object belongs to one thread at a time (or to whoever holds the lock around it). No
// allocation, no lock, no system call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/ipc/layout.h"

// ThreadSanitizer keeps its clocks by address. In a test both ends live in one process, each with a mapping of its own, so
// that it sees no order between a lane and the other lane to which the client hands the same slot later. It is told.
#if defined(__SANITIZE_THREAD__)
#define SLUICE_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SLUICE_TSAN 1
#endif
#endif
#ifdef SLUICE_TSAN
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace sluice::ipc {

enum class RingState : uint8_t {
  kOk,      // an entry was written, or copied out
  kEmpty,   // reader: nothing there
  kFull,    // writer: no free slot; the entry was not taken
  kBroken,  // the other end's index is impossible: disconnect
};

namespace detail {

// The unit of access to shared entries, whatever their type.
using Word = uint64_t __attribute__((may_alias));

// Copies a trivially copyable object between private and shared memory, one 64-bit word at a time.
template <typename T>
void copy_in(T* shared, const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0 && alignof(T) >= 8);
  const auto* from = reinterpret_cast<const std::byte*>(&value);
  auto* to = reinterpret_cast<Word*>(shared);
  for (size_t i = 0; i < sizeof(T) / sizeof(uint64_t); ++i) {
    uint64_t word = 0;
    std::memcpy(&word, from + i * sizeof(word), sizeof(word));
    __atomic_store_n(to + i, word, __ATOMIC_RELAXED);
  }
}

template <typename T>
void copy_out(T* value, const T* shared) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0 && alignof(T) >= 8);
  auto* to = reinterpret_cast<std::byte*>(value);
  const auto* from = reinterpret_cast<const Word*>(shared);
  for (size_t i = 0; i < sizeof(T) / sizeof(uint64_t); ++i) {
    const uint64_t word = __atomic_load_n(from + i, __ATOMIC_RELAXED);
    std::memcpy(to + i * sizeof(word), &word, sizeof(word));
  }
}

}  // namespace detail

// The accesses to shared memory that the rings are made of. Tests replace it by a policy that stops at every
// access and explores schedules, so that the code that ships is the code that is explored.
struct StdAtomics {
  using Index = RingIndex;
  static uint64_t load_acquire(const Index& index) {
    const uint64_t value = index.value.load(std::memory_order_acquire);
#ifdef SLUICE_TSAN
    __tsan_acquire(&all_mappings);
#endif
    return value;
  }
  static void store_release(Index& index, uint64_t value) {
#ifdef SLUICE_TSAN
    __tsan_release(&all_mappings);
#endif
    index.value.store(value, std::memory_order_release);
  }
#ifdef SLUICE_TSAN
  static inline char all_mappings = 0;
#endif
  template <typename Entry>
  static void write(Entry* slot, const Entry& entry) {
    detail::copy_in(slot, entry);
  }
  template <typename Entry>
  static void read(Entry* entry, const Entry* slot) {
    detail::copy_out(entry, slot);
  }
};

// The writing end. `tail` is this end's word, `head` the reader's; both are 0 when a ring is new.
template <typename Entry, typename Atomics = StdAtomics>
class RingWriter {
 public:
  using Index = typename Atomics::Index;
  RingWriter() = default;
  RingWriter(Index* tail, const Index* head, Entry* slots)
      : tail_word_(tail), head_word_(head), slots_(slots) {}

  // Puts one entry into the ring where the reader can see it. kOk, kFull or kBroken.
  RingState push(const Entry& entry) {
    if (tail_ - head_ >= kRingEntries) {  // full by what was last heard: ask again
      const uint64_t head = Atomics::load_acquire(*head_word_);
      if (tail_ - head > kRingEntries) return RingState::kBroken;
      head_ = head;
      if (tail_ - head_ == kRingEntries) return RingState::kFull;
    }
    Atomics::write(&slots_[tail_ % kRingEntries], entry);
    ++tail_;
    Atomics::store_release(*tail_word_, tail_);
    return RingState::kOk;
  }

  // Free slots now; 0 also when the reader's index is broken (the next push says so).
  uint32_t free_slots() {
    const uint64_t head = Atomics::load_acquire(*head_word_);
    if (tail_ - head > kRingEntries) return 0;
    head_ = head;
    return static_cast<uint32_t>(kRingEntries - (tail_ - head_));
  }

  uint64_t written() const { return tail_; }  // entries ever

 private:
  Index* tail_word_ = nullptr;
  const Index* head_word_ = nullptr;
  Entry* slots_ = nullptr;
  uint64_t tail_ = 0;
  uint64_t head_ = 0;  // the reader's index as last loaded
};

// The reading end. `head` is this end's word, `tail` the writer's.
template <typename Entry, typename Atomics = StdAtomics>
class RingReader {
 public:
  using Index = typename Atomics::Index;
  RingReader() = default;
  RingReader(Index* head, const Index* tail, const Entry* slots)
      : head_word_(head), tail_word_(tail), slots_(slots) {}

  // Copies the oldest entry, which stays in the ring until advance(). kOk, kEmpty or kBroken.
  RingState peek(Entry* entry) {
    const RingState state = look();
    if (state == RingState::kOk) Atomics::read(entry, &slots_[head_ % kRingEntries]);
    return state;
  }

  // Gives the slot of the entry that peek() copied back to the writer. Only after a peek() that said kOk.
  void advance() {
    ++head_;
    Atomics::store_release(*head_word_, head_);
  }

  // peek() and advance() in one.
  RingState pop(Entry* entry) {
    const RingState state = peek(entry);
    if (state == RingState::kOk) advance();
    return state;
  }

  // Whether there is an entry: kOk, kEmpty or kBroken. For the check between "I sleep soon" and sleeping.
  RingState look() {
    if (tail_ != head_) return RingState::kOk;  // known from an earlier look; the writer cannot take it back
    const uint64_t tail = Atomics::load_acquire(*tail_word_);
    if (tail - head_ > kRingEntries) return RingState::kBroken;
    tail_ = tail;
    return tail_ == head_ ? RingState::kEmpty : RingState::kOk;
  }

  uint64_t read() const { return head_; }  // entries ever

 private:
  Index* head_word_ = nullptr;
  const Index* tail_word_ = nullptr;
  const Entry* slots_ = nullptr;
  uint64_t head_ = 0;
  uint64_t tail_ = 0;  // the writer's index as last loaded
};

// --- The four ends over the pages of layout.h
// ------------------------------------------------------------------------

using DescriptorWriter = RingWriter<Descriptor>;  // client
using DescriptorReader = RingReader<Descriptor>;  // lane
using CompletionWriter = RingWriter<Completion>;  // lane
using CompletionReader = RingReader<Completion>;  // client

inline DescriptorWriter descriptor_writer(SubmitPage& submit, const ControlPage& control, uint32_t lane) {
  return {&submit.submit_tail[lane], &control.submit_head[lane], submit.ring[lane]};
}
inline DescriptorReader descriptor_reader(ControlPage& control, const SubmitPage& submit, uint32_t lane) {
  return {&control.submit_head[lane], &submit.submit_tail[lane], submit.ring[lane]};
}
inline CompletionWriter completion_writer(ControlPage& control, const SubmitPage& submit, uint32_t lane) {
  return {&control.complete_tail[lane], &submit.complete_head[lane], control.ring[lane]};
}
inline CompletionReader completion_reader(SubmitPage& submit, const ControlPage& control, uint32_t lane) {
  return {&submit.complete_head[lane], &control.complete_tail[lane], control.ring[lane]};
}

// --- Reports
// ---------------------------------------------------------------------------------------------------------

// Lane: writes the report of an op (value.op_seq names it) before the completion that announces it is pushed.
// May be repeated for a later event of the same op. `value.version` is not looked at.
void write_report(ControlPage& control, uint32_t lane, const Report& value);

// Client: the report of op `op_seq` on `lane`, after a completion of that op was read. False when the lane
// has nothing to say about it. `text` is always terminated and `ranges` never above kReportRanges.
bool read_report(const ControlPage& control, uint32_t lane, uint32_t op_seq, Report* value);

}  // namespace sluice::ipc
