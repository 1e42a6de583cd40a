#include "daemon/control/control.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "daemon/control/control_state.h"

namespace sluice::daemon {
namespace {

constexpr Micros kLongestSleep = 100'000;
constexpr Micros kGreetingPatience = 600'000'000;  // a card may wait long for those of other ranks
constexpr Micros kSilentPatience = 60'000'000;     // before HELLO; libsluice connects again when it needs to
constexpr Micros kStopFlush = 300'000;             // for the ABORTs to leave
constexpr Micros kStopDetach = 1'500'000;
constexpr size_t kAcceptBurst = 64;
constexpr uint64_t kListenerTag = 1, kWakeTag = 2, kClientTag = 1ULL << 62, kPidTag = 1ULL << 63;

}  // namespace

const char* phase_name(JobPhase phase) {
  switch (phase) {
    case JobPhase::kGathering:
      return "gathering";
    case JobPhase::kPreparing:
      return "preparing";
    case JobPhase::kShaking:
      return "shaking";
    case JobPhase::kAttaching:
      return "attaching";
    case JobPhase::kRunning:
      return "running";
    case JobPhase::kLingering:
      return "lingering";
    case JobPhase::kDetaching:
      return "detaching";
  }
  return "unknown";
}

std::string Client::name() const { return fmt::format("rank {} (pid {})", rank, who.pid); }

ControlState::ControlState(ControlOptions control_options, ipc::Listener socket)
    : options(std::move(control_options)),
      listener(std::move(socket)),
      epoll(::epoll_create1(EPOLL_CLOEXEC)),
      config(options.config),
      slow(options.wake_fd) {
  SLUICE_ASSERT(epoll.valid());
  watch(listener.fd(), EPOLLIN, kListenerTag);
  watch(options.wake_fd, EPOLLIN, kWakeTag);
  counts.reload_unix = options.facts.started_unix;
}

void ControlState::watch(int fd, uint32_t events, uint64_t tag) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  SLUICE_ASSERT(::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) == 0);
}

bool ControlState::poll_descriptors(int timeout_ms) {
  epoll_event events[64];
  const int count = ::epoll_wait(epoll.get(), events, static_cast<int>(std::size(events)), timeout_ms);
  for (int i = 0; i < count; ++i) {
    const uint64_t tag = events[i].data.u64;
    if (tag == kListenerTag) {
      accept_clients();
    } else if (tag == kWakeTag) {
      uint64_t rung = 0;
      [[maybe_unused]] const ssize_t got = ::read(options.wake_fd, &rung, sizeof rung);
    } else if ((tag & kClientTag) != 0) {
      read_client(tag & ~kClientTag);
    } else if (Client* client = find_client(tag & ~kPidTag)) {
      // A forked child may hold the socket open: the process that joined is gone all the same. What it had sent counts.
      read_client(client->id);
      client = find_client(tag & ~kPidTag);
      if (client != nullptr && client->phase != Client::Phase::kGone) lose(client, Status::kPeerLost, "died");
    }
  }
  return count > 0;
}

void ControlState::accept_clients() {
  for (size_t i = 0; i < kAcceptBurst; ++i) {
    auto channel = listener.accept(0);
    if (!channel) {
      if (channel.error().code == EMFILE || channel.error().code == ENFILE) {
        // The connection stays in the queue and would wake us at once, for ever.
        ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, listener.fd(), nullptr);
        out_of_files = true;
        accept_errors.write(now, log::Level::kError, "{}; raise LimitNOFILE= (ulimit -n)",
                            channel.error().message);
      }
      return;
    }
    auto client = std::make_unique<Client>();
    client->id = next_id++;
    client->channel = std::move(*channel);
    client->since = now;
    if (auto who = client->channel.peer(); who.ok()) client->who = *who;
    Client* added = client.get();
    clients.emplace(client->id, std::move(client));
    ++counts.clients_accepted;
    const auto connected =
        static_cast<size_t>(std::count_if(clients.begin(), clients.end(), [](const auto& entry) {
          return entry.second->phase != Client::Phase::kGone;
        }));
    if (connected > config->config.memory.clients_max) {
      refuse(added, Status::kRefused,
             fmt::format("{} clients are connected already (memory.clients_max)", connected - 1));
      continue;
    }
    watch(added->channel.fd(), EPOLLIN | EPOLLRDHUP, kClientTag | added->id);
    auto pidfd = added->channel.peer_pidfd();
    if (pidfd.ok()) {
      added->pidfd = std::move(*pidfd);
      watch(added->pidfd.get(), EPOLLIN, kPidTag | added->id);
    } else {
      log::debug("{}; only the socket tells when it dies", pidfd.error().message);
    }
  }
}

bool ControlState::take_notices() {
  bool any = false;
  for (LaneWorker* lane : options.lanes) {
    while (lane->take_notice(&notice)) {
      any = true;
      take_notice(notice);
    }
  }
  return any;
}

