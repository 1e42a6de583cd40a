// What a network device looks like to the daemon: a control plane (Port) and data planes (Queue), one queue per lane.
//
// A port moves datagrams between endpoints. It knows nothing of packets, ops or jobs, and promises nothing: a
// datagram may be lost, doubled, reordered or cut short, and the one who receives it must check all of it.
//
// Threads: Port belongs to the control thread. A Queue has exactly one owner thread at a time, takes no lock and
// allocates nothing after it was opened. One virtual call moves a burst.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "base/types.h"

namespace sluice::port {

// Where a queue can be reached. IPv4 is stored as ::ffff:a.b.c.d, so that comparing is comparing bytes.
struct Endpoint {
  std::array<uint8_t, 16> ip{};
  uint16_t port = 0;  // host byte order
  uint16_t reserved = 0;
  uint32_t scope = 0;  // interface index of a link-local IPv6 address, else 0
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
static_assert(sizeof(Endpoint) == 24);
// "10.0.0.1:9470", "[fe80::1%2]:9470". parse_endpoint takes numeric addresses only; names are resolved by the
// slow-work thread with resolve() of the port.
std::string to_string(const Endpoint& endpoint);
Result<Endpoint> parse_endpoint(std::string_view text);

// A peer that was made known to a queue. Small dense numbers, valid for one queue until remove_peer.
using PeerHandle = uint32_t;
inline constexpr PeerHandle kUnknownPeer = UINT32_MAX;

// One datagram to send: header, payload, trailer, in this order, gathered by the port. Header and trailer are copied
// (at most kMaxHeader and kMaxTrailer bytes); the payload is only referenced, and must not change until the port is
// done with it: on return of send() if Capabilities::copies_on_send, else when reap() has passed its ticket.
struct TxPacket {
  PeerHandle peer = kUnknownPeer;
  uint16_t header_length = 0;
  uint16_t trailer_length = 0;
  uint32_t payload_length = 0;
  const std::byte* header = nullptr;
  const std::byte* payload = nullptr;
  const std::byte* trailer = nullptr;
};
inline constexpr size_t kMaxHeader = 64;
inline constexpr size_t kMaxTrailer = 16;

// One datagram that has arrived. `data` is the port's memory until release(). `peer` is the handle whose endpoint is
// the datagram's source, or kUnknownPeer; `source` is always set.
struct RxPacket {
  const std::byte* data = nullptr;
  uint32_t length = 0;
  PeerHandle peer = kUnknownPeer;
  Endpoint source;
  bool congestion_experienced = false;  // ECN CE
  uint64_t token = 0;  // the port's own, top bit 0 (decorators use it); give it back unchanged
};

struct Capabilities {
  std::string kind;                   // "udp", "sim" ...
  std::string device;                 // interface or device name, for messages
  uint32_t max_datagram = 0;          // largest header + payload + trailer that leaves in one piece
  uint32_t queues = 1;                // how many queues can be opened
  bool copies_on_send = true;         // payload memory is free again when send() returns
  uint64_t link_bits_per_second = 0;  // 0: not known
  uint64_t receive_buffer_bytes = 0;  // per queue, as granted (read back), 0: not applicable
  std::string note;                   // what a person should know: a clamped buffer, GSO missing ...
};

// Counters of one queue; read by other threads (relaxed atomics behind snapshot()). Drops are the port's or kernel's own.
struct QueueCounters {
  uint64_t tx_datagrams = 0, tx_bytes = 0, tx_calls = 0;
  uint64_t tx_again = 0;   // send() could not take everything: the device is full
  uint64_t tx_errors = 0;  // refused for another reason (no route, message too long); the datagram is dropped
  uint64_t rx_datagrams = 0, rx_bytes = 0, rx_calls = 0;
  uint64_t rx_overflow = 0;   // dropped for want of buffer space (SO_RXQ_OVFL, imissed ...)
  uint64_t rx_truncated = 0;  // longer than a receive buffer; dropped
};

class Queue {
 public:
  virtual ~Queue() = default;

  // Makes a peer known. May allocate: call it outside the data path (it is the one exception to the rule above).
  // An endpoint that is known already keeps its handle, and is forgotten after as many remove_peer as add_peer.
  virtual Result<PeerHandle> add_peer(const Endpoint& endpoint) = 0;
  virtual void remove_peer(PeerHandle peer) = 0;

  // Takes up to packets.size() datagrams that have arrived; never waits. Their memory stays valid until release().
  virtual size_t receive(std::span<RxPacket> packets) = 0;
  virtual void release(std::span<const RxPacket> packets) = 0;

  // Sends a prefix of `packets` and returns its length; never waits. Less than all means that the device is full:
  // try again later; poll fd() for POLLOUT too before sleeping. A packet that cannot be sent at all (unknown peer, longer
  // than max_datagram, no route) is taken, dropped and counted in tx_errors. Packets to one peer with equal length in a
  // row are cheapest (GSO).
  virtual size_t send(std::span<const TxPacket> packets) = 0;

  // Number of packets (counted from the first ever sent) whose payload memory is free again. Only of interest when
  // !copies_on_send; otherwise the number of packets sent.
  virtual uint64_t reap() = 0;

  // A descriptor to sleep on with poll(), readable when datagrams wait (and writable when send() can go on, when
  // asked for). -1: there is none, the owner must poll. arm() must be called before each sleep; it returns false when
  // work is there already and the owner must not sleep.
  virtual int fd() const = 0;
  virtual bool arm() = 0;

  virtual Endpoint local() const = 0;
  virtual QueueCounters counters() const = 0;  // any thread
};

class Port {
 public:
  virtual ~Port() = default;
  virtual const Capabilities& capabilities() const = 0;
  // Opens queue `index` (0 .. queues-1). The queue must be destroyed before the port.
  virtual Result<std::unique_ptr<Queue>> open_queue(uint32_t index) = 0;
  // Largest datagram that is believed to reach this endpoint in one piece (interface MTU, path MTU if known).
  virtual uint32_t max_datagram_to(const Endpoint& endpoint) = 0;
};

}  // namespace sluice::port
