#include "transport/port/faulty/faulty_pipe.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace sluice::port {
namespace {

constexpr size_t kOld = 64;  // datagrams kept for replay, of all peers of the direction
// How likely a full store takes a datagram in: not always, so that some very old ones stay.
constexpr double kRecord = 0.25;

// For the heap functions of the standard library, which put the greatest first.
constexpr auto later = [](const Held& a, const Held& b) {
  return a.due != b.due ? a.due > b.due : a.order > b.order;
};

void gather(const Passing& datagram, std::byte* to) {
  for (const auto& piece : datagram.pieces) {
    if (piece.empty()) continue;
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
}

}  // namespace

Result<void> Pipe::allocate(size_t slots, uint32_t slot_bytes, bool replays) {
  const size_t total = slots + (replays ? kOld : 0);
  auto memory = Mapping::anonymous(total * slot_bytes);
  if (!memory.ok()) {
    return Error{memory.error().code, "memory for datagrams that faults hold back (" + std::to_string(total) +
                                          " of " + std::to_string(slot_bytes) +
                                          " bytes): " + memory.error().message};
  }
  memory_ = std::move(*memory);
  slots_ = slots;
  slot_bytes_ = slot_bytes;
  free_slots_.reserve(slots);
  for (size_t slot = slots; slot > 0; --slot) free_slots_.push_back(static_cast<uint32_t>(slot - 1));
  heap_.reserve(slots);
  old_.resize(replays ? kOld : 0);
  return {};
}

void Pipe::count(Fault fault) {
  std::atomic<uint64_t>& counter = counters_->fired[static_cast<size_t>(fault)];
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);  // one writer
}

Held Pipe::pop() {
  std::pop_heap(heap_.begin(), heap_.end(), later);
  const Held held = heap_.back();
  heap_.pop_back();
  return held;
}

void Pipe::put_back(const Held& held) {
  heap_.push_back(held);
  std::push_heap(heap_.begin(), heap_.end(), later);
}

bool Pipe::judge(Way* way, const Passing& datagram, Micros now) {
  if (way->cut) {
    count(Fault::kCut);
    return false;
  }
  const Loss loss = draw_loss(way->faults, &way->bad, &way->random);
  if (loss == Loss::kLost) count(Fault::kLost);
  if (loss == Loss::kLostInBurst) count(Fault::kLostInBurst);
  if (way->faults.replay > 0) {
    if (way->random.chance(way->faults.replay)) replay(way, datagram, now);
    record(way, datagram);  // a lost one too: an old datagram is one that was sent
  }
  if (loss != Loss::kNone) return false;
  if (way->random.chance(way->faults.duplicate) && !depart(way, datagram, now, true))
    count(Fault::kDuplicated);
  return depart(way, datagram, now, false);
}

// Damages and delays one datagram. `copy`: it comes in addition to the original, and so never passes as it is. True:
// nothing is held.
bool Pipe::depart(Way* way, const Passing& datagram, Micros now, bool copy) {
  const size_t length = draw_length(way->faults, datagram.length, &way->random);
  const bool corrupt = draw_corruption(way->faults, length, &way->random);
  bool reordered = false;
  const Micros delay = draw_delay(way->faults, &reordered, &way->random);
  if (!copy && length == datagram.length && !corrupt && delay == 0) return true;
  if (datagram.length > slot_bytes_ || free_slots_.empty()) {
    count(Fault::kUnheld);
    return true;
  }
  Held held;
  held.due = now + delay;
  held.order = order_++;
  held.slot = free_slots_.back();
  free_slots_.pop_back();
  held.length = static_cast<uint32_t>(length);
  held.link = datagram.link;
  held.congestion_experienced = datagram.congestion_experienced;
  held.source = datagram.source;
  gather(datagram, data(held.slot));
  if (corrupt) flip_bits({data(held.slot), length}, &way->random);
  put_back(held);
  if (length < datagram.length) count(Fault::kTruncated);
  if (corrupt) count(Fault::kCorrupted);
  if (delay > 0) count(reordered ? Fault::kReordered : Fault::kDelayed);
  return false;
}

// An old datagram of the same link, if there is one, sets out once more.
void Pipe::replay(Way* way, const Passing& datagram, Micros now) {
  if (olds_ == 0) return;
  size_t at = way->random.below(olds_);
  for (size_t tries = 0; old_[at].link != datagram.link; at = (at + 1) % olds_) {
    if (++tries == olds_) return;
  }
  const Old& old = old_[at];
  Passing again;
  again.pieces[0] = {data(static_cast<uint32_t>(slots_ + at)), old.length};
  again.length = old.length;
  again.link = old.link;
  again.source = old.source;
  again.congestion_experienced = old.congestion_experienced;
  if (!depart(way, again, now, true)) count(Fault::kReplayed);
}

void Pipe::record(Way* way, const Passing& datagram) {
  if (datagram.length > slot_bytes_) return;
  size_t at = olds_;
  if (olds_ < old_.size()) {
    ++olds_;
  } else if (way->random.chance(kRecord)) {
    at = way->random.below(olds_);
  } else {
    return;
  }
  old_[at] = {static_cast<uint32_t>(datagram.length), datagram.link, datagram.congestion_experienced,
              datagram.source};
  gather(datagram, data(static_cast<uint32_t>(slots_ + at)));
}

void Pipe::forget(uint32_t link) {
  for (Old& old : old_) {
    if (old.link == link) old.link = kNoLink;
  }
}

}  // namespace sluice::port
