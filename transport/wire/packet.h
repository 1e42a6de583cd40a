// The packet: a header of 48 bytes, a payload, and a tag of 16 bytes unless sealing is `none` (protocol, section 14).
// Every packet can be used alone. Nothing here allocates or does I/O; structures are little-endian and copied by
// memcpy, so that a receive buffer needs no alignment.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/types.h"

namespace sluice::wire {

static_assert(std::endian::native == std::endian::little, "packets are little-endian and copied as they lie");

inline constexpr uint8_t kMagic = 0x53;
inline constexpr uint8_t kVersion = 1;
inline constexpr size_t kHeaderBytes = 48;
inline constexpr size_t kTagBytes = 16;
inline constexpr size_t kVerdictReserve = 64;      // of each payload, for count and 31 senders (section 5)
inline constexpr uint32_t kMaxListedSenders = 31;  // longer verdicts are asked for by REQUEST_ROW
inline constexpr uint32_t kMaxBlocks = 1U << 24;   // blocks of one shard: a 24-bit field
inline constexpr uint32_t kMaxNodes = 1024;
inline constexpr uint16_t kNoSender = 65535;      // HELLO: the view is not known yet
inline constexpr uint32_t kDaemonOps = 1U << 31;  // top bit of op_seq: the daemons' own ops

// clang-format off
enum class Type : uint8_t {
  kHello = 1, kHelloAck = 2, kPing = 3, kPong = 4, kAnnounce = 5, kPush = 6, kPull = 7, kRequest = 8,
  kRequestRow = 9, kRow = 10, kFeedback = 11, kGone = 12, kAbort = 13, kPush2 = 14, kPull2 = 15,
};
// clang-format on
inline constexpr uint8_t kTypes = 16;
const char* type_name(Type type);

// Flags of the header.
inline constexpr uint8_t kFlagTail = 1U << 0;
inline constexpr uint8_t kFlagClassShift = 1;  // bits 1-2: OpClass
inline constexpr uint8_t kFlagClassMask = 3U << kFlagClassShift;
inline constexpr uint8_t kFlagEncoded = 1U << 3;
inline constexpr uint8_t kFlagNonfinite = 1U << 4;
inline constexpr uint8_t kFlagAllCounted = 1U << 5;
inline constexpr uint8_t kFlagSkip = 1U << 6;
inline constexpr uint8_t kFlagRow = 1U << 7;

// A 24-bit little-endian number.
struct Uint24 {
  uint8_t byte[3] = {};
  constexpr Uint24() = default;
  constexpr Uint24(uint32_t value)  // NOLINT(google-explicit-constructor)
      : byte{static_cast<uint8_t>(value), static_cast<uint8_t>(value >> 8),
             static_cast<uint8_t>(value >> 16)} {}
  constexpr operator uint32_t() const {  // NOLINT(google-explicit-constructor)
    return byte[0] | static_cast<uint32_t>(byte[1]) << 8 | static_cast<uint32_t>(byte[2]) << 16;
  }
};

struct Header {
  uint8_t magic = kMagic;
  uint8_t version = kVersion;
  uint8_t type = 0;
  uint8_t flags = 0;
  uint16_t sender = 0;
  uint8_t lane = 0;
  uint8_t policy = 0;
  uint32_t job = 0;
  uint32_t epoch = 0;
  uint32_t op_seq = 0;
  uint16_t shard = 0;
  uint16_t elements = 0;
  Uint24 block;
  Uint24 total;
  uint16_t ranks = 0;
  uint32_t fingerprint = 0;
  uint32_t stamp = 0;
  uint64_t counter = 0;

