#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "base/ipc/channel.h"
#include "tests/unit/ipc_support.h"

namespace sluice::ipc {
namespace {

struct Pair {
  Pair() {
    int fds[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) std::abort();
    a = Channel(UniqueFd(fds[0]));
    b = Channel(UniqueFd(fds[1]));
  }
  Channel a, b;
};

Message message_of(MessageType type) {
  Message message;
  message.type = static_cast<uint32_t>(type);
  set_text(message.job, "job-1");
  return message;
}

// Sends raw bytes with descriptors, as a broken peer would.
void send_raw(const Channel& channel, size_t bytes, const std::vector<int>& fds) {
  std::vector<char> data(bytes, 'x');
  iovec part{data.data(), data.size()};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * fds.size()));
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(rights), fds.data(), sizeof(int) * fds.size());
  }
  ASSERT_EQ(::sendmsg(channel.fd(), &header, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
}

TEST(Channel, CarriesMessagesAndDescriptors) {
  Pair pair;
  for (size_t count = 0; count <= kMaxFds; ++count) {
    const int before = test::open_fds();
    {
      std::vector<UniqueFd> events;
      std::vector<int> numbers;
      for (size_t i = 0; i < count; ++i) {
        events.emplace_back(::eventfd(static_cast<unsigned>(100 + i), EFD_CLOEXEC | EFD_NONBLOCK));
        numbers.push_back(events.back().get());
      }
      Message message = message_of(MessageType::kJoined);
      message.arena_bytes = 1234567;
      ASSERT_TRUE(pair.a.send(message, numbers, 1000).ok());
      events.clear();
      auto received = pair.b.receive(1000);
      ASSERT_TRUE(received.ok()) << received.error().message;
      EXPECT_EQ(received->message.arena_bytes, 1234567U);
      EXPECT_STREQ(received->message.job, "job-1");
      ASSERT_EQ(received->fd_count, count);
      for (size_t i = 0; i < count; ++i) {  // in order, and the same objects
        uint64_t value = 0;
        ASSERT_EQ(::read(received->fds[i].get(), &value, sizeof(value)), static_cast<ssize_t>(sizeof(value)));
        EXPECT_EQ(value, 100 + i);
        EXPECT_TRUE((::fcntl(received->fds[i].get(), F_GETFD) & FD_CLOEXEC) != 0);
      }
    }
    EXPECT_EQ(test::open_fds(), before) << count << " descriptors";
  }
}

TEST(Channel, KeepsMessagesAndTheirDescriptorsTogether) {
  Pair pair;
  const UniqueFd event(::eventfd(0, EFD_CLOEXEC));
  const int number = event.get();
  ASSERT_TRUE(pair.a.send(message_of(MessageType::kHello), 1000).ok());
  ASSERT_TRUE(pair.a.send(message_of(MessageType::kJoin), std::span(&number, 1), 1000).ok());
  ASSERT_TRUE(pair.a.send(message_of(MessageType::kLeave), 1000).ok());
  const size_t expected[] = {0, 1, 0};
  for (const size_t count : expected) {
    auto received = pair.b.receive(1000);
    ASSERT_TRUE(received.ok());
    EXPECT_EQ(received->fd_count, count);
  }
}

TEST(Channel, RefusesWrongSizesAndClosesTheirDescriptors) {
  for (const size_t bytes : {size_t{1}, size_t{255}, size_t{257}, size_t{4096}}) {
    Pair pair;
    const UniqueFd event(::eventfd(0, EFD_CLOEXEC));
    const int before = test::open_fds();
    send_raw(pair.a, bytes, {event.get(), event.get(), event.get()});
    auto received = pair.b.receive(1000);
    ASSERT_FALSE(received.ok()) << bytes;
    EXPECT_EQ(received.error().code, EBADMSG) << received.error().message;
    EXPECT_EQ(test::open_fds(), before) << bytes;
  }
}

TEST(Channel, RefusesTooManyDescriptorsAndClosesThem) {
  Pair pair;
  const UniqueFd event(::eventfd(0, EFD_CLOEXEC));
  const int before = test::open_fds();
  send_raw(pair.a, sizeof(Message), std::vector<int>(kMaxFds + 1, event.get()));
  auto received = pair.b.receive(1000);
  ASSERT_FALSE(received.ok());
  EXPECT_EQ(received.error().code, EBADMSG);
  EXPECT_EQ(test::open_fds(), before);
  const std::vector<int> many(kMaxFds + 1, event.get());
  EXPECT_EQ(pair.a.send(Message(), many, 100).error().code, EINVAL);
}

TEST(Channel, NoticesDescriptorsLostToTheFileLimit) {
  Pair pair;
  const UniqueFd event(::eventfd(0, EFD_CLOEXEC));
  const int before = test::open_fds();
  const std::vector<int> fds(10, event.get());
  ASSERT_TRUE(pair.a.send(Message(), fds, 1000).ok());
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  const UniqueFd next(::dup(event.get()));  // the lowest free number
  rlimit tight = old;
  tight.rlim_cur = static_cast<rlim_t>(next.get()) + 3;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  auto received = pair.b.receive(1000);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  ASSERT_FALSE(received.ok());
  EXPECT_EQ(received.error().code, EBADMSG);
  EXPECT_EQ(test::open_fds(), before + 1);  // `next`
}

TEST(Channel, StringsAreAlwaysTerminated) {
  Pair pair;
  send_raw(pair.a, sizeof(Message), {});  // all 'x'
  auto received = pair.b.receive(1000);
  ASSERT_TRUE(received.ok());
  EXPECT_EQ(std::strlen(received->message.job), sizeof(Message::job) - 1);
  EXPECT_EQ(std::strlen(received->message.text), sizeof(Message::text) - 1);
}

TEST(Channel, EndOfTheOtherSideIsAnErrorAndNoSignal) {
  Pair pair;
  EXPECT_TRUE(pair.b.alive());
  ASSERT_TRUE(pair.a.send(message_of(MessageType::kBye), 1000).ok());
  pair.a.close();
  EXPECT_TRUE(pair.b.alive()) << "its last message is still to be read";
  ASSERT_TRUE(pair.b.receive(1000).ok());
  EXPECT_FALSE(pair.b.alive());
  EXPECT_EQ(pair.b.receive(1000).error().code, ECONNRESET);
  EXPECT_EQ(pair.b.send(Message(), 1000).error().code, ECONNRESET);
}

TEST(Channel, TimeOutsAreKept) {
  Pair pair;
  Micros before = monotonic_micros();
  EXPECT_EQ(pair.b.receive(0).error().code, ETIMEDOUT);
  EXPECT_LT(monotonic_micros() - before, 2 * kMicrosPerSecond);
  before = monotonic_micros();
  EXPECT_EQ(pair.b.receive(50).error().code, ETIMEDOUT);
  EXPECT_GE(monotonic_micros() - before, 50 * kMicrosPerMilli);
  // Nobody reads: the socket fills up.
  int sent = 0;
  while (sent < 100'000) {
    auto result = pair.a.send(Message(), sent == 0 ? 1000 : 20);
    if (!result.ok()) {
      EXPECT_EQ(result.error().code, ETIMEDOUT);
      break;
    }
    ++sent;
  }
  EXPECT_LT(sent, 100'000);
}

TEST(Listener, ConnectAcceptAndIdentity) {
  const test::TempDir folder;
  const std::string path = folder / "s.sock";
  auto listener = Listener::listen(path, 0660, static_cast<gid_t>(-1));
  ASSERT_TRUE(listener.ok()) << listener.error().message;
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0660U);
  EXPECT_EQ(listener->accept(0).error().code, ETIMEDOUT);

  auto client = Channel::connect(path, 1000);
  ASSERT_TRUE(client.ok()) << client.error().message;
  auto server = listener->accept(1000);
  ASSERT_TRUE(server.ok()) << server.error().message;
  auto identity = server->peer();
  ASSERT_TRUE(identity.ok());
  EXPECT_EQ(identity->pid, ::getpid());
  EXPECT_EQ(identity->uid, ::getuid());
  EXPECT_EQ(identity->gid, ::getgid());
  ASSERT_TRUE(client->send(message_of(MessageType::kHello), 1000).ok());
  EXPECT_TRUE(server->receive(1000).ok());
}

TEST(Listener, PidfdShowsTheDeathOfTheClient) {
  const test::TempDir folder;
  const std::string path = folder / "s.sock";
  auto listener = Listener::listen(path, 0660, static_cast<gid_t>(-1));
  ASSERT_TRUE(listener.ok());
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto channel = Channel::connect(path, 1000);
    if (channel.ok()) ::pause();
    ::_exit(1);
  }
  auto server = listener->accept(5000);
  ASSERT_TRUE(server.ok());
  auto pidfd = server->peer_pidfd();
  ASSERT_TRUE(pidfd.ok()) << pidfd.error().message;
  pollfd entry{pidfd->get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0) << "it lives";
  ::kill(child, SIGKILL);
  EXPECT_EQ(::poll(&entry, 1, 5000), 1);
  EXPECT_EQ(server->receive(5000).error().code, ECONNRESET);
  ::waitpid(child, nullptr, 0);
}

