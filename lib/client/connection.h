// The handshake with the daemon: HELLO -> WELCOME or REFUSE, JOIN -> JOINED or REFUSE, MAPPED (base/ipc/layout.h).
//
// One socket serves one rank of one job, from HELLO to the end; so the death of either side is seen by the other as
// the end of the stream. Errors carry a sluice_error as code. Every function is bounded by its time-out. Any thread,
// one at a time per object.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "base/ipc/card.h"
#include "base/ipc/channel.h"
#include "base/ipc/view_blob.h"
#include "base/mapping.h"
#include "base/result.h"
#include "base/secret.h"
#include "base/types.h"
#include "lib/client/sluice.h"

namespace sluice::client {

// Counts a time-out of several steps down.
class Timer {
 public:
  explicit Timer(int timeout_ms);
  int left_ms() const;  // >= 0
  Micros end() const { return end_; }

 private:
  Micros end_;
};

// What the daemon answered to HELLO.
struct Welcome {
  ipc::JoinNonce join_nonce{};
  std::string endpoint;
  std::string name;  // of the node
  uint16_t lanes = 0;
  uint16_t payload = 0;
};

// A socket over which HELLO has been said for one rank.
struct Greeted {
  ipc::Channel channel;
  Welcome welcome;
  uint32_t world_size = 0;
  uint32_t generation = 0;
};

// What JOIN asks for.
struct JoinRequest {
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint32_t local_ranks = 0;
  uint64_t arena_bytes = 0;
  uint64_t max_op_bytes = 0;
  uint32_t deadline_us = 0;
  std::optional<ipc::View> view;  // none: the daemon's `peers:`
  Secret<32> key{};
};

// What the daemon gave for it: the shared regions, mapped.
struct Joined {
  ipc::Channel channel;
  Mapping control;  // read-only
  Mapping submit;
  Mapping arena;
  std::array<UniqueFd, ipc::kMaxLanes> event_fds;
  uint32_t lanes = 0;
  uint32_t payload = 0;
  uint32_t nodes = 0;
  uint32_t node = 0;
  uint64_t arena_bytes = 0;
  bool carry_over = false, corrects = false;
  std::string node_name, node_address;  // from the WELCOME
};

Result<ipc::Channel> connect(const std::string& path, int timeout_ms);

// `generation` of the view that the rank wants to join; an older one of the job that is open on the node ends.
Result<Greeted> greet(ipc::Channel channel, const std::string& path, const std::string& job, uint32_t rank,
                      uint32_t world_size, uint32_t generation, int timeout_ms);

// Waits until the daemon has reached every node of the job. The daemon gets the time-out too and ends first, with the
// names of those who are missing; the library waits a little longer than that for its words.
Result<Joined> join(Greeted greeted, const JoinRequest& request, int timeout_ms);

// The sluice_error for a status with which the daemon refused something.
int error_of(uint32_t status);

}  // namespace sluice::client
