// The words that clients, daemons and packets share. Values are part of the IPC layout, of the wire format
// and of the C ABI: never renumber, only add.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice {

// Time everywhere: microseconds of this machine's monotonic clock. Never compared between nodes (protocol,
// I8).
using Micros = int64_t;
inline constexpr Micros kNever = INT64_MAX;

enum class ElementType : uint8_t { kF32 = 0, kF16 = 1, kBf16 = 2, kF64 = 3, kI32 = 4, kI64 = 5, kU8 = 6 };
inline constexpr uint8_t kElementTypes = 7;

// Bytes of one element.
constexpr size_t element_size(ElementType type) {
  switch (type) {
    case ElementType::kF32:
    case ElementType::kI32:
      return 4;
    case ElementType::kF16:
    case ElementType::kBf16:
      return 2;
    case ElementType::kF64:
    case ElementType::kI64:
      return 8;
    case ElementType::kU8:
      return 1;
  }
  return 0;
}

// 16-bit floats are summed in f32; every other type is summed in itself (integers wrap).
constexpr ElementType accumulator_type(ElementType type) {
  return type == ElementType::kF16 || type == ElementType::kBf16 ? ElementType::kF32 : type;
}
constexpr bool is_float(ElementType type) {
  return type != ElementType::kI32 && type != ElementType::kI64 && type != ElementType::kU8;
}

// How contributions are combined. kMean divides the sum once, at the owner (protocol, section 5); float types
// only.
enum class ReduceKind : uint8_t { kSum = 0, kMean = 1 };

// Class of service (protocol, section 8).
enum class OpClass : uint8_t { kExact = 0, kConsistent = 1, kBestEffort = 2 };

// Outcome of an op (protocol, section 1).
enum class Status : uint8_t {
  kOk = 0,
  kCorrected = 1,
  kIncomplete = 2,
  kDiverged = 3,
  kApproximated = 4,
  // From here on errors: the result slot holds nothing.
  kMismatch = 16,
  kOpTimeout = 17,
  kPeerLost = 18,
  kRankTimeout = 19,
  kViewChanged = 20,
  kAborted = 21,
  kDaemonLost = 22,
  kInvalid = 23,   // the request itself cannot be carried out; the text says why
  kNoMemory = 24,  // it would not fit the pool of the job; the text names limit and setting
  kTimeout = 25,   // the caller's own deadline passed; the op goes on
  kRefused = 26,   // the daemon refused the client or the job; the text says why
};
constexpr bool is_error(Status status) { return static_cast<uint8_t>(status) >= 16; }
const char* status_name(Status status);
const char* element_type_name(ElementType type);

// Events of an op (protocol, section 1). Bits: one completion may carry both.
inline constexpr uint8_t kEventResult = 1;    // the result slot is filled
inline constexpr uint8_t kEventResolved = 2;  // the contribution slot is the client's again

}  // namespace sluice
