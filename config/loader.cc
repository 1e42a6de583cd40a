#include "config/loader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "base/unique_fd.h"
#include "config/units.h"

namespace sluice::config {
namespace {

constexpr size_t kMaxPeerGroups = 256;
constexpr size_t kMaxPeerNodes = 1024;   // as the protocol (wire::kMaxNodes)
constexpr size_t kMaxProblems = 50;      // enough to work on; a binary file would give one per byte
constexpr size_t kMaxListElements = 64;  // of one text list

std::string place(const std::string& file, const YAML::Mark& mark, bool column) {
  if (mark.is_null() || mark.line < 0) return file;
  return column ? fmt::format("{}:{}:{}", file, mark.line + 1, mark.column + 1)
                : fmt::format("{}:{}", file, mark.line + 1);
}

YAML::Mark nowhere() { return YAML::Mark::null_mark(); }

// What was found, for "expected X, found Y".
const char* describe(const YAML::Node& node) {
  switch (node.Type()) {
    case YAML::NodeType::Scalar:
      return "a single value";
    case YAML::NodeType::Sequence:
      return "a list";
    case YAML::NodeType::Map:
      return "a mapping";
    default:
      return "nothing";
  }
}

// Longer values are cut in messages: they may be anything.
std::string quoted(const std::string& text) {
  std::string shown;
  for (const char c : text.substr(0, 60)) shown += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return fmt::format("'{}{}'", shown, text.size() > 60 ? "..." : "");
}

// Where a document ends and another begins; YAML::LoadAll would tell, but never returns from some broken texts ("]").
class DocumentStart : public YAML::EventHandler {
 public:
  std::optional<YAML::Mark> mark;
  void OnDocumentStart(const YAML::Mark& start) override { mark = start; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
  }
  void OnMapEnd() override {}
};

std::optional<YAML::Mark> second_document(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  DocumentStart first, second;
  if (!parser.HandleNextDocument(first) || !parser.HandleNextDocument(second)) return std::nullopt;
  return second.mark;
}

// Reads texts one after another into one Loaded.
class Reader {
 public:
  explicit Reader(Loaded* loaded) : loaded_(loaded) {
    loaded_->config = defaults();
    loaded_->origins.assign(keys().size(), "default");
  }

  void read_text(const std::string& name, const std::string& text) {
    file_ = name;
    try {
      const YAML::Node root = YAML::Load(text);
      if (const auto mark = second_document(text)) {
        add(*mark, "something follows the end of the document: a second one ('---') or a stray bracket");
        return;
      }
      if (root.IsNull()) return;
      if (!root.IsMap()) {
        add(root.Mark(), fmt::format("expected sections and keys, found {}", describe(root)));
        return;
      }
      read_section(root, "");
    } catch (const YAML::Exception& error) {
      add(error.mark, fmt::format("not YAML: {}", error.msg));
    } catch (const std::exception& error) {
      loaded_->problems.push_back({file_, fmt::format("not YAML: {}", error.what())});
    }
  }

  void read_override(const std::string& assignment) {
    file_ = "--set";
    const size_t equals = assignment.find('=');
    const std::string name = assignment.substr(0, equals);
    const Key* key = find_key(name);
    if (equals == std::string::npos || key == nullptr || std::holds_alternative<std::monostate>(key->field)) {
      const std::string meant = suggestion("", name);
      add(nowhere(),
          fmt::format("{}: expected KEY=VALUE with a key of the configuration{}", quoted(assignment), meant));
      return;
    }
    try {
      // A list is written as in YAML: transport.bind=[eth1, auto].
      const std::string value = assignment.substr(equals + 1);
      if (key->kind == Kind::kTextList && value.starts_with('[')) {
        read_leaf(*key, YAML::Load(value), nowhere());
      } else {
        store(*key, nowhere(), set_value(*key, value, &loaded_->config));
      }
    } catch (const YAML::Exception& error) {
      add(nowhere(), fmt::format("{}: not YAML: {}", name, error.msg));
    }
  }

  void check_whole() {
    check_peers();
    for (const CrossProblem& problem : cross_check(loaded_->config)) {
      const std::string& origin = origin_of(problem.key);
      loaded_->problems.push_back({origin, fmt::format("{}: {}", problem.key, problem.what)});
    }
  }

