// The collective calls of a job, all of them as one kind of op: an elementwise sum over the ranks. broadcast and
// all_gather are exact integer sums to which every rank adds zeros wherever it has nothing to say. That moves about
// twice the bytes of an algorithm of their own; they serve start-up and checkpoints, where that does not matter, and so
// have nothing of their own that could be wrong.
#include <cmath>
#include <cstring>

#include "lib/client/error_text.h"
#include "lib/client/job.h"

namespace sluice::client {
namespace {

std::string number(uint64_t value) { return std::to_string(value); }

bool overlap(uint64_t a, uint64_t b, uint64_t bytes) { return a < b + bytes && b < a + bytes; }

// As few elements as possible: 8 bytes at a time where the size allows it.
void as_integers(uint64_t bytes, Call* call) {
  const bool wide = bytes % 8 == 0;
  call->type = wide ? ElementType::kI64 : ElementType::kU8;
  call->count = wide ? bytes / 8 : bytes;
}

int not_ours(const char* call, const char* which) {
  return fail(SLUICE_ERROR_INVALID,
              std::string(call) + ": `" + which +
                  "` must be 64-byte aligned memory from sluice_alloc of this job, long enough "
                  "for the call");
}

}  // namespace

int Job::allreduce(const void* contribution, void* result, uint64_t count, int type, int kind,
                   const sluice_op_options& options, sluice_op* handle) {
  constexpr const char* kName = "sluice_allreduce";
  if (type < 0 || type >= kElementTypes) {
    return fail(SLUICE_ERROR_INVALID,
                std::string(kName) + ": there is no element type " + std::to_string(type));
  }
  if (kind != SLUICE_SUM && kind != SLUICE_MEAN) {
    return fail(SLUICE_ERROR_INVALID, std::string(kName) + ": there is no kind " + std::to_string(kind));
  }
  int op_class = 0;  // as a number: the caller may have written any into the enumeration
  std::memcpy(&op_class, &options.op_class, sizeof(op_class));
  if (op_class < SLUICE_EXACT || op_class > SLUICE_BEST_EFFORT) {
    return fail(SLUICE_ERROR_INVALID, std::string(kName) + ": there is no class " + std::to_string(op_class));
  }
  if (op_class == SLUICE_BEST_EFFORT && !is_float(static_cast<ElementType>(type))) {
    return fail(
        SLUICE_ERROR_INVALID,
        std::string(kName) + ": SLUICE_BEST_EFFORT is for floating-point types, which can be approximated");
  }
  if (!std::isfinite(options.loss_scale) || options.loss_scale < 0) {
    return fail(SLUICE_ERROR_INVALID,
                std::string(kName) + ": loss_scale must be finite and above 0 (0: none)");
  }
  Call call;
  call.type = static_cast<ElementType>(type);
  call.kind = static_cast<ReduceKind>(kind);
  if (call.kind == ReduceKind::kMean && !is_float(call.type)) {
    return fail(SLUICE_ERROR_INVALID, std::string(kName) + ": SLUICE_MEAN is for floating-point types; sum " +
                                          element_type_name(call.type) + " and divide by the world size");
  }
  call.count = count;
  const uint64_t element = element_size(call.type);
  if (const int error = check_size(kName, count, element); error != SLUICE_SUCCESS) return error;
  const uint64_t bytes = count * element;
  const auto from = offset_of(contribution, bytes);
  if (!from) return not_ours(kName, "contribution");
  const auto to = offset_of(result, bytes);
  if (!to) return not_ours(kName, "result");
  if (overlap(*from, *to, bytes)) {
    return fail(SLUICE_ERROR_INVALID, std::string(kName) + ": `contribution` and `result` overlap");
  }
  call.contribution = *from;
  call.result = *to;
  call.op_class = static_cast<OpClass>(op_class);
  call.tag = options.tag;
  call.deadline_us = options.deadline_us;
  call.loss_scale = is_float(call.type) ? options.loss_scale : 0;
  return submit(call, handle);
}

int Job::broadcast(void* buffer, uint64_t bytes, uint32_t root, sluice_op* handle) {
  constexpr const char* kName = "sluice_broadcast";
  if (root >= request_.world_size) {
    return fail(SLUICE_ERROR_INVALID, std::string(kName) + ": root " + number(root) + " of " +
                                          number(request_.world_size) + " ranks");
  }
  if (const int error = check_size(kName, bytes, 1); error != SLUICE_SUCCESS) return error;
  const auto to = offset_of(buffer, bytes);
  if (!to) return not_ours(kName, "buffer");
  Call call;
  as_integers(bytes, &call);
  call.result = *to;
  if (bytes > 0) {
    call.temporary = take_temporary(kName, bytes);
    if (!call.temporary) return SLUICE_ERROR_NO_MEMORY;
    call.contribution = *call.temporary;
    if (root == request_.rank) {
      std::memcpy(arena_data() + call.contribution, buffer, bytes);
    } else {
      std::memset(arena_data() + call.contribution, 0, bytes);
    }
  }
  return submit(call, handle);
}

int Job::all_gather(const void* contribution, void* result, uint64_t bytes, sluice_op* handle) {
  constexpr const char* kName = "sluice_all_gather";
  if (bytes > 0 && contribution == nullptr) {
    return fail(SLUICE_ERROR_INVALID, std::string(kName) + ": `contribution` is NULL");
  }
  // The product is checked before it is made.
  if (const int error = check_size(kName, bytes, request_.world_size); error != SLUICE_SUCCESS) return error;
  const uint64_t total = bytes * request_.world_size;
  const auto to = offset_of(result, total);
  if (!to) return not_ours(kName, "result");
  Call call;
  as_integers(total, &call);
  call.result = *to;
  if (total > 0) {
    call.temporary = take_temporary(kName, total);
    if (!call.temporary) return SLUICE_ERROR_NO_MEMORY;
    call.contribution = *call.temporary;
    std::byte* slot = arena_data() + call.contribution;
    const uint64_t mine = bytes * request_.rank;
    std::memset(slot, 0, mine);
    std::memcpy(slot + mine, contribution, bytes);
    std::memset(slot + mine + bytes, 0, total - mine - bytes);
  }
  return submit(call, handle);
}

}  // namespace sluice::client
