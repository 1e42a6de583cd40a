// A daemon in one thread of the test process: speaks base/ipc as sluiced does, and sums over the ranks that joined it.
// Every rank of a job is on its one node, so there is no network: what is left is exactly the client's side of things.
//
// It obeys the contract of layout.h, doorbell.h and channel.h to the letter (copies descriptors once and checks the
// copy, seals what clients may not write, sleeps only by the protocol), so that it also serves as a reference.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/ipc/layout.h"

namespace sluice::test {

struct FakeOptions {
  uint32_t lanes = 2;
  uint32_t payload = 1408;
  uint32_t abi_version = ipc::kAbiVersion;
  std::string refuse_join;    // REFUSE to every JOIN, with this text
  bool silent = false;        // never answers
  bool split_events = false;  // RESULT at once, RESOLVED only when release_resolved() has been called
  uint64_t incomplete_op = UINT64_MAX;  // this op_seq ends INCOMPLETE: lane 0's first block is missing
};

class FakeDaemon {
 public:
  FakeDaemon(std::string path, const FakeOptions& options);
  ~FakeDaemon();  // as die(), and joins the thread
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;

  // From now on descriptors are read but nothing is answered, until let_go().
  void hold() { held_ = true; }
  void let_go() { held_ = false; }
  void release_resolved() { resolve_ = true; }
  // Closes every socket at once, as the kernel does for a killed process, and serves nobody any more.
  void die();
  // Lets every client go: `gone` in the control page, then the end of the socket.
  void evict() { evict_ = true; }
  // Says goodbye (BYE with text) and closes.
  void shut_down() { shut_down_ = true; }
  // Ruins the next thing it tells a client: 1 = an impossible ring index, 2 = a completion of an op never submitted,
  // 3 = unknown events.
  void misbehave(int how) { misbehave_ = how; }

  int descriptors_read() const { return descriptors_read_; }
  int clients() const { return clients_; }
  int bad_descriptors() const { return bad_descriptors_; }
  int leaves() const { return leaves_; }

 private:
  class Server;
  void run(std::string path, FakeOptions options);

  std::atomic<bool> held_{false};
  std::atomic<bool> resolve_{false};
  std::atomic<bool> die_{false};
  std::atomic<bool> evict_{false};
  std::atomic<bool> shut_down_{false};
  std::atomic<int> misbehave_{0};
  std::atomic<int> descriptors_read_{0};
  std::atomic<int> clients_{0};
  std::atomic<int> bad_descriptors_{0};
  std::atomic<int> leaves_{0};
  std::atomic<bool> listening_{false};
  std::thread thread_;
};

}  // namespace sluice::test
