// Daemons in the test's own process, on loopback ports that the kernel chooses, and clients for them: a rank over
// libsluice, and a raw one that says what it wants and dies when it wants.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/ipc/card.h"
#include "base/ipc/channel.h"
#include "base/ipc/ring.h"
#include "base/log.h"
#include "base/mapping.h"
#include "config/loader.h"
#include "daemon/lifecycle/daemon.h"

namespace sluice::daemon::test {

// Looks every millisecond whether `condition` holds; false after `seconds`.
template <typename Condition>
bool eventually(Condition condition, double seconds = 10) {
  const Micros end = monotonic_micros() + static_cast<Micros>(seconds * 1e6);
  while (!condition()) {
    if (monotonic_micros() > end) return false;
    ::usleep(1'000);
  }
  return true;
}

// Daemons with a folder of their own; gone, with all they had, at the end.
class Nodes {
 public:
  explicit Nodes(size_t count, std::vector<std::string> overrides = {}) : overrides_(std::move(overrides)) {
    log::configure(log::Level::kOff);
    char name[] = "/tmp/sluice-daemon-XXXXXX";
    EXPECT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
    for (size_t i = 0; i < count; ++i) start();
  }
  ~Nodes() {
    daemons_.clear();
    std::filesystem::remove_all(folder_);
  }

  std::shared_ptr<config::Loaded> load(size_t index, const std::vector<std::string>& more = {},
                                       const std::string& yaml = "") const {
    std::vector<std::string> all = {"node=n" + std::to_string(index), "transport.bind=127.0.0.1",
                                    "transport.port=0", "metrics.listen=off", "socket.path=" + socket(index)};
    all.insert(all.end(), overrides_.begin(), overrides_.end());
    all.insert(all.end(), more.begin(), more.end());
    return std::make_shared<config::Loaded>(config::load_texts({{"t.yaml", yaml}}, all));
  }
  // Starts one more; the error when it cannot.
  Result<void> try_start(const std::vector<std::string>& more = {}, const std::string& yaml = "") {
    const auto loaded = load(daemons_.size(), more, yaml);
    if (!loaded->ok()) return Error{kExitConfig, loaded->problems_text()};
    auto daemon = Daemon::start(loaded);
    if (!daemon) return daemon.error();
    daemons_.push_back(std::move(*daemon));
    return {};
  }
  void start(const std::vector<std::string>& more = {}, const std::string& yaml = "") {
    const auto started = try_start(more, yaml);
    ASSERT_TRUE(started.ok()) << started.error().message;
  }

  Daemon& operator[](size_t index) { return *daemons_[index]; }
  std::string socket(size_t index) const { return folder_ + "/n" + std::to_string(index) + ".sock"; }
  const std::string& folder() const { return folder_; }

  nlohmann::json ask(size_t index, const nlohmann::json& request) const {
    auto channel = ipc::Channel::connect(socket(index), 1'000);
    if (!channel) return {{"error", channel.error().message}};
    ipc::Message message;
    message.type = static_cast<uint32_t>(ipc::MessageType::kAdmin);
    ipc::set_text(message.text, request.dump());
    EXPECT_TRUE(channel->send(message, 1'000).ok());
    auto answer = channel->receive(2'000);
    if (!answer || answer->fd_count != 1) return {{"error", "no answer"}};
    std::string text(answer->message.arena_bytes, '\0');
    EXPECT_EQ(::pread(answer->fds[0].get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    return nlohmann::json::parse(text);
  }

 private:
  const std::vector<std::string> overrides_;
  std::string folder_;
  std::vector<std::unique_ptr<Daemon>> daemons_;
};

// A client that speaks the protocol of layout.h by hand. Its destructor closes the socket, as the kernel does for a
// process that dies.
class RawClient {
 public:
  RawClient(std::string job, uint32_t rank, uint32_t world)
      : job_(std::move(job)), rank_(rank), world_(world) {}

  // HELLO; the error is the text of a refusal.
  Result<void> hello(const std::string& socket) {
    auto channel = ipc::Channel::connect(socket, 1'000);
    if (!channel) return channel.error();
    channel_ = std::move(*channel);
    ipc::Message message;
    message.type = static_cast<uint32_t>(ipc::MessageType::kHello);
    message.rank = rank_;
    message.world_size = world_;
    ipc::set_text(message.job, job_);
    auto sent = channel_.send(message, 1'000);
    if (!sent.ok()) return sent;
    auto answer = receive(5'000);
    if (!answer) return answer.error();
    welcome = answer->message;
    return {};
  }

  // This node as a node of a view.
  ipc::View::Node node() const {
    ipc::View::Node out;
    std::copy(std::begin(welcome.join_nonce), std::end(welcome.join_nonce), out.join_nonce.begin());
    const std::string told = welcome.text;
    out.endpoint = told.substr(0, told.find(' '));
    out.name = told.substr(told.find(' ') + 1);
    return out;
  }

  void send_join(const ipc::View* view, uint64_t arena = 1 << 20, uint32_t timeout_ms = 10'000) {
    ipc::Message message;
    message.type = static_cast<uint32_t>(ipc::MessageType::kJoin);
    message.rank = rank_;
    message.world_size = world_;
    message.arena_bytes = arena;
    message.max_op_bytes = max_op_bytes;
    message.timeout_ms = timeout_ms;
    std::copy(std::begin(welcome.join_nonce), std::end(welcome.join_nonce), message.join_nonce);
    ipc::set_text(message.job, job_);
    std::fill(std::begin(message.key), std::end(message.key), key_byte);
    UniqueFd fd;
    if (view != nullptr) {
      auto blob = ipc::encode_view(*view);
      ASSERT_TRUE(blob.ok()) << blob.error().message;
      fd = std::move(*blob);
    }
    const int raw = fd.get();
    ASSERT_TRUE(
        channel_.send(message, fd ? std::span<const int>(&raw, 1) : std::span<const int>(), 1'000).ok());
  }

  // The answer to JOIN, mapped and told so.
  Result<void> finish_join(int timeout_ms = 15'000) {
    auto answer = receive(timeout_ms);
    if (!answer) return answer.error();
    if (answer->message.type != static_cast<uint32_t>(ipc::MessageType::kJoined))
      return Error{EPROTO, "not JOINED"};
    joined = answer->message;
    auto control = Mapping::map(answer->fds[0].get(), sizeof(ipc::ControlPage), Access::kRead);
    auto submit = Mapping::map(answer->fds[1].get(), sizeof(ipc::SubmitPage), Access::kReadWrite);
    auto arena = Mapping::map(answer->fds[2].get(), joined.arena_bytes, Access::kReadWrite);
    EXPECT_TRUE(control.ok() && submit.ok() && arena.ok());
    control_ = std::move(*control);
    submit_ = std::move(*submit);
    arena_ = std::move(*arena);
    for (uint32_t lane = 0; lane < joined.lanes; ++lane)
      event_fds_.push_back(std::move(answer->fds[3 + lane]));
    received_ = std::move(*answer);
    writer_ = ipc::descriptor_writer(submit_page(), control_page(), 0);
    reader_ = ipc::completion_reader(submit_page(), control_page(), 0);
    return say(ipc::MessageType::kMapped);
  }

  Result<void> say(ipc::MessageType type) {
    ipc::Message message;
    message.type = static_cast<uint32_t>(type);
    return channel_.send(message, 1'000);
  }

  void submit(const ipc::Descriptor& descriptor) {
    ASSERT_EQ(writer_.push(descriptor), ipc::RingState::kOk);
    const uint64_t one = 1;
    ASSERT_EQ(::write(event_fds_[0].get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }
  bool completion(ipc::Completion* out, double seconds = 10) {
    return eventually([&] { return reader_.pop(out) == ipc::RingState::kOk; }, seconds);
  }
  std::string report(uint32_t op_seq) {
    ipc::Report report;
    return ipc::read_report(control_page(), 0, op_seq, &report) ? report.text : "";
  }

  // The next message; a REFUSE is an error with its text (the whole one, where it came as a file) and its status.
  Result<ipc::Received> receive(int timeout_ms) {
    auto answer = channel_.receive(timeout_ms);
    if (!answer) return answer;
    if (answer->message.type != static_cast<uint32_t>(ipc::MessageType::kRefuse)) return answer;
    std::string text = answer->message.text;
    if (answer->fd_count == 1) {
      char whole[4096];
      const ssize_t length = ::pread(answer->fds[0].get(), whole, sizeof whole, 0);
      if (length > 0) text.assign(whole, static_cast<size_t>(length));
    }
    return Error{static_cast<int>(answer->message.code), text};
  }

  void die() {
    channel_.close();
    control_.reset();
    submit_.reset();
    arena_.reset();
    received_ = ipc::Received();
    event_fds_.clear();
  }

  const ipc::ControlPage& control_page() const {
    return *reinterpret_cast<const ipc::ControlPage*>(control_.data());
  }
  ipc::SubmitPage& submit_page() const { return *reinterpret_cast<ipc::SubmitPage*>(submit_.data()); }
  std::byte* arena() const { return arena_.data(); }
  ipc::Channel& channel() { return channel_; }
  const ipc::Received& received() const { return received_; }

  ipc::Message welcome, joined;
  uint64_t max_op_bytes = 1 << 18;
  uint8_t key_byte = 7;

 private:
  const std::string job_;
  const uint32_t rank_, world_;
  ipc::Channel channel_;
  Mapping control_, submit_, arena_;
  std::vector<UniqueFd> event_fds_;
  ipc::Received received_;
  ipc::DescriptorWriter writer_;
  ipc::CompletionReader reader_;
};

inline ipc::View view_of(const std::vector<ipc::View::Node>& nodes, const std::vector<uint32_t>& node_of_rank,
                         const ipc::Message& welcome) {
  ipc::View view;
  view.nodes = nodes;
  view.node_of_rank = node_of_rank;
  view.lanes = static_cast<uint16_t>(welcome.lanes);
  view.payload = static_cast<uint16_t>(welcome.payload);
  return view;
}

// Raw clients, one per rank, on the nodes in `node_of_rank` (in the order of their lowest ranks), all joined.
inline std::vector<std::unique_ptr<RawClient>> join_all(Nodes& nodes, const std::string& job,
                                                        const std::vector<uint32_t>& node_of_rank) {
  std::vector<std::unique_ptr<RawClient>> clients;
  std::vector<ipc::View::Node> view_nodes;
  for (uint32_t rank = 0; rank < node_of_rank.size(); ++rank) {
    clients.push_back(std::make_unique<RawClient>(job, rank, static_cast<uint32_t>(node_of_rank.size())));
    const auto greeted = clients.back()->hello(nodes.socket(node_of_rank[rank]));
    EXPECT_TRUE(greeted.ok()) << greeted.error().message;
    if (node_of_rank[rank] == view_nodes.size()) view_nodes.push_back(clients.back()->node());
  }
  const ipc::View view = view_of(view_nodes, node_of_rank, clients[0]->welcome);
  for (auto& client : clients) client->send_join(&view);
  for (auto& client : clients) {
    const auto joined = client->finish_join();
    EXPECT_TRUE(joined.ok()) << joined.error().message;
  }
  return clients;
}

// A good descriptor: `count` floats from the start of the arena to its middle.
inline ipc::Descriptor descriptor(uint32_t op_seq, uint64_t count = 16) {
  ipc::Descriptor out;
  out.request = static_cast<uint32_t>(ipc::Request::kAllreduce);
  out.op_seq = op_seq;
  out.count = count;
  out.contribution = 0;
  out.result = 1 << 19;
  out.cookie = op_seq + 1;
  return out;
}

}  // namespace sluice::daemon::test
