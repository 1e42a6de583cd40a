#include "base/cpu_set.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

namespace sluice {
namespace {

bool parse_cpu(std::string_view text, int* cpu) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *cpu);
  return error == std::errc() && end == text.data() + text.size() && *cpu >= 0 && *cpu < CPU_SETSIZE;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

}  // namespace

Result<CpuSet> CpuSet::parse(std::string_view text) {
  CpuSet set;
  text = trim(text);
  if (text.empty()) return set;
  while (true) {
    const size_t comma = text.find(',');
    const std::string_view part = trim(text.substr(0, comma));
    const size_t dash = part.find('-');
    int first = 0;
    int last = 0;
    const bool good = dash == std::string_view::npos ? parse_cpu(part, &first) && parse_cpu(part, &last)
                                                     : parse_cpu(trim(part.substr(0, dash)), &first) &&
                                                           parse_cpu(trim(part.substr(dash + 1)), &last);
    if (!good || last < first) {
      return Error{EINVAL, "'" + std::string(part) +
                               "' is not a CPU or a range of CPUs; write for example \"0,2-3\" (0 to " +
                               std::to_string(CPU_SETSIZE - 1) + ")"};
    }
    for (int cpu = first; cpu <= last; ++cpu) set.cpus_.push_back(cpu);
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
  }
  std::sort(set.cpus_.begin(), set.cpus_.end());
  set.cpus_.erase(std::unique(set.cpus_.begin(), set.cpus_.end()), set.cpus_.end());
  return set;
}

CpuSet CpuSet::allowed() {
  CpuSet set;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return set;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) set.cpus_.push_back(cpu);
  }
  return set;
}

bool CpuSet::contains(int cpu) const { return std::binary_search(cpus_.begin(), cpus_.end(), cpu); }

std::string CpuSet::to_string() const {
  std::string text;
  for (size_t i = 0; i < cpus_.size();) {
    size_t end = i + 1;
    while (end < cpus_.size() && cpus_[end] == cpus_[end - 1] + 1) ++end;
    if (!text.empty()) text += ',';
    text += std::to_string(cpus_[i]);
    if (end - i > 1) text += '-' + std::to_string(cpus_[end - 1]);
    i = end;
  }
  return text;
}

Result<void> pin_current_thread(const CpuSet& cpus) {
  if (cpus.empty()) return {};
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int cpu : cpus.cpus()) CPU_SET(cpu, &mask);
  // The kernel silently drops CPUs that are not there as long as one is left; a person wants to know.
  const CpuSet before = CpuSet::allowed();
  if (sched_setaffinity(0, sizeof mask, &mask) != 0) {
    const int code = errno;
    return Error{code, "cannot run on CPU " + cpus.to_string() + " (allowed: " + before.to_string() +
                           "): " + std::strerror(code)};
  }
  const CpuSet now = CpuSet::allowed();
  for (const int cpu : cpus.cpus()) {
    if (!now.contains(cpu)) {
      return Error{EINVAL, "CPU " + std::to_string(cpu) +
                               " is not there or not allowed; the thread runs on " + now.to_string()};
    }
  }
  return {};
}

}  // namespace sluice
