// A configuration file: any bytes are either a good configuration or a list of problems with their places, and what
// is printed of a good one reads back to the same.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "base/assert.h"
#include "config/loader.h"
#include "config/print.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sluice::config;
  const Loaded loaded = load_texts({{"f.yaml", std::string(reinterpret_cast<const char*>(data), size)}});
  SLUICE_ASSERT(loaded.origins.size() == keys().size());
  for (const Problem& problem : loaded.problems)
    SLUICE_ASSERT(!problem.what.empty() && !problem.where.empty());
  if (!loaded.ok()) return 0;
  const std::string printed = print_config(loaded);
  const Loaded again = load_texts({{"p.yaml", printed}});
  if (!again.ok()) std::fprintf(stderr, "%s%s", again.problems_text().c_str(), printed.c_str());
  SLUICE_ASSERT(again.ok());
  for (const Key& key : keys())
    SLUICE_ASSERT(format_value(key, loaded.config) == format_value(key, again.config));
  return 0;
}
