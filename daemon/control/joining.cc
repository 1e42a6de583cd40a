// How a job comes to be: ranks of this node gather, nodes shake hands, lanes take the job in.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "base/random.h"
#include "config/units.h"
#include "daemon/control/control_state.h"
#include "transport/exchange/join.h"

namespace sluice::daemon {
namespace {

constexpr Micros kTellPeers = 500'000;  // for ABORTs to leave
constexpr size_t kNamed = 6;            // missing nodes or ranks that a message names; of others the number

template <typename Names>
std::string listed(const Names& names) {
  const size_t shown = std::min(names.size(), kNamed);
  std::string text =
      fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<ptrdiff_t>(shown), ", "));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

}  // namespace

Job* ControlState::gathering_job(const std::string& name, uint32_t world_size, uint32_t generation) {
  size_t present = 0;
  const uint32_t wire_id = wire::job_id(name);
  for (const auto& [id, job] : jobs) {
    if (job->phase == JobPhase::kGathering && job->name == name && job->generation == generation)
      return job.get();
    if (job->wire_id == wire_id && job->name != name) return nullptr;  // packets could not be told apart
    present += job->phase != JobPhase::kLingering && job->phase != JobPhase::kDetaching ? 1 : 0;
  }
  if (present >= config->config.memory.jobs_max) return nullptr;
  auto job = std::make_unique<Job>();
  job->id = next_id++;
  job->name = name;
  job->wire_id = wire_id;
  job->world_size = world_size;
  job->generation = generation;
  random_bytes(job->nonce);
  job->enter(JobPhase::kGathering, now);
  Job* added = job.get();
  jobs.emplace(job->id, std::move(job));
  return added;
}

void ControlState::handle_join(Client* client, ipc::Received&& received) {
  ipc::Message message = received.message;
  const UniqueFd view_fd = std::move(received.fds[0]);
  explicit_bzero(received.message.key, sizeof(received.message.key));
  Job* job = find_job(client->job);
  if (client->phase != Client::Phase::kGreeted || job == nullptr) {
    explicit_bzero(message.key, sizeof(message.key));
    return lose(client, Status::kInvalid, "was let go: JOIN without HELLO");
  }
  const Result<void> good = check_join(job, client, message, view_fd);
  explicit_bzero(message.key, sizeof(message.key));
  if (!good.ok()) {
    const Error& error = good.error();
    return refuse(client, error.code == ENOMEM ? Status::kNoMemory : Status::kInvalid, error.message);
  }
  client->phase = Client::Phase::kJoining;
  client->arena_wanted = message.arena_bytes;
  const Micros longest = config->config.exchange.join_timeout;
  const Micros wanted = message.timeout_ms == 0 ? longest : static_cast<Micros>(message.timeout_ms) * 1'000;
  job->deadline = std::min(job->deadline, now + std::min(wanted, longest));
  const auto joining = std::count_if(job->clients.begin(), job->clients.end(), [&](uint64_t id) {
    return find_client(id)->phase == Client::Phase::kJoining;
  });
  if (static_cast<size_t>(joining) == job->membership.local_ranks.size()) prepare(job);
}

