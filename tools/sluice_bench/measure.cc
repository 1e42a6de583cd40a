#include "tools/sluice_bench/measure.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tools/sluice_bench/oracle.h"

namespace sluice::bench {
namespace {

double clock_seconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// The q-quantile of sorted values: the smallest one that at least the share q does not exceed.
double quantile(const std::vector<double>& sorted, double q) {
  if (sorted.empty()) return 0;
  const auto size = static_cast<double>(sorted.size());
  auto index = static_cast<size_t>(size * q + 0.999999);
  index = std::min(std::max<size_t>(index, 1), sorted.size());
  return sorted[index - 1];
}

constexpr size_t kPackedHead = 7;

}  // namespace

uint64_t parse_size(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || !(value >= 0)) return 0;
  double unit = 1;
  if (*end != '\0') {
    switch (*end++) {
      case 'K':
      case 'k':
        unit = 1024;
        break;
      case 'M':
      case 'm':
        unit = 1048576;
        break;
      case 'G':
      case 'g':
        unit = 1073741824;
        break;
      case 'B':
      case 'b':
        --end;
        break;
      default:
        return 0;
    }
  }
  if (*end == 'i') ++end;
  if (*end == 'B' || *end == 'b') ++end;
  if (*end != '\0') return 0;
  return static_cast<uint64_t>(value * unit);
}

std::vector<uint64_t> sizes(const Sweep& sweep) {
  std::vector<uint64_t> found;
  const uint64_t element = element_size(sweep.type);
  for (const uint64_t bytes : sweep.list) found.push_back(bytes / element * element);
  if (!found.empty()) return found;
  for (uint64_t bytes = sweep.begin; bytes <= sweep.end; bytes *= sweep.factor) {
    found.push_back(bytes / element * element);
    if (sweep.factor < 2 || bytes == 0) break;
  }
  return found;
}

double now_seconds() { return clock_seconds(CLOCK_MONOTONIC); }
double own_cpu_seconds() { return clock_seconds(CLOCK_PROCESS_CPUTIME_ID); }