void ControlState::take_notice(const Notice& from_lane) {
  switch (from_lane.kind) {
    case Notice::Kind::kHello:
      take_hello(from_lane);
      break;
    case Notice::Kind::kJobAttached:
      if (Job* job = find_job(from_lane.job_id); job != nullptr && job->phase == JobPhase::kAttaching) {
        if (++job->lanes_attached == job->settings.lanes) joined(job);
      }
      break;
    case Notice::Kind::kJobDetached:
      job_detached(from_lane.job_id);
      break;
    case Notice::Kind::kClientDetached:
      client_detached(from_lane.client_id);
      break;
    case Notice::Kind::kClientBroken:
      if (Client* client = find_client(from_lane.client_id);
          client != nullptr && client->phase != Client::Phase::kGone) {
        ++counts.clients_broken;
        lose(client, Status::kInvalid, fmt::format("was let go: {}", from_lane.text));
      }
      break;
    case Notice::Kind::kJobFailed:
      if (Job* job = find_job(from_lane.job_id))
        fail_job(job, from_lane.status, from_lane.text, job->settings.lanes > 1);
      break;
  }
}

void ControlState::run_timers() {
  // Handlers may erase jobs and clients: walk over copies of the ids.
  std::vector<uint64_t> ids;
  for (const auto& [id, job] : jobs) ids.push_back(id);
  for (const uint64_t id : ids) {
    Job* job = find_job(id);
    if (job != nullptr && job->join != nullptr && job->join->next_timer() <= now) {
      job->join->tick(now);
      pump(job);
      job = find_job(id);
    }
    if (job == nullptr || job->deadline > now) continue;
    if (job->phase == JobPhase::kLingering) {
      detach(job);
    } else {
      fail_join(job, Status::kTimeout, who_is_missing(*job));
    }
  }
  ids.clear();
  for (const auto& [id, client] : clients) {
    const Micros idle = now - client->since;
    if ((client->phase == Client::Phase::kGreeted && idle > kGreetingPatience) ||
        (client->phase == Client::Phase::kConnected && idle > kSilentPatience)) {
      ids.push_back(id);
    }
  }
  for (const uint64_t id : ids) {
    Client* client = find_client(id);
    refuse(client, Status::kTimeout,
           client->phase == Client::Phase::kGreeted ? "said HELLO and then nothing for 10 minutes"
                                                    : "connected and then said nothing for a minute");
  }
  if (out_of_files && accepting) {
    out_of_files = false;  // once per turn at most, so at most every 100 ms while descriptors are short
    watch(listener.fd(), EPOLLIN, kListenerTag);
  }
}

Micros ControlState::next_timer() const {
  Micros next = std::min(now + kLongestSleep, stop_deadline);
  for (const auto& [id, job] : jobs) {
    next = std::min(next, job->deadline);
    if (job->join != nullptr) next = std::min(next, job->join->next_timer());
  }
  return next;
}

// SIGTERM: goodbye to clients, the end of all jobs on all nodes, then the lanes let go of everything.
void ControlState::advance_stop() {
  if (stop == Stop::kNo) {
    std::string why;
    {
      const std::lock_guard lock(shared.mutex);
      why = shared.stop_why;
    }
    if (why.empty()) return;
    stop = Stop::kFlushing;
    stop_deadline = now + kStopFlush;
    accepting = false;
    if (!out_of_files) ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, listener.fd(), nullptr);
    const std::string text = fmt::format("sluiced on node {} is stopping: {}", options.facts.name, why);
    std::vector<uint64_t> ids;
    for (const auto& [id, job] : jobs) ids.push_back(id);
    for (const uint64_t id : ids) {
      Job* job = find_job(id);
      if (job == nullptr) continue;
      if (job->on_lanes()) {
        fail_job(job, Status::kDaemonLost, text, true);
      } else if (job->phase != JobPhase::kDetaching) {
        fail_join(job, Status::kDaemonLost, text);
      }
    }
    ids.clear();
    for (const auto& [id, client] : clients) ids.push_back(id);
    for (const uint64_t id : ids) {
      Client* client = find_client(id);
      if (client == nullptr || client->phase == Client::Phase::kGone) continue;
      ipc::Message bye;
      bye.type = static_cast<uint32_t>(ipc::MessageType::kBye);
      bye.code = static_cast<uint32_t>(Status::kDaemonLost);
      ipc::set_text(bye.text, text);
      [[maybe_unused]] const auto sent = client->channel.send(bye, 0);
      if (client->phase == Client::Phase::kJoined) {
        take_out(client, Status::kOk, "");
      } else {
        close(client);
      }
    }
    return;
  }
  if (stop == Stop::kFlushing && now >= stop_deadline) {
    stop = Stop::kDetaching;
    stop_deadline = now + kStopDetach;
    std::vector<uint64_t> ids;
    for (const auto& [id, job] : jobs) ids.push_back(id);
    for (const uint64_t id : ids) {
      if (Job* job = find_job(id); job != nullptr && job->phase != JobPhase::kDetaching) detach(job);
    }
  }
  if (stop == Stop::kDetaching && ((jobs.empty() && clients.empty()) || now >= stop_deadline)) {
    if (!jobs.empty()) log::error("{} jobs were not let go by the lanes in time", jobs.size());
    stop = Stop::kDone;
    stop_deadline = kNever;
    stopped.store(true);
  }
}

