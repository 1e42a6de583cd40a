#include "lib/client/connection.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace sluice::client {
namespace {

// How much longer than the daemon the library waits for the outcome of a join, so that the daemon's error, which names
// the missing nodes, comes before the library's own.
constexpr int kJoinGraceMs = 1000;

std::string number(uint64_t value) { return std::to_string(value); }

Error abi_error(const std::string& path, uint32_t version) {
  return Error{SLUICE_ERROR_ABI, "libsluice speaks ABI version " + number(ipc::kAbiVersion) + ", sluiced" +
                                     (path.empty() ? "" : " at " + path) + " speaks version " +
                                     number(version) + "; install the same release of both"};
}

// An answer that a daemon of this ABI version does not give.
Error nonsense(const std::string& what) {
  return Error{SLUICE_ERROR_ABI,
               "sluiced gave an impossible answer: " + what + "; install the same release of both"};
}

// An error of the channel in the terms of the C interface. `doing` says what was waited for.
Error channel_error(const Error& error, const std::string& doing) {
  int code = SLUICE_ERROR_SYSTEM;
  if (error.code == ETIMEDOUT) code = SLUICE_ERROR_TIMEOUT;
  if (error.code == ECONNRESET) code = SLUICE_ERROR_DAEMON_LOST;
  if (error.code == EBADMSG) code = SLUICE_ERROR_ABI;
  return Error{code, doing + ": " + error.message};
}

Error refusal(const ipc::Received& received) {
  const ipc::Message& message = received.message;
  std::string text = message.text[0] != '\0' ? message.text : status_name(static_cast<Status>(message.code));
  if (received.fd_count == 1) {  // the whole of a text that does not fit the message
    char whole[4096];
    const ssize_t length = ::pread(received.fds[0].get(), whole, sizeof(whole), 0);
    if (length > 0) text.assign(whole, static_cast<size_t>(length));
  }
  return Error{error_of(message.code), "sluiced refused: " + text};
}

// Waits for the answer to what was asked: `wanted`, or the daemon's refusal as an error.
Result<ipc::Received> answer(ipc::Channel& channel, ipc::MessageType wanted, const std::string& doing,
                             int timeout_ms) {
  auto received = channel.receive(timeout_ms);
  if (!received.ok()) return channel_error(received.error(), doing);
  const ipc::Message& message = received->message;
  if (message.abi_version != ipc::kAbiVersion) return abi_error("", message.abi_version);
  const auto type = static_cast<ipc::MessageType>(message.type);
  if (type == ipc::MessageType::kRefuse) return refusal(*received);
  if (type == ipc::MessageType::kBye) {
    return Error{
        SLUICE_ERROR_DAEMON_LOST,
        doing + ": sluiced shuts down" + (message.text[0] != '\0' ? ": " + std::string(message.text) : "")};
  }
  if (type != wanted) return nonsense("message type " + number(message.type));
  return received;
}

Result<Mapping> map_region(int fd, size_t size, Access access, const char* what) {
  // Sealed against shrinking: no access to it can ever be a SIGBUS.
  if (auto sealed = check_sealed(fd, size); !sealed.ok()) {
    return nonsense(std::string(what) + ": " + sealed.error().message);
  }
  auto mapping = Mapping::map(fd, size, access);
  if (!mapping.ok()) {
    return Error{SLUICE_ERROR_SYSTEM, std::string("cannot map the ") + what + ": " + mapping.error().message};
  }
  return mapping;
}

}  // namespace

Timer::Timer(int timeout_ms) : end_(monotonic_micros() + std::max(timeout_ms, 0) * kMicrosPerMilli) {}

int Timer::left_ms() const {
  const Micros left = end_ - monotonic_micros();
  return left <= 0 ? 0 : static_cast<int>((left + kMicrosPerMilli - 1) / kMicrosPerMilli);
}

int error_of(uint32_t status) {
  switch (static_cast<Status>(status)) {
    case Status::kTimeout:
    case Status::kOpTimeout:
    case Status::kRankTimeout:
      return SLUICE_ERROR_TIMEOUT;
    case Status::kNoMemory:
      return SLUICE_ERROR_NO_MEMORY;
    case Status::kInvalid:
      return SLUICE_ERROR_INVALID;
    case Status::kDaemonLost:
      return SLUICE_ERROR_DAEMON_LOST;
    default:
      return SLUICE_ERROR_REFUSED;
  }
}

Result<ipc::Channel> connect(const std::string& path, int timeout_ms) {
  auto channel = ipc::Channel::connect(path, timeout_ms);
  if (channel.ok()) return channel;
  const int code = channel.error().code;
  return Error{code == ENAMETOOLONG ? SLUICE_ERROR_INVALID
               : code == ETIMEDOUT  ? SLUICE_ERROR_TIMEOUT
                                    : SLUICE_ERROR_UNREACHABLE,
               channel.error().message};
}

