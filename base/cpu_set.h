// Sets of CPUs, as written in a configuration ("0,2-3") and as given to the scheduler. Any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace sluice {

class CpuSet {
 public:
  CpuSet() = default;
  // "0,2-3": numbers and ranges, ascending or not, doubled ones count once. An empty text is the empty set
  // (which means "anywhere"). Errors name the part that was not understood.
  static Result<CpuSet> parse(std::string_view text);
  // The CPUs that the calling thread may run on now.
  static CpuSet allowed();

  const std::vector<int>& cpus() const { return cpus_; }  // ascending
  bool empty() const { return cpus_.empty(); }
  bool contains(int cpu) const;
  std::string to_string() const;  // shortest form, "0,2-3"

  friend bool operator==(const CpuSet&, const CpuSet&) = default;

 private:
  std::vector<int> cpus_;
};

// Binds the calling thread to `cpus` (the empty set: leaves it alone). Fails when a CPU is not there or not
// allowed, naming it and the ones that are.
Result<void> pin_current_thread(const CpuSet& cpus);

}  // namespace sluice