 private:
  void add(const YAML::Mark& mark, std::string what) {
    if (loaded_->problems.size() < kMaxProblems)
      loaded_->problems.push_back({place(file_, mark, true), std::move(what)});
  }

  std::string& origin_of(std::string_view name) {
    const auto all = keys();
    const Key* key = find_key(name);
    return loaded_->origins[static_cast<size_t>(key - all.data())];
  }

  // "; did you mean 'x'?" for a name under `prefix` ("" or "transport.").
  static std::string suggestion(const std::string& prefix, const std::string& name) {
    std::set<std::string> siblings;
    std::vector<std::string> full;
    for (const Key& key : keys()) {
      const std::string_view whole = key.name;
      full.emplace_back(whole);
      if (const size_t dot = whole.rfind('.'); dot != std::string_view::npos)
        full.emplace_back(whole.substr(0, dot));  // its section
      if (whole.starts_with(prefix)) {
        const std::string_view rest = whole.substr(prefix.size());
        siblings.emplace(rest.substr(0, rest.find_first_of(".[")));
      }
    }
    const std::vector<std::string> names(siblings.begin(), siblings.end());
    if (const std::string meant = nearest(name, names); !meant.empty())
      return fmt::format("; did you mean '{}'?", meant);
    // The right name in the wrong section.
    for (const std::string& candidate : full) {
      if (candidate.ends_with("." + name)) return fmt::format("; did you mean '{}'?", candidate);
    }
    if (const std::string meant = nearest(name, full); !meant.empty())
      return fmt::format("; did you mean '{}'?", meant);
    return fmt::format("; known here: {}", fmt::join(names, ", "));
  }

  static bool is_section(const std::string& name) {
    return std::any_of(keys().begin(), keys().end(),
                       [&](const Key& key) { return key.name.starts_with(name + "."); });
  }

  void read_section(const YAML::Node& map, const std::string& prefix) {
    std::set<std::string> seen;
    for (const auto& entry : map) {
      if (!entry.first.IsScalar()) {
        add(entry.first.Mark(), "a key must be a single word");
        continue;
      }
      const std::string name = entry.first.Scalar();
      const std::string full = prefix + name;
      if (!seen.insert(name).second) {
        add(entry.first.Mark(), fmt::format("{}: given twice in one file", full));
        continue;
      }
      const Key* key = find_key(full);
      if (key != nullptr) {
        if (key->kind == Kind::kPeers) {
          read_peers(entry.second);
        } else {
          // What is not there has no place of its own.
          read_leaf(*key, entry.second, entry.second.IsNull() ? entry.first.Mark() : entry.second.Mark());
        }
      } else if (is_section(full)) {
        if (entry.second.IsMap()) {
          read_section(entry.second, full + ".");
        } else if (!entry.second.IsNull()) {  // a section whose keys are all commented out is empty
          add(entry.second.Mark(),
              fmt::format("{}: is a section with keys of its own, found {}", full, describe(entry.second)));
        }
      } else {
        const std::string shown = quoted(name);
        add(entry.first.Mark(), fmt::format("{}{}: no such key{}", prefix, shown, suggestion(prefix, name)));
      }
    }
  }

  void read_leaf(const Key& key, const YAML::Node& value, const YAML::Mark& mark) {
    if (value.IsScalar()) {
      store(key, mark, set_value(key, value.Scalar(), &loaded_->config));
    } else if (value.IsSequence() && key.kind == Kind::kTextList && value.size() <= kMaxListElements) {
      std::vector<std::string> texts;
      for (const auto& element : value) {
        if (!element.IsScalar()) {
          add(element.Mark(),
              fmt::format("{}: expected {}, found {}", key.name, allowed(key), describe(element)));
          return;
        }
        texts.push_back(element.Scalar());
      }
      store(key, mark, set_list(key, texts, &loaded_->config));
    } else {
      add(mark, fmt::format("{}: expected {}, found {}", key.name, allowed(key), describe(value)));
    }
  }

  void store(const Key& key, const YAML::Mark& mark, const Result<void>& stored) {
    if (!stored.ok()) {
      add(mark, fmt::format("{}: {}", key.name, stored.error().message));
      return;
    }
    origin_of(key.name) = place(file_, mark, false);
  }

