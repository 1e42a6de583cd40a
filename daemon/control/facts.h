// What a daemon knows of itself once its port is open; fixed until it ends. Plain data, any thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/types.h"
#include "transport/port/port.h"
#include "transport/wire/seal.h"

namespace sluice::daemon {

inline constexpr const char* kVersion = SLUICE_VERSION;

struct NodeFacts {
  std::string name;             // of the node, for messages
  port::Endpoint endpoint;      // lane 0; lane l has port + l
  std::string endpoint_text;    // what clients tell each other
  std::string interface;        // that it lies on
  std::string why;              // this interface and not another
  std::string port_kind;        // "udp"
  std::string port_note;        // what a person should know of it: a clamped buffer ...
  uint64_t receive_buffer = 0;  // bytes per lane, as granted
  uint64_t link_bits = 0;       // per second, 0: not known
  uint32_t lanes = 1;
  uint32_t largest_datagram = 0;
  wire::Sealing sealing = wire::Sealing::kAuth;
  Micros started = 0;        // monotonic
  int64_t started_unix = 0;  // seconds
};

const char* sealing_name(wire::Sealing sealing);

}  // namespace sluice::daemon
