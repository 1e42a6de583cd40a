// The default port: kernel UDP, one unconnected socket per queue.
//
// What makes it fast is that one system call moves many datagrams: on the way out UDP_SEGMENT (GSO) lets a run of
// equally long datagrams to one peer pass the stack as one buffer, on the way in UDP_GRO hands such a run over in
// one piece (measured: 12 times the throughput of datagrams one by one). Datagrams are never fragmented
// (IP_PMTUDISC_DO): one that does not fit the path is dropped and counted.
//
// Sleeping: fd() is the socket. It is readable when datagrams wait; after a short send() poll it for POLLOUT too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "transport/port/port.h"

namespace sluice::port {

struct UdpOptions {
  // Queue i binds to bind.port + i; port 0 lets the kernel choose one for each (Queue::local() says which). The
  // family of the address decides whether the port speaks IPv4 or IPv6; 0.0.0.0 and :: bind to every interface.
  Endpoint bind;
  uint32_t queues = 1;
  // Socket buffers in bytes, per queue. The kernel counts its own overhead too (2,304 bytes for a datagram of 1,500
  // that comes alone) and grants twice the number, up to 2 x net.core.rmem_max / wmem_max unless the process has
  // CAP_NET_ADMIN. What was granted stands in Capabilities::receive_buffer_bytes; a clamped one in its note.
  size_t receive_buffer = 8 << 20;
  size_t send_buffer = 4 << 20;
  bool gso = true;
  bool gro = true;
  // For MTU, link speed and messages; found by the bind address when empty. Does not restrict routing.
  std::string interface;
  // Largest datagram to send, and to take without GRO; 0: what the MTU of the interface allows.
  uint32_t max_datagram = 0;
  // Buffers that receive() can have lent out at once, per queue; each holds one datagram, or with GRO a run of up to
  // 64 KiB. When all are lent receive() gives nothing until release().
  uint32_t receive_slots = 64;
};

// Opens nothing yet but reads the interface; queues are opened by Port::open_queue. Errors: no such address or
// interface, a port number beyond 65535, 0 queues or slots.
Result<std::unique_ptr<Port>> open_udp_port(const UdpOptions& options);

}  // namespace sluice::port
