// The control socket between a client and its daemon: fixed 256-byte messages (layout.h) with file
// descriptors beside them, over a UNIX SOCK_SEQPACKET socket, which keeps each message together with its
// descriptors.
//
// Errors carry an errno value as code:
//   ETIMEDOUT   the time-out passed (receive and accept with a time-out of 0: nothing there now)
//   ECONNRESET  the other side is gone (end of file, reset, broken pipe)
//   EBADMSG     not one whole 256-byte message, or its descriptors were cut off: a broken peer; close the
//   channel other       from the system call that the text names
// No call raises SIGPIPE. Every descriptor that arrives is close-on-exec and owned; it is closed when
// anything about its message is refused. Time-outs are milliseconds; none is infinite.
//
// Threads: one Channel may send in one thread and receive in another; two threads must not do the same at
// once.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/ipc/layout.h"
#include "base/result.h"
#include "base/unique_fd.h"

namespace sluice::ipc {

// Control, submit and arena regions and one eventfd per lane, with one to spare.
inline constexpr size_t kMaxFds = 20;
static_assert(kMaxFds >= 3 + kMaxLanes);

// A message as it came. `job` and `text` are always terminated; nothing else in it has been looked at.
struct Received {
  Message message;
  std::array<UniqueFd, kMaxFds> fds;
  size_t fd_count = 0;
};

// Who is at the other end, as the kernel noted it at connect().
struct PeerIdentity {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};

class Channel {
 public:
  Channel() = default;
  // Takes a connected SOCK_SEQPACKET socket and makes it nonblocking.
  explicit Channel(UniqueFd socket);

  // Connects to the daemon that listens at `path`. ENOENT or ECONNREFUSED: none is there; EACCES: no
  // permission; the text says what to do.
  static Result<Channel> connect(const std::string& path, int timeout_ms);

  // Sends one message with at most kMaxFds descriptors, which stay the caller's.
  Result<void> send(const Message& message, std::span<const int> fds, int timeout_ms);
  Result<void> send(const Message& message, int timeout_ms) { return send(message, {}, timeout_ms); }

  // Receives one message. After an error other than ETIMEDOUT the channel is of no further use.
  Result<Received> receive(int timeout_ms);

  // False once the other side has closed its end and everything it sent has been received. No system call
  // that waits.
  bool alive() const;

  Result<PeerIdentity> peer() const;
  // A pidfd of the process that connected: readable when it has died. ENOSYS on kernels before 5.3.
  Result<UniqueFd> peer_pidfd() const;

  int fd() const { return socket_.get(); }  // for epoll
  bool valid() const { return socket_.valid(); }
  void close() { socket_.reset(); }

 private:
  UniqueFd socket_;
};

// The listening end. A lock file "<path>.lock" is held (flock) for as long as the listener lives: while one
// daemon serves a path, a second one is refused and does not touch the first one's socket; a socket file
// whose owner has died is replaced. The lock file itself stays, so that two daemons can never lock two
// different files of that name.
class Listener {
 public:
  Listener() = default;
  Listener(Listener&&) noexcept = default;
  Listener& operator=(Listener&&) = delete;  // would have to close; nobody needs it
  ~Listener();

  // Listens at `path` (at most 107 bytes; its folder must exist) with the permission bits `mode`. `group` is
  // the id of the group that owns the socket; (gid_t)-1 leaves it. EADDRINUSE: another live daemon holds the
  // lock.
  static Result<Listener> listen(const std::string& path, mode_t mode, gid_t group);

  // The next connection; timeout_ms 0: only one that waits already.
  Result<Channel> accept(int timeout_ms);

  int fd() const { return socket_.get(); }  // for epoll
  const std::string& path() const { return path_; }

 private:
  UniqueFd lock_;
  UniqueFd socket_;
  std::string path_;
  dev_t device_ = 0;  // of the socket file, so that only our own is unlinked
  ino_t inode_ = 0;
};

// Copies `text` into a message field, cut to fit and terminated.
template <size_t kSize>
void set_text(char (&field)[kSize], std::string_view text) {
  const size_t length = text.size() < kSize ? text.size() : kSize - 1;
  for (size_t i = 0; i < kSize; ++i) field[i] = i < length ? text[i] : '\0';
}

// 1-63 printable ASCII characters without space or slash.
bool valid_job_name(std::string_view name);

}  // namespace sluice::ipc
