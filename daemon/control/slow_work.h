// Work that may take long (allocating and clearing shared memory) on a thread of its own, so that the control thread
// goes on noticing dead clients within milliseconds.
//
// submit() and drain() belong to the control thread. A piece of work runs on the slow thread and returns what is to be
// done with its outcome, which drain() then runs on the control thread. Work is done in order. The destructor waits for
// the piece that is running and drops the rest.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace sluice::daemon {

class SlowWork {
 public:
  using Outcome = std::function<void()>;
  using Work = std::function<Outcome()>;

  // `wake_fd` is an eventfd that is written when drain() has something to do.
  explicit SlowWork(int wake_fd);
  ~SlowWork();
  SlowWork(const SlowWork&) = delete;
  SlowWork& operator=(const SlowWork&) = delete;

  void submit(Work work);
  bool drain();  // true: something was done

 private:
  void run();

  const int wake_fd_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Work> waiting_;
  std::deque<Outcome> done_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace sluice::daemon
