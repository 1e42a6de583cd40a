// Reads a configuration: defaults, then the file, then conf.d/*.yaml beside it in the order of their names, then
// overrides from the command line. A later value replaces an earlier one; `peers` lists are appended. Everything that
// is wrong is found in one go, with its place. Nothing that a file can contain ends the process. Any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "config/schema.h"

namespace sluice::config {

// One thing that is wrong. to_string() is what a person reads: "sluice.yaml:3:9: transport.port: 99999 is out of ...".
struct Problem {
  std::string where;  // "file:line:column", "--set", or a file name
  std::string what;
};
std::string to_string(const Problem& problem);

struct Loaded {
  Config config;
  std::vector<std::string> origins;  // one per key of keys(): "default", "file:line", "--set"
  std::vector<std::string> files;    // that were read
  std::vector<Problem> problems;     // empty: the configuration can be used

  bool ok() const { return problems.empty(); }
  std::string problems_text() const;  // one a line
};

struct LoadOptions {
  std::string path;                    // "" : no file, defaults only
  std::vector<std::string> overrides;  // "transport.port=9480"
};
Loaded load(const LoadOptions& options);

// The same from texts; for tests and fuzzing.
struct SourceText {
  std::string name;
  std::string text;
};
Loaded load_texts(const std::vector<SourceText>& files, const std::vector<std::string>& overrides = {});

inline constexpr size_t kMaxFileBytes = 1 << 20;  // a configuration is some KiB; this only bounds a mistake

}  // namespace sluice::config
