// How jobs end: by failure, by the leaving of all local ranks, and how the lanes let go of them.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "daemon/control/control_state.h"

namespace sluice::daemon {

Job* ControlState::find_job(uint64_t id) {
  const auto found = jobs.find(id);
  return found == jobs.end() ? nullptr : found->second.get();
}

void ControlState::post_all(const Job& job, Command::Kind kind, uint64_t client_id, Status status,
                            const std::string& text) {
  for (uint32_t lane = 0; lane < job.settings.lanes; ++lane) {
    Command command;
    command.kind = kind;
    command.job_id = job.id;
    command.client_id = client_id;
    command.status = status;
    command.text = text;
    options.lanes[lane]->post(std::move(command));
  }
}

uint64_t ControlState::arena_bytes() const {
  uint64_t sum = 0;
  for (const auto& [id, client] : clients) {
    sum += client->regions.valid() ? client->regions.arena_bytes() : client->arena_wanted;
  }
  return sum;
}

void ControlState::fail_job(Job* job, Status status, const std::string& text, bool tell_lanes) {
  if (job->failed) return;
  job->failed = true;
  job->failure = status;
  job->failure_text = text;
  ++counts.jobs_failed;
  log::warning("job '{}' ended with {}: {}", job->name, status_name(status), text);
  if (job->phase == JobPhase::kAttaching) return fail_join(job, status, text);
  if (tell_lanes) post_all(*job, Command::Kind::kFailJob, 0, status, text);
}

void ControlState::supersede(const std::string& name, uint32_t generation) {
  std::vector<uint64_t> older;
  for (const auto& [id, job] : jobs) {
    const bool open = job->phase != JobPhase::kLingering && job->phase != JobPhase::kDetaching;
    if (job->name == name && job->generation < generation && open && !job->failed) older.push_back(id);
  }
  for (const uint64_t id : older) {
    Job* job = find_job(id);
    if (job == nullptr) continue;
    const std::string text = fmt::format("generation {} of job '{}' begins on node {}, this is {}",
                                         generation, name, options.facts.name, job->generation);
    if (job->phase == JobPhase::kRunning || job->phase == JobPhase::kAttaching) {
      fail_job(job, Status::kViewChanged, text, true);
    } else {
      fail_join(job, Status::kViewChanged, text);
    }
  }
}

void ControlState::let_go(const Job* job, Client* client, Status status, const std::string& text) {
  if (job == nullptr || !job->on_lanes()) return;
  client->lanes_holding = job->settings.lanes;
  post_all(*job, Command::Kind::kGoneClient, client->id, status, text);
}

void ControlState::take_out(Client* client, Status status, const std::string& text) {
  Job* job = find_job(client->job);
  let_go(job, client, status, text);
  close(client);
  if (job != nullptr) end_if_left(job);
}

void ControlState::client_detached(uint64_t client_id) {
  Client* client = find_client(client_id);
  if (client == nullptr || client->lanes_holding == 0) return;
  if (--client->lanes_holding > 0 || client->phase != Client::Phase::kGone) return;
  close(client);
}

// Called whenever a client left a job.
void ControlState::end_if_left(Job* job) {
  if (!job->clients.empty()) return;
  switch (job->phase) {
    case JobPhase::kGathering:
      jobs.erase(job->id);
      return;
    case JobPhase::kRunning:
      if (!job->failed) log::info("job '{}' was left by all ranks of this node", job->name);
      job->enter(JobPhase::kLingering, now);
      // Peers may still need something of ours, and those that are still busy should not take us for lost at once.
      job->deadline = now + (job->settings.members.size() > 1 ? config->config.exchange.linger : 0);
      return;
    case JobPhase::kAttaching:
      return detach(job);
    default:
      return;
  }
}

void ControlState::detach(Job* job) {
  if (!job->on_lanes()) {
    jobs.erase(job->id);
    return;
  }
  options.totals->update();
  job->join.reset();
  job->deadline = kNever;
  job->enter(JobPhase::kDetaching, now);
  post_all(*job, Command::Kind::kDetachJob, 0, Status::kOk, "");
}

void ControlState::job_detached(uint64_t job_id) {
  Job* job = find_job(job_id);
  if (job == nullptr || ++job->lanes_detached < job->settings.lanes) return;
  jobs.erase(job_id);
}

}  // namespace sluice::daemon
