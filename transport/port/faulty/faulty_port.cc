#include "transport/port/faulty/faulty_port.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "transport/port/faulty/faulty_queue.h"

namespace sluice::port {
namespace {

constexpr uint32_t kSlotAlignment = 64;  // a cache line

class Decorator final : public FaultyPort {
 public:
  Decorator(std::unique_ptr<Port> inner, FaultyOptions options) : inner_(std::move(inner)) {
    const Capabilities& capabilities = inner_->capabilities();
    setup_.send = options.plan.faults_send();
    setup_.receive = options.plan.faults_receive();
    setup_.copies_on_send = capabilities.copies_on_send;
    setup_.max_datagram = capabilities.max_datagram;
    const uint32_t longest = std::max<uint32_t>(1, std::min(options.longest_held, capabilities.max_datagram));
    setup_.slot_bytes = (longest + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
    setup_.options = std::move(options);
    counters_ = std::vector<Counters>(capabilities.queues);
  }

  const Capabilities& capabilities() const override {
    capabilities_ = inner_->capabilities();  // its note may have grown
    capabilities_.kind = "faulty(" + capabilities_.kind + ")";
    if (setup_.options.plan.any()) {
      capabilities_.note = "faults are injected on purpose: " + describe(setup_.options.plan) +
                           (capabilities_.note.empty() ? "" : "; " + capabilities_.note);
    }
    return capabilities_;
  }

  Result<std::unique_ptr<Queue>> open_queue(uint32_t index) override {
    auto queue = inner_->open_queue(index);
    if (!queue.ok()) return queue;
    return FaultyQueue::open(setup_, std::move(*queue), index, &counters_[index].send,
                             &counters_[index].receive);
  }

  uint32_t max_datagram_to(const Endpoint& endpoint) override { return inner_->max_datagram_to(endpoint); }

  FaultCounters fault_counters() const override {
    FaultCounters sum;
    for (const Counters& counters : counters_) {
      for (size_t i = 0; i < kFaults; ++i) {
        sum.send[i] += counters.send.fired[i].load(std::memory_order_relaxed);
        sum.receive[i] += counters.receive.fired[i].load(std::memory_order_relaxed);
      }
    }
    return sum;
  }

 private:
  struct Counters {
    LiveFaults send;
    LiveFaults receive;
  };
  std::unique_ptr<Port> inner_;
  FaultySetup setup_;
  std::vector<Counters> counters_;  // by queue
  mutable Capabilities capabilities_;
};

}  // namespace

const char* fault_name(Fault fault) {
  switch (fault) {
    case Fault::kLost:
      return "lost";
    case Fault::kLostInBurst:
      return "lost_in_burst";
    case Fault::kCut:
      return "cut";
    case Fault::kDuplicated:
      return "duplicated";
    case Fault::kReplayed:
      return "replayed";
    case Fault::kDelayed:
      return "delayed";
    case Fault::kReordered:
      return "reordered";
    case Fault::kCorrupted:
      return "corrupted";
    case Fault::kTruncated:
      return "truncated";
    case Fault::kRefused:
      return "refused";
    case Fault::kUnheld:
      return "unheld";
    case Fault::kCount:
      break;
  }
  return "";
}

std::unique_ptr<FaultyPort> make_faulty_port(std::unique_ptr<Port> inner, FaultyOptions options) {
  return std::make_unique<Decorator>(std::move(inner), std::move(options));
}

}  // namespace sluice::port
