// The way out of a faulty queue: judging packets once, in bursts, and sending what was held.
#include <algorithm>

#include "transport/port/faulty/faulty_queue.h"

namespace sluice::port {
namespace {

size_t length_of(const TxPacket& packet) {
  return size_t{packet.header_length} + packet.payload_length + packet.trailer_length;
}

}  // namespace

// True: the packet itself is to be sent.
bool FaultyQueue::judge(const TxPacket& packet, Micros now) {
  Link* link = link_of(packet.peer);
  // What cannot be sent at all is the inner queue's to count.
  if (link == nullptr || length_of(packet) > setup_.max_datagram) return true;
  Passing datagram;
  datagram.pieces = {{{packet.header, packet.header_length},
                      {packet.payload, packet.payload_length},
                      {packet.trailer, packet.trailer_length}}};
  datagram.length = length_of(packet);
  datagram.link = link_of_handle_[packet.peer];
  size_t held = out_.held();
  const bool passes = out_.judge(&link->send, datagram, now);
  for (; held < out_.held(); ++held) {
    ++link->held;
    // One more use, so that the peer can still be reached when its time comes; it is known, so nothing is allocated.
    const auto again = inner_->add_peer(link->endpoint);
    SLUICE_ASSERT(again.ok() && *again == link->handle);
  }
  return passes;
}

// Settles the fate of packets from the front on, as far as no refusal comes in between, and gathers in run_ those that
// pass. Returns how many are settled.
size_t FaultyQueue::decide(std::span<const TxPacket> packets, Micros now) {
  run_.clear();
  size_t count = 0;
  for (; count < std::min(packets.size(), kBurst); ++count) {
    const TxPacket& packet = packets[count];
    // Another packet than the one that was refused: the owner has changed its mind.
    if (count < fates_.size() && fates_[count].peer != packet.peer) fates_.resize(count);
    if (count == fates_.size()) {
      if (refusals_.chance(plan_.refuse)) {
        out_.count(Fault::kRefused);
        full_ = true;
        break;
      }
      fates_.push_back({packet.peer, judge(packet, now)});
    }
    if (!fates_[count].passes) continue;
    run_.push_back(packet);
    // The inner queue may still know the peer, for the sake of what is held.
    if (link_of(packet.peer) == nullptr) run_.back().peer = kUnknownPeer;
  }
  return count;
}

size_t FaultyQueue::send(std::span<const TxPacket> packets) {
  if (!setup_.send) return inner_->send(packets);
  const Micros now = holds_send_ ? setup_.options.clock() : 0;
  full_ = false;
  if (!flush(now)) return 0;
  size_t done = 0;
  while (done < packets.size() && !full_) {
    const size_t settled = decide(packets.subspan(done), now);
    const size_t sent = run_.empty() ? 0 : inner_->send(run_);
    inner_sent_ += sent;
    size_t count = settled;
    if (sent < run_.size()) {
      full_ = true;
      // Up to the first that passes and was not taken.
      count = 0;
      for (size_t passed = 0; passed < sent || !fates_[count].passes; ++count) passed += fates_[count].passes;
    }
    fates_.erase(fates_.begin(), fates_.begin() + static_cast<ptrdiff_t>(count));
    done += count;
  }
  if (!full_) flush(now);  // duplicates and damaged ones that need not wait
  return taken(done);
}

size_t FaultyQueue::taken(size_t packets) {
  sent_ += packets;
  if (setup_.copies_on_send || packets == 0) return packets;
  // When there are too many the last ones are merged: then payloads come back later, never too early.
  if (tickets_.size() == kTickets && ticket_first_ > 0) {
    tickets_.erase(tickets_.begin(), tickets_.begin() + static_cast<ptrdiff_t>(ticket_first_));
    ticket_first_ = 0;
  }
  if (tickets_.size() == kTickets) tickets_.pop_back();
  tickets_.push_back({sent_, inner_sent_});
  return packets;
}

// Sends what is held and due. False: the device is full.
bool FaultyQueue::flush(Micros now) {
  if (!holds_send_) return true;
  if (!setup_.copies_on_send) take_back();
  while (out_.next_due() <= now) {
    TxPacket packets[kFlush];
    leaving_.clear();
    while (leaving_.size() < kFlush && out_.next_due() <= now) {
      const Held held = out_.pop();
      TxPacket& packet = packets[leaving_.size()];
      packet.peer = links_[held.link].handle;
      packet.payload = out_.data(held.slot);
      packet.payload_length = held.length;
      leaving_.push_back(held);
    }
    const size_t sent = inner_->send({packets, leaving_.size()});
    for (size_t i = 0; i < sent; ++i) {
      ++inner_sent_;
      left(leaving_[i]);
    }
    for (size_t i = sent; i < leaving_.size(); ++i) out_.put_back(leaving_[i]);
    if (sent < leaving_.size()) {
      full_ = true;
      return false;
    }
  }
  return true;
}

void FaultyQueue::left(const Held& held) {
  Link& link = links_[held.link];
  --link.held;
  inner_->remove_peer(link.handle);
  if (setup_.copies_on_send) {
    out_.free_slot(held.slot);
  } else {
    lent_.push_back({inner_sent_, held.slot});
  }
}

// Slots that the inner queue has done with.
void FaultyQueue::take_back() {
  const uint64_t done = inner_->reap();
  while (lent_first_ < lent_.size() && lent_[lent_first_].ticket <= done)
    out_.free_slot(lent_[lent_first_++].slot);
  // At most slots() are lent, and the vector has room for twice as many.
  if (lent_first_ >= out_.slots() || lent_first_ == lent_.size()) {
    lent_.erase(lent_.begin(), lent_.begin() + static_cast<ptrdiff_t>(lent_first_));
    lent_first_ = 0;
  }
  while (ticket_first_ < tickets_.size() && tickets_[ticket_first_].inner <= done)
    reaped_ = tickets_[ticket_first_++].own;
  if (ticket_first_ == tickets_.size()) {
    tickets_.clear();
    ticket_first_ = 0;
  }
}

uint64_t FaultyQueue::reap() {
  if (!setup_.send) return inner_->reap();
  if (setup_.copies_on_send) return sent_;
  take_back();
  return reaped_;
}

}  // namespace sluice::port