// Everything that can be wrong with a JOIN. ENOMEM: a quota; else EINVAL.
Result<void> ControlState::check_join(Job* job, Client* client, const ipc::Message& message,
                                      const UniqueFd& view_fd) {
  const auto& memory = config->config.memory;
  const auto wrong = [](std::string text) { return Error{EINVAL, std::move(text)}; };
  if (job->name != message.job)
    return wrong(fmt::format("JOIN is for job '{}', HELLO was for '{}'", message.job, job->name));
  if (message.rank != client->rank || message.world_size != job->world_size) {
    return wrong(fmt::format("JOIN is for rank {} of {}, HELLO was for rank {} of {}", message.rank,
                             message.world_size, client->rank, job->world_size));
  }
  if (std::memcmp(message.join_nonce, job->nonce.data(), job->nonce.size()) != 0) {
    return wrong("the join nonce is of another join; get a new card");
  }
  if (message.max_op_bytes == 0 || message.max_op_bytes > memory.op_max) {
    return Error{ENOMEM, fmt::format("max_op_bytes is {}; this node allows 1 to {} (memory.op_max)",
                                     message.max_op_bytes, config::format_bytes(memory.op_max))};
  }
  if (message.arena_bytes == 0 || message.arena_bytes > memory.arena_max) {
    return Error{ENOMEM,
                 fmt::format("arena of {} bytes; this node allows 1 to {} for one client (memory.arena_max)",
                             message.arena_bytes, config::format_bytes(memory.arena_max))};
  }
  const uint64_t used = arena_bytes();
  if (message.arena_bytes > memory.arena_total || used > memory.arena_total - message.arena_bytes) {
    return Error{ENOMEM,
                 fmt::format("arena of {} bytes; {} of {} are taken by other clients (memory.arena_total)",
                             message.arena_bytes, used, config::format_bytes(memory.arena_total))};
  }
  Membership membership;
  wire::JobKey key{};
  if (view_fd) {
    auto view = ipc::decode_view(view_fd.get());
    if (!view) return view.error();
    if (view->node_of_rank.size() != job->world_size) {
      return wrong(
          fmt::format("the view has {} ranks, world_size is {}", view->node_of_rank.size(), job->world_size));
    }
    auto made = membership_of_view(std::move(*view), options.facts, job->nonce);
    if (!made) return made.error();
    membership = std::move(*made);
    if (membership.view.generation != job->generation) {
      return wrong(fmt::format("the view has generation {}, the card is for generation {}",
                               membership.view.generation, job->generation));
    }
    std::memcpy(key.data(), message.key, key.size());
  } else {
    auto made = membership_of_config(config->config, job->name, job->world_size, options.facts, job->nonce);
    if (!made) return made.error();
    membership = std::move(*made);
    if (!config->config.security.key_file.empty()) {
      auto loaded = load_key(config->config.security.key_file);
      if (!loaded) return loaded.error();
      key = *loaded;
    } else if (options.facts.sealing != wire::Sealing::kNone) {
      return wrong("jobs under `peers:` need security.key_file, equal on all nodes");
    }
  }
  const auto place = std::find(membership.local_ranks.begin(), membership.local_ranks.end(), client->rank);
  if (place == membership.local_ranks.end()) {
    return wrong(fmt::format("rank {} is not on this node; its ranks are {}", client->rank,
                             listed(membership.local_ranks)));
  }
  if (message.local_ranks != 0 && message.local_ranks != membership.local_ranks.size()) {
    return wrong(fmt::format("local_ranks is {}, but {} ranks are on this node", message.local_ranks,
                             membership.local_ranks.size()));
  }
  exchange::Settings settings =
      make_settings(config->config, options.facts, job->name, membership, key, message);
  if (job->described) {
    if (membership.view != job->membership.view || key != job->settings.key) {
      return wrong(fmt::format("rank {} has another view or key than another rank of job '{}' here",
                               client->rank, job->name));
    }
    if (message.max_op_bytes != job->client_max_op_bytes || message.deadline_us != job->client_deadline_us) {
      return wrong(fmt::format(
          "max_op_bytes or deadline differ: here {} and {} us, another rank said {} and {} us",
          message.max_op_bytes, message.deadline_us, job->client_max_op_bytes, job->client_deadline_us));
    }
    for (const uint64_t id : job->clients) {
      const Client* other = find_client(id);
      if (other != client && other->phase == Client::Phase::kJoining && other->rank == client->rank) {
        return wrong(fmt::format("rank {} has joined already (pid {})", client->rank, other->who.pid));
      }
    }
  } else {
    const uint64_t needed = exchange::minimum_pool_bytes(settings);
    if (needed > settings.pool_bytes) {
      return Error{ENOMEM,
                   fmt::format("ops of {} need a pool of {}, memory.job_pool is {}",
                               config::format_bytes(settings.max_op_bytes), config::format_bytes(needed),
                               config::format_bytes(settings.pool_bytes))};
    }
    job->membership = std::move(membership);
    job->settings = std::move(settings);
    job->client_max_op_bytes = message.max_op_bytes;
    job->client_deadline_us = message.deadline_us;
    job->described = true;
  }
  client->local_rank = static_cast<uint32_t>(
      std::find(job->membership.local_ranks.begin(), job->membership.local_ranks.end(), client->rank) -
      job->membership.local_ranks.begin());
  return {};
}

