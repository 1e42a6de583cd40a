// One job on this node, from the first HELLO of a local rank until the lanes have let it go. Control thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/control/control.h"
#include "daemon/control/settings.h"
#include "transport/exchange/join.h"

namespace sluice::daemon {

struct Job {
  uint64_t id = 0;
  std::string name;
  uint32_t wire_id = 0;  // wire::job_id(name)
  ipc::JoinNonce nonce{};
  uint32_t world_size = 0;
  uint32_t generation = 0;  // of its view, as HELLO said
  JobPhase phase = JobPhase::kGathering;
  Micros since = 0;          // of the phase
  Micros deadline = kNever;  // gathering to attaching: when the join fails; lingering: when it ends
  std::vector<uint64_t>
      clients;  // ids, in the order in which they came; those that left or died are taken out

  // From the first JOIN on; every other JOIN must be equal.
  bool described = false;
  Membership membership;
  exchange::Settings settings;  // of lane 0
  uint64_t client_max_op_bytes = 0;
  uint32_t client_deadline_us = 0;

  std::unique_ptr<exchange::Join> join;  // from shaking on; goes on answering slower nodes
  uint32_t lanes_attached = 0;
  uint32_t lanes_detached = 0;
  bool failed = false;
  Status failure = Status::kOk;
  std::string failure_text;

  bool on_lanes() const {
    return phase == JobPhase::kAttaching || phase == JobPhase::kRunning || phase == JobPhase::kLingering;
  }
  void enter(JobPhase next, Micros now) {
    phase = next;
    since = now;
  }
};

}  // namespace sluice::daemon
