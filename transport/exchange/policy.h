// Deadlines that adapt (protocol, sections 4 and 10): what a node measures, and what all nodes make of it together.
//
// Each node keeps the completion times of its last 64 ops per size class. Every 50 ops the daemons exchange these in a
// pulse; next_policy() is a pure function of what they exchanged, so that every node that completed the pulse holds the
// same record, and those that did not can be told it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.h"

namespace sluice::exchange {

inline constexpr uint32_t kSizeClasses = 16;  // ops up to 4 KiB x 2^c; the last one is open
inline constexpr uint32_t kPulseEvery = 50;   // ops (protocol, section 10)
inline constexpr uint32_t kEstimationOps = 64;
inline constexpr double kEwmaPast = 0.95;  // OptiReduce's alpha
inline constexpr uint32_t kPolicyRecordBytes = 64;

uint32_t size_class(uint64_t bytes);

// Bounds of one size class. push 0: the class is warming up, its ops have no deadline.
struct ClassPolicy {
  Micros push = 0;      // P
  Micros pull = 0;      // Q
  Micros complete = 0;  // t_C
};

struct Policy {
  uint32_t number = 0;  // of the pulse that made it, from 1; 0: the one that a job begins with
  uint32_t from = 0;    // first op under it
  bool hadamard = false;
  bool halt = false;
  uint8_t incast = 8;       // I
  uint8_t exit_share = 10;  // x, percent of t_C
  std::array<ClassPolicy, kSizeClasses> of_class{};
};

// Time codes of the record: v = 2^(v/8) us, 0 = warm-up. encode rounds up.
uint8_t encode_time(Micros time);
Micros decode_time(uint8_t code);
void encode_policy(const Policy& policy, std::byte* record);         // kPolicyRecordBytes
bool decode_policy(std::span<const std::byte> record, Policy* out);  // false: not a record

// What one node says in a pulse.
struct PulseNode {
  struct Class {
    int64_t samples = 0;   // of the last 64
    int64_t p95 = 0;       // us; EWMA of the 95th percentile
    int64_t complete = 0;  // us; EWMA of the completion time
  };
  std::array<Class, kSizeClasses> of_class{};
  int64_t blocks = 0;   // expected since the last pulse
  int64_t lost = 0;     // of them uncounted, filled or missing at the bound
  int64_t highest = 0;  // op announced by this node
  int64_t number = 0;   // of its newest record
  int64_t from = 0;     // of its newest record
  int64_t calm = 0;     // pulses without loss before this one, as the node counts them
  int64_t link = 0;     // bits a second of its link; 0: unknown
};
inline constexpr uint32_t kPulseWords = kSizeClasses * 3 + 7;
void encode_pulse(const PulseNode& node, std::span<int64_t, kPulseWords> words);
PulseNode decode_pulse(std::span<const int64_t, kPulseWords> words);

struct PolicyLimits {
  uint32_t nodes = 1;
  uint32_t warmup_ops = 20;           // per class (OptiReduce: t_B is the P95 of 20)
  double h_factor = 5;                // x P95
  Micros hard_deadline_min = 10'000;  // below it a wake-up of a busy machine decides, not the network
  Micros hard_deadline_max = 1'000'000;
};

// The record of pulse `number`, from what all nodes said in it and the record that was the newest then.
Policy next_policy(uint32_t number, const Policy& last, std::span<const PulseNode> nodes,
                   const PolicyLimits& limits);

// Completion times of one size class on one node.
class Estimator {
 public:
  void add(Micros sample);
  int64_t samples() const { return count_; }
  Micros p95() const { return static_cast<Micros>(p95_); }
  Micros complete() const { return static_cast<Micros>(complete_); }

 private:
  std::array<Micros, kEstimationOps> ring_{};
  uint32_t count_ = 0, next_ = 0;
  double p95_ = 0, complete_ = 0;
};

}  // namespace sluice::exchange
