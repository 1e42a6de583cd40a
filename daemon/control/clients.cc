// What clients say, and how connections end.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "daemon/control/control_state.h"

namespace sluice::daemon {
namespace {

constexpr size_t kMessagesPerTurn = 16;  // of one client, so that no client can keep the others waiting

ipc::Message answer(ipc::MessageType type) {
  ipc::Message message;
  message.type = static_cast<uint32_t>(type);
  return message;
}

// A memfd with `text`, sealed; the receiver reads it from the start. Invalid: no memory.
UniqueFd text_fd(const char* name, const std::string& text) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fd;
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t n =
        ::pwrite(fd.get(), text.data() + written, text.size() - written, static_cast<off_t>(written));
    if (n <= 0) return UniqueFd();
    written += static_cast<size_t>(n);
  }
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
  return fd;
}

}  // namespace

Client* ControlState::find_client(uint64_t id) {
  const auto found = clients.find(id);
  return found == clients.end() ? nullptr : found->second.get();
}

void ControlState::read_client(uint64_t id) {
  for (size_t i = 0; i < kMessagesPerTurn; ++i) {
    Client* client = find_client(id);
    if (client == nullptr || client->phase == Client::Phase::kGone) return;
    auto received = client->channel.receive(0);
    if (received.ok()) {
      handle(client, std::move(*received));
      continue;
    }
    if (received.error().code == ETIMEDOUT) return;
    if (received.error().code == EBADMSG) {
      ++counts.clients_broken;
      lose(client, Status::kInvalid, fmt::format("was let go: {}", received.error().message));
    } else {
      lose(client, Status::kPeerLost, "died or closed its connection without leaving");
    }
    return;
  }
}

void ControlState::handle(Client* client, ipc::Received&& received) {
  const ipc::Message& message = received.message;
  if (message.abi_version != ipc::kAbiVersion) {
    return refuse(
        client, Status::kRefused,
        fmt::format("libsluice has ABI version {}, sluiced {} has {}; install the same release of both",
                    message.abi_version, kVersion, ipc::kAbiVersion));
  }
  switch (static_cast<ipc::MessageType>(message.type)) {
    case ipc::MessageType::kHello:
      return handle_hello(client, message);
    case ipc::MessageType::kJoin:
      return handle_join(client, std::move(received));
    case ipc::MessageType::kMapped:
      return handle_mapped(client);
    case ipc::MessageType::kLeave:
      return handle_leave(client);
    case ipc::MessageType::kAbort:
      return handle_abort(client);
    case ipc::MessageType::kAdmin:
      return handle_admin(client, message);
    case ipc::MessageType::kRegister:
      return refuse(client, Status::kRefused, "this release does not register GPU memory");
    default:
      break;
  }
  ++counts.clients_broken;
  lose(client, Status::kInvalid, fmt::format("was let go: sent a message of unknown type {}", message.type));
}

void ControlState::handle_hello(Client* client, const ipc::Message& message) {
  const std::string name = message.job;
  if (client->phase != Client::Phase::kConnected) {
    return lose(client, Status::kInvalid, "was let go: said HELLO twice on one connection");
  }
  if (!ipc::valid_job_name(name)) {
    return refuse(client, Status::kInvalid,
                  "a job's name has 1 to 63 printable characters without space or slash");
  }
  if (message.world_size == 0 || message.world_size > ipc::kMaxRanks || message.rank >= message.world_size) {
    return refuse(client, Status::kInvalid,
                  fmt::format("rank {} of {} ranks", message.rank, message.world_size));
  }
  if (stop != Stop::kNo) return refuse(client, Status::kDaemonLost, "sluiced is stopping");
  client->rank = message.rank;
  const uint32_t generation = message.node;
  // A job belongs to the user whose process began it: nobody else ends or joins it here.
  for (const auto& [id, job] : jobs) {
    if (job->name != name || job->clients.empty() || client->who.uid == 0) continue;
    const Client* holder = find_client(job->clients.front());
    if (holder == nullptr || holder->who.uid == client->who.uid) continue;
    return refuse(
        client, Status::kRefused,
        fmt::format("job '{}' here belongs to user {}, this process runs as user {}; take another name", name,
                    holder->who.uid, client->who.uid));
  }
  supersede(name, generation);
  for (const auto& [id, job] : jobs) {
    if (job->name != name || job->phase == JobPhase::kLingering || job->phase == JobPhase::kDetaching)
      continue;
    if (job->failed || job->clients.empty()) continue;
    if (job->phase == JobPhase::kGathering && job->generation == generation) continue;
    const Client* holder = find_client(job->clients.front());
    const std::string held = fmt::format("job '{}' is {} here with {}", name, phase_name(job->phase),
                                         holder == nullptr ? "other ranks" : holder->name());
    if (job->generation <= generation) {
      return refuse(client, Status::kRefused, held + "; end it, or take another name");
    }
    return refuse(client, Status::kRefused,
                  fmt::format("{} in generation {}, newer than {}: read the view again", held,
                              job->generation, generation));
  }
  Job* job = gathering_job(name, message.world_size, generation);
  if (job == nullptr) {
    return refuse(
        client, Status::kRefused,
        fmt::format("{} jobs are here already (memory.jobs_max), or one whose name has the same hash",
                    config->config.memory.jobs_max));
  }
  if (job->world_size != message.world_size) {
    return refuse(client, Status::kInvalid,
                  fmt::format("world_size is {}, another rank of job '{}' here said {}", message.world_size,
                              name, job->world_size));
  }
  client->phase = Client::Phase::kGreeted;
  client->job = job->id;
  client->since = now;
  job->clients.push_back(client->id);
  ipc::Message welcome = answer(ipc::MessageType::kWelcome);
  welcome.rank = client->rank;
  welcome.world_size = job->world_size;
  welcome.lanes = options.facts.lanes;
  welcome.payload = wire::payload_for_datagram(options.facts.largest_datagram);
  std::copy(job->nonce.begin(), job->nonce.end(), welcome.join_nonce);
  ipc::set_text(welcome.job, name);
  ipc::set_text(welcome.text, options.facts.endpoint_text + " " + options.facts.name);
  if (!client->channel.send(welcome, 0).ok()) lose(client, Status::kPeerLost, "does not take its messages");
}

