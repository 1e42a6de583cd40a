// Answers for sluicectl, as JSON. Times are microseconds; names are stable and only grow.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "config/schema.h"
#include "daemon/control/control_state.h"
#include "transport/wire/packet.h"

namespace sluice::daemon {
namespace {

using nlohmann::json;

constexpr size_t kMostTraces = 256;

// Texts may hold bytes of clients that are not UTF-8; they are replaced, not thrown about.
std::string dumped(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

const char* class_name(OpClass op_class) {
  switch (op_class) {
    case OpClass::kExact:
      return "exact";
    case OpClass::kConsistent:
      return "consistent";
    case OpClass::kBestEffort:
      return "best_effort";
  }
  return "unknown";
}

json ops_json(const exchange::Counters& counters) {
  json ops = json::object();
  for (size_t status = 0; status < std::size(counters.ops); ++status) {
    if (counters.ops[status] != 0) ops[status_name(static_cast<Status>(status))] = counters.ops[status];
  }
  return ops;
}

json drops_json(const uint64_t* drops) {
  json found = json::object();
  for (size_t reason = 1; reason < static_cast<size_t>(wire::Drop::kCount); ++reason) {
    if (drops[reason] != 0) found[wire::drop_name(static_cast<wire::Drop>(reason))] = drops[reason];
  }
  return found;
}

const JobStats* stats_of(const LaneStats& lane, uint64_t job_id) {
  const auto found = std::find_if(lane.jobs.begin(), lane.jobs.end(),
                                  [&](const JobStats& job) { return job.job_id == job_id; });
  return found == lane.jobs.end() ? nullptr : &*found;
}

// What of one job's lanes can be added up.
JobTotals lanes_together(const Snapshot& snapshot, uint64_t job_id) {
  JobTotals sum;
  for (const LaneStats& lane : snapshot.lanes) {
    const JobStats* stats = stats_of(lane, job_id);
    if (stats == nullptr) continue;
    JobTotals one;
    one.counters = stats->counters;
    one.owed = stats->owed;
    add(one, &sum);
  }
  return sum;
}

json job_json(const ControlState& state, const Job& job, const Snapshot& snapshot, Micros now) {
  json out;
  out["id"] = job.id;
  out["name"] = job.name;
  out["phase"] = phase_name(job.phase);
  out["phase_us"] = now - job.since;
  out["ranks"] = job.world_size;
  out["nodes"] = job.membership.view.nodes.size();
  out["node"] = job.membership.self;
  out["lanes"] = job.settings.lanes;
  out["payload_bytes"] = job.settings.payload;
  out["failed"] = job.failed;
  out["failure"] = job.failed ? json(status_name(job.failure)) : json();
  out["failure_text"] = job.failure_text;
  out["clients"] = json::array();
  for (const uint64_t id : job.clients) {
    const auto client = state.clients.find(id);
    if (client == state.clients.end()) continue;
    out["clients"].push_back({{"rank", client->second->rank},
                              {"pid", client->second->who.pid},
                              {"uid", client->second->who.uid},
                              {"arena_bytes", client->second->regions.arena_bytes()}});
  }
  if (job.phase == JobPhase::kShaking || (job.phase == JobPhase::kGathering && job.described)) {
    out["waiting_for"] = state.who_is_missing(job);
  }
  if (snapshot.lanes.empty()) return out;
  const JobTotals all = lanes_together(snapshot, job.id);
  const JobStats* first = stats_of(snapshot.lanes[0], job.id);
  out["ops"] = ops_json(first == nullptr ? exchange::Counters() : first->counters);
  out["open_ops"] = first == nullptr ? 0 : first->counters.open_ops;
  out["bytes_sent"] = all.counters.bytes_sent;
  out["bytes_received"] = all.counters.bytes_received;
  out["packets_sent"] = all.counters.packets_sent;
  out["packets_received"] = all.counters.packets_received;
  out["blocks_repaired"] = all.counters.blocks_repaired;
  out["blocks_skipped"] = all.counters.blocks_skipped;
  out["blocks_uncounted"] = all.counters.blocks_uncounted;
  out["blocks_carried"] = all.counters.blocks_carried;
  out["blocks_discarded"] = all.counters.blocks_discarded;
  out["blocks_undecided"] = all.counters.blocks_undecided;
  out["blocks_filled"] = all.counters.blocks_filled;
  out["blocks_corrected"] = all.counters.blocks_corrected;
  out["carry_over"] = job.settings.carry_over;
  out["carry_blocks"] = all.owed.blocks;
  out["contributions_queued"] = first == nullptr ? 0 : first->counters.slots_queued;
  out["contributions_queued_now"] = first == nullptr ? 0 : first->owed.slots;
  out["deadline_us"] = job.settings.hard_deadline;  // the longest possible where it adapts
  out["deadline_adapts"] = job.settings.adaptive;
  if (first != nullptr && job.settings.adaptive) {
    out["policy"] = first->bounds.policy;
    out["deadlines"] = json::array();
    for (size_t c = 0; c < std::size(first->bounds.hard); ++c) {
      if (first->bounds.hard[c] == 0 && first->bounds.samples[c] == 0) continue;
      out["deadlines"].push_back({{"bytes", uint64_t{4096} << c},
                                  {"hard_us", first->bounds.hard[c]},  // 0: warming up
                                  {"samples", first->bounds.samples[c]}});
    }
  }
  out["pool_used_bytes"] = all.counters.pool_used_bytes;
  out["pool_bytes"] = all.counters.pool_bytes;
  out["drops"] = drops_json(all.counters.drops);
  return out;
}

json peer_json(const Job& job, const Snapshot& snapshot, uint32_t node, Micros now) {
  json out;
  out["job"] = job.name;
  out["node"] = node;
  out["address"] = job.membership.view.nodes[node].endpoint;
  out["name"] = job.membership.view.nodes[node].name;  // "": `peers:` tells none
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < job.membership.view.node_of_rank.size(); ++rank) {
    if (job.membership.view.node_of_rank[rank] == node) ranks.push_back(rank);
  }
  out["ranks"] = ranks;
  exchange::PeerState sum;
  bool seen = false;
  for (const LaneStats& lane : snapshot.lanes) {
    const JobStats* stats = stats_of(lane, job.id);
    if (stats == nullptr || node >= stats->peers.size()) continue;
    const exchange::PeerState& peer = stats->peers[node];
    sum.last_heard = std::max(sum.last_heard, peer.last_heard);
    sum.rtt = std::max(sum.rtt, peer.rtt);
    sum.suspect |= peer.suspect;
    sum.lost |= peer.lost;
    sum.in_flight += peer.in_flight;
    sum.window += peer.window;
    sum.packets_sent += peer.packets_sent;
    sum.bytes_sent += peer.bytes_sent;
    sum.packets_received += peer.packets_received;
    sum.bytes_received += peer.bytes_received;
    sum.blocks_repaired += peer.blocks_repaired;
    sum.blocks_late += peer.blocks_late;
    // Lanes have the same ops: they wait for a node together.
    sum.ops_waited = std::max(sum.ops_waited, peer.ops_waited);
    sum.waited = std::max(sum.waited, peer.waited);
    if (!seen) sum.done = peer.done;
    seen = true;
  }
  out["state"] = !seen ? "joining" : sum.lost ? "lost" : sum.suspect ? "suspect" : "alive";
  out["last_heard_us"] = sum.last_heard == 0 ? json() : json(std::max<Micros>(now - sum.last_heard, 0));
  out["rtt_us"] = sum.rtt;
  out["done"] = sum.done;
  out["in_flight_bytes"] = sum.in_flight;
  out["window_bytes"] = sum.window;
  out["packets_sent"] = sum.packets_sent;
  out["bytes_sent"] = sum.bytes_sent;
  out["packets_received"] = sum.packets_received;
  out["bytes_received"] = sum.bytes_received;
  out["blocks_repaired"] = sum.blocks_repaired;
  out["blocks_late"] = sum.blocks_late;
  out["ops_waited"] = sum.ops_waited;
  out["waited_us"] = sum.waited;
  return out;
}

json traces_json(const Job& job, const Snapshot& snapshot, size_t last) {
  json out = json::array();
  for (size_t lane = 0; lane < snapshot.lanes.size(); ++lane) {
    const JobStats* stats = stats_of(snapshot.lanes[lane], job.id);
    if (stats == nullptr) continue;
    const size_t skipped = stats->traces.size() > last ? stats->traces.size() - last : 0;
    for (size_t i = skipped; i < stats->traces.size(); ++i) {
      const exchange::Trace& trace = stats->traces[i];
      out.push_back({{"lane", lane},
                     {"op_seq", trace.op_seq},
                     {"class", class_name(trace.op_class)},
                     {"status", status_name(trace.status)},
                     {"tag", fmt::format("{:016x}", trace.tag)},
                     {"bytes", trace.bytes},
                     {"waited_for", trace.waited_for == UINT32_MAX ? json() : json(trace.waited_for)},
                     {"submitted_us", trace.submitted},
                     {"admitted_us", trace.admitted},
                     {"quorum_us", trace.quorum},
                     {"first_push_us", trace.first_push},
                     {"push_sent_us", trace.push_sent},
                     {"closed_us", trace.closed},
                     {"pull_sent_us", trace.pull_sent},
                     {"result_us", trace.result}});
    }
  }
  return out;
}

json config_json(const config::Loaded& loaded) {
  json out;
  out["files"] = loaded.files;
  out["keys"] = json::array();
  size_t index = 0;
  for (const config::Key& key : config::keys()) {
    const std::string& origin = loaded.origins[index++];
    if (key.kind == config::Kind::kPeers) continue;
    out["keys"].push_back({{"name", key.name},
                           {"value", config::format_value(key, loaded.config)},
                           {"origin", origin},
                           {"reload", key.reload}});
  }
  out["peers"] = json::array();
  for (const config::PeerGroup& group : loaded.config.peers) {
    json nodes = json::array();
    for (const config::PeerGroup::Node& node : group.nodes)
      nodes.push_back({{"address", node.address}, {"ranks", node.ranks}});
    out["peers"].push_back({{"jobs", group.jobs}, {"nodes", nodes}});
  }
  return out;
}

json status_json(const ControlState& state, const Snapshot& snapshot, Micros now) {
  const NodeFacts& facts = state.options.facts;
  json out;
  out["version"] = kVersion;
  out["protocol"] = wire::kVersion;
  out["abi"] = ipc::kAbiVersion;
  out["node"] = facts.name;
  out["endpoint"] = facts.endpoint_text;
  out["interface"] = facts.interface;
  out["why_interface"] = facts.why;
  out["port"] = facts.port_kind;
  out["port_note"] = facts.port_note;
  out["sealing"] = sealing_name(facts.sealing);
  out["lanes"] = facts.lanes;
  out["receive_buffer_bytes"] = facts.receive_buffer;
  out["largest_datagram_bytes"] = facts.largest_datagram;
  out["up_us"] = now - facts.started;
  out["started_unix"] = facts.started_unix;
  out["config"] = {{"files", state.config->files}, {"last_reload_ok", state.counts.reload_ok}};
  out["clients"] = std::count_if(state.clients.begin(), state.clients.end(), [](const auto& entry) {
    return entry.second->phase != Client::Phase::kGone;
  });
  out["clients_lost"] = state.counts.clients_lost;
  out["clients_refused"] = state.counts.clients_refused;
  out["joins_succeeded"] = state.counts.joins_succeeded;
  out["joins_failed"] = state.counts.joins_failed;
  out["jobs_failed"] = state.counts.jobs_failed;
  out["arena_bytes"] = state.arena_bytes();
  out["stopping"] = state.stop != ControlState::Stop::kNo;
  out["ops"] = ops_json(snapshot.first_lane.counters);
  json lanes = json::array();
  for (const LaneStats& lane : snapshot.lanes) {
    lanes.push_back({{"tx_datagrams", lane.queue.tx_datagrams},
                     {"tx_bytes", lane.queue.tx_bytes},
                     {"tx_full", lane.queue.tx_again},
                     {"tx_errors", lane.queue.tx_errors},
                     {"rx_datagrams", lane.queue.rx_datagrams},
                     {"rx_bytes", lane.queue.rx_bytes},
                     {"rx_overflow", lane.queue.rx_overflow},
                     {"rx_truncated", lane.queue.rx_truncated},
                     {"drops", drops_json(lane.drops)}});
  }
  out["queues"] = lanes;
  out["jobs"] = json::array();
  json health = json::array();
  for (const auto& [id, job] : state.jobs) {
    out["jobs"].push_back(job_json(state, *job, snapshot, now));
    if (job->failed) health.push_back(fmt::format("job '{}' failed: {}", job->name, job->failure_text));
    for (const LaneStats& lane : snapshot.lanes) {
      const JobStats* stats = stats_of(lane, id);
      if (stats == nullptr) continue;
      for (uint32_t node = 0; node < stats->peers.size(); ++node) {
        if (!stats->peers[node].suspect && !stats->peers[node].lost) continue;
        health.push_back(fmt::format("job '{}': node {} ({}) is {}", job->name, node,
                                     job->membership.view.nodes[node].endpoint,
                                     stats->peers[node].lost ? "lost" : "silent"));
      }
    }
  }
  if (!state.counts.reload_ok)
    health.push_back("the last reload of the configuration failed; the old one is in force");
  uint64_t overflow = 0;
  for (const LaneStats& lane : snapshot.lanes) overflow += lane.queue.rx_overflow;
  if (overflow != 0) {
    health.push_back(
        fmt::format("the kernel dropped {} datagrams for want of receive buffer; raise net.core.rmem_max and "
                    "transport.receive_buffer",
                    overflow));
  }
  out["health"] = health;
  return out;
}

}  // namespace

std::string ControlState::admin_answer(const std::string& text) {
  const auto wrong = [](const std::string& what) { return dumped(json({{"error", what}})); };
  const json request = json::parse(text, nullptr, false);
  if (!request.is_object()) return wrong("the request is not a JSON object");
  const auto text_of = [&](const char* name) {
    const auto found = request.find(name);
    return found != request.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  const std::string wanted_job = text_of("job");
  const auto wanted = [&](const Job& job) { return wanted_job.empty() || job.name == wanted_job; };
  const std::string what = text_of("request");
  const Snapshot snapshot = options.totals->update();
  if (what == "status") return dumped(status_json(*this, snapshot, now));
  if (what == "config") return dumped(config_json(*config));
  if (what != "jobs" && what != "peers" && what != "trace") {
    return wrong("unknown request '" + what + "'; known: status, jobs, peers, trace, config");
  }
  json out = json::object();
  out["now_us"] = now;
  out["node"] = options.facts.name;
  out[what] = json::array();
  const auto last = request.find("last");
  const size_t count =
      last != request.end() && last->is_number_unsigned() ? last->get<size_t>() : kMostTraces;
  bool found = false;
  for (const auto& [id, job] : jobs) {
    if (!wanted(*job)) continue;
    found = true;
    if (what == "jobs") out[what].push_back(job_json(*this, *job, snapshot, now));
    if (what == "trace") {
      out[what].push_back(
          {{"job", job->name}, {"node", job->membership.self}, {"ops", traces_json(*job, snapshot, count)}});
    }
    if (what != "peers" || !job->described) continue;
    for (uint32_t node = 0; node < job->membership.view.nodes.size(); ++node) {
      if (node != job->membership.self) out[what].push_back(peer_json(*job, snapshot, node, now));
    }
  }
  if (!wanted_job.empty() && !found) return wrong("no job '" + wanted_job + "' is here");
  return dumped(out);
}

}  // namespace sluice::daemon
