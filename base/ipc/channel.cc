#include "base/ipc/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace sluice::ipc {
namespace {

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; not in the headers of Debian 12
#endif

Error system_error(const std::string& what, int code) {
  return Error{code, what + ": " + std::strerror(code)};
}

Error gone() { return Error{ECONNRESET, "the other side closed the control socket"}; }

// Time left until a deadline, for poll(2): rounded up, so that a wait does not end before its time.
class Deadline {
 public:
  explicit Deadline(int timeout_ms)
      : end_(monotonic_micros() + std::max(timeout_ms, 0) * kMicrosPerMilli), look_only_(timeout_ms <= 0) {}
  int left_ms() const {
    if (look_only_) return 0;
    const Micros left = end_ - monotonic_micros();
    return left <= 0 ? 0 : static_cast<int>((left + kMicrosPerMilli - 1) / kMicrosPerMilli);
  }
  bool passed() const { return left_ms() == 0; }

 private:
  Micros end_;
  bool look_only_;
};

// Waits for `events` or an error condition on `fd`. False at the deadline.
bool wait_for(int fd, short events, const Deadline& deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.left_ms());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the call that follows reports what is wrong
    if (deadline.passed()) return false;
  }
}

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return Error{ENAMETOOLONG, "the socket path '" + path + "' must have 1 to " +
                                   std::to_string(sizeof(address.sun_path) - 1) + " bytes; it has " +
                                   std::to_string(path.size())};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Error connect_error(const std::string& path, int code) {
  std::string next;
  if (code == ENOENT || code == ECONNREFUSED) {
    next = "; is sluiced running (systemctl status sluiced), and is this its `socket:`?";
  } else if (code == EACCES || code == EPERM) {
    next = "; your user must be in the group that owns the socket (ls -l " + path + ")";
  } else if (code == EPROTOTYPE) {
    next = "; another program's socket lies there";
  }
  return Error{code, "cannot connect to sluiced at " + path + ": " + std::strerror(code) + next};
}

void close_fds(const cmsghdr* header, size_t bytes) {
  for (size_t offset = 0; offset + sizeof(int) <= bytes; offset += sizeof(int)) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header) + offset, sizeof(fd));
    ::close(fd);
  }
}

// Takes every descriptor out of the control data, so that each is owned before anything else is judged.
// False when there are more than a message may carry.
bool take_fds(msghdr* header, Received* received) {
  bool fits = true;
  for (cmsghdr* part = CMSG_FIRSTHDR(header); part != nullptr; part = CMSG_NXTHDR(header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t bytes = part->cmsg_len - CMSG_LEN(0);
    const size_t count = bytes / sizeof(int);
    if (received->fd_count + count > kMaxFds) {
      close_fds(part, bytes);
      fits = false;
      continue;
    }
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(fd));
      received->fds[received->fd_count++].reset(fd);
    }
  }
  return fits;
}

void set_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags >= 0) ::fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

}  // namespace

Channel::Channel(UniqueFd socket) : socket_(std::move(socket)) { set_nonblocking(socket_.get()); }

Result<Channel> Channel::connect(const std::string& path, int timeout_ms) {
  auto address = address_of(path);
  if (!address.ok()) return address.error();
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return system_error("cannot create a UNIX socket", errno);
  const Deadline deadline(timeout_ms);
  for (;;) {
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(sockaddr_un)) == 0) {
      return Channel(std::move(socket));
    }
    if (errno == EINTR) continue;
    // A UNIX socket whose backlog is full says EAGAIN and offers nothing to poll for.
    if (errno != EAGAIN) return connect_error(path, errno);
    if (deadline.passed()) {
      return Error{ETIMEDOUT, "sluiced at " + path + " did not accept the connection within " +
                                  std::to_string(timeout_ms) + " ms; it is overloaded or stopped"};
    }
    ::usleep(1000);
  }
}

Result<void> Channel::send(const Message& message, std::span<const int> fds, int timeout_ms) {
  if (fds.size() > kMaxFds) return Error{EINVAL, "more than 20 descriptors for one control message"};
  iovec data{const_cast<Message*>(&message), sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(part), fds.data(), fds.size_bytes());
  }
  const Deadline deadline(timeout_ms);
  for (;;) {
    const ssize_t sent = ::sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == static_cast<ssize_t>(sizeof(message))) return {};
    if (sent >= 0) return Error{EBADMSG, "a control message was cut short when it was sent"};
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) return gone();
    if (errno != EAGAIN) return system_error("cannot send on the control socket", errno);
    if (!wait_for(socket_.get(), POLLOUT, deadline)) {
      return Error{ETIMEDOUT, "the other side did not take a control message within " +
                                  std::to_string(timeout_ms) + " ms"};
    }
  }
}