// --- Shared memory ----------------------------------------------------------------------------------------------------

void ControlState::prepare(Job* job) {
  job->enter(JobPhase::kPreparing, now);
  // Those who only said HELLO have no place in it.
  std::vector<uint64_t> extra;
  for (const uint64_t id : job->clients) {
    if (find_client(id)->phase != Client::Phase::kJoining) extra.push_back(id);
  }
  for (const uint64_t id : extra)
    refuse(find_client(id), Status::kRefused, "the job has started without this connection");

  struct Wanted {
    uint64_t client;
    uint64_t bytes;
    std::string name;
  };
  std::vector<Wanted> wanted;
  for (const uint64_t id : job->clients) {
    const Client* client = find_client(id);
    wanted.push_back({id, client->arena_wanted, fmt::format("{}-{}", job->name, client->rank)});
  }
  slow.submit([this, job_id = job->id, lanes = job->settings.lanes, wanted]() -> SlowWork::Outcome {
    auto made = std::make_shared<std::vector<std::pair<uint64_t, Regions>>>();
    std::string error;
    for (const Wanted& one : wanted) {
      auto regions = Regions::create(one.name, one.bytes, lanes);
      if (!regions) {
        error = regions.error().message;
        made->clear();
        break;
      }
      made->emplace_back(one.client, std::move(*regions));
    }
    return [this, job_id, made, error] { prepared(job_id, std::move(*made), error); };
  });
}

void ControlState::prepared(uint64_t job_id, std::vector<std::pair<uint64_t, Regions>> regions,
                            const std::string& error) {
  Job* job = find_job(job_id);
  if (job == nullptr || job->phase != JobPhase::kPreparing)
    return;  // it failed meanwhile; the memory goes back here
  if (!error.empty()) return fail_join(job, Status::kNoMemory, error);
  for (auto& [client_id, made] : regions) {
    if (Client* client = find_client(client_id)) client->regions = std::move(made);
  }
  shake(job);
}

// --- Handshake --------------------------------------------------------------------------------------------------------

void ControlState::shake(Job* job) {
  job->enter(JobPhase::kShaking, now);
  exchange::JoinSettings join;
  join.job = job->name;
  join.key = job->settings.key;
  join.self = job->membership.self;
  for (uint32_t node = 0; node < job->membership.view.nodes.size(); ++node) {
    const bool known = !job->membership.from_config || node == join.self;
    join.join_nonces.push_back(known ? std::optional(job->membership.view.nodes[node].join_nonce)
                                     : std::nullopt);
  }
  join.generation = job->settings.generation;
  join.config_digest = config_digest(job->settings);
  join.sealing = job->settings.sealing;
  join.lanes = job->settings.lanes;
  join.largest_datagram =
      std::min<uint32_t>(options.facts.largest_datagram,
                         static_cast<uint32_t>(job->settings.payload + wire::kHeaderBytes + wire::kTagBytes));
  random_bytes(join.random);
  job->join = std::make_unique<exchange::Join>(std::move(join));
  job->join->tick(now);
  pump(job);
}

// Sends what the handshake has to send, and looks at how it stands.
void ControlState::pump(Job* job) {
  exchange::Join::Outgoing out;
  while (job->join->poll_send(now, &out)) {
    Command command;
    command.kind = Command::Kind::kSend;
    command.endpoint = job->membership.endpoints[out.node];
    command.datagram.assign(out.bytes.begin(), out.bytes.end());
    options.lanes[0]->post(std::move(command));
  }
  if (job->phase != JobPhase::kShaking) return;
  if (job->join->state() == exchange::Join::State::kFinished) return attach(job);
  if (job->join->state() != exchange::Join::State::kFailed) return;
  const exchange::JoinFault& fault = job->join->fault();
  std::string text = fmt::format("{} ({})", fault.text(), job->membership.view.nodes[fault.node].endpoint);
  if (fault.kind == exchange::JoinFault::Kind::kConfig)
    text += fmt::format("; here: {}", common_settings(job->settings));
  fail_join(job, Status::kRefused, text);
}

