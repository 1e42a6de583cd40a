// The command-line options that all programs of the benchmark family share; they are those of nccl-tests where it has
// them.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "tools/sluice_bench/measure.h"
#include "tools/sluice_bench/oracle.h"

namespace sluice::bench {

// Turns a size or a type in text into its value, or stops with the usage line.
struct SweepOptions {
  Sweep sweep;
  std::string begin = "1K", end = "64M", type = "f32", json;
  std::vector<std::string> list;

  void add_to(CLI::App* app) {
    app->add_option("-b,--begin", begin, "smallest size in bytes; K, M, G are powers of 1024")
        ->capture_default_str();
    app->add_option("-e,--end", end, "largest size")->capture_default_str();
    app->add_option("-f,--factor", sweep.factor, "factor from size to size")
        ->check(CLI::Range(1U, 1024U))
        ->capture_default_str();
    app->add_option("--sizes", list, "these sizes instead, separated by commas")->delimiter(',');
    app->add_option("-n,--iters", sweep.iterations, "timed calls per size")
        ->check(CLI::Range(1U, 1'000'000U))
        ->capture_default_str();
    app->add_option("-w,--warmup", sweep.warmup, "calls before them")
        ->check(CLI::Range(0U, 1'000'000U))
        ->capture_default_str();
    app->add_flag("-c,--check", sweep.check,
                  "compare every element of the result with the exact sum (#wrong)");
    app->add_option("--json", json, "also write the results to this file");
  }

  void finish() {
    sweep.begin = size_of("-b", begin);
    sweep.end = size_of("-e", end);
    if (!parse_type(type, &sweep.type)) {
      throw CLI::ValidationError("--type", type + ": known are f32, f16, bf16, f64, i32, i64, u8");
    }
    for (const std::string& text : list) sweep.list.push_back(size_of("--sizes", text));
    if (!list.empty()) {
      sweep.begin = *std::min_element(sweep.list.begin(), sweep.list.end());
      sweep.end = *std::max_element(sweep.list.begin(), sweep.list.end());
    }
    if (sweep.begin > sweep.end) throw CLI::ValidationError("-b", begin + " is larger than -e " + end);
  }

 private:
  static uint64_t size_of(const char* option, const std::string& text) {
    const uint64_t bytes = parse_size(text);
    if (bytes == 0) throw CLI::ValidationError(option, text + " is not a size: use bytes, or 1K, 25M, 1G");
    return bytes;
  }
};

}  // namespace sluice::bench
