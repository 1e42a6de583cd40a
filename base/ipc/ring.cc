#include "base/ipc/ring.h"

#include <algorithm>

#include "base/ipc/doorbell.h"

namespace sluice::ipc {
namespace {

// Report::version lies in the second word of the report; the words around it are copied, it is not.
constexpr size_t kBodyOffset = 16;
constexpr size_t kBodyWords = (sizeof(Report) - kBodyOffset) / sizeof(uint64_t);
static_assert(offsetof(Report, text) == kBodyOffset && sizeof(Report) % sizeof(uint64_t) == 0);

using detail::Word;

Word* body(Report* report) {
  return reinterpret_cast<Word*>(reinterpret_cast<std::byte*>(report) + kBodyOffset);
}
const Word* body(const Report* report) {
  return reinterpret_cast<const Word*>(reinterpret_cast<const std::byte*>(report) + kBodyOffset);
}

// A lane rewrites a report at most once or twice in an op's life, so a reader that meets a write in progress
// succeeds a moment later; a daemon that died in the middle of one leaves the version odd for ever.
constexpr int kReadAttempts = 1000;

}  // namespace

void write_report(ControlPage& control, uint32_t lane, const Report& value) {
  Report* shared = &control.report[lane][value.op_seq % kWindow];
  // A sequence lock: odd while writing. Only the lane writes this page, so its own last version can be read
  // back.
  const uint32_t version = __atomic_load_n(&shared->version, __ATOMIC_RELAXED);
  __atomic_store_n(&shared->version, version + 1, __ATOMIC_RELAXED);
  release_fence();
  __atomic_store_n(&shared->op_seq, value.op_seq, __ATOMIC_RELAXED);
  __atomic_store_n(&shared->ranges, value.ranges, __ATOMIC_RELAXED);
  __atomic_store_n(&shared->ranges_total, value.ranges_total, __ATOMIC_RELAXED);
  const Word* from = body(&value);
  Word* to = body(shared);
  for (size_t i = 0; i < kBodyWords; ++i) __atomic_store_n(to + i, from[i], __ATOMIC_RELAXED);
  __atomic_store_n(&shared->version, version + 2, __ATOMIC_RELEASE);
}

bool read_report(const ControlPage& control, uint32_t lane, uint32_t op_seq, Report* value) {
  const Report* shared = &control.report[lane][op_seq % kWindow];
  for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
    const uint32_t version = __atomic_load_n(&shared->version, __ATOMIC_ACQUIRE);
    if (version % 2 != 0) {
      cpu_relax();
      continue;
    }
    value->op_seq = __atomic_load_n(&shared->op_seq, __ATOMIC_RELAXED);
    if (version == 0 || value->op_seq != op_seq) return false;  // never written, or of an op 64 calls ago
    value->version = version;
    value->ranges = __atomic_load_n(&shared->ranges, __ATOMIC_RELAXED);
    value->ranges_total = __atomic_load_n(&shared->ranges_total, __ATOMIC_RELAXED);
    const Word* from = body(shared);
    Word* to = body(value);
    for (size_t i = 0; i < kBodyWords; ++i) to[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
    acquire_fence();
    if (__atomic_load_n(&shared->version, __ATOMIC_RELAXED) != version) continue;
    value->text[kReportText - 1] = '\0';
    value->ranges = std::min(value->ranges, kReportRanges);
    return true;
  }
  return false;
}

}  // namespace sluice::ipc