TEST(Listener, ASecondLiveDaemonIsRefusedAndHarmsNothing) {
  const test::TempDir folder;
  const std::string path = folder / "s.sock";
  auto first = Listener::listen(path, 0660, static_cast<gid_t>(-1));
  ASSERT_TRUE(first.ok());
  const int before = test::open_fds();
  auto second = Listener::listen(path, 0660, static_cast<gid_t>(-1));
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code, EADDRINUSE);
  EXPECT_NE(second.error().message.find(path), std::string::npos);
  EXPECT_EQ(test::open_fds(), before);
  EXPECT_TRUE(Channel::connect(path, 1000).ok()) << "the first one's socket is still there";
}

TEST(Listener, ASocketWhoseOwnerDiedIsReplaced) {
  const test::TempDir folder;
  const std::string path = folder / "s.sock";
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto listener = Listener::listen(path, 0660, static_cast<gid_t>(-1));
    ::_exit(listener.ok() ? 0 : 1);  // no destructor: the file stays, as after kill -9
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(WEXITSTATUS(status), 0);
  ASSERT_EQ(::access(path.c_str(), F_OK), 0);
  EXPECT_EQ(Channel::connect(path, 1000).error().code, ECONNREFUSED);
  auto listener = Listener::listen(path, 0660, static_cast<gid_t>(-1));
  ASSERT_TRUE(listener.ok()) << listener.error().message;
  EXPECT_TRUE(Channel::connect(path, 1000).ok());
}

