#include "daemon/engine/lane_worker.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/ipc/doorbell.h"
#include "daemon/engine/attached_job.h"

namespace sluice::daemon {
namespace {

constexpr Micros kPublishEvery = 100'000;
constexpr Micros kLongestSleep = 100'000;
constexpr size_t kHelloNotices = 64;   // HELLOs that wait for the control thread; more are dropped
constexpr uint32_t kDescriptors = 64;  // of one client in one turn
constexpr int kSendTurns = 4;          // bursts between two looks at the receive side

// Whether looking again for a while before each sleep pays. It does where a lane has a CPU to itself and its peers
// answer soon; where processes share CPUs it takes time from the very one that is waited for. Spinning goes on while
// more than one spin in three finds work; otherwise one sleep in sixteen tries whether that has changed.
class SpinScore {
 public:
  bool worth_it() { return score_ >= kEnough || ++skipped_ % 16 == 0; }
  void hit() { score_ = std::min(score_ + 2, 2 * kEnough); }
  void miss() { score_ = std::max(score_ - 1, 0); }

 private:
  static constexpr int kEnough = 8;
  int score_ = 2 * kEnough;
  uint32_t skipped_ = 0;
};

}  // namespace

struct LaneWorker::State {
  port::Queue* queue;
  WorkerOptions options;
  int wake_control;
  UniqueFd event;

  // Between the threads. Neither is touched while data flow: the flags are looked at, the locks are not.
  std::mutex mutex;
  std::vector<Command> commands;
  std::atomic<bool> commands_wait{false};
  std::vector<std::unique_ptr<Notice>> notices;
  size_t hellos = 0;
  mutable std::mutex stats_mutex;
  LaneStats stats;

  std::vector<std::unique_ptr<AttachedJob>> jobs;
  PeerTable peers;
  std::vector<port::RxPacket> received;
  std::vector<exchange::Outgoing> outgoing;
  std::vector<port::TxPacket> backlog;  // of one job, not taken by the device yet
  size_t backlog_first = 0;
  uint64_t backlog_job = 0;
  size_t turn = 0;
  uint64_t loops = 0;
  uint64_t drops[static_cast<size_t>(wire::Drop::kCount)] = {};
  Micros publish_at = 0;
  bool stop = false;

  State(port::Queue* q, const WorkerOptions& o, int wake)
      : queue(q), options(o), wake_control(wake), event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), peers(q) {
    received.resize(o.burst);
    outgoing.resize(256);
    backlog.reserve(256);
  }

  void notify(std::unique_ptr<Notice> notice) {
    {
      const std::lock_guard lock(mutex);
      if (notice->kind == Notice::Kind::kHello) {
        if (hellos >= kHelloNotices) return;
        ++hellos;
      }
      notices.push_back(std::move(notice));
    }
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_control, &one, sizeof one);
  }
  void notify(Notice::Kind kind, uint64_t job_id, uint64_t client_id = 0, Status status = Status::kOk,
              const char* text = "") {
    auto notice = std::make_unique<Notice>();
    notice->kind = kind;
    notice->job_id = job_id;
    notice->client_id = client_id;
    notice->status = status;
    std::snprintf(notice->text, sizeof notice->text, "%s", text);
    notify(std::move(notice));
  }

  AttachedJob* find(uint64_t id) {
    for (auto& job : jobs) {
      if (job->id == id) return job.get();
    }
    return nullptr;
  }
  void drop_backlog(uint64_t job_id) {
    if (backlog_job != job_id) return;
    backlog.clear();
    backlog_first = 0;
  }

  void run_commands(Micros now);
  void run_command(Command& command, Micros now);
  bool receive(Micros now);
  void attach(LaneJob job, Micros now);
  void dispatch(const port::RxPacket& packet, Micros now);
  bool read_rings(Micros now);
  bool send(Micros now);
  bool flush_backlog();
  bool deliver_events(Micros now);
  void publish(Micros now);
};

LaneWorker::LaneWorker(port::Queue* queue, const WorkerOptions& options, int wake_control)
    : state_(std::make_unique<State>(queue, options, wake_control)) {}
LaneWorker::~LaneWorker() = default;

