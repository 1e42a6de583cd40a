#include "tools/sluicectl/tables.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdint>

namespace sluice::ctl {
namespace {

using nlohmann::json;
using Rows = std::vector<std::vector<std::string>>;

uint64_t number(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_number() ? found->get<uint64_t>() : 0;
}

std::string text(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

std::string bytes(uint64_t value) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto scaled = static_cast<double>(value);
  size_t unit = 0;
  while (scaled >= 1024 && unit + 1 < std::size(kUnits)) {
    scaled /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{}B", value) : fmt::format("{:.1f}{}", scaled, kUnits[unit]);
}

std::string micros(int64_t value) {
  if (value < 10'000) return fmt::format("{}us", value);
  if (value < 10'000'000) return fmt::format("{:.1f}ms", static_cast<double>(value) / 1e3);
  return fmt::format("{:.1f}s", static_cast<double>(value) / 1e6);
}

std::string age(uint64_t us) {
  const uint64_t s = us / 1'000'000;
  if (s < 60) return fmt::format("{}s", s);
  if (s < 3'600) return fmt::format("{}m{:02}s", s / 60, s % 60);
  if (s < 86'400) return fmt::format("{}h{:02}m", s / 3'600, s % 3'600 / 60);
  return fmt::format("{}d{:02}h", s / 86'400, s % 86'400 / 3'600);
}

// "3 OK, 1 OP_TIMEOUT"; "none" when nothing has ended.
std::string ops(const json& counts) {
  std::vector<std::string> parts;
  if (counts.is_object()) {
    for (const auto& [status, count] : counts.items())
      parts.push_back(fmt::format("{} {}", count.dump(), status));
  }
  return parts.empty() ? "none" : fmt::format("{}", fmt::join(parts, ", "));
}

uint64_t ended(const json& job, bool ok) {
  uint64_t sum = 0;
  const auto counts = job.find("ops");
  if (counts == job.end() || !counts->is_object()) return 0;
  for (const auto& [status, count] : counts->items()) {
    if ((status == "OK") == ok) sum += count.get<uint64_t>();
  }
  return sum;
}

std::string here(const json& job) {
  std::vector<uint64_t> ranks;
  for (const json& client : job.value("clients", json::array())) ranks.push_back(number(client, "rank"));
  std::sort(ranks.begin(), ranks.end());
  return ranks.empty() ? "-" : fmt::format("{}", fmt::join(ranks, ","));
}

std::string paint(const Style& style, const char* code, const std::string& what) {
  return style.color ? fmt::format("\033[{}m{}\033[0m", code, what) : what;
}

std::string jobs_table(const json& jobs) {
  Rows rows;
  for (const json& job : jobs) {
    rows.push_back({text(job, "name"), job.value("failed", false) ? "failed" : text(job, "phase"),
                    fmt::format("{}", number(job, "nodes")), fmt::format("{}", number(job, "ranks")),
                    here(job), fmt::format("{}", number(job, "open_ops")),
                    fmt::format("{}", ended(job, true)), fmt::format("{}", ended(job, false)),
                    bytes(number(job, "bytes_sent")), bytes(number(job, "bytes_received")),
                    fmt::format("{}", number(job, "blocks_repaired")),
                    fmt::format("{}", number(job, "blocks_skipped"))});
  }
  return table({"JOB", "PHASE", "NODES", "RANKS", "HERE", "OPEN", "OK", "NOT_OK", "SENT", "RECEIVED",
                "REPAIRED", "SKIPPED"},
               rows);
}

// Deadlines and what was not counted in time, where there is something to say.
std::string bounded_notes(const json& job) {
  std::string out;
  if (job.value("deadline_adapts", false)) {
    std::vector<std::string> found;
    for (const json& one : job.value("deadlines", json::array())) {
      const uint64_t hard = number(one, "hard_us");
      found.push_back(fmt::format("{} {}", bytes(number(one, "bytes")),
                                  hard == 0 ? fmt::format("warming up ({} ops)", number(one, "samples"))
                                            : micros(static_cast<int64_t>(hard))));
    }
    out += fmt::format("{}: deadline auto, policy {}{}{}\n", text(job, "name"), number(job, "policy"),
                       found.empty() ? "" : ": ", fmt::join(found, ", "));
  }
  const uint64_t carried = number(job, "blocks_carried"), queued = number(job, "contributions_queued"),
                 discarded = number(job, "blocks_discarded"), undecided = number(job, "blocks_undecided"),
                 filled = number(job, "blocks_filled"), corrected = number(job, "blocks_corrected");
  if (carried + queued + discarded + undecided != 0) {
    out += fmt::format(
        "{}: carry-over: {} blocks carried ({} owed now), {} contributions queued ({} now), {} blocks "
        "discarded, {} "
        "undecided\n",
        text(job, "name"), carried, number(job, "carry_blocks"), queued,
        number(job, "contributions_queued_now"), discarded, undecided);
  }
  if (filled != 0) out += fmt::format("{}: {} blocks of results filled by rule\n", text(job, "name"), filled);
  if (corrected != 0) {
    out += fmt::format("{}: {} blocks of results corrected by holes of earlier ones\n", text(job, "name"),
                       corrected);
  }
  return out;
}

std::string jobs_notes(const json& jobs) {
  std::string out;
  for (const json& job : jobs) {
    if (const std::string why = text(job, "failure_text"); !why.empty())
      out += fmt::format("{}: {}\n", text(job, "name"), why);
    if (const std::string who = text(job, "waiting_for"); !who.empty()) out += fmt::format("{}\n", who);
    out += bounded_notes(job);
  }
  return out;
}

}  // namespace

std::string table(const std::vector<std::string>& headings, const Rows& rows) {
  std::vector<size_t> widths;
  std::vector<bool> left;
  for (size_t column = 0; column < headings.size(); ++column) {
    size_t width = headings[column].size();
    bool numeric = !rows.empty();
    for (const auto& row : rows) {
      width = std::max(width, row[column].size());
      numeric &= !row[column].empty() &&
                 (std::isdigit(static_cast<unsigned char>(row[column][0])) != 0 || row[column] == "-");
    }
    widths.push_back(width);
    left.push_back(column == 0 || !numeric);
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string out;
    for (size_t column = 0; column < cells.size(); ++column) {
      if (column > 0) out += "  ";
      out += left[column] ? fmt::format("{:<{}}", cells[column], widths[column])
                          : fmt::format("{:>{}}", cells[column], widths[column]);
    }
    out.erase(out.find_last_not_of(' ') + 1);
    return out + "\n";
  };
  std::string out = line(headings);
  for (const auto& row : rows) out += line(row);
  return out;
}

std::string status_text(const json& answer, const Style& style) {
  std::string out = fmt::format("sluiced {} on node {} (protocol {}, ABI {}), up {}\n",
                                text(answer, "version"), text(answer, "node"), number(answer, "protocol"),
                                number(answer, "abi"), age(number(answer, "up_us")));
  out += fmt::format(
      "address   {} {} ({}), {} lane(s), sealing {}, receive buffer {}, datagrams up to {} bytes\n",
      text(answer, "port"), text(answer, "endpoint"), text(answer, "interface"), number(answer, "lanes"),
      text(answer, "sealing"), bytes(number(answer, "receive_buffer_bytes")),
      number(answer, "largest_datagram_bytes"));
  if (const std::string why = text(answer, "why_interface"); !why.empty())
    out += fmt::format("          {}\n", why);
  if (const std::string note = text(answer, "port_note"); !note.empty())
    out += fmt::format("          {}\n", note);
  out += fmt::format("clients   {} connected, {} lost, {} refused, {} of arenas\n", number(answer, "clients"),
                     number(answer, "clients_lost"), number(answer, "clients_refused"),
                     bytes(number(answer, "arena_bytes")));
  out += fmt::format("rounds    {}\n", ops(answer.value("ops", json::object())));
  const json jobs = answer.value("jobs", json::array());
  if (!jobs.empty()) out += "\n" + jobs_table(jobs) + "\n" + jobs_notes(jobs);
  const json health = answer.value("health", json::array());
  if (health.empty()) return out + "health    " + paint(style, "32", "ok") + "\n";
  for (const json& line : health)
    out += "health    " + paint(style, "31", line.is_string() ? line.get<std::string>() : line.dump()) + "\n";
  return out;
}

std::string jobs_text(const json& answer, const Style&) {
  const json jobs = answer.value("jobs", json::array());
  return jobs_table(jobs) + jobs_notes(jobs);
}

std::string peers_text(const json& answer, const Style& style) {
  Rows rows;
  bool bad = false;
  for (const json& peer : answer.value("peers", json::array())) {
    const json ranks = peer.value("ranks", json::array());
    const json heard = peer.value("last_heard_us", json());
    rows.push_back(
        {text(peer, "job"), fmt::format("{}", number(peer, "node")), text(peer, "name"),
         text(peer, "address"),
         ranks.empty() ? "-" : fmt::format("{}", fmt::join(ranks.get<std::vector<uint64_t>>(), ",")),
         text(peer, "state"), heard.is_number() ? micros(heard.get<int64_t>()) : "-",
         micros(static_cast<int64_t>(number(peer, "rtt_us"))), bytes(number(peer, "bytes_sent")),
         bytes(number(peer, "bytes_received")), fmt::format("{}", number(peer, "blocks_repaired")),
         fmt::format("{}", number(peer, "blocks_late")),
         micros(static_cast<int64_t>(number(peer, "waited_us")))});
    bad |= text(peer, "state") == "lost" || text(peer, "state") == "suspect";
  }
  std::string out = table({"JOB", "NODE", "NAME", "ADDRESS", "RANKS", "STATE", "HEARD", "RTT", "SENT",
                           "RECEIVED", "REPAIRED", "LATE", "WAITED_FOR"},
                          rows);
  if (bad)
    out += paint(style, "31", "A suspect peer was silent for 3 ping intervals; a lost one ends its jobs.") +
           "\n";
  return out;
}

std::string trace_text(const json& answer, const Style&) {
  Rows rows;
  for (const json& job : answer.value("trace", json::array())) {
    for (const json& op : job.value("ops", json::array())) {
      const auto submitted = static_cast<int64_t>(number(op, "submitted_us"));
      // Since the submit; "-" for what did not happen on this node.
      const auto since = [&](const char* name) {
        const auto at = static_cast<int64_t>(number(op, name));
        return at == 0 || submitted == 0 ? std::string("-") : micros(std::max<int64_t>(at - submitted, 0));
      };
      rows.push_back({text(job, "job"), fmt::format("{}", number(op, "lane")),
                      fmt::format("{}", number(op, "op_seq")), text(op, "class"), text(op, "status"),
                      bytes(number(op, "bytes")), since("admitted_us"), since("quorum_us"),
                      since("first_push_us"), since("push_sent_us"), since("closed_us"),
                      since("pull_sent_us"), since("result_us"),
                      op.contains("waited_for") && op["waited_for"].is_number()
                          ? fmt::format("node {}", number(op, "waited_for"))
                          : std::string("-")});
    }
  }
  return table({"JOB", "LANE", "OP", "CLASS", "STATUS", "BYTES", "ADMITTED", "QUORUM", "FIRST_PUSH",
                "PUSH_SENT", "CLOSED", "PULL_SENT", "RESULT", "WAITED_FOR"},
               rows);
}

std::string config_text(const json& answer, const Style&) {
  Rows rows;
  for (const json& key : answer.value("keys", json::array())) {
    const std::string value = text(key, "value");
    rows.push_back({text(key, "name"), value.empty() ? "\"\"" : value, text(key, "origin"),
                    key.value("reload", false) ? "reload" : "restart"});
  }
  return table({"KEY", "VALUE", "FROM", "CHANGED_BY"}, rows);
}

json chrome_trace(const json& answer) {
  json events = json::array();
  for (const json& job : answer.value("trace", json::array())) {
    const std::string process = fmt::format("{} node {}", text(job, "job"), number(job, "node"));
    for (const json& op : job.value("ops", json::array())) {
      const auto span = [&](const char* name, const char* from, const char* to, int row) {
        const uint64_t begin = number(op, from), end = number(op, to);
        if (begin == 0 || end < begin) return;
        events.push_back(
            {{"name", fmt::format("{} {}", name, number(op, "op_seq"))},
             {"cat", text(op, "class")},
             {"ph", "X"},
             {"ts", begin},
             {"dur", end - begin},
             {"pid", process},
             {"tid", fmt::format("lane {} {}", number(op, "lane"),
                                 row == 0   ? "op"
                                 : row == 1 ? "push"
                                            : "shard")},
             {"args",
              {{"status", text(op, "status")}, {"tag", text(op, "tag")}, {"bytes", number(op, "bytes")}}}});
      };
      span("op", "submitted_us", "result_us", 0);
      span("push", "first_push_us", "push_sent_us", 1);
      span("close to pulled", "closed_us", "pull_sent_us", 2);
    }
  }
  return {{"traceEvents", events}, {"displayTimeUnit", "ms"}};
}

}  // namespace sluice::ctl
