#include "config/print.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <string_view>

namespace sluice::config {
namespace {

constexpr size_t kWidth = 110;

// "transport.faults" of "transport.faults.loss"; empty at the top.
std::string_view section_of(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}

std::string_view leaf_of(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

// Columns before the keys of a section.
size_t indent_of(std::string_view section) {
  return section.empty() ? 0 : 2 * (1 + static_cast<size_t>(std::count(section.begin(), section.end(), '.')));
}

// The lines that open `section` after `before`, each part that is not open yet with `start` in front.
std::string open_section(std::string_view before, std::string_view section, std::string_view start) {
  std::string out;
  for (size_t end = 0; end != std::string_view::npos && !section.empty();) {
    end = section.find('.', end == 0 ? 0 : end + 1);
    const std::string_view part = section.substr(0, end);
    const bool open =
        before.starts_with(part) && (before.size() == part.size() || before[part.size()] == '.');
    if (open) continue;
    out += fmt::format("{}{}{}:\n", start, std::string(indent_of(section_of(part)), ' '), leaf_of(part));
  }
  return out;
}

std::string quoted(const std::string& value) {
  YAML::Emitter out;
  out << YAML::DoubleQuoted << value;
  return out.c_str();
}

// A scalar with quotes where YAML needs them.
std::string scalar(const std::string& value) {
  const bool plain =
      !value.empty() &&
      value.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789./_:+-") ==
          std::string::npos &&
      value.front() != '-' && value.back() != ':' && !YAML::IsNullString(value);
  return plain ? value : quoted(value);
}

std::string yaml_value(const Key& key, const Config& config) {
  if (key.kind != Kind::kTextList) return scalar(format_value(key, config));
  const auto& list =
      (*std::get_if<std::vector<std::string>& (*)(Config&)>(&key.field))(const_cast<Config&>(config));
  if (list.size() == 1) return scalar(list[0]);
  std::vector<std::string> parts;
  for (const std::string& element : list) parts.push_back(scalar(element));
  return fmt::format("[{}]", fmt::join(parts, ", "));
}

const char* source_text(Source source) {
  switch (source) {
    case Source::kProtocol:
      return "protocol";
    case Source::kMeasured:
      return "measured";
    case Source::kJudgement:
      return "judgement";
  }
  return "";
}

// Breaks `text` into comment lines of at most kWidth columns.
std::string comment(std::string_view text, size_t indent) {
  const std::string start = std::string(indent, ' ') + "#";
  std::string out;
  std::string line = start;
  while (!text.empty()) {
    const size_t space = text.find(' ');
    const std::string_view word = text.substr(0, space);
    if (line.size() + 1 + word.size() > kWidth) {
      out += line + "\n";
      line = start;
    }
    line += fmt::format(" {}", word);
    text = space == std::string_view::npos ? std::string_view() : text.substr(space + 1);
  }
  return out + line + "\n";
}

std::string annotation(const Key& key) {
  return fmt::format("Allowed: {}. Default from: {}. {}", allowed(key), source_text(key.source),
                     key.reload ? "Reloaded by SIGHUP." : "Needs a restart.");
}

constexpr const char* kPeersExample =
    "#peers:\n"
    "#  - jobs: [train-a, train-b]\n"
    "#    nodes:\n"
    "#      - { address: 10.0.0.1:9470, ranks: 2 }\n"
    "#      - { address: 10.0.0.2:9470, ranks: 2 }\n";

}  // namespace

std::string print_config(const Loaded& loaded) {
  std::string out;
  std::string_view section;
  size_t index = 0;
  for (const Key& key : keys()) {
    const std::string& origin = loaded.origins[index++];
    if (key.kind == Kind::kPeers) continue;
    const std::string_view own_section = section_of(key.name);
    out += open_section(section, own_section, "");
    section = own_section;
    const std::string entry = fmt::format("{}{}: {}", std::string(indent_of(own_section), ' '),
                                          leaf_of(key.name), yaml_value(key, loaded.config));
    out += fmt::format("{:<48} # {}\n", entry, origin);
  }
  if (loaded.config.peers.empty()) return out;
  out += "peers:\n";
  for (const PeerGroup& group : loaded.config.peers) {
    std::vector<std::string> jobs;
    for (const std::string& job : group.jobs) jobs.push_back(quoted(job));
    out += fmt::format("{:<48} # {}\n    nodes:\n", fmt::format("  - jobs: [{}]", fmt::join(jobs, ", ")),
                       group.where);
    for (const PeerGroup::Node& node : group.nodes) {
      out += fmt::format("      - {{ address: {}, ranks: {} }}\n", quoted(node.address), node.ranks);
    }
  }
  return out;
}

std::string reference_yaml() {
  std::string out =
      "# Configuration of sluiced. Every key stands here with its default; take the '#' away to change one.\n"
      "#\n"
      "# Files beside this one in conf.d/*.yaml are read after it, in the order of their names; a later "
      "value replaces\n"
      "# an earlier one. `sluiced --check-config` finds mistakes, `sluiced --print-config` shows what is in "
      "force and\n"
      "# where it is from. Times need a unit (20us, 200ms, 1s), sizes may have one (512KiB, 1GiB).\n"
      "#\n"
      "# \"Default from\": protocol = docs/protocol.md; measured = a measurement that the text names; "
      "judgement = chosen.\n";
  std::string_view section;
  const Config standard = defaults();
  for (const Key& key : keys()) {
    const std::string_view own_section = section_of(key.name);
    if (key.kind == Kind::kPeers) {
      if (key.name == "peers") {
        out += "\n" + comment(key.help, 0);
      } else {
        out += comment(fmt::format("{}: {}", leaf_of(key.name), key.help), 0);
        if (key.name == "peers[].nodes[].ranks") out += comment("Reloaded by SIGHUP.", 0) + kPeersExample;
      }
      continue;
    }
    if (own_section != section) {
      out += open_section(section, own_section, "\n");
      section = own_section;
    } else {
      out += "\n";
    }
    if (own_section.empty() && !out.ends_with("\n\n")) out += "\n";
    const size_t indent = indent_of(own_section);
    out += comment(key.help, indent) + comment(annotation(key), indent);
    out += fmt::format("{}#{}: {}\n", std::string(indent, ' '), leaf_of(key.name), yaml_value(key, standard));
  }
  return out;
}

}  // namespace sluice::config
