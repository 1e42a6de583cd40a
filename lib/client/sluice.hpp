// libsluice for C++20: the C interface (sluice.h, which has the contracts) with ownership and types.
//
//   sluice::Context context;
//   sluice::Job job(context, options);
//   auto in = job.buffer<float>(count), out = job.buffer<float>(count);
//   sluice_report report = job.allreduce<float>(in, out, SLUICE_MEAN).wait(30'000);
//
// Errors are thrown as sluice::Failure, which carries the sluice_error. The outcome of an op is no exception: look at
// report.status. A Buffer may outlive its Job's leave(), but its memory does not: nothing may look at it then. An Op
// must be waited for; destroying it waits for nothing.
#pragma once

#include <sluice.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace sluice {

class Failure : public std::runtime_error {
 public:
  explicit Failure(int error)
      : std::runtime_error(std::string(sluice_error_name(error)) + ": " + sluice_last_error()),
        error_(error) {}
  int error() const { return error_; }

 private:
  int error_;
};

inline void must(int error) {
  if (error != SLUICE_SUCCESS) throw Failure(error);
}

// The element type of a C++ type. 16-bit floats have none here: pass sluice_type to the C interface.
template <typename T>
constexpr sluice_type type_of() {
  if constexpr (std::same_as<T, float>)
    return SLUICE_F32;
  else if constexpr (std::same_as<T, double>)
    return SLUICE_F64;
  else if constexpr (std::same_as<T, int32_t>)
    return SLUICE_I32;
  else if constexpr (std::same_as<T, int64_t>)
    return SLUICE_I64;
  else {
    static_assert(std::same_as<T, uint8_t>, "float, double, int32_t, int64_t or uint8_t");
    return SLUICE_U8;
  }
}

class Context {
 public:
  explicit Context(const char* socket_path = nullptr, int timeout_ms = 1000) {
    sluice_context* context = nullptr;
    must(sluice_open(socket_path, timeout_ms, &context));
    handle_.reset(context);
  }
  sluice_card card(const std::string& job, uint32_t rank, uint32_t world_size, int timeout_ms = 1000) {
    sluice_card card;
    must(sluice_card_get(handle_.get(), job.c_str(), rank, world_size, timeout_ms, &card));
    return card;
  }
  // For a later view of the job; the join options name the same generation.
  sluice_card renew_card(const std::string& job, uint32_t rank, uint32_t world_size, uint32_t generation,
                         int timeout_ms = 1000) {
    sluice_card card;
    must(sluice_card_renew(handle_.get(), job.c_str(), rank, world_size, generation, timeout_ms, &card));
    return card;
  }
  sluice_context* get() const { return handle_.get(); }

 private:
  struct Closer {
    void operator()(sluice_context* context) const { sluice_close(context); }
  };
  std::unique_ptr<sluice_context, Closer> handle_;
};

namespace detail {
// Shared by a job and its buffers, so that whichever goes last leaves.
struct Membership {
  explicit Membership(sluice_job* joined) : job(joined) {}
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;
  ~Membership() {
    if (job != nullptr) sluice_leave(job, 1000);
  }
  sluice_job* job;
};
}  // namespace detail

// `size` elements of the job's arena.
template <typename T>
class Buffer {
 public:
  Buffer(std::shared_ptr<detail::Membership> membership, size_t size)
      : membership_(std::move(membership)), size_(size) {
    data_ = static_cast<T*>(sluice_alloc(membership_->job, size * sizeof(T)));
    if (data_ == nullptr) throw Failure(SLUICE_ERROR_NO_MEMORY);
  }
  Buffer(Buffer&& other) noexcept
      : membership_(std::move(other.membership_)),
        data_(std::exchange(other.data_, nullptr)),
        size_(other.size_) {}
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (data_ != nullptr && membership_->job != nullptr) sluice_free(membership_->job, data_);
  }
  T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }

 private:
  std::shared_ptr<detail::Membership> membership_;
  T* data_ = nullptr;
  size_t size_;
};

// A collective call under way.
class Op {
 public:
  Op(sluice_job* job, sluice_op op) : job_(job), op_(op) {}
  // Until result and contribution are the caller's again; throws Failure when the time is over (call again).
  sluice_report wait(int timeout_ms) const { return outcome(sluice_wait, timeout_ms); }
  // Until the result is there; wait() is still to be called unless report.events has SLUICE_EVENT_RESOLVED.
  sluice_report wait_result(int timeout_ms) const { return outcome(sluice_wait_result, timeout_ms); }
  sluice_op get() const { return op_; }