Result<Received> Channel::receive(int timeout_ms) {
  const Deadline deadline(timeout_ms);
  for (;;) {
    Received received;
    // One byte more than a message, so that a longer one shows.
    std::array<char, sizeof(Message) + 1> bytes{};
    iovec data{bytes.data(), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t length = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (length < 0) {
      if (errno == EINTR) continue;
      if (errno == ECONNRESET || errno == EPIPE || errno == ENOTCONN) return gone();
      if (errno != EAGAIN) return system_error("cannot receive on the control socket", errno);
      if (!wait_for(socket_.get(), POLLIN, deadline)) {
        return Error{ETIMEDOUT, "no control message within " + std::to_string(timeout_ms) + " ms"};
      }
      continue;
    }
    const bool fits = take_fds(&header, &received);
    // A zero-length packet cannot be told from the end of the stream, and nobody of ours sends one.
    if (length == 0) return gone();
    if (length != static_cast<ssize_t>(sizeof(Message)) || (header.msg_flags & MSG_TRUNC) != 0) {
      return Error{EBADMSG, "a control message of " +
                                (length > static_cast<ssize_t>(sizeof(Message)) ? std::string("more than 256")
                                                                                : std::to_string(length)) +
                                " bytes came; it must have 256. Library and daemon are not of one version"};
    }
    if (!fits || (header.msg_flags & MSG_CTRUNC) != 0) {
      return Error{
          EBADMSG,
          "descriptors of a control message were lost: more than 20 were sent, or this process has reached "
          "its limit of open files (ulimit -n)"};
    }
    std::memcpy(static_cast<void*>(&received.message), bytes.data(), sizeof(Message));
    received.message.job[sizeof(received.message.job) - 1] = '\0';
    received.message.text[sizeof(received.message.text) - 1] = '\0';  // beyond `key`, which shares the bytes
    return received;
  }
}

bool Channel::alive() const {
  if (!socket_.valid()) return false;
  char byte = 0;
  const ssize_t length = ::recv(socket_.get(), &byte, sizeof(byte), MSG_PEEK | MSG_DONTWAIT);
  return length > 0 || (length < 0 && (errno == EAGAIN || errno == EINTR));
}

Result<PeerIdentity> Channel::peer() const {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return system_error("cannot read who is at the other end of the control socket", errno);
  }
  return PeerIdentity{credentials.pid, credentials.uid, credentials.gid};
}

Result<UniqueFd> Channel::peer_pidfd() const {
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0) return UniqueFd(fd);
  // Before Linux 6.5: by number. The process could have died and its number be taken anew in between; then
  // the socket shows the end of the first one, which is looked at as well.
  auto identity = peer();
  if (!identity.ok()) return identity.error();
  fd = static_cast<int>(::syscall(SYS_pidfd_open, identity->pid, 0));
  if (fd < 0) {
    return system_error("cannot watch process " + std::to_string(identity->pid) + " (pidfd_open)", errno);
  }
  return UniqueFd(fd);
}

Listener::~Listener() {
  if (!socket_.valid()) return;
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_) {
    ::unlink(path_.c_str());
  }
}

Result<Listener> Listener::listen(const std::string& path, mode_t mode, gid_t group) {
  auto address = address_of(path);
  if (!address.ok()) return address.error();
  Listener listener;
  listener.path_ = path;

  const std::string lock_path = path + ".lock";
  listener.lock_.reset(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!listener.lock_) {
    const int code = errno;
    return Error{code, "cannot open the lock file " + lock_path + ": " + std::strerror(code) +
                           (code == ENOENT ? "; create the folder first" : "")};
  }
  if (::flock(listener.lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return system_error("cannot lock " + lock_path, errno);
    return Error{EADDRINUSE, "another sluiced serves " + path + " (it holds " + lock_path +
                                 "); stop it, or give this one another `socket:`"};
  }

  // With the lock in hand a socket that lies there has no owner any more.
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) {
    if (!S_ISSOCK(status.st_mode)) {
      return Error{EEXIST, path + " exists and is not a socket; remove it, or set another `socket:`"};
    }
    if (::unlink(path.c_str()) != 0) return system_error("cannot remove the stale socket " + path, errno);
  }

  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return system_error("cannot create a UNIX socket", errno);
  // Linux gives the file the socket's own mode at bind(): nobody else gets in before group and mode are set
  // below.
  if (::fchmod(socket.get(), 0600) != 0) return system_error("cannot set the mode of a UNIX socket", errno);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(sockaddr_un)) != 0) {
    return system_error("cannot bind the socket " + path, errno);
  }
  if (::lstat(path.c_str(), &status) != 0) return system_error("cannot stat the socket " + path, errno);
  listener.device_ = status.st_dev;
  listener.inode_ = status.st_ino;
  listener.socket_ = std::move(socket);  // from here on the destructor removes the file
  if (group != static_cast<gid_t>(-1) && ::chown(path.c_str(), static_cast<uid_t>(-1), group) != 0) {
    return system_error("cannot give the socket " + path + " to group " + std::to_string(group), errno);
  }
  if (::chmod(path.c_str(), mode) != 0)
    return system_error("cannot set the mode of the socket " + path, errno);
  if (::listen(listener.socket_.get(), SOMAXCONN) != 0) {
    return system_error("cannot listen on the socket " + path, errno);
  }
  return listener;
}

Result<Channel> Listener::accept(int timeout_ms) {
  const Deadline deadline(timeout_ms);
  for (;;) {
    const int fd = ::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) return Channel(UniqueFd(fd));
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN) return system_error("cannot accept a client on " + path_, errno);
    if (!wait_for(socket_.get(), POLLIN, deadline)) {
      return Error{ETIMEDOUT, "no client connected within " + std::to_string(timeout_ms) + " ms"};
    }
  }
}

bool valid_job_name(std::string_view name) {
  return !name.empty() && name.size() <= kMaxJobName &&
         std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 0x7F && c != '/'; });
}

}  // namespace sluice::ipc
