#include "tools/sluice_bench/rendezvous.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>

#include "base/unique_fd.h"
#include "tools/sluice_bench/measure.h"

namespace sluice::bench {
namespace {

constexpr useconds_t kPollMicros = 2000;

std::optional<std::string> read_file(const std::string& path, size_t size) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (bytes.size() != size) return std::nullopt;
  return bytes;
}

}  // namespace

std::string Rendezvous::path(const std::string& name, uint32_t rank) const {
  return folder_ + "/" + name + "." + std::to_string(rank);
}

Result<void> Rendezvous::put(const std::string& name, std::string_view bytes) const {
  const std::string target = path(name, rank_);
  const std::string temporary = target + ".part." + std::to_string(getpid());
  UniqueFd file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file.valid()) {
    return Error{errno, "rendezvous: cannot write " + temporary + ": " + std::strerror(errno) +
                            "; give --rendezvous a folder that all ranks can write"};
  }
  if (write(file.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    const int error = errno;
    unlink(temporary.c_str());
    return Error{error, "rendezvous: cannot write " + temporary + ": " + std::strerror(error)};
  }
  // link fails where rename would replace: a file of an earlier run must not be mistaken for this run's.
  const int linked = link(temporary.c_str(), target.c_str());
  const int error = errno;
  unlink(temporary.c_str());
  if (linked != 0) {
    return Error{error,
                 "rendezvous: " + target + ": " + std::strerror(error) +
                     (error == EEXIST ? "; an earlier run has used this folder: give an empty one" : "")};
  }
  return {};
}

Result<std::string> Rendezvous::get(const std::string& name, uint32_t rank, size_t size) const {
  const double end = now_seconds() + timeout_ms_ / 1000.0;
  for (;;) {
    if (auto bytes = read_file(path(name, rank), size)) return std::move(*bytes);
    if (now_seconds() >= end) {
      return Error{ETIMEDOUT, "rendezvous: rank " + std::to_string(rank) + " is missing after " +
                                  std::to_string(timeout_ms_) + " ms (no " + path(name, rank) +
                                  "); was it started, with the same --rendezvous?"};
    }
    usleep(kPollMicros);
  }
}

Result<std::vector<std::string>> Rendezvous::get_all(const std::string& name, size_t size) const {
  const double end = now_seconds() + timeout_ms_ / 1000.0;
  std::vector<std::optional<std::string>> found(world_size_);
  for (;;) {
    std::string missing;
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      if (!found[rank]) found[rank] = read_file(path(name, rank), size);
      if (!found[rank]) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
    if (missing.empty()) break;
    if (now_seconds() >= end) {
      return Error{ETIMEDOUT, "rendezvous: missing after " + std::to_string(timeout_ms_) + " ms: rank " +
                                  missing + " of " + std::to_string(world_size_) + " (in " + folder_ +
                                  "); were they started, with the same --rendezvous?"};
    }
    usleep(kPollMicros);
  }
  std::vector<std::string> all;
  all.reserve(world_size_);
  for (auto& bytes : found) all.push_back(std::move(*bytes));
  return all;
}

}  // namespace sluice::bench
