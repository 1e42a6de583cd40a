#include "base/types.h"

namespace sluice {

const char* status_name(Status status) {
  switch (status) {
    case Status::kOk:
      return "OK";
    case Status::kCorrected:
      return "CORRECTED";
    case Status::kIncomplete:
      return "INCOMPLETE";
    case Status::kDiverged:
      return "DIVERGED";
    case Status::kApproximated:
      return "APPROXIMATED";
    case Status::kMismatch:
      return "MISMATCH";
    case Status::kOpTimeout:
      return "OP_TIMEOUT";
    case Status::kPeerLost:
      return "PEER_LOST";
    case Status::kRankTimeout:
      return "RANK_TIMEOUT";
    case Status::kViewChanged:
      return "VIEW_CHANGED";
    case Status::kAborted:
      return "ABORTED";
    case Status::kDaemonLost:
      return "DAEMON_LOST";
    case Status::kInvalid:
      return "INVALID";
    case Status::kNoMemory:
      return "NO_MEMORY";
    case Status::kTimeout:
      return "TIMEOUT";
    case Status::kRefused:
      return "REFUSED";
  }
  return "UNKNOWN";
}

const char* element_type_name(ElementType type) {
  switch (type) {
    case ElementType::kF32:
      return "f32";
    case ElementType::kF16:
      return "f16";
    case ElementType::kBf16:
      return "bf16";
    case ElementType::kF64:
      return "f64";
    case ElementType::kI32:
      return "i32";
    case ElementType::kI64:
      return "i64";
    case ElementType::kU8:
      return "u8";
  }
  return "?";
}

}  // namespace sluice
