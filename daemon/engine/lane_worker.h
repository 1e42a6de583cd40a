// One lane of the daemon: where a port's queue, the clients' rings and the exchange protocol meet.
//
// A LaneWorker owns one queue and, for every job, one exchange::Lane. It is an agent: do_work(now) does what can be
// done now and says whether there was anything; wait() sleeps until there is more. The daemon runs it on a thread of
// its own (run); tests call do_work under a clock of their own.
//
// Threads: everything here belongs to the lane's thread, except post() and take_notice(), which belong to the control
// thread and are the only way between the two (single producer, single consumer each way), and stats(), which any
// thread may call. On the lane's thread nothing allocates, locks or logs while data flow; attaching a job does, once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/ipc/layout.h"
#include "base/ipc/ring.h"
#include "base/result.h"
#include "base/types.h"
#include "base/unique_fd.h"
#include "transport/exchange/lane.h"
#include "transport/port/port.h"

namespace sluice::daemon {

inline constexpr size_t kHelloBytes = 9216;  // largest HELLO that passes between the threads (jumbo frames)

// A client as a lane sees it. Made by the control thread; the memory behind it stays mapped until every lane has said
// kClientDetached (or kJobDetached) for it.
struct LaneClient {
  uint64_t id = 0;
  uint32_t local_rank = 0;
  ipc::ControlPage* control = nullptr;
  ipc::SubmitPage* submit = nullptr;
  std::byte* arena = nullptr;
  uint64_t arena_bytes = 0;
};

// What attaches a job to a lane. `nodes[i]` is where node i's lane can be reached (own entry unused).
struct LaneJob {
  uint64_t id = 0;
  exchange::Settings settings;
  std::vector<port::Endpoint> nodes;
  std::vector<LaneClient> clients;  // every local rank, in rank order
};

struct Command {
  enum class Kind : uint8_t {
    kAttachJob,   // job
    kDetachJob,   // job_id; answered by kJobDetached
    kFailJob,     // job_id, status, text: ends its ops and tells the other nodes
    kGoneClient,  // job_id, client_id: its pages must not be touched any more; answered by kClientDetached
    kSend,        // endpoint, datagram: HELLO and HELLO_ACK
    kStop,
  };
  Kind kind = Kind::kStop;
  uint64_t job_id = 0;
  uint64_t client_id = 0;
  Status status = Status::kOk;
  std::string text;
  std::unique_ptr<LaneJob> job;
  port::Endpoint endpoint;
  std::vector<std::byte> datagram;
};

struct Notice {
  enum class Kind : uint8_t {
    kJobAttached,     // job_id: attached here, and on this lane of all other nodes
    kJobDetached,     // job_id
    kClientDetached,  // job_id, client_id
    kClientBroken,    // job_id, client_id, text: it broke the rules of the rings; let it go
    kJobFailed,       // job_id, status, text: the protocol ended the job (once)
    kHello,           // endpoint, datagram: HELLO or HELLO_ACK from the network
  };
  Kind kind = Kind::kJobAttached;
  uint64_t job_id = 0;
  uint64_t client_id = 0;
  Status status = Status::kOk;
  char text[320] = {};
  port::Endpoint endpoint;
  uint32_t length = 0;
  std::byte datagram[kHelloBytes];
};

// Facts of one job on one lane, as last published (every 100 ms while it lives).
struct JobStats {
  uint64_t job_id = 0;
  std::string job;
  exchange::Counters counters;
  exchange::Owed owed;
  exchange::Bounds bounds;
  std::vector<exchange::PeerState> peers;
  std::vector<exchange::Trace> traces;  // the last ones, oldest first
  bool drained = false;
  bool failed = false;
  // Duration of ended ops by class (exact, consistent, best_effort): bucket i counts those of at most
  // kDurationBuckets[i] seconds, the last one all; sum in seconds.
  uint64_t durations[3][20] = {};
  double duration_sum[3] = {};
};
inline constexpr double kDurationBuckets[19] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01,
                                                0.025,  0.05,    0.1,    0.25,  0.5,    1,     2.5,
                                                5,      10,      30,     60,    120};

struct LaneStats {
  port::QueueCounters queue;
  uint64_t loops = 0;  // advances while the lane is alive: feeds the watchdog
  uint64_t drops[static_cast<size_t>(wire::Drop::kCount)] = {};  // before a job was found
  std::vector<JobStats> jobs;
};

struct WorkerOptions {
  uint32_t lane = 0;
  Micros spin = 20;      // busy looking before each sleep
  bool busy = false;     // never sleeps
  uint32_t burst = 256;  // datagrams of one receive
};

class LaneWorker {
 public:
  // `queue` must outlive the worker's last do_work. `wake_control` is an eventfd that is written when notices wait.
  LaneWorker(port::Queue* queue, const WorkerOptions& options, int wake_control);
  ~LaneWorker();
  LaneWorker(const LaneWorker&) = delete;
  LaneWorker& operator=(const LaneWorker&) = delete;

  // --- control thread ---
  void post(Command command);        // and wakes the lane
  bool take_notice(Notice* notice);  // oldest first; false: none
  int event_fd() const;              // the lane's eventfd; clients get a duplicate and ring it (doorbell.h)

  // --- lane thread ---
  bool do_work(Micros now);  // true: something was done, call again soon
  void wait(Micros now);     // sleeps until there may be work, at most 100 ms
  void run();                // do_work and wait until kStop
  bool stopped() const;

  // --- any thread ---
  void stats(LaneStats* out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Why a descriptor is refused; nullptr: it is sound. `arena_bytes` and `max_op_bytes` are the daemon's own numbers.
const char* check_descriptor(const ipc::Descriptor& descriptor, uint64_t arena_bytes, uint64_t max_op_bytes);

}  // namespace sluice::daemon
