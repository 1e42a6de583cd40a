// Addresses: the small helpers around Endpoint (port.h) that ports and their owners need. Any thread.
#pragma once

#include <string>
#include <string_view>

#include "transport/port/port.h"

namespace sluice::port {

bool is_ipv4(const Endpoint& endpoint);
Endpoint ipv4_endpoint(uint8_t a, uint8_t b, uint8_t c, uint8_t d, uint16_t port);

// The address without the port: "10.0.0.1", "fe80::1%2". parse_ip is its inverse; the port is then 0.
std::string ip_to_string(const Endpoint& endpoint);
Result<Endpoint> parse_ip(std::string_view text);

}  // namespace sluice::port
