// sluicectl: looks into a running sluiced. `sluicectl --help` is its manual.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <functional>
#include <string>

#include "base/ipc/layout.h"
#include "tools/sluicectl/daemon_client.h"
#include "tools/sluicectl/tables.h"
#include "transport/wire/packet.h"

namespace sluice::ctl {
namespace {

constexpr const char* kDefaultSocket = "/run/sluice/sluice.sock";

struct Options {
  std::string socket;
  std::string job;
  uint32_t last = 256;
  bool json = false, no_color = false, chrome = false;
};

std::string default_socket() {
  const char* from_environment = std::getenv("SLUICE_SOCKET");
  return from_environment != nullptr && *from_environment != '\0' ? from_environment : kDefaultSocket;
}

// https://no-color.org: any value that is not empty turns colour off.
bool want_color(const Options& options) {
  const char* no_color = std::getenv("NO_COLOR");
  return !options.no_color && (no_color == nullptr || *no_color == '\0') && ::isatty(STDOUT_FILENO) != 0;
}

using Formatter = std::function<std::string(const nlohmann::json&, const Style&)>;

int run(const Options& options, const std::string& what, const Formatter& format) {
  nlohmann::json request = {{"request", what}};
  if (!options.job.empty()) request["job"] = options.job;
  if (what == "trace") request["last"] = options.last;
  const auto answer = ask(options.socket, request);
  if (!answer) {
    fmt::print(stderr, "sluicectl: {}\n", answer.error().message);
    return answer.error().code;
  }
  if (options.chrome) {
    fmt::print("{}\n", chrome_trace(*answer).dump());
  } else if (options.json) {
    fmt::print("{}\n", answer->dump(2));
  } else {
    fmt::print("{}", format(*answer, {want_color(options)}));
  }
  return std::fflush(stdout) == 0 ? kExitOk : kExitFailure;
}

}  // namespace
}  // namespace sluice::ctl

int main(int argc, char** argv) {
  using namespace sluice::ctl;
  Options options;
  options.socket = default_socket();
  CLI::App app("sluicectl: looks into a running sluiced.");
  app.add_option("-s,--socket", options.socket,
                 "Socket of the daemon; default: $SLUICE_SOCKET, else /run/sluice/sluice.sock")
      ->type_name("PATH");
  app.add_flag("--no-color", options.no_color,
               "No colours; also by NO_COLOR, and when the output is not a terminal");
  app.set_version_flag("--version", fmt::format("sluicectl {} (protocol {}, ABI {})", SLUICE_VERSION,
                                                sluice::wire::kVersion, sluice::ipc::kAbiVersion));
  app.require_subcommand(1);
  app.fallthrough();
  app.footer(
      "Exit codes: 0 ok, 1 the daemon reports an error, 2 wrong command line, 3 no daemon at the socket.");
  std::function<int()> action;
  const auto add = [&](const char* name, const char* help, Formatter format) {
    CLI::App* command = app.add_subcommand(name, help);
    command->add_flag("--json", options.json, "The whole answer as JSON; names are stable");
    command->callback([&options, &action, name, format] {
      action = [&options, name, format] { return run(options, name, format); };
    });
    return command;
  };
  add("status", "Version, address, clients, jobs, rounds and what is wrong, on one screen", status_text);
  CLI::App* jobs = add("jobs", "Jobs of this node", jobs_text);
  CLI::App* peers = add(
      "peers", "Other nodes of each job: state, round-trip time, bytes, repairs, late blocks", peers_text);
  CLI::App* trace =
      add("trace", "The last collective calls: when each step happened, counted from the submit", trace_text);
  add("config", "Every key of the configuration: value in force, where it is from, reload or restart",
      config_text);
  for (CLI::App* command : {jobs, peers, trace})
    command->add_option("--job", options.job, "Only this job")->type_name("NAME");
  trace->add_option("--last", options.last, "How many of each lane, at most 256")
      ->type_name("N")
      ->check(CLI::Range(1, 256));
  trace->add_flag("--chrome", options.chrome, "As a file for chrome://tracing or ui.perfetto.dev");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  return action();
}
