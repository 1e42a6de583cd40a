// The receiving half of a UDP queue: buffers, and cutting what GRO has merged.
#include <netinet/udp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/port/udp/udp_queue.h"

#ifndef UDP_GRO
#define UDP_GRO 104  // linux/udp.h
#endif

namespace sluice::port {
namespace {

constexpr uint8_t kEcnMask = 3;  // RFC 3168: the two low bits of TOS / traffic class; 3 is CE

}  // namespace

// Asks the kernel for datagrams into free slots. False when it had fewer than asked for, so that asking again at
// once is in vain.
bool UdpQueue::fetch(size_t wanted) {
  const size_t count = std::min({wanted, kRxMessages, free_slots_.size()});
  if (count == 0) return false;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t slot = free_slots_[free_slots_.size() - 1 - i];
    rx_slots_[i] = slot;
    rx_iovecs_[i] = {buffers_.data() + size_t{slot} * slot_bytes_, slot_bytes_};
    msghdr& header = rx_messages_[i].msg_hdr;
    header.msg_name = &rx_sources_[i];
    header.msg_namelen = sizeof(SocketAddress);
    header.msg_iov = &rx_iovecs_[i];
    header.msg_iovlen = 1;
    header.msg_control = &rx_control_[i];
    header.msg_controllen = sizeof(RxControl);
    header.msg_flags = 0;
  }
  int got;
  do {
    LiveCounters::add(counters_.rx_calls, 1);
    got = recvmmsg(socket_.get(), rx_messages_.data(), static_cast<unsigned>(count), MSG_DONTWAIT, nullptr);
  } while (got < 0 && errno == EINTR);
  // Other errors are reports of earlier sends; there is nothing to receive then.
  if (got <= 0) return false;
  free_slots_.resize(free_slots_.size() - static_cast<size_t>(got));
  pending_first_ = 0;
  pending_count_ = 0;
  for (size_t i = 0; i < static_cast<size_t>(got); ++i) take(rx_messages_[i], rx_slots_[i]);
  return static_cast<size_t>(got) == count;
}

// Reads what the kernel says about one message and queues it, or gives its slot back when it was cut.
void UdpQueue::take(const mmsghdr& message, uint32_t slot) {
  Pending pending;
  pending.slot = slot;
  pending.length = message.msg_len;
  pending.segment = message.msg_len;
  auto* header = const_cast<msghdr*>(&message.msg_hdr);
  for (cmsghdr* control = CMSG_FIRSTHDR(header); control != nullptr; control = CMSG_NXTHDR(header, control)) {
    const unsigned char* data = CMSG_DATA(control);
    if (control->cmsg_level == SOL_UDP && control->cmsg_type == UDP_GRO) {
      int segment = 0;
      std::memcpy(&segment, data, sizeof segment);
      if (segment > 0) pending.segment = static_cast<uint32_t>(segment);
    } else if (control->cmsg_level == SOL_SOCKET && control->cmsg_type == SO_RXQ_OVFL) {
      uint32_t total = 0;  // since the socket was opened
      std::memcpy(&total, data, sizeof total);
      LiveCounters::add(counters_.rx_overflow, total - last_overflow_);
      last_overflow_ = total;
    } else if (control->cmsg_level == IPPROTO_IP && control->cmsg_type == IP_TOS) {
      pending.congestion_experienced = (data[0] & kEcnMask) == kEcnMask;
    } else if (control->cmsg_level == IPPROTO_IPV6 && control->cmsg_type == IPV6_TCLASS) {
      int traffic_class = 0;
      std::memcpy(&traffic_class, data, sizeof traffic_class);
      pending.congestion_experienced = (traffic_class & kEcnMask) == kEcnMask;
    }
  }
  if ((header->msg_flags & MSG_TRUNC) != 0) {
    LiveCounters::add(counters_.rx_truncated, 1);
    free_slots_.push_back(slot);
    return;
  }
  pending.source = from_socket_address(*static_cast<const SocketAddress*>(header->msg_name));
  pending.peer = peers_.find(pending.source);
  lent_[slot] = 1;
  pending_[pending_count_++] = pending;
}

size_t UdpQueue::hand_out(std::span<RxPacket> packets) {
  size_t count = 0;
  uint64_t bytes = 0;
  while (count < packets.size() && pending_first_ < pending_count_) {
    Pending& pending = pending_[pending_first_];
    const std::byte* base = buffers_.data() + size_t{pending.slot} * slot_bytes_;
    while (count < packets.size() && (!pending.started || pending.next < pending.length)) {
      RxPacket& packet = packets[count++];
      packet.data = base + pending.next;
      packet.length = std::min(pending.segment, pending.length - pending.next);
      packet.peer = pending.peer;
      packet.source = pending.source;
      packet.congestion_experienced = pending.congestion_experienced;
      packet.token = pending.slot;
      pending.next += packet.length;
      pending.started = true;
      bytes += packet.length;
      ++lent_[pending.slot];
    }
    if (pending.next < pending.length) break;
    ++pending_first_;
    if (--lent_[pending.slot] == 0)
      free_slots_.push_back(pending.slot);  // all its datagrams are back already
  }
  LiveCounters::add(counters_.rx_datagrams, count);
  LiveCounters::add(counters_.rx_bytes, bytes);
  return count;
}

size_t UdpQueue::receive(std::span<RxPacket> packets) {
  size_t count = hand_out(packets);
  while (count < packets.size()) {
    const bool more = fetch(packets.size() - count);
    count += hand_out(packets.subspan(count));
    if (!more) break;
  }
  return count;
}

void UdpQueue::release(std::span<const RxPacket> packets) {
  for (const RxPacket& packet : packets) {
    SLUICE_ASSERT(packet.token < lent_.size() && lent_[packet.token] > 0);
    if (--lent_[packet.token] == 0) free_slots_.push_back(static_cast<uint32_t>(packet.token));
  }
}

}  // namespace sluice::port
