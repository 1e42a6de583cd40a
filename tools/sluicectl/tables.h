// Answers of the daemon as text for people: columns have a fixed order and a heading, numbers have units. Pure functions.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace sluice::ctl {

struct Style {
  bool color = false;
};

std::string status_text(const nlohmann::json& answer, const Style& style);
std::string jobs_text(const nlohmann::json& answer, const Style& style);
std::string peers_text(const nlohmann::json& answer, const Style& style);
std::string trace_text(const nlohmann::json& answer, const Style& style);
std::string config_text(const nlohmann::json& answer, const Style& style);
// The trace in the format that chrome://tracing and Perfetto read.
nlohmann::json chrome_trace(const nlohmann::json& answer);

// Rows below headings; every column as wide as its widest cell, the first column of text to the left, numbers to the
// right. No trailing spaces.
std::string table(const std::vector<std::string>& headings,
                  const std::vector<std::vector<std::string>>& rows);

}  // namespace sluice::ctl
