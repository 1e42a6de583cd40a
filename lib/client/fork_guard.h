// A child process inherits its parent's handles, sockets and mappings, but it is not the client that joined: what it
// sent would be taken for its parent's words, and locks may be held for ever by threads that it does not have. Each
// handle remembers the process that made it; in any other, calls return SLUICE_ERROR_FORKED before they touch
// anything. One getpid() per call; no pthread_atfork handler, which could not be removed when the library is unloaded.
#pragma once

#include <unistd.h>

namespace sluice::client {

class ForkGuard {
 public:
  bool forked() const { return ::getpid() != owner_; }

 private:
  pid_t owner_ = ::getpid();
};

}  // namespace sluice::client
