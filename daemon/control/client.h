// One connection of a client, and what the daemon holds for it. Control thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/ipc/channel.h"
#include "base/types.h"
#include "daemon/control/regions.h"

namespace sluice::daemon {

struct Client {
  enum class Phase : uint8_t {
    kConnected,  // has said nothing yet, or is sluicectl
    kGreeted,    // HELLO
    kJoining,    // JOIN
    kJoined,     // has its regions
    kGone,       // its socket is closed; regions stay until all lanes have let go
  };

  uint64_t id = 0;
  ipc::Channel channel;
  UniqueFd pidfd;  // invalid: the kernel has none; then only the socket tells
  ipc::PeerIdentity who;
  Phase phase = Phase::kConnected;
  Micros since = 0;  // of the connection
  uint64_t job = 0;  // 0: none
  uint32_t rank = 0;
  uint32_t local_rank = 0;
  uint64_t arena_wanted = 0;
  Regions regions;
  uint32_t lanes_holding = 0;  // lanes that may touch the regions

  std::string name() const;  // "rank 3 (pid 4242)"
};

}  // namespace sluice::daemon