void ControlState::handle_mapped(Client* client) {
  if (client->phase != Client::Phase::kJoined)
    return lose(client, Status::kInvalid, "was let go: MAPPED before JOINED");
  if (auto sealed = client->regions.seal(); !sealed.ok()) {
    log::warning("{}: {}", client->name(), sealed.error().message);
  }
}

void ControlState::handle_leave(Client* client) {
  ipc::Message bye = answer(ipc::MessageType::kBye);
  bye.rank = client->rank;
  // A client that closes at once does not need it.
  [[maybe_unused]] const auto sent = client->channel.send(bye, 0);
  if (client->phase == Client::Phase::kJoined) {
    log::debug("{} left job {}", client->name(), client->job);
    return take_out(client, Status::kOk, "");
  }
  lose(client, Status::kAborted, "left while joining");
}

void ControlState::handle_abort(Client* client) {
  Job* job = find_job(client->job);
  if (client->phase != Client::Phase::kJoined || job == nullptr) {
    return lose(client, Status::kInvalid, "was let go: ABORT without a job");
  }
  if (!job->failed) {
    fail_job(
        job, Status::kAborted,
        fmt::format("{} of job '{}' on node {} called abort", client->name(), job->name, options.facts.name),
        true);
  }
}

void ControlState::handle_admin(Client* client, const ipc::Message& message) {
  const std::string text = admin_answer(message.text);
  const UniqueFd fd = text_fd("sluice-admin", text);
  if (!fd) return lose(client, Status::kNoMemory, "was let go: no memory for the answer");
  ipc::Message part = answer(ipc::MessageType::kAdminPart);
  part.arena_bytes = text.size();
  const int raw = fd.get();
  if (!client->channel.send(part, std::span(&raw, 1), 0).ok())
    lose(client, Status::kPeerLost, "does not take its messages");
}

// --- The end of connections -------------------------------------------------------------------------------------------

void ControlState::refuse(Client* client, Status status, const std::string& text) {
  ++counts.clients_refused;
  refusals.write(now, log::Level::kWarning, "refused pid {} (uid {}): {}", client->who.pid, client->who.uid,
                 text);
  ipc::Message refusal = answer(ipc::MessageType::kRefuse);
  refusal.code = static_cast<uint32_t>(status);
  refusal.rank = client->rank;
  ipc::set_text(refusal.text, text);
  // What does not fit the message comes along as a file.
  UniqueFd whole;
  if (text.size() >= sizeof(refusal.text)) whole = text_fd("sluice-refusal", text);
  const int raw = whole.get();
  [[maybe_unused]] const auto sent =
      client->channel.send(refusal, whole ? std::span<const int>(&raw, 1) : std::span<const int>(), 0);
  if (client->phase == Client::Phase::kJoined)
    return lose(client, status, fmt::format("was refused: {}", text));
  const uint64_t job_id = client->job;
  close(client);
  if (Job* job = find_job(job_id)) end_if_left(job);
}

void ControlState::lose(Client* client, Status status, const std::string& why) {
  Job* job = find_job(client->job);
  const bool died = status == Status::kPeerLost;
  switch (client->phase) {
    case Client::Phase::kConnected:
      if (!died) log::warning("client with pid {} {}", client->who.pid, why);
      return close(client);
    case Client::Phase::kGreeted:
      log::debug("{} {} after HELLO", client->name(), why);
      close(client);
      if (job != nullptr) end_if_left(job);
      return;
    case Client::Phase::kJoining: {
      ++counts.clients_lost;
      const std::string text = fmt::format("{} of job '{}' {} while joining", client->name(),
                                           job == nullptr ? "" : job->name, why);
      let_go(job, client, status, text);
      close(client);
      if (job != nullptr) fail_join(job, status, text);
      return;
    }
    case Client::Phase::kJoined: {
      ++counts.clients_lost;
      const std::string text =
          fmt::format("{} of job '{}' on node {} at {} {}", client->name(), job == nullptr ? "" : job->name,
                      options.facts.name, options.facts.endpoint_text, why);
      if (!died) {
        auto& gone = client->regions.control()->gone;
        std::snprintf(gone.text, sizeof gone.text, "%s", text.c_str());
        gone.value.store(static_cast<uint32_t>(status), std::memory_order_release);
      }
      if (job != nullptr && !job->failed) fail_job(job, status, text, false);
      return take_out(client, status, text);
    }
    case Client::Phase::kGone:
      return;
  }
}

void ControlState::close(Client* client) {
  // Closing a socket that holds unread messages would take away from the other side what was sent to it.
  for (size_t i = 0; i < kMessagesPerTurn && client->channel.receive(0).ok(); ++i) {
  }
  client->channel.close();
  client->pidfd.reset();
  if (Job* job = find_job(client->job)) std::erase(job->clients, client->id);
  client->phase = Client::Phase::kGone;
  if (client->lanes_holding > 0) return;
  if (client->regions.valid()) {
    // Giving back gigabytes takes a while.
    auto regions = std::make_shared<Regions>(std::move(client->regions));
    slow.submit([regions]() mutable -> SlowWork::Outcome {
      regions.reset();
      return [] {};
    });
  }
  clients.erase(client->id);
}

}  // namespace sluice::daemon
