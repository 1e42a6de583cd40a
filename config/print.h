// Configurations as text. Any thread.
#pragma once

#include <string>

#include "config/loader.h"

namespace sluice::config {

// Every key with its value, as YAML that load() reads back to the same configuration, each with a comment that says
// where the value is from.
std::string print_config(const Loaded& loaded);

// The annotated reference: every key with its default (commented out), unit, range, meaning, the source of the default
// and whether a reload applies it. config/sluice.yaml is this text; a test compares them.
std::string reference_yaml();

}  // namespace sluice::config
