// The counters of a queue (QueueCounters, port.h): written by the owner thread, read by any.
#pragma once

#include <atomic>

#include "transport/port/port.h"

namespace sluice::port {

// One writer, so a relaxed load and store suffice; no locked instruction on a lane.
class LiveCounters {
 public:
  using Counter = std::atomic<uint64_t>;

  static void add(Counter& counter, uint64_t n) {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }

  QueueCounters snapshot() const {
    QueueCounters out;
    out.tx_datagrams = tx_datagrams.load(std::memory_order_relaxed);
    out.tx_bytes = tx_bytes.load(std::memory_order_relaxed);
    out.tx_calls = tx_calls.load(std::memory_order_relaxed);
    out.tx_again = tx_again.load(std::memory_order_relaxed);
    out.tx_errors = tx_errors.load(std::memory_order_relaxed);
    out.rx_datagrams = rx_datagrams.load(std::memory_order_relaxed);
    out.rx_bytes = rx_bytes.load(std::memory_order_relaxed);
    out.rx_calls = rx_calls.load(std::memory_order_relaxed);
    out.rx_overflow = rx_overflow.load(std::memory_order_relaxed);
    out.rx_truncated = rx_truncated.load(std::memory_order_relaxed);
    return out;
  }

  Counter tx_datagrams{0}, tx_bytes{0}, tx_calls{0}, tx_again{0}, tx_errors{0};
  Counter rx_datagrams{0}, rx_bytes{0}, rx_calls{0}, rx_overflow{0}, rx_truncated{0};
};

}  // namespace sluice::port
