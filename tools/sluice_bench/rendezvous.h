// A rendezvous by a folder that all ranks can see: each rank leaves files there, whole or not at all, and waits for
// those of the others. Stands in for a launcher's store where there is none.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace sluice::bench {

class Rendezvous {
 public:
  // `folder` must exist and must not have been used by an earlier run.
  Rendezvous(std::string folder, uint32_t rank, uint32_t world_size, int timeout_ms)
      : folder_(std::move(folder)), rank_(rank), world_size_(world_size), timeout_ms_(timeout_ms) {}

  // Leaves `bytes` as "name.rank". EEXIST: an earlier run has left such a file.
  Result<void> put(const std::string& name, std::string_view bytes) const;
  // Waits for "name.rank" of `rank`, which must have `size` bytes. ETIMEDOUT names the rank.
  Result<std::string> get(const std::string& name, uint32_t rank, size_t size) const;
  // Waits for all ranks' files, in rank order. ETIMEDOUT names the ranks that are missing.
  Result<std::vector<std::string>> get_all(const std::string& name, size_t size) const;

 private:
  std::string path(const std::string& name, uint32_t rank) const;

  std::string folder_;
  uint32_t rank_, world_size_;
  int timeout_ms_;
};

}  // namespace sluice::bench