 private:
  template <typename Wait>
  sluice_report outcome(Wait wait, int timeout_ms) const {
    sluice_report report{};
    report.size = sizeof(report);
    must(wait(job_, op_, timeout_ms, &report));
    return report;
  }
  sluice_job* job_;
  sluice_op op_;
};

inline sluice_join_options join_options(const char* job, uint32_t rank, uint32_t world_size,
                                        int timeout_ms = 30'000) {
  sluice_join_options options{};
  options.size = sizeof(options);
  options.job = job;
  options.rank = rank;
  options.world_size = world_size;
  options.timeout_ms = timeout_ms;
  return options;
}

// Leaves when it and all its buffers are gone, or by leave().
class Job {
 public:
  Job(Context& context, const sluice_join_options& options) {
    sluice_job* job = nullptr;
    must(sluice_join(context.get(), &options, &job));
    membership_ = std::make_shared<detail::Membership>(job);
  }

  template <typename T>
  Buffer<T> buffer(size_t size) {
    return Buffer<T>(membership_, size);
  }

  // Both of one size; a smaller `count` may be given.
  template <typename T>
  Op allreduce(const Buffer<T>& contribution, const Buffer<T>& result, sluice_kind kind = SLUICE_SUM,
               const sluice_op_options* options = nullptr) {
    return allreduce(contribution, result, contribution.size(), kind, options);
  }
  template <typename T>
  Op allreduce(const Buffer<T>& contribution, const Buffer<T>& result, size_t count, sluice_kind kind,
               const sluice_op_options* options = nullptr) {
    if (count > contribution.size() || count > result.size())
      throw std::out_of_range("sluice: count beyond a buffer");
    sluice_op op = 0;
    must(
        sluice_allreduce(get(), contribution.data(), result.data(), count, type_of<T>(), kind, options, &op));
    return {get(), op};
  }
  template <typename T>
  Op broadcast(const Buffer<T>& buffer, uint32_t root) {
    sluice_op op = 0;
    must(sluice_broadcast(get(), buffer.data(), buffer.size() * sizeof(T), root, &op));
    return {get(), op};
  }
  // `result` has world_size x contribution.size() elements.
  template <typename T>
  Op all_gather(std::span<const T> contribution, const Buffer<T>& result) {
    if (result.size() < contribution.size() * info().world_size)
      throw std::out_of_range("sluice: result too small");
    sluice_op op = 0;
    must(sluice_all_gather(get(), contribution.data(), result.data(), contribution.size_bytes(), &op));
    return {get(), op};
  }
  // What all ranks owe under the tag, summed or averaged; equal on all ranks (sluice_flush).
  template <typename T>
  void flush(uint64_t tag, sluice_kind kind, std::span<T> out, int timeout_ms) {
    must(sluice_flush(get(), tag, kind, type_of<T>(), out.size(), out.data(), timeout_ms));
  }
  // What this rank owes under the tag, which will not be used again (sluice_tag_retire).
  template <typename T>
  void tag_retire(uint64_t tag, sluice_kind kind, std::span<T> out, int timeout_ms) {
    must(sluice_tag_retire(get(), tag, kind, type_of<T>(), out.size(), out.data(), timeout_ms));
  }
  // What waits to be added to results of this rank under the tag, which will not be used again (sluice_take_correction).
  template <typename T>
  void take_correction(uint64_t tag, sluice_kind kind, std::span<T> out, int timeout_ms) {
    must(sluice_take_correction(get(), tag, kind, type_of<T>(), out.size(), out.data(), timeout_ms));
  }
  void barrier(int timeout_ms) { must(sluice_barrier(get(), timeout_ms)); }
  void abort() { must(sluice_abort(get())); }
  void leave(int timeout_ms) { must(sluice_leave(std::exchange(membership_->job, nullptr), timeout_ms)); }

  sluice_job_info info() const {
    sluice_job_info info{};
    info.size = sizeof(info);
    must(sluice_job_get_info(get(), &info));
    return info;
  }
  sluice_job* get() const { return membership_->job; }

 private:
  std::shared_ptr<detail::Membership> membership_;
};

}  // namespace sluice
