// sluiced: command line, signals, and the service manager. Everything else is in libraries.
#include <fmt/format.h>
#include <signal.h>
#include <systemd/sd-daemon.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <memory>

#include "base/clock.h"
#include "base/ipc/layout.h"
#include "base/log.h"
#include "config/loader.h"
#include "config/print.h"
#include "daemon/lifecycle/daemon.h"
#include "transport/wire/packet.h"

namespace sluice::daemon {
namespace {

constexpr const char* kDefaultConfig = "/etc/sluice/sluice.yaml";
constexpr Micros kLookEvery = 500'000;  // at the health of the loops, when no watchdog asks for more

struct CommandLine {
  std::string config_path;
  std::vector<std::string> overrides;
  bool check = false, print = false, reference = false;
};

std::shared_ptr<config::Loaded> load(const CommandLine& command) {
  config::LoadOptions options;
  options.path = command.config_path;
  options.overrides = command.overrides;
  // Without a file the defaults are a good configuration; one that was asked for must be there.
  if (options.path.empty() && std::filesystem::exists(kDefaultConfig)) options.path = kDefaultConfig;
  return std::make_shared<config::Loaded>(config::load(options));
}

void configure_log(const config::Config& config) {
  log::configure(static_cast<log::Level>(config.log.level), static_cast<log::Format>(config.log.format));
}

// What systemd wants to hear; nothing happens where there is no systemd.
void notify(const std::string& state) { ::sd_notify(0, state.c_str()); }

int check(const config::Loaded& loaded) {
  std::string problems = loaded.problems_text();
  if (problems.empty()) problems = check_on_this_machine(loaded.config);
  if (problems.empty()) {
    std::string files;
    for (const std::string& file : loaded.files) files += (files.empty() ? "" : ", ") + file;
    fmt::print("{}: ok\n", files.empty() ? "defaults" : files);
    return 0;
  }
  fmt::print(stderr, "{}", problems);
  return kExitConfig;
}

void reload(Daemon* daemon, const CommandLine& command) {
  notify(fmt::format("RELOADING=1\nMONOTONIC_USEC={}", monotonic_micros()));
  const auto loaded = load(command);
  auto done = daemon->reload(loaded);
  if (done) {
    configure_log(loaded->config);
    log::info("configuration reloaded: {}", *done);
  } else {
    log::error("the configuration was NOT reloaded, the old one stays in force: {}", done.error().message);
  }
  notify("READY=1\nSTATUS=" + daemon->status_line());
}

// Waits for signals and feeds the watchdog until it is time to go. Returns why.
std::string serve(Daemon* daemon, const CommandLine& command, const sigset_t& signals) {
  uint64_t watchdog = 0;
  const bool watched = ::sd_watchdog_enabled(0, &watchdog) > 0 && watchdog > 0;
  // Half of what systemd allows (sd_watchdog_enabled(3)).
  const Micros every = watched ? std::min<Micros>(static_cast<Micros>(watchdog / 2), kLookEvery) : kLookEvery;
  bool complained = false;
  std::string status;
  while (true) {
    const timespec timeout{static_cast<time_t>(every / 1'000'000),
                           static_cast<long>(every % 1'000'000) * 1'000};
    const int signal = ::sigtimedwait(&signals, nullptr, &timeout);
    if (signal == SIGTERM || signal == SIGINT)
      return fmt::format("signal {}", signal == SIGTERM ? "TERM" : "INT");
    if (signal == SIGHUP) reload(daemon, command);
    const Health::Verdict health = daemon->health();
    if (health.alive()) {
      if (watched) notify("WATCHDOG=1");
      complained = false;
    } else if (!complained) {
      complained = true;
      for (const std::string& line : health.stuck)
        log::error("{}{}", line, watched ? "; systemd will restart this daemon" : "");
    }
    if (const std::string line = daemon->status_line(); line != status) {
      status = line;
      notify("STATUS=" + status);
    }
  }
}

int run(const CommandLine& command) {
  const auto loaded = load(command);
  if (command.reference) {
    fmt::print("{}", config::reference_yaml());
    return 0;
  }
  if (command.check) return check(*loaded);
  if (!loaded->ok()) {
    fmt::print(stderr, "{}", loaded->problems_text());
    return kExitConfig;
  }
  if (command.print) {
    fmt::print("{}", config::print_config(*loaded));
    return 0;
  }
  configure_log(loaded->config);

  // Blocked before any thread is made, so that this one alone gets them.
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&signals, signal);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);

  auto started = Daemon::start(loaded);
  if (!started) {
    log::error("cannot start: {}", started.error().message);
    notify("STATUS=cannot start: " + started.error().message);
    return started.error().code;
  }
  Daemon& daemon = **started;
  if (loaded->files.empty()) log::info("no {} and no --config: running on defaults", kDefaultConfig);
  log::info("{}", daemon.summary());
  if (!daemon.facts().port_note.empty()) log::warning("{}", daemon.facts().port_note);
  if (daemon.facts().sealing == wire::Sealing::kNone) {
    log::warning("sealing none: whoever can send to {} can change gradients", daemon.facts().endpoint_text);
  }
  notify("READY=1\nSTATUS=" + daemon.status_line());

  const std::string why = serve(&daemon, command, signals);
  log::info("stopping: {}", why);
  notify("STOPPING=1\nSTATUS=stopping: " + why);
  daemon.stop(why);
  log::info("stopped");
  return 0;
}

}  // namespace
}  // namespace sluice::daemon

int main(int argc, char** argv) {
  using namespace sluice::daemon;
  CLI::App app(
      "sluiced: exchanges gradients between the nodes of a training job, outside of the training processes.");
  CommandLine command;
  std::string socket;
  app.add_option("-c,--config", command.config_path,
                 "Configuration file; conf.d/*.yaml beside it is read too")
      ->type_name("FILE");
  app.add_option("--set", command.overrides,
                 "Set one key, e.g. --set transport.port=9480; may be given again")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--socket", socket, "Short for --set socket.path=PATH")->type_name("PATH");
  app.add_flag("--check-config", command.check,
               "Check the configuration and exit: 0, or 78 with file:line:column of each problem");
  app.add_flag("--print-config", command.print,
               "Print every key with its value and where it is from, and exit");
  app.add_flag("--print-reference", command.reference,
               "Print the annotated reference configuration, and exit");
  app.set_version_flag("--version", fmt::format("sluiced {} (protocol {}, ABI {})", kVersion,
                                                sluice::wire::kVersion, sluice::ipc::kAbiVersion));
  app.footer(
      "Signals: TERM and INT stop, HUP reloads the configuration.\n"
      "Exit codes: 0 ended as asked, 1 failure, 2 wrong command line, 78 wrong configuration.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (!socket.empty()) command.overrides.push_back("socket.path=" + socket);
  return run(command);
}
