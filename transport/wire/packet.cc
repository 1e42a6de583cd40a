#include "transport/wire/packet.h"

namespace sluice::wire {

const char* type_name(Type type) {
  switch (type) {
    case Type::kHello:
      return "HELLO";
    case Type::kHelloAck:
      return "HELLO_ACK";
    case Type::kPing:
      return "PING";
    case Type::kPong:
      return "PONG";
    case Type::kAnnounce:
      return "ANNOUNCE";
    case Type::kPush:
      return "PUSH";
    case Type::kPull:
      return "PULL";
    case Type::kRequest:
      return "REQUEST";
    case Type::kRequestRow:
      return "REQUEST_ROW";
    case Type::kRow:
      return "ROW";
    case Type::kFeedback:
      return "FEEDBACK";
    case Type::kGone:
      return "GONE";
    case Type::kAbort:
      return "ABORT";
    case Type::kPush2:
      return "PUSH2";
    case Type::kPull2:
      return "PULL2";
  }
  return "unknown";
}

const char* drop_name(Drop drop) {
  switch (drop) {
    case Drop::kNone:
      return "none";
    case Drop::kLength:
      return "length";
    case Drop::kMagic:
      return "magic";
    case Drop::kVersion:
      return "version";
    case Drop::kType:
      return "type";
    case Drop::kJob:
      return "job";
    case Drop::kEpoch:
      return "epoch";
    case Drop::kSender:
      return "sender";
    case Drop::kSource:
      return "source";
    case Drop::kNotMine:
      return "not_mine";
    case Drop::kRetired:
      return "retired";
    case Drop::kTooEarly:
      return "too_early";
    case Drop::kBlock:
      return "block";
    case Drop::kSize:
      return "size";
    case Drop::kDuplicate:
      return "duplicate";
    case Drop::kReplay:
      return "replay";
    case Drop::kTag:
      return "tag";
    case Drop::kLate:
      return "late";
    case Drop::kNotSubmitted:
      return "not_submitted";
    case Drop::kPolicy:
      return "policy";
    case Drop::kNoMemory:
      return "no_memory";
    case Drop::kMismatch:
      return "mismatch";
    case Drop::kClosed:
      return "closed";
    case Drop::kState:
      return "state";
    case Drop::kCount:
      break;
  }
  return "unknown";
}

namespace {

// Finalizer of SplitMix64 (Steele, Lea, Flood 2014, constants "Mix13" of Stafford): a bijection on 64 bits in
// which each input bit flips each output bit with a probability close to one half.
constexpr uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15U;  // 2^64 / golden ratio: no fixed point at 0

}  // namespace

uint32_t fingerprint(ReduceKind kind, ElementType element_type, ElementType wire_type, uint64_t count,
                     uint64_t tag) {
  const uint64_t types = static_cast<uint64_t>(kind) | static_cast<uint64_t>(element_type) << 8 |
                         static_cast<uint64_t>(wire_type) << 16;
  // Chained, not XORed side by side: count and tag swapped give another value.
  uint64_t hash = mix(types + kGamma);
  hash = mix((hash ^ count) + kGamma);
  hash = mix((hash ^ tag) + kGamma);
  return (static_cast<uint32_t>(hash >> 32) & ~1U) | (tag != 0 ? 1U : 0U);
}

}  // namespace sluice::wire