void ControlState::take_hello(const Notice& from_lane) {
  wire::Header header;
  if (from_lane.length < sizeof header + sizeof(wire::Hello)) return;
  std::memcpy(&header, from_lane.datagram, sizeof header);
  wire::Hello hello;
  std::memcpy(&hello, from_lane.datagram + sizeof header, sizeof hello);
  const char* reason = "no job of that name is joining here";
  Job* best = nullptr;
  uint32_t best_node = 0;
  for (const auto& [id, job] : jobs) {
    if (job->wire_id != header.job || job->join == nullptr) continue;
    const auto& endpoints = job->membership.endpoints;
    const auto from = std::find(endpoints.begin(), endpoints.end(), from_lane.endpoint);
    if (from == endpoints.end()) {
      reason = "the job has no node with that address";
      continue;
    }
    const auto node = static_cast<uint32_t>(from - endpoints.begin());
    // A job that has failed or was left here serves those who are in it; whoever starts anew waits for our own new
    // start instead of being told that this one does not know him.
    if (job->failed || job->phase == JobPhase::kLingering) {
      const bool member = job->join->state() == exchange::Join::State::kFinished &&
                          std::memcmp(job->join->members()[node].join_nonce.data(), hello.join_nonce,
                                      sizeof hello.join_nonce) == 0;
      if (!member) continue;
    }
    // The newest wins: it is the one that is joining.
    best = job.get();
    best_node = node;
  }
  if (best == nullptr) {
    ++counts.hellos_stray;
    return stray_hellos.write(now, log::Level::kDebug, "HELLO from {} for job id {:08x}: {}",
                              port::to_string(from_lane.endpoint), header.job, reason);
  }
  best->join->on_packet(best_node, std::span(from_lane.datagram, from_lane.length), now);
  pump(best);
}

// --- Lanes ------------------------------------------------------------------------------------------------------------

void ControlState::attach(Job* job) {
  job->settings.members = job->join->members();
  job->settings.lanes = job->join->lanes();
  job->settings.payload = job->join->payload();
  const uint64_t needed = exchange::minimum_pool_bytes(job->settings);
  if (needed > job->settings.pool_bytes) {
    return fail_join(
        job, Status::kNoMemory,
        fmt::format("with datagrams of {} bytes ops of {} need a pool of {}, memory.job_pool is {}",
                    job->settings.payload, config::format_bytes(job->settings.max_op_bytes),
                    config::format_bytes(needed), config::format_bytes(job->settings.pool_bytes)));
  }
  job->enter(JobPhase::kAttaching, now);
  for (uint32_t lane = 0; lane < job->settings.lanes; ++lane) {
    auto made = std::make_unique<LaneJob>();
    made->id = job->id;
    made->settings = job->settings;
    made->settings.lane = lane;
    for (port::Endpoint endpoint : job->membership.endpoints) {
      endpoint.port = static_cast<uint16_t>(endpoint.port + lane);
      made->nodes.push_back(endpoint);
    }
    made->clients.resize(job->clients.size());
    for (const uint64_t id : job->clients) {
      Client* client = find_client(id);
      client->regions.control()->lanes = job->settings.lanes;
      made->clients[client->local_rank] = {client->id,
                                           client->local_rank,
                                           client->regions.control(),
                                           client->regions.submit(),
                                           client->regions.arena(),
                                           client->regions.arena_bytes()};
    }
    Command command;
    command.kind = Command::Kind::kAttachJob;
    command.job_id = job->id;
    command.job = std::move(made);
    options.lanes[lane]->post(std::move(command));
  }
  job->settings.key.wipe();  // nobody can join any more; lanes and handshake have made their own keys of it
}

