#include "daemon/lifecycle/daemon.h"

#include <fmt/format.h>
#include <grp.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>

#include "base/clock.h"
#include "base/log.h"
#include "config/units.h"
#include "daemon/control/settings.h"
#include "daemon/lifecycle/fault_injection.h"
#include "daemon/lifecycle/port_owner.h"
#include "daemon/metrics/exposition.h"
#include "transport/port/endpoint.h"
#include "transport/port/interfaces.h"
#include "transport/port/udp/udp_port.h"
#include "transport/wire/packet.h"

namespace sluice::daemon {
namespace {

Error config_error(std::string message) { return {kExitConfig, std::move(message)}; }
Error failure(std::string message) { return {kExitFailure, std::move(message)}; }

std::string node_name(const config::Config& config) {
  if (!config.node.empty()) return config.node;
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 && name[0] != '\0' ? name : "localhost";
}

bool is_loopback(const port::Endpoint& endpoint) {
  if (port::is_ipv4(endpoint)) return endpoint.ip[12] == 127;
  return std::all_of(endpoint.ip.begin(), endpoint.ip.end() - 1, [](uint8_t byte) { return byte == 0; }) &&
         endpoint.ip[15] == 1;
}

// The first entry of transport.bind that fits.
Result<port::BindChoice> choose(const config::Config& config) {
  auto interfaces = port::list_interfaces();
  if (!interfaces) return failure(interfaces.error().message);
  std::string reasons;
  for (const std::string& want : config.transport.bind) {
    auto choice = port::choose_bind(want, static_cast<uint16_t>(config.transport.port), *interfaces);
    if (choice) return choice;
    reasons += (reasons.empty() ? "" : "; ") + choice.error().message;
  }
  return config_error(fmt::format("transport.bind: {}", reasons));
}

Result<void> check_sealing(const config::Config& config, const port::BindChoice& choice) {
  if (config.security.sealing != config::SealingMode::kNone || config.security.insecure ||
      is_loopback(choice.endpoint))
    return {};
  return config_error(
      fmt::format("security.sealing: none on {} ({}) lets anybody there change gradients; use auth, or set "
                  "security.insecure: true",
                  port::ip_to_string(choice.endpoint), choice.interface));
}

Result<gid_t> group_id(const std::string& group) {
  if (group.empty()) return static_cast<gid_t>(-1);
  gid_t id = 0;
  const auto [end, error] = std::from_chars(group.data(), group.data() + group.size(), id);
  if (error == std::errc() && end == group.data() + group.size()) return id;
  char buffer[16384];
  ::group entry{};
  ::group* found = nullptr;
  if (::getgrnam_r(group.c_str(), &entry, buffer, sizeof buffer, &found) != 0 || found == nullptr) {
    return config_error(fmt::format(
        "socket.group: there is no group '{}' on this machine; create it (groupadd --system {}) or "
        "leave the key out",
        group, group));
  }
  return entry.gr_gid;
}

template <typename Function>
std::thread named_thread(const std::string& name, const CpuSet& cpus, Function function) {
  return std::thread([name, cpus, function] {
    ::pthread_setname_np(::pthread_self(), name.substr(0, 15).c_str());
    if (auto pinned = pin_current_thread(cpus); !pinned.ok())
      log::warning("{}: {}", name, pinned.error().message);
    function();
  });
}

}  // namespace

std::string check_on_this_machine(const config::Config& config) {
  std::string problems;
  const auto note = [&](const Error& error) { problems += error.message + "\n"; };
  if (!config.security.key_file.empty()) {
    if (auto key = load_key(config.security.key_file); !key) note(key.error());
  }
  if (auto group = group_id(config.socket.group); !group) note(group.error());
  if (auto choice = choose(config); !choice) {
    note(choice.error());
  } else if (auto sealing = check_sealing(config, *choice); !sealing.ok()) {
    note(sealing.error());
  }
  if (auto faults = fault_plan(config); !faults) note(faults.error());
  if (config.metrics.listen != "off" && !port::parse_endpoint(config.metrics.listen)) {
    problems += fmt::format("metrics.listen: '{}' is not address:port, such as 127.0.0.1:9477, nor off\n",
                            config.metrics.listen);
  }
  return problems;
}

Result<std::unique_ptr<Daemon>> Daemon::start(std::shared_ptr<const config::Loaded> loaded) {
  const config::Config& config = loaded->config;
  std::unique_ptr<Daemon> daemon(new Daemon());
  daemon->config_ = loaded;
  daemon->facts_.name = node_name(config);
  daemon->facts_.started = monotonic_micros();
  daemon->facts_.started_unix = std::time(nullptr);
  daemon->wake_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!daemon->wake_) return failure(fmt::format("cannot create an eventfd: {}", std::strerror(errno)));
  if (!config.security.key_file.empty()) {
    if (auto key = load_key(config.security.key_file); !key) return config_error(key.error().message);
  }
  // First the socket: its lock says whether another daemon is here, before its port and everything else is in the way.
  auto group = group_id(config.socket.group);
  if (!group) return group.error();
  auto listener = ipc::Listener::listen(config.socket.path, config.socket.mode, *group);
  if (!listener) return failure(fmt::format("socket.path: {}", listener.error().message));
  if (auto opened = daemon->open_port(config); !opened.ok()) return opened.error();
  if (auto opened = daemon->open_lanes(config); !opened.ok()) return opened.error();
  daemon->open_control(loaded, std::move(*listener));
  if (auto opened = daemon->open_metrics(config); !opened.ok()) return opened.error();
  daemon->start_threads(config);
  return daemon;
}

