// Asks a running sluiced one question over its control socket. Any thread.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "base/result.h"

namespace sluice::ctl {

// Exit codes of sluicectl, and codes of Errors.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;      // the daemon answered with an error, or nonsense
inline constexpr int kExitUsage = 2;        // wrong command line
inline constexpr int kExitUnreachable = 3;  // no daemon there (as systemctl status)

// Sends `request` and gives the answer, at most 5 s later. Errors name the socket and what to do next.
Result<nlohmann::json> ask(const std::string& socket, const nlohmann::json& request);

}  // namespace sluice::ctl