void ControlState::joined(Job* job) {
  job->enter(JobPhase::kRunning, now);
  job->deadline = kNever;
  ++counts.joins_succeeded;
  log::info(
      "job '{}' runs: {} nodes, {} ranks, here {}; this is node {}, {} lanes, datagrams of {} bytes, sealing "
      "{}",
      job->name, job->settings.members.size(), job->world_size, listed(job->membership.local_ranks),
      job->membership.self, job->settings.lanes, job->settings.payload, sealing_name(job->settings.sealing));
  const std::vector<uint64_t> ids = job->clients;
  for (const uint64_t id : ids) {
    Client* client = find_client(id);
    if (client == nullptr || client->phase != Client::Phase::kJoining) continue;
    client->phase = Client::Phase::kJoined;
    ipc::Message message;
    message.type = static_cast<uint32_t>(ipc::MessageType::kJoined);
    message.rank = client->rank;
    message.world_size = job->world_size;
    message.local_ranks = static_cast<uint32_t>(job->membership.local_ranks.size());
    message.lanes = job->settings.lanes;
    message.payload = job->settings.payload;
    message.nodes = static_cast<uint32_t>(job->settings.members.size());
    message.node = job->membership.self;
    message.code = job->settings.carry_over ? ipc::kJoinedCarries : 0;
    if (job->settings.on_incomplete == exchange::OnIncomplete::kCorrect) message.code |= ipc::kJoinedCorrects;
    message.arena_bytes = client->regions.arena_bytes();
    message.max_op_bytes = job->settings.max_op_bytes;
    message.deadline_us = static_cast<uint32_t>(job->settings.hard_deadline);
    ipc::set_text(message.job, job->name);
    std::vector<int> fds = {client->regions.control_fd(), client->regions.submit_fd(),
                            client->regions.arena_fd()};
    for (uint32_t lane = 0; lane < job->settings.lanes; ++lane)
      fds.push_back(options.lanes[lane]->event_fd());
    if (!client->channel.send(message, fds, 0).ok())
      lose(client, Status::kPeerLost, "does not take its messages");
  }
}

// --- Failure ----------------------------------------------------------------------------------------------------------

std::string ControlState::who_is_missing(const Job& job) const {
  const std::string start = fmt::format("job '{}' could not join in time: ", job.name);
  if (job.phase == JobPhase::kShaking) {
    std::vector<std::string> missing;
    for (const exchange::JoinPeer& peer : job.join->peers()) {
      if (peer.state == exchange::JoinPeer::State::kReady ||
          peer.state == exchange::JoinPeer::State::kWaiting)
        continue;
      missing.push_back(fmt::format("{} ({})", job.membership.view.nodes[peer.node].endpoint,
                                    exchange::state_name(peer.state)));
    }
    if (missing.empty()) return start + "all nodes answered, but some wait for others";
    return start + "missing " + listed(missing);
  }
  if (job.phase == JobPhase::kGathering && job.described) {
    std::vector<uint32_t> missing = job.membership.local_ranks;
    for (const uint64_t id : job.clients) {
      const auto client = clients.find(id);
      if (client != clients.end() && client->second->phase == Client::Phase::kJoining)
        std::erase(missing, client->second->rank);
    }
    return start + fmt::format("no JOIN on node {} from rank {}", options.facts.name, listed(missing));
  }
  return start + fmt::format("it is still {}", phase_name(job.phase));
}

void ControlState::fail_join(Job* job, Status status, const std::string& text) {
  ++counts.joins_failed;
  log::warning("job '{}' was not joined: {}", job->name, text);
  const std::vector<uint64_t> ids = std::move(job->clients);
  job->clients.clear();
  for (const uint64_t id : ids) {
    Client* client = find_client(id);
    if (client == nullptr) continue;
    let_go(job, client, status, text);
    client->job = 0;
    refuse(client, status, text);
  }
  if (!job->on_lanes()) return detach(job);
  // Peers may be running already: the lanes tell them.
  job->failed = true;
  job->failure_text = text;
  post_all(*job, Command::Kind::kFailJob, 0, status, text);
  job->enter(JobPhase::kLingering, now);
  job->deadline = now + kTellPeers;
}

}  // namespace sluice::daemon