void LaneWorker::post(Command command) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->commands.push_back(std::move(command));
  }
  state_->commands_wait.store(true, std::memory_order_release);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(state_->event.get(), &one, sizeof one);
}

bool LaneWorker::take_notice(Notice* notice) {
  const std::lock_guard lock(state_->mutex);
  if (state_->notices.empty()) return false;
  *notice = *state_->notices.front();
  state_->notices.erase(state_->notices.begin());
  if (notice->kind == Notice::Kind::kHello) --state_->hellos;
  return true;
}

int LaneWorker::event_fd() const { return state_->event.get(); }
bool LaneWorker::stopped() const { return state_->stop; }
void LaneWorker::stats(LaneStats* out) const {
  const std::lock_guard lock(state_->stats_mutex);
  *out = state_->stats;
}

// --- Commands ---------------------------------------------------------------------------------------------------------

void LaneWorker::State::run_commands(Micros now) {
  std::vector<Command> taken;
  {
    const std::lock_guard lock(mutex);
    taken.swap(commands);
    commands_wait.store(false, std::memory_order_relaxed);
  }
  for (Command& command : taken) run_command(command, now);
}

// Memory for a job is taken here and nowhere later; where there is none, this job fails and no other.
void LaneWorker::State::attach(LaneJob job, Micros now) {
  const uint64_t id = job.id;
  const std::string text = fmt::format("job '{}': no memory for its pool of {} MiB a lane (memory.job_pool)",
                                       job.settings.job, job.settings.pool_bytes >> 20);
  try {
    jobs.push_back(std::make_unique<AttachedJob>(std::move(job), &peers, options.lane, now));
  } catch (const std::bad_alloc&) {
    notify(Notice::Kind::kJobFailed, id, 0, Status::kNoMemory, text.c_str());
  }
}

void LaneWorker::State::run_command(Command& command, Micros now) {
  switch (command.kind) {
    case Command::Kind::kAttachJob: {
      attach(std::move(*command.job), now);
      break;
    }
    case Command::Kind::kDetachJob: {
      drop_backlog(command.job_id);
      for (size_t i = 0; i < jobs.size(); ++i) {
        if (jobs[i]->id != command.job_id) continue;
        jobs[i]->release_peers(&peers);
        jobs.erase(jobs.begin() + static_cast<ptrdiff_t>(i));
        break;
      }
      notify(Notice::Kind::kJobDetached, command.job_id);
      break;
    }
    case Command::Kind::kFailJob:
      if (AttachedJob* job = find(command.job_id)) {
        job->failure_told = true;  // the control thread knows: it said so
        job->lane.fail(now, command.status, command.text.c_str());
      }
      break;
    case Command::Kind::kGoneClient:
      if (AttachedJob* job = find(command.job_id)) {
        // Its slots may be in use: end the job's ops first, and forget packets that point there. One that left is
        // through with its ops, but for what it owes; one that says so with ops open is treated like one that died.
        drop_backlog(command.job_id);
        const bool left = command.status == Status::kOk;
        if (left && job->forget(command.client_id, now, true)) {
          job->deliver_events();
        } else {
          job->failure_told |= !left;
          job->lane.fail(now, left ? Status::kPeerLost : command.status,
                         left ? "a rank of this node left while its calls were open" : command.text.c_str());
          job->deliver_events();
          job->forget(command.client_id, now, false);
        }
      }
      notify(Notice::Kind::kClientDetached, command.job_id, command.client_id);
      break;
    case Command::Kind::kSend: {
      const port::PeerHandle peer = peers.hold(command.endpoint);
      if (peer == port::kUnknownPeer) break;
      port::TxPacket packet;
      packet.peer = peer;
      packet.payload = command.datagram.data();
      packet.payload_length = static_cast<uint32_t>(command.datagram.size());
      queue->send({&packet, 1});  // not taken: the handshake repeats it
      peers.drop(command.endpoint);
      break;
    }
    case Command::Kind::kStop:
      stop = true;
      break;
  }
}

// --- Receive ----------------------------------------------------------------------------------------------------------

bool LaneWorker::State::receive(Micros now) {
  const size_t count = queue->receive(received);
  for (size_t i = 0; i < count; ++i) dispatch(received[i], now);
  if (count > 0) queue->release({received.data(), count});
  return count > 0;
}

