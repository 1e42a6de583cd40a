#include "transport/port/link_faults.h"

#include <fmt/core.h>

#include <algorithm>

namespace sluice::port {

Loss draw_loss(const LinkFaults& faults, bool* bad, Prng* random) {
  if (faults.burst_enter > 0) {
    if (random->chance(*bad ? faults.burst_leave : faults.burst_enter)) *bad = !*bad;
    if (*bad && random->chance(faults.burst_loss)) return Loss::kLostInBurst;
  }
  return random->chance(faults.loss) ? Loss::kLost : Loss::kNone;
}

Micros draw_delay(const LinkFaults& faults, bool* reordered, Prng* random) {
  Micros delay = faults.latency;
  if (faults.jitter > 0) delay += random->between(0, faults.jitter);
  if (random->chance(faults.tail_probability)) delay += random->log_between(faults.tail_min, faults.tail_max);
  *reordered = random->chance(faults.reorder);
  if (*reordered) delay += random->between(1, std::max<Micros>(1, faults.reorder_delay));
  return delay;
}

size_t draw_length(const LinkFaults& faults, size_t length, Prng* random) {
  return length > 0 && random->chance(faults.truncate) ? random->below(length) : length;
}

bool draw_corruption(const LinkFaults& faults, size_t length, Prng* random) {
  return length > 0 && random->chance(faults.corrupt);
}

void flip_bits(std::span<std::byte> bytes, Prng* random) {
  for (uint64_t flips = 1 + random->below(3); flips > 0; --flips) {
    const uint64_t bit = random->below(bytes.size() * 8);
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
  }
}

std::string describe(const LinkFaults& faults) {
  std::string text;
  const auto add = [&](double value, const std::string& what) {
    if (value > 0) text += (text.empty() ? "" : ", ") + what;
  };
  add(static_cast<double>(faults.latency), fmt::format("latency {}", faults.latency));
  add(static_cast<double>(faults.jitter), fmt::format("jitter {}", faults.jitter));
  add(faults.tail_probability,
      fmt::format("tail {:.4f} of {}-{}", faults.tail_probability, faults.tail_min, faults.tail_max));
  add(faults.loss, fmt::format("loss {:.4f}", faults.loss));
  add(faults.burst_enter, fmt::format("bursts {:.4f}/{:.4f} of {:.2f}", faults.burst_enter,
                                      faults.burst_leave, faults.burst_loss));
  add(faults.duplicate, fmt::format("duplicate {:.4f}", faults.duplicate));
  add(faults.reorder, fmt::format("reorder {:.4f} by {}", faults.reorder, faults.reorder_delay));
  add(faults.replay, fmt::format("replay {:.4f}", faults.replay));
  add(faults.corrupt, fmt::format("corrupt {:.4f}", faults.corrupt));
  add(faults.truncate, fmt::format("truncate {:.4f}", faults.truncate));
  return text;
}

}  // namespace sluice::port
