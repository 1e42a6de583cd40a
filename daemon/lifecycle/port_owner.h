// Who holds a port that is taken, as far as this process may see. Reads /proc; any thread.
#pragma once

#include <cstdint>
#include <string>

namespace sluice::daemon {

// " (held by pid 42, sluiced)", or "" when it cannot be seen. `protocol`: "udp" or "tcp".
std::string port_owner_text(const std::string& protocol, uint16_t port);

}  // namespace sluice::daemon