void LaneWorker::State::dispatch(const port::RxPacket& packet, Micros now) {
  const auto drop = [&](wire::Drop reason) { ++drops[static_cast<size_t>(reason)]; };
  if (packet.length < wire::kHeaderBytes) return drop(wire::Drop::kLength);
  wire::Header header;
  std::memcpy(&header, packet.data, sizeof header);
  if (header.magic != wire::kMagic) return drop(wire::Drop::kMagic);
  const auto type = static_cast<wire::Type>(header.type);
  if (type == wire::Type::kHello || type == wire::Type::kHelloAck) {
    if (packet.length > kHelloBytes) return drop(wire::Drop::kLength);
    auto notice = std::make_unique<Notice>();
    notice->kind = Notice::Kind::kHello;
    notice->endpoint = packet.source;
    notice->length = packet.length;
    std::memcpy(notice->datagram, packet.data, packet.length);
    return notify(std::move(notice));
  }
  // After HELLO: a join that fails names the versions of both sides.
  if (header.version != wire::kVersion) return drop(wire::Drop::kVersion);
  for (auto& job : jobs) {
    if (job->lane.job_id() != header.job) continue;
    if (job->lane.epoch() != header.epoch) continue;  // another view of the same job may be attached, too
    if (header.sender >= job->handles.size()) return drop(wire::Drop::kSender);
    if (packet.peer == port::kUnknownPeer || job->handles[header.sender] != packet.peer) {
      return drop(wire::Drop::kSource);
    }
    job->lane.on_packet(now, {packet.data, packet.length});
    return;
  }
  const bool known = std::any_of(jobs.begin(), jobs.end(),
                                 [&](const auto& job) { return job->lane.job_id() == header.job; });
  drop(known ? wire::Drop::kEpoch : wire::Drop::kJob);
}

// --- Clients ----------------------------------------------------------------------------------------------------------

bool LaneWorker::State::read_rings(Micros now) {
  bool any = false;
  for (auto& job : jobs) {
    for (AttachedClient& client : job->clients) {
      if (!client.live()) continue;
      for (uint32_t i = 0; i < kDescriptors; ++i) {
        ipc::Descriptor descriptor;
        const ipc::RingState state = client.descriptors.pop(&descriptor);
        if (state == ipc::RingState::kEmpty) break;
        any = true;
        const char* wrong = state == ipc::RingState::kBroken ? "its submit ring is broken"
                                                             : job->submit(&client, descriptor, now);
        if (wrong == nullptr) continue;
        client.broken = true;
        notify(Notice::Kind::kClientBroken, job->id, client.view.id, Status::kInvalid, wrong);
        break;
      }
    }
  }
  return any;
}

bool LaneWorker::State::deliver_events(Micros now) {
  bool any = false;
  for (auto& job : jobs) {
    any |= job->deliver_events();
    any |= job->serve_takes(now);
    for (AttachedClient& client : job->clients) {
      if (!std::exchange(client.overran, false) || client.gone) continue;
      notify(Notice::Kind::kClientBroken, job->id, client.view.id, Status::kInvalid,
             "it does not take its completions");
    }
    if (!job->met_told && job->lane.met()) {
      job->met_told = true;
      notify(Notice::Kind::kJobAttached, job->id);
    }
    if (job->lane.failed() && !job->failure_told) {
      job->failure_told = true;
      notify(Notice::Kind::kJobFailed, job->id, 0, job->lane.failure(), job->lane.failure_text());
    }
  }
  return any;
}

// --- Send -------------------------------------------------------------------------------------------------------------

bool LaneWorker::State::flush_backlog() {
  if (backlog_first == backlog.size()) return true;
  backlog_first += queue->send(std::span(backlog).subspan(backlog_first));
  if (backlog_first < backlog.size()) return false;
  backlog.clear();
  backlog_first = 0;
  return true;
}