  void read_peers(const YAML::Node& list) {
    if (list.IsNull()) return;
    if (!list.IsSequence()) {
      add(list.Mark(), fmt::format("peers: expected a list, found {}", describe(list)));
      return;
    }
    for (const auto& entry : list) {
      if (loaded_->config.peers.size() >= kMaxPeerGroups) {
        add(entry.Mark(), fmt::format("peers: more than {} entries", kMaxPeerGroups));
        return;
      }
      PeerGroup group;
      group.where = place(file_, entry.Mark(), true);
      if (read_fields(entry, "peers[].",
                      {{"jobs", [&](const YAML::Node& node) { read_jobs(node, &group); }},
                       {"nodes", [&](const YAML::Node& node) { read_nodes(node, &group); }}})) {
        loaded_->config.peers.push_back(std::move(group));
      }
    }
    origin_of("peers") = place(file_, list.Mark(), false);
  }

  using FieldReader = std::function<void(const YAML::Node&)>;
  bool read_fields(const YAML::Node& map, const std::string& prefix,
                   const std::map<std::string, FieldReader>& fields) {
    if (!map.IsMap()) {
      add(map.Mark(), fmt::format("{}: expected a mapping, found {}", prefix.substr(0, prefix.size() - 1),
                                  describe(map)));
      return false;
    }
    for (const auto& entry : map) {
      const std::string name = entry.first.IsScalar() ? entry.first.Scalar() : "";
      const auto field = fields.find(name);
      if (field == fields.end()) {
        add(entry.first.Mark(),
            fmt::format("{}{}: no such key{}", prefix, quoted(name), suggestion(prefix, name)));
      } else {
        field->second(entry.second);
      }
    }
    return true;
  }

  void read_jobs(const YAML::Node& node, PeerGroup* group) {
    if (node.IsScalar()) {
      group->jobs = {node.Scalar()};
    } else if (node.IsSequence() && node.size() <= kMaxListElements) {
      for (const auto& name : node) {
        if (name.IsScalar()) group->jobs.push_back(name.Scalar());
        if (!name.IsScalar()) add(name.Mark(), "peers[].jobs: expected names of jobs");
      }
    } else {
      add(node.Mark(),
          fmt::format("peers[].jobs: expected a name or a list of names, found {}", describe(node)));
    }
    for (const std::string& name : group->jobs) {
      const bool printable = std::all_of(name.begin(), name.end(),
                                         [](unsigned char c) { return c > 0x20 && c < 0x7f && c != '/'; });
      if (name.empty() || name.size() > 63 || !printable) {
        add(node.Mark(),
            fmt::format("peers[].jobs: {} is not 1-63 printable characters without space or slash",
                        quoted(name)));
      }
    }
  }

  void read_nodes(const YAML::Node& list, PeerGroup* group) {
    if (!list.IsSequence()) {
      add(list.Mark(), fmt::format("peers[].nodes: expected a list, found {}", describe(list)));
      return;
    }
    for (const auto& entry : list) {
      if (group->nodes.size() >= kMaxPeerNodes) {
        add(entry.Mark(), fmt::format("peers[].nodes: more than {} nodes", kMaxPeerNodes));
        return;
      }
      PeerGroup::Node node;
      node.where = place(file_, entry.Mark(), true);
      const auto read_address = [&](const YAML::Node& value) {
        node.address = value.IsScalar() ? value.Scalar() : "";
      };
      const auto read_ranks = [&](const YAML::Node& value) {
        const auto count = parse_count(value.IsScalar() ? value.Scalar() : "");
        if (!count || *count < 1 || *count > 1024) {
          add(value.Mark(), "peers[].nodes[].ranks: expected 1 to 1024");
        } else {
          node.ranks = static_cast<uint32_t>(*count);
        }
      };
      if (read_fields(entry, "peers[].nodes[].", {{"address", read_address}, {"ranks", read_ranks}})) {
        group->nodes.push_back(std::move(node));
      }
    }
  }