double process_cpu_seconds(pid_t pid) {
  // The first number of a thread's schedstat is its run time in nanoseconds; /proc/PID/stat counts ticks of 10 ms.
  const std::string folder = "/proc/" + std::to_string(pid) + "/task";
  DIR* tasks = opendir(folder.c_str());
  if (tasks == nullptr) return 0;
  double sum = 0;
  bool seen = false;
  while (const dirent* entry = readdir(tasks)) {
    if (entry->d_name[0] == '.') continue;
    std::ifstream file(folder + "/" + entry->d_name + "/schedstat");
    double nanoseconds = 0;
    if (file >> nanoseconds) {
      sum += nanoseconds * 1e-9;
      seen = true;
    }
  }
  closedir(tasks);
  if (seen) return sum;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const size_t after_name = text.rfind(')');
  if (after_name == std::string::npos) return 0;
  double user = 0, system = 0;
  // After the name come state (field 3) and, eleven fields later, utime and stime.
  if (std::sscanf(text.c_str() + after_name + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lf %lf",
                  &user, &system) != 2) {
    return 0;
  }
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double machine_cpu_seconds() {
  std::ifstream file("/proc/stat");
  std::string word;
  double user = 0, nice = 0, system = 0, idle = 0, wait = 0, hard = 0, soft = 0;
  file >> word >> user >> nice >> system >> idle >> wait >> hard >> soft;
  return (user + nice + system + hard + soft) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

void Stopwatch::start() {
  machine_ = machine_cpu_seconds();
  other_ = daemon_ > 0 ? process_cpu_seconds(daemon_) : 0;
  own_ = own_cpu_seconds();
  wall_ = now_seconds();
}

void Stopwatch::stop(Sample* sample) {
  sample->wall = now_seconds() - wall_;
  sample->cpu_own = own_cpu_seconds() - own_;
  sample->cpu_daemon = daemon_ > 0 ? process_cpu_seconds(daemon_) - other_ : 0;
  sample->cpu_machine = machine_cpu_seconds() - machine_;
}

void run_calls(uint32_t iterations, uint32_t inflight, const std::function<void(uint32_t)>& begin,
               const std::function<void(uint32_t)>& finish, std::vector<double>* duration) {
  struct Open {
    uint32_t slot;
    double since;
  };
  std::deque<Open> open;
  duration->clear();
  duration->reserve(iterations);
  const auto finish_oldest = [&] {
    finish(open.front().slot);
    duration->push_back(now_seconds() - open.front().since);
    open.pop_front();
  };
  for (uint32_t i = 0; i < iterations; ++i) {
    if (open.size() >= inflight) finish_oldest();
    open.push_back({i % inflight, now_seconds()});
    begin(i % inflight);
  }
  while (!open.empty()) finish_oldest();
}

std::vector<double> pack(const Sample& sample) {
  std::vector<double> data{sample.wall,       sample.cpu_own, sample.cpu_daemon, sample.cpu_machine,
                           sample.daemon_key, sample.wrong,   sample.incomplete};
  data.insert(data.end(), sample.duration.begin(), sample.duration.end());
  return data;
}

Sample unpack(const double* data, size_t count) {
  Sample sample;
  if (count < kPackedHead) return sample;
  sample.wall = data[0];
  sample.cpu_own = data[1];
  sample.cpu_daemon = data[2];
  sample.cpu_machine = data[3];
  sample.daemon_key = data[4];
  sample.wrong = data[5];
  sample.incomplete = data[6];
  sample.duration.assign(data + kPackedHead, data + count);
  return sample;
}

Row summarize(uint64_t bytes, uint64_t count, const std::vector<Sample>& ranks) {
  Row row;
  row.bytes = bytes;
  row.count = count;
  double wall = 0, cpu = 0, machine = 0;
  std::vector<double> slowest(ranks.empty() ? 0 : ranks[0].duration.size(), 0.0);
  std::vector<double> daemons;
  for (const Sample& rank : ranks) {
    wall = std::max(wall, rank.wall);
    machine = std::max(machine, rank.cpu_machine);
    cpu += rank.cpu_own;
    if (rank.daemon_key != 0 && std::find(daemons.begin(), daemons.end(), rank.daemon_key) == daemons.end()) {
      daemons.push_back(rank.daemon_key);
      cpu += rank.cpu_daemon;
    }
    row.incomplete += rank.incomplete;
    if (rank.wrong < 0) {
      row.wrong = -1;
    } else if (row.wrong >= 0) {
      row.wrong += rank.wrong;
    }
    for (size_t i = 0; i < slowest.size() && i < rank.duration.size(); ++i) {
      slowest[i] = std::max(slowest[i], rank.duration[i]);
    }
  }
  if (slowest.empty()) return row;
  std::sort(slowest.begin(), slowest.end());
  const auto iterations = static_cast<double>(slowest.size());
  row.mean_s = wall / iterations;
  row.min_s = slowest.front();
  row.p50_s = quantile(slowest, 0.5);
  row.p99_s = quantile(slowest, 0.99);
  const auto gigabytes = static_cast<double>(bytes) * 1e-9;
  const auto n = static_cast<double>(ranks.size());
  if (row.mean_s > 0) row.algbw = gigabytes / row.mean_s;
  row.busbw = row.algbw * 2 * (n - 1) / n;
  if (bytes > 0) {
    row.cpu_per_gb = cpu / (gigabytes * iterations);
    row.machine_cpu_per_gb = machine / (gigabytes * iterations);
  }
  return row;
}

Report::Report(std::string system, std::string variant, uint32_t ranks, const Sweep& sweep)
    : system_(std::move(system)), variant_(std::move(variant)), ranks_(ranks), sweep_(sweep) {}

void Report::print_head() const {
  std::printf("# %s allreduce (%s), %u ranks, %u iterations after %u, %u in flight\n", system_.c_str(),
              variant_.c_str(), ranks_, sweep_.iterations, sweep_.warmup, sweep_.inflight);
  std::printf("# %10s %12s %8s %6s %10s %10s %10s %8s %8s %8s %9s\n", "size", "count", "type", "redop",
              "time", "p50", "p99", "algbw", "busbw", "#wrong", "cpu");
  std::printf("# %10s %12s %8s %6s %10s %10s %10s %8s %8s %8s %9s\n", "(B)", "(elements)", "", "", "(us)",
              "(us)", "(us)", "(GB/s)", "(GB/s)", "", "(s/GB)");
  std::fflush(stdout);
}

void Report::add(const Row& row) {
  rows_.push_back(row);
  char wrong[32];
  if (row.wrong < 0) {
    std::snprintf(wrong, sizeof(wrong), "N/A");
  } else {
    std::snprintf(wrong, sizeof(wrong), "%.0f", row.wrong);
  }
  std::printf("  %10llu %12llu %8s %6s %10.1f %10.1f %10.1f %8.3f %8.3f %8s %9.3f%s\n",
              static_cast<unsigned long long>(row.bytes), static_cast<unsigned long long>(row.count),
              type_name(sweep_.type), sweep_.kind == ReduceKind::kMean ? "avg" : "sum", row.mean_s * 1e6,
              row.p50_s * 1e6, row.p99_s * 1e6, row.algbw, row.busbw, wrong, row.cpu_per_gb,
              row.incomplete > 0 ? "  incomplete" : "");
  std::fflush(stdout);
}

bool Report::all_right() const {
  return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.wrong <= 0; });
}