void ControlState::publish() {
  const std::lock_guard lock(shared.mutex);
  ControlStats& stats = shared.stats;
  stats = counts;
  stats.clients = static_cast<uint64_t>(std::count_if(clients.begin(), clients.end(), [](const auto& entry) {
    return entry.second->phase != Client::Phase::kGone;
  }));
  stats.arena_bytes = arena_bytes();
  stats.stopping = stop != Stop::kNo;
  for (const auto& [id, job] : jobs) {
    JobFacts facts;
    facts.id = id;
    facts.name = job->name;
    facts.phase = job->phase;
    facts.ranks = job->world_size;
    facts.self = job->membership.self;
    facts.lanes = job->settings.lanes;
    facts.payload = job->settings.payload;
    facts.deadline = job->settings.hard_deadline;
    facts.adaptive = job->settings.adaptive;
    facts.pull_patience = job->settings.pull_patience;
    for (const ipc::View::Node& node : job->membership.view.nodes) facts.nodes.push_back(node.endpoint);
    for (const uint64_t client_id : job->clients) {
      const auto client = clients.find(client_id);
      if (client != clients.end()) facts.local_ranks.push_back(client->second->rank);
    }
    std::sort(facts.local_ranks.begin(), facts.local_ranks.end());
    facts.failed = job->failed;
    facts.failure = job->failure_text;
    facts.since = job->since;
    stats.jobs.push_back(std::move(facts));
  }
}

bool ControlState::do_work(Micros turn) {
  now = turn;
  loops.fetch_add(1, std::memory_order_relaxed);
  bool any = false;
  // Before the clients: an answer given after a reload shows what was loaded.
  if (asked.exchange(false)) {
    any = true;
    const std::lock_guard lock(shared.mutex);
    if (shared.new_config != nullptr) config = std::exchange(shared.new_config, nullptr);
    if (std::exchange(shared.reload_noted, false)) {
      counts.reload_ok = shared.reload_ok;
      if (shared.reload_ok) counts.reload_unix = shared.reload_unix;
    }
  }
  any |= poll_descriptors(0);
  any |= take_notices();
  any |= slow.drain();
  run_timers();
  advance_stop();
  publish();
  return any;
}

void ControlState::wait(Micros turn) {
  now = turn;
  const Micros left = std::max<Micros>(next_timer() - now, 0);
  // Rounded up to milliseconds, so that a timer is due when the sleep ends. What arrives is handled by do_work.
  epoll_event ignored;
  if (asked.load() || left == 0) return;
  ::epoll_wait(epoll.get(), &ignored, 1, static_cast<int>((left + 999) / 1'000));
}

// --- Public -----------------------------------------------------------------------------------------------------------

Control::Control(ControlOptions options, ipc::Listener listener)
    : state_(std::make_unique<ControlState>(std::move(options), std::move(listener))) {}
Control::~Control() = default;

bool Control::do_work(Micros now) { return state_->do_work(now); }
void Control::wait(Micros now) { state_->wait(now); }
bool Control::stopped() const { return state_->stopped.load(); }
uint64_t Control::loops() const { return state_->loops.load(std::memory_order_relaxed); }

void Control::run() {
  while (!stopped()) {
    if (!do_work(monotonic_micros())) wait(monotonic_micros());
  }
}

void Control::request_stop(const std::string& why) {
  {
    const std::lock_guard lock(state_->shared.mutex);
    if (state_->shared.stop_why.empty()) state_->shared.stop_why = why.empty() ? "asked to" : why;
  }
  state_->asked.store(true);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(state_->options.wake_fd, &one, sizeof one);
}

void Control::apply(std::shared_ptr<const config::Loaded> config, bool ok, int64_t now_unix) {
  {
    const std::lock_guard lock(state_->shared.mutex);
    if (ok) state_->shared.new_config = std::move(config);
    state_->shared.reload_noted = state_->shared.reloads_seen = true;
    state_->shared.reload_ok = ok;
    state_->shared.reload_unix = now_unix;
  }
  state_->asked.store(true);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(state_->options.wake_fd, &one, sizeof one);
}

ControlStats Control::stats() const {
  const std::lock_guard lock(state_->shared.mutex);
  ControlStats stats = state_->shared.stats;
  // Whoever asked for a reload and then reads must not find the state before it.
  if (state_->shared.reloads_seen) {
    stats.reload_ok = state_->shared.reload_ok;
    if (stats.reload_ok) stats.reload_unix = state_->shared.reload_unix;
  }
  return stats;
}

}  // namespace sluice::daemon
