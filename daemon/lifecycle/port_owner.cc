#include "daemon/lifecycle/port_owner.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cctype>
#include <climits>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace sluice::daemon {
namespace {

// Inodes of the sockets that are bound to `port`, from /proc/net/udp and the like: "sl local rem st ... inode".
std::set<std::string> inodes_of(const std::string& protocol, uint16_t port) {
  std::set<std::string> inodes;
  const std::string wanted = fmt::format(":{:04X}", port);
  for (const char* family : {"", "6"}) {
    std::ifstream file("/proc/net/" + protocol + family);
    std::string line;
    std::getline(file, line);  // heading
    while (std::getline(file, line)) {
      std::istringstream fields(line);
      std::string slot, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
      fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >> inode;
      const bool listens = protocol == "udp" || state == "0A";
      if (listens && local.ends_with(wanted)) inodes.insert(fmt::format("socket:[{}]", inode));
    }
  }
  return inodes;
}

}  // namespace

std::string port_owner_text(const std::string& protocol, uint16_t port) {
  const std::set<std::string> inodes = inodes_of(protocol, port);
  if (inodes.empty()) return "";
  std::error_code failed;
  for (const auto& process : std::filesystem::directory_iterator("/proc", failed)) {
    const std::string pid = process.path().filename();
    if (pid.empty() || std::isdigit(static_cast<unsigned char>(pid[0])) == 0) continue;
    std::error_code hidden;  // another user's, or gone meanwhile
    for (auto entry = std::filesystem::directory_iterator(process.path() / "fd", hidden);
         !hidden && entry != std::filesystem::directory_iterator(); entry.increment(hidden)) {
      char target[PATH_MAX];
      const ssize_t length = ::readlink(entry->path().c_str(), target, sizeof target);
      if (length <= 0 || !inodes.contains(std::string(target, static_cast<size_t>(length)))) continue;
      std::string name;
      std::getline(std::ifstream(process.path() / "comm"), name);
      return fmt::format(" (held by pid {}, {})", pid, name);
    }
  }
  return "";
}

}  // namespace sluice::daemon