void Report::print_foot() const {
  double sum = 0, wrong = 0, incomplete = 0;
  for (const Row& row : rows_) {
    sum += row.busbw;
    wrong += std::max(row.wrong, 0.0);
    incomplete += row.incomplete;
  }
  std::printf("# Out of bounds values : %.0f %s\n", wrong, wrong == 0 ? "OK" : "FAILED");
  if (incomplete > 0) std::printf("# Incomplete calls     : %.0f\n", incomplete);
  std::printf("# Avg bus bandwidth    : %.4f\n", rows_.empty() ? 0 : sum / static_cast<double>(rows_.size()));
  std::fflush(stdout);
}

bool Report::write_json(const std::string& path) const {
  nlohmann::json rows = nlohmann::json::array();
  for (const Row& row : rows_) {
    rows.push_back({{"bytes", row.bytes},
                    {"count", row.count},
                    {"time_ms", row.mean_s * 1e3},
                    {"min_ms", row.min_s * 1e3},
                    {"p50_ms", row.p50_s * 1e3},
                    {"p99_ms", row.p99_s * 1e3},
                    {"algbw_gb_s", row.algbw},
                    {"busbw_gb_s", row.busbw},
                    {"cpu_s_per_gb", row.cpu_per_gb},
                    {"machine_cpu_s_per_gb", row.machine_cpu_per_gb},
                    {"wrong", row.wrong},
                    {"incomplete", row.incomplete}});
  }
  const nlohmann::json all = {{"system", system_},
                              {"variant", variant_},
                              {"ranks", ranks_},
                              {"type", type_name(sweep_.type)},
                              {"redop", sweep_.kind == ReduceKind::kMean ? "avg" : "sum"},
                              {"iterations", sweep_.iterations},
                              {"warmup", sweep_.warmup},
                              {"inflight", sweep_.inflight},
                              {"rows", rows}};
  const std::string temporary = path + ".part";
  {
    std::ofstream file(temporary);
    file << all.dump(2) << "\n";
    file.close();
    if (!file) {
      std::fprintf(stderr, "%s: cannot write; is there such a folder, and is it yours?\n", temporary.c_str());
      return false;
    }
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    std::perror(path.c_str());
    return false;
  }
  return true;
}

}  // namespace sluice::bench
