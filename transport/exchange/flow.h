// How much may be on the way to one peer: a window of bytes that PING and PONG empty (protocol, section 9).
//
// After every run of packets to a peer the lane sends a PING; its PONG says that the peer's daemon has worked through
// everything that was sent before it. What lies between is in flight. The window thus follows the receiver's processor
// as well as the path, needs no acknowledgement per packet, and survives losses: a later PONG covers an earlier one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/types.h"

namespace sluice::exchange {

// An answer that takes longer says that one side stood still (SIGSTOP for seconds), not how long the path is; repair timers
// are multiples of the round trip, and would wait for a minute. Above the longest path on the ground, 20,000 km each way.
inline constexpr Micros kLongestRtt = 250'000;

class Flow {
 public:
  void configure(uint32_t window_max, uint32_t window_min) {
    window_max_ = std::max(window_max, window_min);
    window_min_ = window_min;
    window_ = window_max_;
  }

  // Room for one more packet of this size? One is always allowed when nothing is in flight.
  bool room(uint32_t bytes) const {
    return in_flight() == 0 || in_flight() + bytes <= std::min(window_, grant_);
  }
  // What the peer can take from us without dropping it, in bytes; until it has said so, little.
  void granted(uint32_t bytes) { grant_ = bytes; }
  void sent(uint32_t bytes, Micros now) {
    if (in_flight() == 0) waiting_since_ = now;
    sent_ += bytes;
    if (retry_at_ < now) retry_at_ = now + retry_delay();
  }
  uint32_t in_flight() const { return static_cast<uint32_t>(sent_ - acknowledged_); }
  uint32_t window() const { return window_; }
  Micros rtt() const { return rtt_; }
  // The largest of the last 64 samples or so: stands for the 99th percentile.
  Micros rtt_high() const { return std::max(rtt_high_, rtt_high_before_); }

  // A probe is due when much was sent since the last one, or when something is in flight and no probe is.
  bool probe_due() const {
    const uint64_t since = sent_ - (count_ == 0 ? acknowledged_ : newest().sent);
    return since != 0 && (count_ == 0 || since >= std::min(window_, grant_) / 4);
  }
  void probed(uint32_t stamp, Micros now) {
    if (count_ == probes_.size()) {  // the oldest is forgotten; a later one covers it
      first_ = (first_ + 1) % probes_.size();
      --count_;
    }
    probes_[(first_ + count_) % probes_.size()] = {stamp, now, sent_};
    ++count_;
    retry_at_ = now + retry_delay();
  }

  // The peer answered the probe with this stamp after holding it for `hold`.
  void answered(uint32_t stamp, Micros hold, Micros now) {
    for (uint32_t i = 0; i < count_; ++i) {
      const Probe& probe = probes_[(first_ + i) % probes_.size()];
      if (probe.stamp != stamp) continue;
      const Micros sample = std::clamp<Micros>(now - probe.when - std::max<Micros>(0, hold), 1, kLongestRtt);
      rtt_ = rtt_ == 0 ? sample : (7 * rtt_ + sample) / 8;
      rtt_high_ = std::max(rtt_high_, sample);
      if (++samples_ % 32 == 0) {
        rtt_high_before_ = rtt_high_;
        rtt_high_ = 0;
      }
      const uint64_t freed = probe.sent - std::min(probe.sent, acknowledged_);
      acknowledged_ = std::max(acknowledged_, probe.sent);
      window_ = static_cast<uint32_t>(std::min<uint64_t>(window_max_, window_ + freed / 8));
      first_ = (first_ + i + 1) % probes_.size();
      count_ -= i + 1;
      waiting_since_ = now;
      retries_ = 0;
      retry_at_ = now + retry_delay();
      return;
    }
  }

  // Blocks that were sent did not arrive. At most once per round trip.
  void lost(Micros now) {
    if (now < shrunk_ + std::max<Micros>(rtt_, 1000)) return;
    shrunk_ = now;
    window_ = std::max(window_min_, window_ - window_ * 3 / 10);
  }

  // While something is in flight, a PING without an answer is repeated: it may be lost, and a full window would wait
  // for it. Nothing back for long: the window shrinks, and in the end what is in flight is taken for lost.
  Micros timeout() const { return std::max<Micros>(4 * rtt_, 20'000); }
  Micros deadline() const {
    return in_flight() == 0 ? kNever : std::min(retry_at_, waiting_since_ + timeout());
  }
  void expired(Micros now) {
    if (now < waiting_since_ + timeout()) {
      retries_ = std::min<uint32_t>(retries_ + 1, 8);
    } else {
      if (++expirations_ % 4 == 0) acknowledged_ = sent_;
      count_ = 0;
      waiting_since_ = now;
      window_ = std::max(window_min_, window_ / 2);
    }
    retry_at_ = now + retry_delay();
  }

 private:
  struct Probe {
    uint32_t stamp = 0;
    Micros when = 0;
    uint64_t sent = 0;
  };
  Micros retry_delay() const { return std::min(std::max<Micros>(2 * rtt_, 1000) << retries_, timeout()); }
  const Probe& newest() const { return probes_[(first_ + count_ - 1) % probes_.size()]; }

  uint64_t sent_ = 0, acknowledged_ = 0;
  uint32_t window_ = 0, window_max_ = 0, window_min_ = 0;
  uint32_t grant_ = 32 * 1024;
  Micros rtt_high_ = 0, rtt_high_before_ = 0;
  uint32_t samples_ = 0;
  Micros rtt_ = 0, shrunk_ = 0;
  Micros waiting_since_ = 0;  // for an answer, or since the last one
  Micros retry_at_ = 0;       // the PING goes out again
  uint32_t expirations_ = 0, retries_ = 0;
  std::array<Probe, 32> probes_{};
  uint32_t first_ = 0, count_ = 0;
};

}  // namespace sluice::exchange