TEST(Listener, LeavesNothingButItsLockFile) {
  const test::TempDir folder;
  const std::string path = folder / "s.sock";
  const int before = test::open_fds();
  {
    auto listener = Listener::listen(path, 0660, static_cast<gid_t>(-1));
    ASSERT_TRUE(listener.ok());
    Listener moved = std::move(*listener);
    EXPECT_TRUE(Channel::connect(path, 1000).ok());
  }
  EXPECT_EQ(::access(path.c_str(), F_OK), -1);
  EXPECT_EQ(test::open_fds(), before);
  EXPECT_TRUE(Listener::listen(path, 0660, static_cast<gid_t>(-1)).ok()) << "the lock is free again";
}

TEST(Listener, ErrorsSayWhatToDo) {
  const test::TempDir folder;
  const std::string file = folder / "file";
  ::close(::open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  auto not_a_socket = Listener::listen(file, 0660, static_cast<gid_t>(-1));
  ASSERT_FALSE(not_a_socket.ok());
  EXPECT_EQ(not_a_socket.error().code, EEXIST);
  EXPECT_EQ(::access(file.c_str(), F_OK), 0) << "it must not be removed";

  auto no_folder = Listener::listen(folder / "none/s.sock", 0660, static_cast<gid_t>(-1));
  ASSERT_FALSE(no_folder.ok());
  EXPECT_EQ(no_folder.error().code, ENOENT);
  EXPECT_NE(no_folder.error().message.find("create the folder"), std::string::npos);

  auto long_path = Listener::listen(folder / std::string(200, 'p'), 0660, static_cast<gid_t>(-1));
  ASSERT_FALSE(long_path.ok());
  EXPECT_EQ(long_path.error().code, ENAMETOOLONG);

  auto nobody = Channel::connect(folder / "nobody.sock", 1000);
  ASSERT_FALSE(nobody.ok());
  EXPECT_EQ(nobody.error().code, ENOENT);
  EXPECT_NE(nobody.error().message.find("is sluiced running"), std::string::npos);
}

TEST(Names, Jobs) {
  EXPECT_TRUE(valid_job_name("train-1.a_b:c"));
  EXPECT_TRUE(valid_job_name(std::string(kMaxJobName, 'j')));
  for (const std::string& bad :
       {std::string(), std::string(kMaxJobName + 1, 'j'), std::string("a b"), std::string("a/b"),
        std::string("a\nb"), std::string("\xC3\xA9"), std::string(1, '\0')}) {
    EXPECT_FALSE(valid_job_name(bad)) << bad;
  }
}

}  // namespace
}  // namespace sluice::ipc
