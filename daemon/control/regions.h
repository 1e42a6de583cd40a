// The three shared regions of one client (base/ipc/layout.h): control, submit, arena.
//
// The daemon creates and maps them with every page present. The control page is closed to new writable mappings before
// the client sees it; submit page and arena once the client has mapped them. Any thread, one at a time.
#pragma once

#include <cstdint>
#include <string>

#include "base/ipc/layout.h"
#include "base/mapping.h"
#include "base/result.h"
#include "base/unique_fd.h"

namespace sluice::daemon {

class Regions {
 public:
  Regions() = default;

  // `name` shows in /proc/PID/maps. Takes as long as clearing `arena_bytes` of memory takes. The error says what could
  // not be had and why.
  static Result<Regions> create(const std::string& name, uint64_t arena_bytes, uint32_t lanes);

  // After the client has mapped everything: no new writable mapping of any region.
  Result<void> seal();

  bool valid() const { return arena_.valid(); }
  ipc::ControlPage* control() const { return reinterpret_cast<ipc::ControlPage*>(control_.data()); }
  ipc::SubmitPage* submit() const { return reinterpret_cast<ipc::SubmitPage*>(submit_.data()); }
  std::byte* arena() const { return arena_.data(); }
  uint64_t arena_bytes() const { return arena_.size(); }
  int control_fd() const { return control_fd_.get(); }
  int submit_fd() const { return submit_fd_.get(); }
  int arena_fd() const { return arena_fd_.get(); }

 private:
  UniqueFd control_fd_, submit_fd_, arena_fd_;
  Mapping control_, submit_, arena_;
};

}  // namespace sluice::daemon