Result<void> Daemon::open_port(const config::Config& config) {
  auto choice = choose(config);
  if (!choice) return choice.error();
  if (auto sealing = check_sealing(config, *choice); !sealing.ok()) return sealing.error();
  port::UdpOptions options;
  options.bind = choice->endpoint;
  options.queues = config.lanes;
  options.receive_buffer = config.transport.receive_buffer;
  options.send_buffer = config.transport.send_buffer;
  options.gso = config.transport.gso;
  options.gro = config.transport.gro;
  options.interface = choice->interface;
  auto opened = port::open_udp_port(options);
  if (!opened) return failure(opened.error().message);
  port_ = std::move(*opened);
  auto faults = fault_plan(config);
  if (!faults) return config_error(faults.error().message);
  if (faults->any()) {  // its note says what is on, and is logged as a warning
    port::FaultyOptions decoration;
    decoration.plan = std::move(*faults);
    decoration.plan.seed = fault_seed(decoration.plan.seed, choice->endpoint);
    auto faulty = port::make_faulty_port(std::move(port_), std::move(decoration));
    faulty_ = faulty.get();
    port_ = std::move(faulty);
  }
  facts_.interface = choice->interface;
  facts_.why = choice->reason;
  facts_.lanes = config.lanes;
  facts_.sealing =
      config.security.sealing == config::SealingMode::kNone ? wire::Sealing::kNone : wire::Sealing::kAuth;
  return {};
}

Result<void> Daemon::open_lanes(const config::Config& config) {
  for (uint32_t lane = 0; lane < config.lanes; ++lane) {
    auto queue = port_->open_queue(lane);
    if (!queue) {
      std::string owner;
      if (queue.error().code == EADDRINUSE) {
        owner = port_owner_text("udp", static_cast<uint16_t>(config.transport.port + lane));
      }
      return failure(fmt::format("transport.port: {}{}", queue.error().message, owner));
    }
    queues_.push_back(std::move(*queue));
    WorkerOptions options;
    options.lane = lane;
    options.spin = config.idle.mode == config::IdleMode::kEvent ? 0 : config.idle.spin;
    options.busy = config.idle.mode == config::IdleMode::kBusy;
    lanes_.push_back(std::make_unique<LaneWorker>(queues_.back().get(), options, wake_.get()));
  }
  const port::Capabilities& capabilities = port_->capabilities();
  // The address that is bound is the one that is told: the host name may be 127.0.1.1 in /etc/hosts.
  facts_.endpoint = queues_.front()->local();
  facts_.endpoint_text = port::to_string(facts_.endpoint);
  facts_.port_kind = capabilities.kind;
  facts_.port_note = capabilities.note;
  facts_.receive_buffer = capabilities.receive_buffer_bytes;
  facts_.link_bits = capabilities.link_bits_per_second;
  facts_.largest_datagram = std::min<uint32_t>(capabilities.max_datagram, kHelloBytes);
  if (wire::payload_for_datagram(facts_.largest_datagram) == 0) {
    return failure(
        fmt::format("transport.bind: {} carries datagrams of {} bytes only; at least {} are needed",
                    facts_.interface, facts_.largest_datagram, exchange::kSmallestDatagram));
  }
  return {};
}

void Daemon::open_control(std::shared_ptr<const config::Loaded> loaded, ipc::Listener listener) {
  std::vector<const LaneWorker*> readable;
  ControlOptions options;
  options.config = std::move(loaded);
  options.facts = facts_;
  for (const auto& lane : lanes_) {
    readable.push_back(lane.get());
    options.lanes.push_back(lane.get());
  }
  totals_ = std::make_unique<Totals>(readable);
  options.totals = totals_.get();
  options.wake_fd = wake_.get();
  control_ = std::make_unique<Control>(std::move(options), std::move(listener));
}

Result<void> Daemon::open_metrics(const config::Config& config) {
  if (config.metrics.listen == "off") return {};
  auto server = MetricsServer::start(config.metrics.listen,
                                     {[this] { return metrics(); }, [this] { return health(); }});
  if (!server)
    return server.error().code == EINVAL ? config_error(server.error().message)
                                         : failure(server.error().message);
  server_ = std::move(*server);
  return {};
}