bool LaneWorker::State::send(Micros now) {
  bool any = false;
  for (int turns = 0; turns < kSendTurns; ++turns) {
    if (!flush_backlog()) return any;
    size_t count = 0;
    for (size_t i = 0; i < jobs.size() && count == 0; ++i) {  // jobs take turns
      AttachedJob& job = *jobs[(turn + i) % jobs.size()];
      count = job.lane.poll_send(now, outgoing);
      if (count == 0) continue;
      backlog_job = job.id;
      turn = (turn + i + 1) % jobs.size();
      for (size_t k = 0; k < count; ++k) {
        const exchange::Outgoing& from = outgoing[k];
        port::TxPacket packet;
        packet.peer = job.handles[from.node];
        packet.header = from.header;
        packet.header_length = wire::kHeaderBytes;
        packet.payload = from.payload;
        packet.payload_length = from.payload_length;
        packet.trailer = from.tag;
        packet.trailer_length = from.tag == nullptr ? 0 : wire::kTagBytes;
        backlog.push_back(packet);
      }
    }
    if (count == 0) break;
    any = true;
  }
  flush_backlog();
  return any;
}

// --- The agent --------------------------------------------------------------------------------------------------------

void LaneWorker::State::publish(Micros now) {
  if (now < publish_at || !stats_mutex.try_lock()) return;
  publish_at = now + kPublishEvery;
  stats.queue = queue->counters();
  stats.loops = loops;
  std::copy(std::begin(drops), std::end(drops), std::begin(stats.drops));
  stats.jobs.resize(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) jobs[i]->publish(&stats.jobs[i]);
  stats_mutex.unlock();
}

bool LaneWorker::do_work(Micros now) {
  State& s = *state_;
  ++s.loops;
  bool any = false;
  if (s.commands_wait.load(std::memory_order_acquire)) {
    s.run_commands(now);
    any = true;
  }
  any |= s.receive(now);  // always before timers: after a pause the packets that came meanwhile count first
  any |= s.read_rings(now);
  for (auto& job : s.jobs) {
    job->collect_traces();
    if (job->lane.next_timer() > now) continue;
    job->lane.tick(now);
    any = true;
  }
  any |= s.send(now);
  any |= s.deliver_events(now);
  s.publish(now);
  return any;
}

void LaneWorker::wait(Micros now) {
  State& s = *state_;
  Micros until = now + kLongestSleep;
  for (auto& job : s.jobs) until = std::min({until, job->lane.next_timer(), job->next_take()});
  if (until <= now) return;
  for (auto& job : s.jobs) {
    for (AttachedClient& client : job->clients) {
      if (client.live()) ipc::lane_sleeps_soon(*client.view.control, s.options.lane);
    }
  }
  ipc::full_fence();
  bool work = s.commands_wait.load(std::memory_order_acquire) || !s.queue->arm();
  for (auto& job : s.jobs) {
    for (AttachedClient& client : job->clients) {
      work |= client.live() && client.descriptors.look() != ipc::RingState::kEmpty;
    }
  }
  if (!work) {
    pollfd fds[2] = {{s.event.get(), POLLIN, 0}, {s.queue->fd(), POLLIN, 0}};
    if (s.backlog_first < s.backlog.size()) fds[1].events |= POLLOUT;
    const Micros sleep = until - now;
    const timespec limit{static_cast<time_t>(sleep / 1'000'000), static_cast<long>(sleep % 1'000'000) * 1000};
    ::ppoll(fds, s.queue->fd() >= 0 ? 2 : 1, &limit, nullptr);
    uint64_t rung = 0;
    if ((fds[0].revents & POLLIN) != 0) {
      [[maybe_unused]] const ssize_t n = ::read(s.event.get(), &rung, sizeof rung);
    }
  }
  for (auto& job : s.jobs) {
    for (AttachedClient& client : job->clients) {
      if (client.live()) ipc::lane_awake(*client.view.control, s.options.lane);
    }
  }
}

void LaneWorker::run() {
  const WorkerOptions& options = state_->options;
  SpinScore score;
  Micros idle_since = 0;
  while (!state_->stop) {
    const Micros now = monotonic_micros();
    if (do_work(now)) {
      if (idle_since != 0) score.hit();
      idle_since = 0;
      continue;
    }
    if (options.busy) continue;
    if (idle_since == 0 && options.spin > 0 && score.worth_it()) idle_since = now;
    if (idle_since != 0) {
      if (now - idle_since < options.spin) {
        ipc::cpu_relax();
        continue;
      }
      score.miss();
    }
    wait(now);
    idle_since = 0;
  }
}

}  // namespace sluice::daemon
