// The inside of Control, shared by the files of this folder. Control thread, but for what `shared` guards.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/log.h"
#include "daemon/control/client.h"
#include "daemon/control/control.h"
#include "daemon/control/job.h"
#include "daemon/control/slow_work.h"

namespace sluice::daemon {

struct ControlState {
  ControlState(ControlOptions control_options, ipc::Listener socket);

  // --- loop (control.cc) ---
  bool do_work(Micros now);
  void wait(Micros now);
  bool poll_descriptors(int timeout_ms);
  void accept_clients();
  bool take_notices();
  void take_notice(const Notice& notice);
  void run_timers();
  Micros next_timer() const;
  void advance_stop();
  void publish();
  void watch(int fd, uint32_t events, uint64_t tag) const;

  // --- messages (clients.cc) ---
  void read_client(uint64_t id);
  void handle(Client* client, ipc::Received&& received);
  void handle_hello(Client* client, const ipc::Message& message);
  void handle_leave(Client* client);
  void handle_mapped(Client* client);
  void handle_abort(Client* client);
  void handle_admin(Client* client, const ipc::Message& message);
  // Closes after a REFUSE. For clients that have not joined.
  void refuse(Client* client, Status status, const std::string& text);
  // Its process died, or it broke the rules: `why` is told to the other ranks. For clients in any phase.
  void lose(Client* client, Status status, const std::string& why);
  void close(Client* client);
  Client* find_client(uint64_t id);

  // --- joining (joining.cc) ---
  Job* gathering_job(const std::string& name, uint32_t world_size, uint32_t generation);
  // Ends what is left here of older generations of a job.
  void supersede(const std::string& name, uint32_t generation);
  void handle_join(Client* client, ipc::Received&& received);
  Result<void> check_join(Job* job, Client* client, const ipc::Message& message, const UniqueFd& view_fd);
  void prepare(Job* job);
  void prepared(uint64_t job_id, std::vector<std::pair<uint64_t, Regions>> regions, const std::string& error);
  void shake(Job* job);
  void pump(Job* job);
  void attach(Job* job);
  void joined(Job* job);
  void take_hello(const Notice& notice);
  // Refuses every client of a job that is not running yet, and forgets the job.
  void fail_join(Job* job, Status status, const std::string& text);
  std::string who_is_missing(const Job& job) const;

  // --- ending (ending.cc) ---
  void fail_job(Job* job, Status status, const std::string& text, bool tell_lanes);
  // Takes a client's pages off the lanes; they stay mapped until the lanes have said so.
  void let_go(const Job* job, Client* client, Status status, const std::string& text);
  // The same, and takes it out of its job.
  void take_out(Client* client, Status status, const std::string& text);
  void client_detached(uint64_t client_id);
  void end_if_left(Job* job);
  void detach(Job* job);
  void job_detached(uint64_t job_id);

  Job* find_job(uint64_t id);
  void post_all(const Job& job, Command::Kind kind, uint64_t client_id, Status status,
                const std::string& text);
  uint64_t arena_bytes() const;

  std::string admin_answer(const std::string& request);  // admin.cc

  const ControlOptions options;
  ipc::Listener listener;
  UniqueFd epoll;
  std::shared_ptr<const config::Loaded> config;
  SlowWork slow;
  Micros now = 0;  // of the turn
  uint64_t next_id = 1;
  std::map<uint64_t, std::unique_ptr<Client>> clients;
  std::map<uint64_t, std::unique_ptr<Job>> jobs;
  Notice notice;  // large: not on the stack
  bool accepting = true;
  bool out_of_files = false;
  log::RateLimit stray_hellos, refusals, accept_errors;

  enum class Stop : uint8_t { kNo, kFlushing, kDetaching, kDone };
  Stop stop = Stop::kNo;
  Micros stop_deadline = kNever;

  // What other threads see and ask for.
  struct Shared {
    mutable std::mutex mutex;
    ControlStats stats;
    std::string stop_why;
    std::shared_ptr<const config::Loaded> new_config;
    bool reload_noted = false, reloads_seen = false, reload_ok = true;
    int64_t reload_unix = 0;
  } shared;
  std::atomic<bool> asked{false};  // something above waits
  std::atomic<bool> stopped{false};
  std::atomic<uint64_t> loops{0};
  ControlStats counts;  // the counters in it; jobs are filled in by publish()
};

}  // namespace sluice::daemon