  void check_peers() {
    std::map<std::string, std::string> job_place;
    for (const PeerGroup& group : loaded_->config.peers) {
      if (group.jobs.empty())
        loaded_->problems.push_back({group.where, "peers[].jobs: missing; \"*\" means every job"});
      if (group.nodes.empty())
        loaded_->problems.push_back({group.where, "peers[].nodes: missing: name all nodes of the job"});
      for (const std::string& job : group.jobs) {
        const auto [first, inserted] = job_place.emplace(job, group.where);
        if (!inserted) {
          loaded_->problems.push_back(
              {group.where, fmt::format("peers[].jobs: '{}' is listed at {} already", job, first->second)});
        }
      }
      std::map<std::string, std::string> node_place;
      for (const PeerGroup::Node& node : group.nodes) {
        check_address(node);
        const auto [first, inserted] = node_place.emplace(node.address, node.where);
        if (!inserted) {
          loaded_->problems.push_back(
              {node.where, fmt::format("peers[].nodes: '{}' is listed at {} already; give it more "
                                       "`ranks` instead",
                                       node.address, first->second)});
        }
      }
    }
  }

  // Only the form: the daemon parses it once more when a job joins.
  void check_address(const PeerGroup::Node& node) {
    const std::string& text = node.address;
    const size_t colon = text.rfind(':');
    const auto port = colon == std::string::npos ? Result<uint64_t>(Error{EINVAL, ""})
                                                 : parse_count(text.substr(colon + 1));
    const std::string host = text.substr(0, colon == std::string::npos ? 0 : colon);
    const bool numeric =
        !host.empty() && (host.front() == '[' ? host.back() == ']' && host.size() > 2
                                              : host.find_first_not_of("0123456789.") == std::string::npos);
    if (!port || *port < 1 || *port > 65'535 || !numeric || text.size() > 63) {
      loaded_->problems.push_back(
          {node.where,
           fmt::format(
               "peers[].nodes[].address: {} is not a numeric address and port such as 10.0.0.7:9470 or "
               "[fd00::7]:9470; names are not looked up",
               quoted(text))});
    }
  }

  Loaded* loaded_;
  std::string file_;
};

Result<std::string> read_file(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!fd) return Error{errno, fmt::format("cannot open: {}", std::strerror(errno))};
  std::string text;
  std::string part(64 * 1024, '\0');
  while (true) {
    const ssize_t got = ::read(fd.get(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Error{errno, fmt::format("cannot read: {}", std::strerror(errno))};
    if (got == 0) return text;
    text.append(part, 0, static_cast<size_t>(got));
    if (text.size() > kMaxFileBytes)
      return Error{EFBIG, fmt::format("is larger than {}", format_bytes(kMaxFileBytes))};
  }
}

}  // namespace

std::string to_string(const Problem& problem) { return fmt::format("{}: {}", problem.where, problem.what); }

std::string Loaded::problems_text() const {
  std::string text;
  for (const Problem& problem : problems) text += to_string(problem) + "\n";
  return text;
}

Loaded load_texts(const std::vector<SourceText>& files, const std::vector<std::string>& overrides) {
  Loaded loaded;
  Reader reader(&loaded);
  for (const SourceText& file : files) {
    loaded.files.push_back(file.name);
    reader.read_text(file.name, file.text);
  }
  for (const std::string& assignment : overrides) reader.read_override(assignment);
  reader.check_whole();
  return loaded;
}

Loaded load(const LoadOptions& options) {
  std::vector<SourceText> texts;
  std::vector<Problem> unreadable;
  std::vector<std::string> paths;
  if (!options.path.empty()) {
    paths.push_back(options.path);
    const std::filesystem::path folder = std::filesystem::path(options.path).parent_path() / "conf.d";
    std::vector<std::string> drop_ins;
    std::error_code ignored;  // no conf.d is the normal case
    for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
      if (entry.path().extension() == ".yaml") drop_ins.push_back(entry.path().string());
    }
    std::sort(drop_ins.begin(), drop_ins.end());
    paths.insert(paths.end(), drop_ins.begin(), drop_ins.end());
  }
  for (const std::string& path : paths) {
    auto text = read_file(path);
    if (text) {
      texts.push_back({path, std::move(*text)});
    } else {
      unreadable.push_back({path, text.error().message});
    }
  }
  Loaded loaded = load_texts(texts, options.overrides);
  loaded.problems.insert(loaded.problems.begin(), unreadable.begin(), unreadable.end());
  return loaded;
}

}  // namespace sluice::config
