// The way in of a faulty queue.
#include "transport/port/faulty/faulty_queue.h"

namespace sluice::port {
namespace {

// Bursts of one receive() from which nothing may be left: the owner has other work.
constexpr int kTurns = 8;

}  // namespace

// True: the packet itself is to be handed out. Makes its peer one that our owner knows.
bool FaultyQueue::judge(RxPacket* packet, Micros now) {
  Link* link = nullptr;
  uint32_t id = Pipe::kStrangers;
  if (packet->peer != kUnknownPeer) {
    id = known_.find(packet->source);
    SLUICE_ASSERT(id < links_.size());
    link = &links_[id];
    if (link->uses == 0)
      packet->peer = kUnknownPeer;  // the inner queue knows it for the sake of what is held
  }
  if (!setup_.receive) return true;
  if (link == nullptr) apply(packet->source, id, nullptr, &strangers_);
  Passing datagram;
  datagram.pieces[0] = {packet->data, packet->length};
  datagram.length = packet->length;
  datagram.link = id;
  datagram.source = packet->source;
  datagram.congestion_experienced = packet->congestion_experienced;
  const size_t held = in_.held();
  const bool passes = in_.judge(link != nullptr ? &link->receive : &strangers_, datagram, now);
  if (link != nullptr) link->held += static_cast<uint32_t>(in_.held() - held);
  return passes;
}

// Hands out what was held and is due.
size_t FaultyQueue::deliver(std::span<RxPacket> packets, Micros now) {
  size_t count = 0;
  for (; count < packets.size() && in_.next_due() <= now; ++count) {
    const Held held = in_.pop();
    RxPacket& packet = packets[count];
    packet.data = in_.data(held.slot);
    packet.length = held.length;
    packet.source = held.source;
    packet.congestion_experienced = held.congestion_experienced;
    packet.token = kOwnToken | held.slot;
    // Peers may have come and gone meanwhile.
    const PeerHandle id = known_.find(held.source);
    packet.peer = id != kUnknownPeer && links_[id].uses > 0 ? links_[id].handle : kUnknownPeer;
    if (held.link != Pipe::kStrangers) --links_[held.link].held;
  }
  return count;
}

// Lets those of a burst of the inner queue through that pass; the others go back to it.
size_t FaultyQueue::take_in(std::span<RxPacket> packets, Micros now) {
  size_t count = 0;
  for (const RxPacket& original : packets) {
    SLUICE_ASSERT((original.token & kOwnToken) == 0);
    RxPacket packet = original;
    if (judge(&packet, now)) {
      packets[count++] = packet;  // never beyond `original`
    } else {
      inner_->release({&original, 1});
    }
  }
  return count;
}

size_t FaultyQueue::receive(std::span<RxPacket> packets) {
  if (!setup_.receive && !holds_send_) return inner_->receive(packets);
  const Micros now = holds_send_ || holds_receive_ ? setup_.options.clock() : 0;
  full_ = false;
  flush(now);
  size_t count = deliver(packets, now);
  for (int turn = 0; turn < kTurns && count < packets.size(); ++turn) {
    const auto room = packets.subspan(count);
    const size_t got = inner_->receive(room);
    count += take_in(room.first(got), now);
    count += deliver(packets.subspan(count), now);  // duplicates and damaged ones that need not wait
    if (got < room.size()) break;
  }
  return count;
}

void FaultyQueue::release(std::span<const RxPacket> packets) {
  size_t first = 0;
  for (size_t i = 0; i < packets.size(); ++i) {
    if ((packets[i].token & kOwnToken) == 0) continue;
    if (i > first) inner_->release(packets.subspan(first, i - first));
    first = i + 1;
    const uint64_t slot = packets[i].token & ~kOwnToken;
    SLUICE_ASSERT(slot < in_.slots());
    in_.free_slot(static_cast<uint32_t>(slot));
  }
  if (first < packets.size()) inner_->release(packets.subspan(first));
}

}  // namespace sluice::port
