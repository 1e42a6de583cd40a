#include "tools/sluicectl/daemon_client.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>

#include "base/ipc/channel.h"

namespace sluice::ctl {
namespace {

constexpr int kTimeoutMs = 5'000;
constexpr uint64_t kLargestAnswer = 256ULL << 20;  // far beyond what 1,024 nodes and 256 jobs need

Error failure(std::string text) { return {kExitFailure, std::move(text)}; }

}  // namespace

Result<nlohmann::json> ask(const std::string& socket, const nlohmann::json& request) {
  auto channel = ipc::Channel::connect(socket, kTimeoutMs);
  if (!channel) return Error{kExitUnreachable, channel.error().message};
  ipc::Message message;
  message.type = static_cast<uint32_t>(ipc::MessageType::kAdmin);
  const std::string text = request.dump();
  if (text.size() >= sizeof message.text)
    return failure("the request is too long: a job's name has at most 63 characters");
  ipc::set_text(message.text, text);
  // A daemon that refuses connections closes at once; what it says of it can still be read.
  if (auto sent = channel->send(message, kTimeoutMs); !sent.ok() && sent.error().code != ECONNRESET) {
    return failure(fmt::format("sluiced at {}: {}", socket, sent.error().message));
  }
  auto received = channel->receive(kTimeoutMs);
  if (!received) {
    return failure(fmt::format(
        "sluiced at {} did not answer: {}; is it stopped or overloaded? (systemctl status sluiced)", socket,
        received.error().message));
  }
  const ipc::Message& answer = received->message;
  if (answer.abi_version != ipc::kAbiVersion) {
    return failure(
        fmt::format("sluicectl has ABI version {}, sluiced at {} has {}; install the same release of both",
                    ipc::kAbiVersion, socket, answer.abi_version));
  }
  if (answer.type == static_cast<uint32_t>(ipc::MessageType::kRefuse)) {
    return failure(fmt::format("sluiced at {} refused: {}", socket, answer.text));
  }
  if (answer.type != static_cast<uint32_t>(ipc::MessageType::kAdminPart) || received->fd_count != 1 ||
      answer.arena_bytes > kLargestAnswer) {
    return failure(
        fmt::format("sluiced at {} gave an answer that is none; install the same release of both", socket));
  }
  std::string body(answer.arena_bytes, '\0');
  size_t got = 0;
  while (got < body.size()) {
    const ssize_t n =
        ::pread(received->fds[0].get(), body.data() + got, body.size() - got, static_cast<off_t>(got));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return failure(fmt::format("sluiced at {} gave half an answer", socket));
    got += static_cast<size_t>(n);
  }
  auto parsed = nlohmann::json::parse(body, nullptr, false);
  if (parsed.is_discarded())
    return failure(fmt::format("sluiced at {} gave an answer that is not JSON", socket));
  if (parsed.contains("error"))
    return failure(parsed["error"].is_string() ? parsed["error"].get<std::string>() : parsed.dump());
  return parsed;
}

}  // namespace sluice::ctl
