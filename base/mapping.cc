#include "base/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace sluice {
namespace {

std::string mebibytes(double bytes) {
  char text[48];
  std::snprintf(text, sizeof text, "%.1f MiB", bytes / (1024.0 * 1024.0));
  return text;
}

// One number from a file of the kernel; -1 when the file is missing or says "max".
long long read_number(const char* path) {
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return -1;
  long long value = -1;
  if (std::fscanf(file, "%lld", &value) != 1) value = -1;
  std::fclose(file);
  return value;
}

// What a person should look at when shared memory could not be had.
std::string memory_limits() {
  std::string text;
  struct sysinfo info {};
  if (sysinfo(&info) == 0) {
    text += "free memory " + mebibytes(static_cast<double>(info.freeram + info.bufferram) * info.mem_unit);
  }
  // cgroup v2 of a service, then v1; a value near 2^63 means no limit.
  long long limit = read_number("/sys/fs/cgroup/memory.max");
  if (limit < 0) limit = read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  if (limit >= 0 && limit < (1LL << 60)) text += ", cgroup limit " + mebibytes(static_cast<double>(limit));
  rlimit file_size{};
  if (getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY) {
    text += ", RLIMIT_FSIZE " + mebibytes(static_cast<double>(file_size.rlim_cur));
  }
  return text;
}

Error system_error(const std::string& what, int code) {
  return Error{code, what + ": " + std::strerror(code)};
}

}  // namespace

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

size_t round_to_pages(size_t size) {
  const size_t page = page_size();
  return (size + page - 1) / page * page;
}

void Mapping::reset() {
  if (data_ != nullptr) munmap(data_, size_);
  data_ = nullptr;
  size_ = 0;
}

Result<Mapping> Mapping::map(int fd, size_t size, Access access, size_t offset) {
  if (size == 0) return Error{EINVAL, "cannot map 0 bytes"};
  struct stat status {};
  if (fstat(fd, &status) != 0) return system_error("cannot map descriptor " + std::to_string(fd), errno);
  if (status.st_size < 0 || static_cast<size_t>(status.st_size) < offset ||
      static_cast<size_t>(status.st_size) - offset < size) {
    return Error{EINVAL, "cannot map " + std::to_string(size) + " bytes at offset " + std::to_string(offset) +
                             ": the file has only " + std::to_string(status.st_size)};
  }
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = mmap(nullptr, size, protection, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    const int code = errno;
    return system_error("cannot map " + mebibytes(static_cast<double>(size)) +
                            (code == ENOMEM ? " (address space, RLIMIT_AS or vm.max_map_count)" : ""),
                        code);
  }
  return Mapping(static_cast<std::byte*>(data), size);
}

Result<Mapping> Mapping::anonymous(size_t size) {
  auto mapping = reserve(size);
  if (!mapping.ok()) return mapping;
  for (size_t at = 0; at < mapping->size(); at += page_size()) mapping->data()[at] = std::byte{0};
  return mapping;
}

Result<Mapping> Mapping::reserve(size_t size) {
  if (size == 0) return Error{EINVAL, "cannot map 0 bytes"};
  size = round_to_pages(size);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return system_error(
        "cannot get " + mebibytes(static_cast<double>(size)) + " of memory (" + memory_limits() + ")", errno);
  }
  madvise(data, size, MADV_HUGEPAGE);  // a wish
  return Mapping(static_cast<std::byte*>(data), size);
}

Result<UniqueFd> create_memfd(const std::string& name, size_t size) {
  if (size == 0) return Error{EINVAL, "shared memory '" + name + "' of 0 bytes"};
  size = round_to_pages(size);
  UniqueFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return system_error("cannot create shared memory '" + name + "'", errno);
  // fallocate, unlike ftruncate, takes the pages now. It can be interrupted by a signal before it is done.
  int code = 0;
  do {
    code = fallocate(fd.get(), 0, 0, static_cast<off_t>(size)) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != 0) {
    return system_error("cannot get " + mebibytes(static_cast<double>(size)) + " of shared memory for '" +
                            name + "' (" + memory_limits() + "); ask for less or raise the limit",
                        code);
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return system_error("cannot seal shared memory '" + name + "'", errno);
  }
  return fd;
}

Result<void> seal_future_writes(int fd) {
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    return system_error("cannot seal shared memory against writes (needs Linux 5.1)", errno);
  }
  return {};
}

Result<void> check_sealed(int fd, size_t size) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) return system_error("the descriptor is not a memfd", errno);
  if ((seals & F_SEAL_SHRINK) == 0) {
    return Error{EPERM, "the memfd is not sealed against shrinking (F_SEAL_SHRINK)"};
  }
  struct stat status {};
  if (fstat(fd, &status) != 0) return system_error("cannot read the size of the memfd", errno);
  if (static_cast<size_t>(status.st_size) < size) {
    return Error{EINVAL, "the memfd has " + std::to_string(status.st_size) + " bytes, expected at least " +
                             std::to_string(size)};
  }
  return {};
}

}  // namespace sluice