void Daemon::start_threads(const config::Config& config) {
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    CpuSet cpus;
    if (!config.cpus.lanes.empty()) {
      auto one = CpuSet::parse(std::to_string(config.cpus.lanes.cpus()[lane]));
      if (one) cpus = *one;
    }
    lane_threads_.push_back(named_thread(fmt::format("sluice-lane-{}", lane), cpus,
                                         [worker = lanes_[lane].get()] { worker->run(); }));
  }
  control_thread_ = named_thread("sluice-control", config.cpus.control, [this] { control_->run(); });
}

Daemon::~Daemon() { stop("the daemon object was destroyed"); }

void Daemon::stop(const std::string& why) {
  if (std::exchange(stopped_, true)) return;
  if (control_ != nullptr) control_->request_stop(why);
  if (control_thread_.joinable()) control_thread_.join();
  for (const auto& lane : lanes_) lane->post(Command{});  // kStop
  for (std::thread& thread : lane_threads_) thread.join();
  server_.reset();
  control_.reset();
  lanes_.clear();
  queues_.clear();
  port_.reset();
}

Result<std::string> Daemon::reload(std::shared_ptr<const config::Loaded> loaded) {
  std::string problems = loaded->ok() ? check_on_this_machine(loaded->config) : loaded->problems_text();
  const auto now = static_cast<int64_t>(std::time(nullptr));
  if (!problems.empty()) {
    control_->apply(nullptr, false, now);
    return config_error(std::move(problems));
  }
  std::string changed, restart;
  {
    const std::lock_guard lock(config_mutex_);
    // What needs a restart keeps its old value, so that what is shown is what is in force.
    auto merged = std::make_shared<config::Loaded>(*loaded);
    size_t index = 0;
    for (const config::Key& key : config::keys()) {
      const size_t i = index++;
      if (key.kind == config::Kind::kPeers) continue;
      const std::string before = config::format_value(key, config_->config);
      const std::string after = config::format_value(key, loaded->config);
      if (before == after) continue;
      std::string& list = key.reload ? changed : restart;
      list += fmt::format("{}{}: {} -> {}", list.empty() ? "" : ", ", key.name, before, after);
      if (!key.reload) {
        config::copy_value(key, config_->config, &merged->config);
        merged->origins[i] = config_->origins[i];
      }
    }
    config_ = merged;
    control_->apply(merged, true, now);
  }
  std::string line = changed.empty() ? "nothing changed" : "changed " + changed;
  if (!restart.empty()) line += "; NOT applied, these need a restart: " + restart;
  return line;
}

std::string Daemon::summary() const {
  std::string line = fmt::format(
      "sluiced {} on node {}: {} {} on {}; {} lane{}; receive buffer {}; datagrams up to {} bytes; sealing "
      "{}; socket {}; metrics {}",
      kVersion, facts_.name, facts_.port_kind, facts_.endpoint_text,
      facts_.why.empty() ? facts_.interface : facts_.why, facts_.lanes, facts_.lanes == 1 ? "" : "s",
      config::format_bytes(facts_.receive_buffer), facts_.largest_datagram, sealing_name(facts_.sealing),
      config_->config.socket.path, server_ ? "http://" + server_->address() + "/metrics" : "off");
  return line;
}

std::string Daemon::status_line() const {
  const ControlStats stats = control_->stats();
  const auto running = std::count_if(stats.jobs.begin(), stats.jobs.end(),
                                     [](const JobFacts& job) { return job.phase == JobPhase::kRunning; });
  return fmt::format("{}: {} clients, {} jobs running{}", facts_.endpoint_text, stats.clients, running,
                     stats.reload_ok ? "" : "; the last reload FAILED, the old configuration is in force");
}

Health::Verdict Daemon::health() {
  return health_.look(monotonic_micros(), control_->loops(), totals_->update(), control_->stats());
}

std::vector<prometheus::MetricFamily> Daemon::metrics() {
  const Snapshot snapshot = totals_->update();
  const ControlStats stats = control_->stats();
  timespec wall{};
  ::clock_gettime(CLOCK_REALTIME, &wall);
  uint32_t peer_series = 0;
  {
    const std::lock_guard lock(config_mutex_);
    peer_series = config_->config.metrics.peer_series;
  }
  port::FaultCounters faults;
  if (faulty_ != nullptr) faults = faulty_->fault_counters();
  return metric_families({snapshot, stats, facts_, peer_series, ++scrapes_, monotonic_micros(),
                          static_cast<double>(wall.tv_sec) + static_cast<double>(wall.tv_nsec) * 1e-9,
                          faulty_ != nullptr ? &faults : nullptr});
}

}  // namespace sluice::daemon
