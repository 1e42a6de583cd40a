#include "transport/exchange/policy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "transport/exchange/lane.h"

namespace sluice::exchange {

uint32_t size_class(uint64_t bytes) {
  uint32_t c = 0;
  while (c + 1 < kSizeClasses && bytes > (4096ULL << c)) ++c;
  return c;
}

uint8_t encode_time(Micros time) {
  if (time <= 0) return 0;
  return static_cast<uint8_t>(
      std::clamp(std::ceil(8 * std::log2(static_cast<double>(time)) - 1e-9), 1.0, 255.0));
}
Micros decode_time(uint8_t code) { return code == 0 ? 0 : static_cast<Micros>(std::exp2(code / 8.0)); }

void encode_policy(const Policy& policy, std::byte* record) {
  std::memset(record, 0, kPolicyRecordBytes);
  const auto flags = static_cast<uint16_t>((policy.hadamard ? 1 : 0) | (policy.halt ? 2 : 0));
  std::memcpy(record, &policy.number, 4);
  std::memcpy(record + 4, &policy.from, 4);
  std::memcpy(record + 8, &flags, 2);
  record[10] = static_cast<std::byte>(policy.incast);
  record[11] = static_cast<std::byte>(policy.exit_share);
  for (uint32_t c = 0; c < kSizeClasses; ++c) {
    record[12 + 3 * c] = static_cast<std::byte>(encode_time(policy.of_class[c].push));
    record[13 + 3 * c] = static_cast<std::byte>(encode_time(policy.of_class[c].pull));
    record[14 + 3 * c] = static_cast<std::byte>(encode_time(policy.of_class[c].complete));
  }
}

bool decode_policy(std::span<const std::byte> record, Policy* out) {
  if (record.size() != kPolicyRecordBytes) return false;
  uint16_t flags = 0;
  std::memcpy(&out->number, record.data(), 4);
  std::memcpy(&out->from, record.data() + 4, 4);
  std::memcpy(&flags, record.data() + 8, 2);
  out->hadamard = (flags & 1) != 0;
  out->halt = (flags & 2) != 0;
  out->incast = static_cast<uint8_t>(record[10]);
  out->exit_share = static_cast<uint8_t>(record[11]);
  if (out->number == 0 || out->incast == 0 || out->exit_share == 0) return false;
  for (uint32_t c = 0; c < kSizeClasses; ++c) {
    out->of_class[c] = {decode_time(static_cast<uint8_t>(record[12 + 3 * c])),
                        decode_time(static_cast<uint8_t>(record[13 + 3 * c])),
                        decode_time(static_cast<uint8_t>(record[14 + 3 * c]))};
  }
  return true;
}

void encode_pulse(const PulseNode& node, std::span<int64_t, kPulseWords> words) {
  size_t i = 0;
  for (const PulseNode::Class& c : node.of_class) {
    words[i++] = c.samples;
    words[i++] = c.p95;
    words[i++] = c.complete;
  }
  for (const int64_t value :
       {node.blocks, node.lost, node.highest, node.number, node.from, node.calm, node.link})
    words[i++] = value;
}

PulseNode decode_pulse(std::span<const int64_t, kPulseWords> words) {
  PulseNode node;
  size_t i = 0;
  for (PulseNode::Class& c : node.of_class) {
    c.samples = words[i++];
    c.p95 = words[i++];
    c.complete = words[i++];
  }
  for (int64_t* value :
       {&node.blocks, &node.lost, &node.highest, &node.number, &node.from, &node.calm, &node.link})
    *value = words[i++];
  return node;
}

namespace {
int64_t median(std::vector<int64_t>* values) {
  const size_t middle = values->size() / 2;
  std::nth_element(values->begin(), values->begin() + static_cast<ptrdiff_t>(middle), values->end());
  return (*values)[middle];
}
// The codes of a record stand for these times; what is kept must survive being told to another node.
Micros coded(Micros time) { return decode_time(encode_time(time)); }
}  // namespace

Policy next_policy(uint32_t number, const Policy& last, std::span<const PulseNode> nodes,
                   const PolicyLimits& limits) {
  Policy policy = last;
  policy.number = number;
  int64_t blocks = 0, lost = 0, calm = 0;
  int64_t link = 0;  // the slowest that is known
  uint64_t from = last.from + kWindow;
  for (const PulseNode& node : nodes) {
    blocks += node.blocks;
    lost += node.lost;
    calm = std::max(calm, node.calm);
    if (node.link > 0) link = link == 0 ? node.link : std::min(link, node.link);
    from = std::max<uint64_t>(from, static_cast<uint64_t>(node.highest) + 2 * kWindow);
    from = std::max<uint64_t>(from, static_cast<uint64_t>(node.from) + kWindow);
  }
  policy.from = static_cast<uint32_t>(from);
  for (uint32_t c = 0; c < kSizeClasses; ++c) {
    std::vector<int64_t> p95, complete;
    for (const PulseNode& node : nodes) {
      if (node.of_class[c].samples < limits.warmup_ops) continue;
      p95.push_back(node.of_class[c].p95);
      complete.push_back(node.of_class[c].complete);
    }
    if (2 * p95.size() < nodes.size() || p95.empty()) continue;  // still warming up, or as before
    const double bytes = 4096.0 * std::exp2(c);
    const double n = limits.nodes;
    const double ideal = link == 0 ? 0 : bytes * 8 * (n - 1) / n / static_cast<double>(link) * 1e6;
    const double floor = std::max(4 * ideal, static_cast<double>(limits.hard_deadline_min));
    const double hard = std::min(std::max(limits.h_factor * static_cast<double>(median(&p95)), floor),
                                 static_cast<double>(limits.hard_deadline_max));
    Micros half = coded(static_cast<Micros>(hard / 2));
    // (Codes round up, and H must not pass its limit.)
    if (2 * half > limits.hard_deadline_max) half = decode_time(encode_time(half) - 1);
    policy.of_class[c].push = policy.of_class[c].pull = half;
    policy.of_class[c].complete = coded(median(&complete));
  }
  // x, I and the Hadamard transform follow the loss since the last pulse.
  const double loss = blocks > 0 ? static_cast<double>(lost) / static_cast<double>(blocks) : 0;
  if (loss > 0.001) {
    policy.exit_share = static_cast<uint8_t>(std::min(50, 2 * policy.exit_share));
    policy.incast = static_cast<uint8_t>(std::max(1, policy.incast / 2));
  } else {
    if (loss < 0.0001) policy.exit_share = static_cast<uint8_t>(std::max(1, policy.exit_share - 1));
    if (calm > 0 && calm % 8 == 0) {
      policy.incast =
          static_cast<uint8_t>(std::min<uint32_t>(policy.incast + 1U, std::clamp(limits.nodes - 1, 1U, 15U)));
    }
  }
  if (loss > 0.02) policy.hadamard = true;
  if (loss < 0.01) policy.hadamard = false;
  return policy;
}

void Estimator::add(Micros sample) {
  ring_[next_] = sample;
  next_ = (next_ + 1) % kEstimationOps;
  count_ = std::min(count_ + 1, kEstimationOps);
  std::array<Micros, kEstimationOps> sorted = ring_;
  const uint32_t rank = (count_ * 95 + 99) / 100 - 1;  // the 61st of 64
  std::nth_element(sorted.begin(), sorted.begin() + rank, sorted.begin() + count_);
  const auto p95 = static_cast<double>(sorted[rank]);
  const auto value = static_cast<double>(sample);
  p95_ = count_ == 1 ? p95 : kEwmaPast * p95_ + (1 - kEwmaPast) * p95;
  complete_ = count_ == 1 ? value : kEwmaPast * complete_ + (1 - kEwmaPast) * value;
}

}  // namespace sluice::exchange
