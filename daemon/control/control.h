// The control thread: the socket that clients connect to, the jobs of this node and how they come to be and end.
//
// Control is an agent like the lanes: do_work(now) does what can be done now, wait() sleeps until there is more, run()
// does both until it was asked to stop. It talks to the lanes by commands and notices (engine/lane_worker.h), to peers
// by HELLOs that lane 0 sends for it, and to clients by messages (base/ipc/layout.h).
//
// A job on this node passes through these phases:
//   gathering   ranks of this node have said HELLO; they share a join nonce that no other join has
//   preparing   all of them have sent JOIN with the same view; their shared memory is being made
//   shaking     HELLOs go between the nodes (exchange/join.h)
//   attaching   the lanes take the job in
//   running     clients have JOINED; ops flow; it stays here when it has failed, until its clients have gone
//   lingering   all ranks of this node have left; peers are still answered
//   detaching   the lanes let it go
//
// Threads: everything belongs to the control thread but request_stop(), apply(), stats() and loops().
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/ipc/channel.h"
#include "config/loader.h"
#include "daemon/control/facts.h"
#include "daemon/engine/lane_worker.h"
#include "daemon/metrics/totals.h"

namespace sluice::daemon {

enum class JobPhase : uint8_t {
  kGathering,
  kPreparing,
  kShaking,
  kAttaching,
  kRunning,
  kLingering,
  kDetaching
};
inline constexpr size_t kJobPhases = 7;
const char* phase_name(JobPhase phase);

// What other threads may know of a job.
struct JobFacts {
  uint64_t id = 0;
  std::string name;
  JobPhase phase = JobPhase::kGathering;
  uint32_t ranks = 0;
  uint32_t self = 0;
  uint32_t lanes = 0;
  uint32_t payload = 0;
  Micros deadline = 0;  // of consistent ops; the longest possible where it adapts
  bool adaptive = false;
  uint32_t pull_patience = 0;
  std::vector<std::string> nodes;     // endpoints, in view order
  std::vector<uint32_t> local_ranks;  // that are attached now
  bool failed = false;
  std::string failure;
  Micros since = 0;  // of the phase
};

struct ControlStats {
  uint64_t clients = 0;
  uint64_t clients_accepted = 0, clients_refused = 0, clients_lost = 0, clients_broken = 0;
  uint64_t joins_succeeded = 0, joins_failed = 0;
  uint64_t jobs_failed = 0;
  uint64_t hellos_stray = 0;  // HELLOs for no job of this node, or from an address that is not in it
  uint64_t arena_bytes = 0;
  bool stopping = false;
  bool reload_ok = true;
  int64_t reload_unix = 0;  // of the last successful one
  std::vector<JobFacts> jobs;
};

struct ControlOptions {
  std::shared_ptr<const config::Loaded> config;
  NodeFacts facts;
  std::vector<LaneWorker*> lanes;  // by index; must outlive Control
  Totals* totals = nullptr;        // likewise
  int wake_fd = -1;                // eventfd that the lanes write; belongs to the caller
};

class Control {
 public:
  Control(ControlOptions options, ipc::Listener listener);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // --- control thread ---
  bool do_work(Micros now);  // true: something was done, call again soon
  void wait(Micros now);     // sleeps until there may be work, at most 100 ms
  void run();                // both until stopped()
  bool stopped() const;      // request_stop() was called and everything has ended

  // --- any thread ---
  // Clients are told goodbye, jobs are ended on all nodes, then stopped() becomes true, within 2 s.
  void request_stop(const std::string& why);
  // A configuration that was reloaded and found good; in force for what happens afterwards. `ok` false: the reload
  // failed and only that is noted.
  void apply(std::shared_ptr<const config::Loaded> config, bool ok, int64_t now_unix);
  ControlStats stats() const;
  uint64_t loops() const;  // advances while the thread lives: feeds the watchdog

 private:
  friend struct ControlState;
  std::unique_ptr<struct ControlState> state_;
};

}  // namespace sluice::daemon
