// Shared memory regions: a memfd and a mapping of it, each with one owner.
//
// Who creates a region (the daemon) allocates every page up front and seals the size, so that neither side
// can meet a SIGBUS later: want of memory is an Error of create_memfd() that names what was asked for and
// what there is. Sizes are bytes and are rounded up to whole pages. Any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "base/result.h"
#include "base/unique_fd.h"

namespace sluice {

enum class Access { kRead, kReadWrite };

// A mapped stretch of a file descriptor; unmapped by the destructor. Addresses stay the same when it is
// moved.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    if (this != &other) {
      reset();
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { reset(); }

  // Maps `size` bytes of `fd` from `offset` on (a multiple of the page size), shared. Refuses when the file
  // is shorter than offset + size: touching the missing part would be a SIGBUS.
  static Result<Mapping> map(int fd, size_t size, Access access, size_t offset = 0);
  // Private memory without a file, every page present, in huge pages where the system has them for those who ask
  // (transparent_hugepage: madvise): a buffer of 64 KiB is one entry of the TLB then, not 16. For buffers of the data
  // path.
  static Result<Mapping> anonymous(size_t size);
  // The same, but pages come when they are touched.
  static Result<Mapping> reserve(size_t size);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool valid() const { return data_ != nullptr; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  void reset();

 private:
  Mapping(std::byte* data, size_t size) : data_(data), size_(size) {}
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

size_t page_size();
// `size` rounded up to whole pages.
size_t round_to_pages(size_t size);

// A memfd of `size` bytes (rounded up to pages) with every page allocated, sealed F_SEAL_SHRINK |
// F_SEAL_GROW. `name` shows in /proc/PID/maps as "memfd:name". Fails with ENOMEM / ENOSPC and the size asked
// for, the free shared memory and the limit that stands in the way (cgroup, RLIMIT_FSIZE).
Result<UniqueFd> create_memfd(const std::string& name, size_t size);

// Forbids new writable mappings and write(); those that exist go on (F_SEAL_FUTURE_WRITE), and no seal can
// follow (F_SEAL_SEAL). For memory that the other side may only read: call it after every writer has mapped
// it.
Result<void> seal_future_writes(int fd);

// Checks a descriptor that came from another process before it is mapped: a memfd sealed against shrinking,
// of at least `size` bytes.
Result<void> check_sealed(int fd, size_t size);

}  // namespace sluice
