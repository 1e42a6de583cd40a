// The sending half of a UDP queue: packing runs into messages, and what to do when the kernel says no.
#include <netinet/udp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/port/udp/udp_queue.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103  // linux/udp.h; glibc 2.36 has it, older ones not
#endif

namespace sluice::port {
namespace {

// What one message may carry. The kernel's own limits: UDP_MAX_SEGMENTS (64 before Linux 6.9) and a UDP payload of
// 65,507 bytes over IPv4.
constexpr size_t kMaxSegments = 64;
constexpr size_t kMaxMessageBytes = 65507;

size_t length_of(const TxPacket& packet) {
  return size_t{packet.header_length} + packet.payload_length + packet.trailer_length;
}

// The device or the socket buffer is full; everything else is a fault of this datagram or its path.
bool is_full(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == ENOBUFS || code == ENOMEM; }

// How the kernel refuses segmentation: EIO without checksum offload on the way out, EINVAL when a segment does not
// fit the MTU of the path (then each alone is refused with EMSGSIZE), EOPNOTSUPP and ENOPROTOOPT by old ones.
bool may_be_gso(int code) {
  return code == EIO || code == EINVAL || code == EMSGSIZE || code == EOPNOTSUPP || code == ENOPROTOOPT;
}

size_t add_iovecs(const TxPacket& packet, iovec* out) {
  size_t count = 0;
  const auto add = [&](const std::byte* data, size_t length) {
    if (length != 0) out[count++] = {const_cast<std::byte*>(data), length};
  };
  add(packet.header, packet.header_length);
  add(packet.payload, packet.payload_length);
  add(packet.trailer, packet.trailer_length);
  return count;
}

}  // namespace

bool UdpQueue::sendable(const TxPacket& packet) const {
  return peers_.contains(packet.peer) && length_of(packet) <= max_datagram_;
}

// Packs a prefix of `packets` into tx_messages_; returns the number of messages. tx_packets_[i] packets go into
// message i; packets that cannot be sent make messages of their own with no address, which send() drops.
size_t UdpQueue::fill(std::span<const TxPacket> packets, bool gso) {
  size_t messages = 0;
  size_t iovecs = 0;
  size_t next = 0;
  while (next < packets.size() && messages < kTxMessages && iovecs + 3 * kMaxSegments <= kTxIovecs) {
    const TxPacket& first = packets[next];
    msghdr& header = tx_messages_[messages].msg_hdr;
    std::memset(&header, 0, sizeof header);
    header.msg_iov = &tx_iovecs_[iovecs];
    if (!sendable(first)) {
      tx_packets_[messages++] = 1;
      ++next;
      continue;
    }
    header.msg_name = &addresses_[first.peer];
    header.msg_namelen = address_length_;
    const size_t segment = length_of(first);
    size_t total = segment;
    size_t count = 1;
    iovecs += add_iovecs(first, &tx_iovecs_[iovecs]);
    if (gso && segment > 0) {
      // A run: equal lengths, then at most one that is shorter (but not empty: that would vanish).
      bool open = true;
      while (open && next + count < packets.size() && count < kMaxSegments) {
        const TxPacket& packet = packets[next + count];
        const size_t length = length_of(packet);
        if (packet.peer != first.peer || length > segment || length == 0 || total + length > kMaxMessageBytes)
          break;
        iovecs += add_iovecs(packet, &tx_iovecs_[iovecs]);
        total += length;
        ++count;
        open = length == segment;
      }
      if (count > 1) {
        header.msg_control = &tx_control_[messages];
        header.msg_controllen = kTxControl;
        cmsghdr* control = CMSG_FIRSTHDR(&header);
        control->cmsg_level = SOL_UDP;
        control->cmsg_type = UDP_SEGMENT;
        control->cmsg_len = CMSG_LEN(sizeof(uint16_t));
        const auto size = static_cast<uint16_t>(segment);
        std::memcpy(CMSG_DATA(control), &size, sizeof size);
      }
    }
    header.msg_iovlen = static_cast<size_t>(&tx_iovecs_[iovecs] - header.msg_iov);
    tx_packets_[messages++] = static_cast<uint32_t>(count);
    next += count;
  }
  return messages;
}

void UdpQueue::count_sent(std::span<const TxPacket> packets) {
  uint64_t bytes = 0;
  for (const TxPacket& packet : packets) bytes += length_of(packet);
  LiveCounters::add(counters_.tx_datagrams, packets.size());
  LiveCounters::add(counters_.tx_bytes, bytes);
}

// Sends the packets of a message that was refused, without segmentation. Returns how many are done with (sent, or
// dropped and counted).
size_t UdpQueue::one_by_one(std::span<const TxPacket> packets, bool* blocked) {
  size_t sent = 0;
  for (size_t i = 0; i < packets.size(); ++i) {
    iovec parts[3];
    msghdr message{};
    message.msg_name = &addresses_[packets[i].peer];
    message.msg_namelen = address_length_;
    message.msg_iov = parts;
    message.msg_iovlen = add_iovecs(packets[i], parts);
    ssize_t result;
    do {
      LiveCounters::add(counters_.tx_calls, 1);
      result = sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    } while (result < 0 && errno == EINTR);
    if (result >= 0) {
      count_sent(packets.subspan(i, 1));
      ++sent;
    } else if (is_full(errno)) {
      *blocked = true;
      return i;
    } else {
      LiveCounters::add(counters_.tx_errors, 1);
    }
  }
  // All went out alone: it was the segmentation that this path refuses. Not asked for again.
  if (sent == packets.size() && sent > 1) {
    gso_ = false;
    findings_->gso_refused.store(true, std::memory_order_relaxed);
  }
  return packets.size();
}

size_t UdpQueue::send(std::span<const TxPacket> packets) {
  size_t done = 0;
  bool blocked = false;
  while (done < packets.size() && !blocked) {
    const size_t messages = fill(packets.subspan(done), gso_);
    size_t first = 0;
    while (first < messages && !blocked) {
      if (tx_messages_[first].msg_hdr.msg_name == nullptr) {  // not sendable
        LiveCounters::add(counters_.tx_errors, 1);
        ++first;
        ++done;
        continue;
      }
      size_t last = first + 1;
      while (last < messages && tx_messages_[last].msg_hdr.msg_name != nullptr) ++last;
      LiveCounters::add(counters_.tx_calls, 1);
      const int result =
          sendmmsg(socket_.get(), &tx_messages_[first], static_cast<unsigned>(last - first), MSG_NOSIGNAL);
      if (result > 0) {
        size_t taken = 0;
        for (size_t i = first; i < first + static_cast<size_t>(result); ++i) taken += tx_packets_[i];
        count_sent(packets.subspan(done, taken));
        done += taken;
        first += static_cast<size_t>(result);
        continue;  // fewer than asked for: the next call says why
      }
      const int code = errno;
      if (code == EINTR) continue;
      if (is_full(code)) {
        blocked = true;
      } else if (tx_packets_[first] > 1 && may_be_gso(code)) {
        const bool was_on = gso_;
        done += one_by_one(packets.subspan(done, tx_packets_[first]), &blocked);
        ++first;
        if (was_on != gso_) break;  // what is packed asks for segmentation: pack again
      } else {
        LiveCounters::add(counters_.tx_errors, tx_packets_[first]);
        done += tx_packets_[first];
        ++first;
      }
    }
  }
  if (blocked) LiveCounters::add(counters_.tx_again, 1);
  sent_ += done;
  return done;
}

}  // namespace sluice::port