Result<Greeted> greet(ipc::Channel channel, const std::string& path, const std::string& job, uint32_t rank,
                      uint32_t world_size, uint32_t generation, int timeout_ms) {
  const Timer timer(timeout_ms);
  const std::string doing = "waiting for sluiced at " + path + " to welcome rank " + number(rank);
  ipc::Message hello;
  hello.type = static_cast<uint32_t>(ipc::MessageType::kHello);
  hello.rank = rank;
  hello.world_size = world_size;
  hello.node = generation;
  ipc::set_text(hello.job, job);
  // A daemon that refuses connections closes at once; what it says of it can still be read.
  if (auto sent = channel.send(hello, timer.left_ms()); !sent.ok() && sent.error().code != ECONNRESET)
    return channel_error(sent.error(), doing);
  auto received = answer(channel, ipc::MessageType::kWelcome, doing, timer.left_ms());
  if (!received.ok()) return received.error();
  const ipc::Message& message = received->message;
  Greeted greeted;
  std::copy(std::begin(message.join_nonce), std::end(message.join_nonce), greeted.welcome.join_nonce.begin());
  const std::string_view told = message.text;
  const size_t space = std::min(told.find(' '), told.size());
  greeted.welcome.endpoint = told.substr(0, space);
  greeted.welcome.name = told.substr(std::min(space + 1, told.size()), sizeof(ipc::ViewNode::name) - 1);
  for (char& c : greeted.welcome.name) c = c > ' ' && c < 0x7F ? c : '_';
  if (greeted.welcome.endpoint.empty() ||
      greeted.welcome.endpoint.size() >= sizeof(ipc::ViewNode::endpoint)) {
    return nonsense("endpoint '" + greeted.welcome.endpoint + "'");
  }
  if (message.lanes == 0 || message.lanes > ipc::kMaxLanes) return nonsense(number(message.lanes) + " lanes");
  if (!ipc::valid_payload(message.payload)) {
    return nonsense("payload of " + number(message.payload) + " bytes");
  }
  greeted.welcome.lanes = static_cast<uint16_t>(message.lanes);
  greeted.welcome.payload = static_cast<uint16_t>(message.payload);
  greeted.world_size = world_size;
  greeted.generation = generation;
  greeted.channel = std::move(channel);
  return greeted;
}

Result<Joined> join(Greeted greeted, const JoinRequest& request, int timeout_ms) {
  const Timer timer(timeout_ms);
  const std::string doing = "joining job '" + request.job + "' as rank " + number(request.rank);
  ipc::Message message;
  message.type = static_cast<uint32_t>(ipc::MessageType::kJoin);
  message.rank = request.rank;
  message.world_size = request.world_size;
  message.local_ranks = request.local_ranks;
  message.arena_bytes = request.arena_bytes;
  message.max_op_bytes = request.max_op_bytes;
  message.deadline_us = request.deadline_us;
  message.timeout_ms = static_cast<uint32_t>(timer.left_ms());
  std::copy(greeted.welcome.join_nonce.begin(), greeted.welcome.join_nonce.end(), message.join_nonce);
  ipc::set_text(message.job, request.job);
  UniqueFd view;
  if (request.view) {
    message.lanes = request.view->lanes;
    message.payload = request.view->payload;
    std::copy(request.key.begin(), request.key.end(), message.key);
    auto blob = ipc::encode_view(*request.view);
    if (!blob.ok()) return Error{SLUICE_ERROR_SYSTEM, doing + ": " + blob.error().message};
    view = std::move(*blob);
  }
  const int view_fd = view.get();
  const auto fds = view ? std::span<const int>(&view_fd, 1) : std::span<const int>();
  auto sent = greeted.channel.send(message, fds, timer.left_ms());
  explicit_bzero(message.key, sizeof(message.key));
  if (!sent.ok()) return channel_error(sent.error(), doing);

  auto received = answer(greeted.channel, ipc::MessageType::kJoined, doing, timer.left_ms() + kJoinGraceMs);
  if (!received.ok()) return received.error();
  const ipc::Message& reply = received->message;
  if (reply.lanes == 0 || reply.lanes > ipc::kMaxLanes || received->fd_count != 3 + reply.lanes) {
    return nonsense(number(reply.lanes) + " lanes with " + number(received->fd_count) + " descriptors");
  }
  if (reply.arena_bytes < request.arena_bytes) {
    return Error{SLUICE_ERROR_NO_MEMORY, doing + ": asked for an arena of " + number(request.arena_bytes) +
                                             " bytes, got " + number(reply.arena_bytes)};
  }
  if (reply.nodes == 0 || reply.node >= reply.nodes) {
    return nonsense("node " + number(reply.node) + " of " + number(reply.nodes));
  }
  auto control = map_region(received->fds[0].get(), sizeof(ipc::ControlPage), Access::kRead, "control page");
  if (!control.ok()) return control.error();
  auto submit =
      map_region(received->fds[1].get(), sizeof(ipc::SubmitPage), Access::kReadWrite, "submit page");
  if (!submit.ok()) return submit.error();
  auto arena = map_region(received->fds[2].get(), reply.arena_bytes, Access::kReadWrite, "arena");
  if (!arena.ok()) return arena.error();
  const uint32_t version = reinterpret_cast<const ipc::ControlPage*>(control->data())->abi_version;
  if (version != ipc::kAbiVersion) return abi_error("", version);

  Joined joined;
  joined.control = std::move(*control);
  joined.submit = std::move(*submit);
  joined.arena = std::move(*arena);
  for (uint32_t lane = 0; lane < reply.lanes; ++lane)
    joined.event_fds[lane] = std::move(received->fds[3 + lane]);
  joined.lanes = reply.lanes;
  joined.payload = reply.payload;
  joined.nodes = reply.nodes;
  joined.node = reply.node;
  joined.arena_bytes = reply.arena_bytes;
  joined.carry_over = (reply.code & ipc::kJoinedCarries) != 0;
  joined.corrects = (reply.code & ipc::kJoinedCorrects) != 0;
  joined.node_name = greeted.welcome.name;
  joined.node_address = greeted.welcome.endpoint;

  // From now on the daemon lets nobody map the regions for writing any more.
  ipc::Message mapped;
  mapped.type = static_cast<uint32_t>(ipc::MessageType::kMapped);
  if (auto told = greeted.channel.send(mapped, timer.left_ms() + kJoinGraceMs); !told.ok()) {
    return channel_error(told.error(), doing);
  }
  joined.channel = std::move(greeted.channel);
  return joined;
}

}  // namespace sluice::client
