#include "daemon/metrics/exposition.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>

#include "base/ipc/layout.h"
#include "transport/wire/packet.h"

namespace sluice::daemon {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr double kMicro = 1e-6;
constexpr const char* kClasses[] = {"exact", "consistent", "best_effort"};
constexpr Status kStatuses[] = {
    Status::kOk,       Status::kCorrected,  Status::kIncomplete, Status::kDiverged,    Status::kApproximated,
    Status::kMismatch, Status::kOpTimeout,  Status::kPeerLost,   Status::kRankTimeout, Status::kViewChanged,
    Status::kAborted,  Status::kDaemonLost, Status::kInvalid,    Status::kNoMemory};

// "OP_TIMEOUT" -> "op_timeout"
std::string lower(const char* text) {
  std::string out = text;
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

class Families {
 public:
  MetricFamily& counter(const char* name, const char* help) { return add(name, help, MetricType::Counter); }
  MetricFamily& gauge(const char* name, const char* help) { return add(name, help, MetricType::Gauge); }
  MetricFamily& histogram(const char* name, const char* help) {
    return add(name, help, MetricType::Histogram);
  }

  static void put(MetricFamily& family, double value, Labels labels = {}) {
    ClientMetric metric;
    metric.label = std::move(labels);
    if (family.type == MetricType::Counter) metric.counter.value = value;
    if (family.type == MetricType::Gauge) metric.gauge.value = value;
    family.metric.push_back(std::move(metric));
  }
  void one_counter(const char* name, const char* help, uint64_t value) {
    put(counter(name, help), static_cast<double>(value));
  }
  void one_gauge(const char* name, const char* help, double value) { put(gauge(name, help), value); }

  std::vector<MetricFamily> take() { return std::move(families_); }

 private:
  MetricFamily& add(const char* name, const char* help, MetricType type) {
    MetricFamily family;
    family.name = name;
    family.help = help;
    family.type = type;
    families_.push_back(std::move(family));
    return families_.back();
  }
  std::vector<MetricFamily> families_;
};

void identity(const Sources& from, Families* out) {
  Families::put(out->gauge("sluice_build_info", "Always 1; what runs is in the labels."), 1,
                {{"abi", std::to_string(ipc::kAbiVersion)},
                 {"protocol", std::to_string(wire::kVersion)},
                 {"version", kVersion}});
  out->one_gauge("sluice_up_since_timestamp_seconds", "When this daemon started, Unix time.",
                 static_cast<double>(from.facts.started_unix));
  out->one_gauge("sluice_clients", "Clients that are connected.", static_cast<double>(from.control.clients));
  MetricFamily& jobs = out->gauge("sluice_jobs", "Jobs on this node by phase.");
  for (size_t phase = 0; phase < kJobPhases; ++phase) {
    const auto count =
        std::count_if(from.control.jobs.begin(), from.control.jobs.end(),
                      [&](const JobFacts& job) { return static_cast<size_t>(job.phase) == phase; });
    Families::put(jobs, static_cast<double>(count), {{"phase", phase_name(static_cast<JobPhase>(phase))}});
  }
  out->one_gauge("sluice_lanes", "Lanes (engine threads) of this daemon.",
                 static_cast<double>(from.snapshot.lanes.size()));
}

void control_counters(const ControlStats& control, Families* out) {
  out->one_counter("sluice_clients_accepted_total", "Connections of clients that were accepted.",
                   control.clients_accepted);
  out->one_counter("sluice_clients_refused_total", "Clients that were refused with a reason.",
                   control.clients_refused);
  out->one_counter("sluice_clients_lost_total", "Clients that died or went away without leaving.",
                   control.clients_lost);
  out->one_counter("sluice_clients_broken_total",
                   "Clients that were let go because they broke the rules of the interface.",
                   control.clients_broken);
  out->one_counter("sluice_joins_total", "Jobs that this node joined.", control.joins_succeeded);
  out->one_counter("sluice_join_failures_total", "Jobs that could not be joined.", control.joins_failed);
  out->one_counter("sluice_job_failures_total", "Jobs that ended with an error.", control.jobs_failed);
  out->one_counter("sluice_stray_hellos_total",
                   "HELLOs for no job that is joining here, or from an address outside of it.",
                   control.hellos_stray);
  out->one_gauge("sluice_arena_bytes", "Shared memory of all clients.",
                 static_cast<double>(control.arena_bytes));
  out->one_gauge("sluice_config_last_reload_successful", "1 if the last load of the configuration was good.",
                 control.reload_ok ? 1 : 0);
  out->one_gauge("sluice_config_last_reload_success_timestamp_seconds",
                 "When a configuration was last loaded, Unix time.",
                 static_cast<double>(control.reload_unix));
}

void rounds(const Snapshot& snapshot, Families* out) {
  // Lane 0 takes part in every op; other lanes only in those with blocks for them.
  MetricFamily& ended = out->counter(
      "sluice_rounds_total", "Collective calls of local ranks that ended, by status, as seen by lane 0.");
  for (const Status status : kStatuses) {
    Families::put(ended, static_cast<double>(snapshot.first_lane.counters.ops[static_cast<size_t>(status)]),
                  {{"status", lower(status_name(status))}});
  }
  MetricFamily& duration =
      out->histogram("sluice_round_duration_seconds",
                     "Submit to result of collective calls, by class of service, as seen by lane 0.");
  for (size_t c = 0; c < std::size(kClasses); ++c) {
    ClientMetric metric;
    metric.label = {{"class", kClasses[c]}};
    uint64_t count = 0;
    for (size_t i = 0; i < std::size(kDurationBuckets) + 1; ++i) {
      count += snapshot.first_lane.durations[c][i];
      const double bound =
          i < std::size(kDurationBuckets) ? kDurationBuckets[i] : std::numeric_limits<double>::infinity();
      metric.histogram.bucket.push_back({count, bound});
    }
    metric.histogram.sample_count = count;
    metric.histogram.sample_sum = snapshot.first_lane.duration_sum[c];
    duration.metric.push_back(std::move(metric));
  }
  const exchange::Counters& all = snapshot.jobs.counters;
  out->one_gauge("sluice_open_rounds", "Collective calls that are open now, as seen by lane 0.",
                 static_cast<double>(snapshot.first_lane.counters.open_ops));
  out->one_counter("sluice_repaired_blocks_total", "Blocks that were asked for again.", all.blocks_repaired);
  out->one_counter("sluice_resent_blocks_total", "Blocks that were sent again because a peer asked.",
                   all.blocks_resent);
  out->one_counter("sluice_skipped_blocks_total",
                   "Blocks set to zero by their owner because too few ranks contributed.",
                   all.blocks_skipped);
  out->one_counter("sluice_uncounted_blocks_total", "Blocks of local ranks that their owner did not count.",
                   all.blocks_uncounted);
  out->one_counter("sluice_carried_blocks_total",
                   "Uncounted blocks of local ranks that were kept for a later round of their tag.",
                   all.blocks_carried);
  out->one_counter("sluice_discarded_blocks_total",
                   "Carried blocks that were given up: too old, not finite, or no memory for them.",
                   all.blocks_discarded);
  out->one_counter("sluice_undecided_blocks_total",
                   "Blocks that were still owed when their rank left or their job ended.",
                   all.blocks_undecided);
  out->one_counter("sluice_filled_blocks_total", "Holes of best_effort results that were filled by rule.",
                   all.blocks_filled);
  out->one_counter(
      "sluice_corrected_blocks_total",
      "Blocks of results to which holes of earlier results were added (exchange.on_incomplete: correct).",
      all.blocks_corrected);
  out->one_counter("sluice_queued_contributions_total",
                   "Contributions that missed their round as a whole and were queued for a later one.",
                   snapshot.first_lane.counters.slots_queued);
  out->one_gauge("sluice_carry_blocks", "Blocks that local ranks owe now.",
                 static_cast<double>(snapshot.jobs.owed.blocks));
  out->one_gauge("sluice_queued_contributions", "Contributions that wait in their slots now.",
                 static_cast<double>(snapshot.first_lane.owed.slots));
  out->one_counter("sluice_nonfinite_blocks_total", "Reduced blocks that hold an infinity or NaN.",
                   all.nonfinite_blocks);
  out->one_counter("sluice_requests_sent_total", "Requests for missing blocks.", all.requests_sent);
  out->one_counter("sluice_late_contributions_total", "Contributions that missed their round as a whole.",
                   all.contributions_late);
  out->one_gauge("sluice_pool_used_bytes",
                 "Memory in use for accumulators and early arrivals, all lanes and jobs.",
                 static_cast<double>(all.pool_used_bytes));
  out->one_gauge("sluice_pool_limit_bytes", "Memory that may be used for accumulators and early arrivals.",
                 static_cast<double>(all.pool_bytes));
}

void network(const Sources& from, Families* out) {
  port::QueueCounters queue;
  uint64_t drops[static_cast<size_t>(wire::Drop::kCount)] = {};
  for (const LaneStats& lane : from.snapshot.lanes) {
    queue.tx_datagrams += lane.queue.tx_datagrams;
    queue.tx_bytes += lane.queue.tx_bytes;
    queue.tx_calls += lane.queue.tx_calls;
    queue.tx_again += lane.queue.tx_again;
    queue.tx_errors += lane.queue.tx_errors;
    queue.rx_datagrams += lane.queue.rx_datagrams;
    queue.rx_bytes += lane.queue.rx_bytes;
    queue.rx_calls += lane.queue.rx_calls;
    queue.rx_overflow += lane.queue.rx_overflow;
    queue.rx_truncated += lane.queue.rx_truncated;
    for (size_t i = 0; i < std::size(drops); ++i) drops[i] += lane.drops[i];
  }
  out->one_counter("sluice_sent_packets_total", "Datagrams sent.", queue.tx_datagrams);
  out->one_counter("sluice_sent_bytes_total", "Bytes of datagrams sent, without IP and UDP headers.",
                   queue.tx_bytes);
  out->one_counter("sluice_received_packets_total", "Datagrams received.", queue.rx_datagrams);
  out->one_counter("sluice_received_bytes_total", "Bytes of datagrams received, without IP and UDP headers.",
                   queue.rx_bytes);
  out->one_counter("sluice_send_calls_total", "System calls to send.", queue.tx_calls);
  out->one_counter("sluice_receive_calls_total", "System calls to receive.", queue.rx_calls);
  out->one_counter("sluice_send_full_total", "Times that the device could not take everything.",
                   queue.tx_again);
  out->one_counter("sluice_send_errors_total", "Datagrams that the kernel refused to send.", queue.tx_errors);
  out->one_counter("sluice_socket_dropped_packets_total",
                   "Datagrams that the kernel dropped because the receive buffer was full.",
                   queue.rx_overflow);
  out->one_counter("sluice_truncated_packets_total", "Datagrams that were longer than a receive buffer.",
                   queue.rx_truncated);
  out->one_gauge("sluice_socket_receive_buffer_bytes",
                 "Receive buffer of each lane, as granted by the kernel.",
                 static_cast<double>(from.facts.receive_buffer));
  MetricFamily& dropped =
      out->counter("sluice_packets_dropped_total", "Datagrams that were received and not used, by reason.");
  for (size_t reason = 1; reason < std::size(drops); ++reason) {
    Families::put(dropped, static_cast<double>(drops[reason] + from.snapshot.jobs.counters.drops[reason]),
                  {{"reason", wire::drop_name(static_cast<wire::Drop>(reason))}});
  }
  if (from.faults != nullptr) {
    MetricFamily& faults =
        out->counter("sluice_faults_injected_total",
                     "Faults that happened to datagrams on purpose (transport.faults), by kind.");
    for (size_t kind = 0; kind < port::kFaults; ++kind) {
      const auto fault = static_cast<port::Fault>(kind);
      Families::put(faults, static_cast<double>(from.faults->total(fault)),
                    {{"kind", port::fault_name(fault)}});
    }
  }
  MetricFamily& loops = out->counter("sluice_lane_loops_total", "Turns of each lane's loop.");
  for (size_t lane = 0; lane < from.snapshot.lanes.size(); ++lane) {
    Families::put(loops, static_cast<double>(from.snapshot.lanes[lane].loops),
                  {{"lane", std::to_string(lane)}});
  }
}

const JobStats* first_lane_of(const Snapshot& snapshot, uint64_t job_id) {
  if (snapshot.lanes.empty()) return nullptr;
  const auto& jobs = snapshot.lanes[0].jobs;
  const auto found =
      std::find_if(jobs.begin(), jobs.end(), [&](const JobStats& job) { return job.job_id == job_id; });
  return found == jobs.end() ? nullptr : &*found;
}

// One peer of one job, all lanes together.
exchange::PeerState peer_of(const Snapshot& snapshot, uint64_t job_id, uint32_t node) {
  exchange::PeerState sum;
  for (const LaneStats& lane : snapshot.lanes) {
    for (const JobStats& job : lane.jobs) {
      if (job.job_id != job_id || node >= job.peers.size()) continue;
      const exchange::PeerState& peer = job.peers[node];
      sum.last_heard = std::max(sum.last_heard, peer.last_heard);
      sum.rtt = std::max(sum.rtt, peer.rtt);
      sum.suspect |= peer.suspect;
      sum.lost |= peer.lost;
      sum.blocks_late += peer.blocks_late;
      sum.blocks_repaired += peer.blocks_repaired;
      sum.waited = std::max(sum.waited, peer.waited);  // lanes have the same ops and wait together
    }
  }
  return sum;
}

// A job that has failed may wait for its processes beside one of the same name that has taken its place: the labels
// would be the same.
bool has_successor(const JobFacts& job, const std::vector<JobFacts>& jobs) {
  return std::any_of(jobs.begin(), jobs.end(), [&](const JobFacts& other) {
    return other.name == job.name && other.phase == JobPhase::kRunning && other.id > job.id;
  });
}

void peers(const Sources& from, Families* out) {
  std::map<std::string, double> states = {{"alive", 0}, {"suspect", 0}, {"lost", 0}};
  MetricFamily heard, rtt, late, repaired, waited;
  heard.name = "sluice_peer_last_heard_timestamp_seconds";
  heard.help = "When the peer was last heard, Unix time.";
  rtt.name = "sluice_peer_rtt_seconds";
  rtt.help = "Smoothed round-trip time to the peer.";
  heard.type = rtt.type = MetricType::Gauge;
  late.name = "sluice_peer_late_blocks_total";
  late.help = "Blocks of the peer that came after their round was closed here.";
  repaired.name = "sluice_peer_repaired_blocks_total";
  repaired.help = "Blocks that the peer was asked for again.";
  waited.name = "sluice_peer_waited_seconds_total";
  waited.help = "Time that calls of this node waited for the peer: to be admitted, or for it to take part.";
  late.type = repaired.type = waited.type = MetricType::Counter;
  MetricFamily failed, deadline;
  failed.name = "sluice_job_failed";
  failed.help = "1 if the job has ended with an error and its ranks have not gone yet.";
  deadline.name = "sluice_deadline_seconds";
  deadline.help = "Bound of consistent rounds of the job; the longest possible where it adapts.";
  MetricFamily policy, bound, warming;
  policy.name = "sluice_policy_number";
  policy.help = "Number of the policy record that is in force; 0 before the first.";
  bound.name = "sluice_adaptive_deadline_seconds";
  bound.help = "Bound in force for rounds of up to `bytes`, as found by measuring.";
  warming.name = "sluice_warming_size_classes";
  warming.help = "Sizes of rounds that are measured and have no bound yet.";
  failed.type = deadline.type = policy.type = bound.type = warming.type = MetricType::Gauge;
  for (const JobFacts& job : from.control.jobs) {
    if (job.phase != JobPhase::kRunning || has_successor(job, from.control.jobs)) continue;
    Families::put(failed, job.failed ? 1 : 0, {{"job", job.name}});
    Families::put(deadline, static_cast<double>(job.deadline) * kMicro, {{"job", job.name}});
    if (const JobStats* stats = first_lane_of(from.snapshot, job.id); stats != nullptr && job.adaptive) {
      Families::put(policy, stats->bounds.policy, {{"job", job.name}});
      uint32_t without = 0;
      for (size_t c = 0; c < std::size(stats->bounds.hard); ++c) {
        without += stats->bounds.samples[c] > 0 && stats->bounds.hard[c] == 0 ? 1 : 0;
        if (stats->bounds.hard[c] == 0) continue;
        Families::put(bound, static_cast<double>(stats->bounds.hard[c]) * kMicro,
                      {{"job", job.name}, {"bytes", std::to_string(uint64_t{4096} << c)}});
      }
      Families::put(warming, without, {{"job", job.name}});
    }
    uint32_t listed = 0;
    exchange::PeerState other;
    bool others = false;
    for (uint32_t node = 0; node < job.nodes.size(); ++node) {
      if (node == job.self) continue;
      const exchange::PeerState peer = peer_of(from.snapshot, job.id, node);
      states[peer.lost ? "lost" : peer.suspect ? "suspect" : "alive"] += 1;
      if (listed++ >= from.peer_series) {
        others = true;
        other.blocks_late += peer.blocks_late;
        other.blocks_repaired += peer.blocks_repaired;
        other.waited += peer.waited;
        continue;
      }
      const Labels labels = {{"job", job.name}, {"peer", job.nodes[node]}};
      if (peer.last_heard != 0) {
        Families::put(heard, from.now_unix - static_cast<double>(from.now - peer.last_heard) * kMicro,
                      labels);
      }
      Families::put(rtt, static_cast<double>(peer.rtt) * kMicro, labels);
      Families::put(late, static_cast<double>(peer.blocks_late), labels);
      Families::put(repaired, static_cast<double>(peer.blocks_repaired), labels);
      Families::put(waited, static_cast<double>(peer.waited) * kMicro, labels);
    }
    if (others) {
      const Labels labels = {{"job", job.name}, {"peer", "other"}};
      Families::put(late, static_cast<double>(other.blocks_late), labels);
      Families::put(repaired, static_cast<double>(other.blocks_repaired), labels);
      Families::put(waited, static_cast<double>(other.waited) * kMicro, labels);
    }
  }
  MetricFamily& all = out->gauge("sluice_peers", "Peers of running jobs by state.");
  for (const auto& [state, count] : states) Families::put(all, count, {{"state", state}});
  for (MetricFamily* family :
       {&failed, &deadline, &policy, &bound, &warming, &heard, &rtt, &late, &repaired, &waited}) {
    if (family->metric.empty()) continue;  // no job: nothing to say, and a family without series is not valid
    MetricFamily& added = family->type == MetricType::Counter
                              ? out->counter(family->name.c_str(), family->help.c_str())
                              : out->gauge(family->name.c_str(), family->help.c_str());
    added.metric = std::move(family->metric);
  }
}

// The standard process_* metrics.
void process(Families* out) {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * kMicro;
  };
  Families::put(out->counter("process_cpu_seconds_total", "User and system CPU time."),
                seconds(usage.ru_utime) + seconds(usage.ru_stime));
  if (FILE* file = std::fopen("/proc/self/statm", "re"); file != nullptr) {
    unsigned long size = 0, resident = 0;
    if (std::fscanf(file, "%lu %lu", &size, &resident) == 2) {
      const auto page = static_cast<double>(::sysconf(_SC_PAGESIZE));
      out->one_gauge("process_virtual_memory_bytes", "Virtual memory size.",
                     static_cast<double>(size) * page);
      out->one_gauge("process_resident_memory_bytes", "Resident memory size.",
                     static_cast<double>(resident) * page);
    }
    std::fclose(file);
  }
  std::error_code failed;
  size_t open = 0;
  for (auto entry = std::filesystem::directory_iterator("/proc/self/fd", failed);
       !failed && entry != std::filesystem::directory_iterator(); entry.increment(failed)) {
    ++open;
  }
  out->one_gauge("process_open_fds", "Open file descriptors.", static_cast<double>(open));
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  out->one_gauge("process_max_fds", "Limit of open file descriptors.", static_cast<double>(limit.rlim_cur));
}

}  // namespace

std::vector<MetricFamily> metric_families(const Sources& sources) {
  Families out;
  identity(sources, &out);
  control_counters(sources.control, &out);
  rounds(sources.snapshot, &out);
  network(sources, &out);
  peers(sources, &out);
  out.one_counter("sluice_scrapes_total", "Times that /metrics was asked for, this one included.",
                  sources.scrapes);
  process(&out);
  return out.take();
}

}  // namespace sluice::daemon
