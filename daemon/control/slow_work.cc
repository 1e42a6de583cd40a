#include "daemon/control/slow_work.h"

#include <unistd.h>

#include <cstdint>

namespace sluice::daemon {

SlowWork::SlowWork(int wake_fd) : wake_fd_(wake_fd), thread_([this] { run(); }) {}

SlowWork::~SlowWork() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void SlowWork::submit(Work work) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(work));
  }
  wake_.notify_all();
}

bool SlowWork::drain() {
  std::deque<Outcome> done;
  {
    const std::lock_guard lock(mutex_);
    done.swap(done_);
  }
  for (const Outcome& outcome : done) outcome();
  return !done.empty();
}

void SlowWork::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
    if (stop_) return;
    const Work work = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    Outcome outcome = work();
    lock.lock();
    done_.push_back(std::move(outcome));
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof one);
  }
}

}  // namespace sluice::daemon
