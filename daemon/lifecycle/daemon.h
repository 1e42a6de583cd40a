// A whole daemon: port, lanes, control, metrics and their threads. The executable runs one; tests run several in one
// process. Nothing here is global but the log, which belongs to whoever starts daemons.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "base/unique_fd.h"
#include "config/loader.h"
#include "daemon/control/control.h"
#include "daemon/metrics/health.h"
#include "daemon/metrics/server.h"
#include "daemon/metrics/totals.h"
#include "transport/port/faulty/faulty_port.h"
#include "transport/port/port.h"

namespace sluice::daemon {

// Exit codes of the executable; also the codes of Errors from start().
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitConfig = 78;  // EX_CONFIG of sysexits.h: systemd does not restart after it

class Daemon {
 public:
  // Opens everything and starts the threads; when it returns clients can connect. Errors say which key is at fault and
  // what to do; code kExitConfig when only another configuration helps, else kExitFailure.
  static Result<std::unique_ptr<Daemon>> start(std::shared_ptr<const config::Loaded> config);
  // stop() if that has not been done.
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Says goodbye to clients, ends jobs on all nodes, joins the threads. At most 5 s. Once.
  void stop(const std::string& why);

  // Takes a configuration that was loaded anew. Good: what can be applied is, and the result is a line that says what
  // changed and which changes need a restart. Bad: the old one stays in force, the error has its problems.
  Result<std::string> reload(std::shared_ptr<const config::Loaded> config);

  // One line for the log: where, why there, what was granted.
  std::string summary() const;
  // One line for systemd's STATUS=.
  std::string status_line() const;
  const NodeFacts& facts() const { return facts_; }
  std::string metrics_address() const { return server_ ? server_->address() : ""; }

  // Any thread.
  Health::Verdict health();
  Snapshot snapshot() { return totals_->update(); }
  ControlStats control_stats() const { return control_->stats(); }

 private:
  Daemon() = default;
  Result<void> open_port(const config::Config& config);
  Result<void> open_lanes(const config::Config& config);
  void open_control(std::shared_ptr<const config::Loaded> config, ipc::Listener listener);
  Result<void> open_metrics(const config::Config& config);
  void start_threads(const config::Config& config);
  std::vector<prometheus::MetricFamily> metrics();

  std::shared_ptr<const config::Loaded> config_;  // guarded by config_mutex_
  mutable std::mutex config_mutex_;
  NodeFacts facts_;
  UniqueFd wake_;
  std::unique_ptr<port::Port> port_;
  const port::FaultyPort* faulty_ = nullptr;  // port_, when transport.faults are on
  std::vector<std::unique_ptr<port::Queue>> queues_;
  std::vector<std::unique_ptr<LaneWorker>> lanes_;
  std::unique_ptr<Totals> totals_;
  std::unique_ptr<Control> control_;
  Health health_;
  std::atomic<uint64_t> scrapes_{0};
  std::unique_ptr<MetricsServer> server_;
  std::vector<std::thread> lane_threads_;
  std::thread control_thread_;
  bool stopped_ = false;
};

// Problems that only show with a look at the machine: key files, sealing on routable addresses ... Empty: none.
std::string check_on_this_machine(const config::Config& config);

}  // namespace sluice::daemon