  OpClass op_class() const { return static_cast<OpClass>((flags & kFlagClassMask) >> kFlagClassShift); }
};
static_assert(sizeof(Header) == kHeaderBytes);
static_assert(offsetof(Header, shard) == 20 && offsetof(Header, block) == 24 &&
              offsetof(Header, total) == 27 && offsetof(Header, ranks) == 30 &&
              offsetof(Header, fingerprint) == 32 && offsetof(Header, counter) == 40);

// Payloads of fixed size.
inline constexpr uint32_t kContributes = 1, kReceives = 2, kFrozen = 4;  // flags of ANNOUNCE
inline constexpr uint32_t kSizeClassShift = 8;  // and its size class (section 4, Warm-up)
struct Announce {
  uint32_t age_us = 0, done = 0, base = 0, flags = 0;
  float scale = 0;  // loss scale of the op, 1 without one; 0: the sender does not know it
};
struct Request {  // then a bitmap from header.block on; empty: all
  uint32_t done = 0, base = 0;
};
struct Feedback {
  uint32_t echo = 0, hold_us = 0, grant = 0, flags = 0;
};
inline constexpr uint32_t kRecordFollows = 1, kWantPolicy = 2;  // flags of PING and PONG
struct Ping {
  uint32_t done = 0, base = 0, pulse_done = 0, echo = 0, hold_us = 0, grant = 0, policy = 0, flags = 0;
};
struct Gone {
  uint32_t base = 0;
};
struct Abort {          // then `count` x uint16_t: missing senders
  uint16_t reason = 0;  // Status
  uint16_t count = 0;
  uint8_t kind = 0, element_type = 0, wire_type = 0, zero = 0;
  uint64_t elements = 0;
  uint64_t tag = 0;
};
// Flag of HELLO: the receiver is in the view, with another join nonce.
inline constexpr uint8_t kHelloUnknownStart = 1;
struct Hello {  // HELLO and HELLO_ACK; padded with zeros to the size that is probed
  uint8_t join_nonce[16] = {};
  uint8_t own_challenge[16] = {};
  uint8_t echoed_challenge[16] = {};
  uint64_t config_digest = 0;
  uint64_t generation = 0;
  uint16_t payload = 0;  // the largest that is still possible, as the sender knows it
  uint8_t lanes = 0;
  uint8_t sealing = 0;
  uint8_t phase = 0;  // 1: looking for the payload size; 2: `payload` reaches every node from here
  uint8_t flags = 0;
  uint16_t probe = 0;  // largest datagram that came from the receiver, bytes
  uint32_t view = 0;   // phase 2: epoch of the nodes, lanes and payload as the sender knows them
  uint32_t zero = 0;
};
static_assert(sizeof(Announce) == 20 && sizeof(Request) == 8 && sizeof(Feedback) == 16 &&
              sizeof(Ping) == 32 && sizeof(Abort) == 24 && sizeof(Hello) == 80);

// Why a packet was dropped. Each has a counter (sluice_packets_dropped_total{reason=...}).
// clang-format off
enum class Drop : uint8_t {
  kNone = 0,
  kLength, kMagic, kVersion, kType, kJob, kEpoch, kSender, kSource, kNotMine, kRetired, kTooEarly, kBlock, kSize,
  kDuplicate, kReplay, kTag, kLate, kNotSubmitted, kPolicy, kNoMemory, kMismatch, kClosed, kState,
  kCount
};
// clang-format on
const char* drop_name(Drop drop);

// A packet as it arrived: a copy of the header, and where payload and tag lie.
struct PacketView {
  Header header;
  std::span<const std::byte> header_bytes;
  std::span<const std::byte> payload;
  std::span<const std::byte> tag;  // empty when sealing is `none`
};

// The first checks: length, magic, version, type. `tagged`: sealing is not `none`.
inline Drop parse(std::span<const std::byte> datagram, bool tagged, PacketView* view) {
  const size_t overhead = kHeaderBytes + (tagged ? kTagBytes : 0);
  if (datagram.size() < overhead) return Drop::kLength;
  std::memcpy(&view->header, datagram.data(), kHeaderBytes);
  if (view->header.magic != kMagic) return Drop::kMagic;
  if (view->header.version != kVersion) return Drop::kVersion;
  if (view->header.type == 0 || view->header.type >= kTypes) return Drop::kType;
  view->header_bytes = datagram.first(kHeaderBytes);
  view->payload = datagram.subspan(kHeaderBytes, datagram.size() - overhead);
  view->tag = datagram.last(tagged ? kTagBytes : 0);
  return Drop::kNone;
}

template <typename T>
bool read_payload(std::span<const std::byte> payload, T* out) {
  if (payload.size() < sizeof(T)) return false;
  std::memcpy(out, payload.data(), sizeof(T));
  return true;
}

// Elements of one block for this payload size and wire type (section 4: the same in both directions).
constexpr uint32_t elements_per_block(uint32_t payload, ElementType wire_type) {
  return (payload - kVerdictReserve) / static_cast<uint32_t>(element_size(wire_type));
}
// Payload bytes of a job for the largest datagram (without IP and UDP headers) that reaches every node.
constexpr uint32_t payload_for_datagram(uint32_t datagram) {
  return datagram < kHeaderBytes + kTagBytes + 128 ? 0 : (datagram - kHeaderBytes - kTagBytes) / 64 * 64;
}

// hash(kind, element type, wire type, count, tag): ranks that disagree on an op are told before anything is summed. Bit 0
// says whether the op has a tag, without which nothing of it can join a later op.
uint32_t fingerprint(ReduceKind kind, ElementType element_type, ElementType wire_type, uint64_t count,
                     uint64_t tag);
constexpr bool tagged(uint32_t fingerprint) { return (fingerprint & 1) != 0; }

}  // namespace sluice::wire
