#include <arpa/inet.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "transport/port/port.h"

namespace sluice::port {
namespace {

constexpr uint8_t kMappedPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

Error not_an_endpoint(std::string_view text, const char* why) {
  return Error{EINVAL, "'" + std::string(text) + "' is not an address and port (" + why +
                           "); write for example 10.0.0.1:9470 or [2001:db8::1]:9470"};
}

template <typename Number>
bool parse_number(std::string_view text, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

}  // namespace

bool is_ipv4(const Endpoint& endpoint) {
  return std::memcmp(endpoint.ip.data(), kMappedPrefix, sizeof kMappedPrefix) == 0;
}

Endpoint ipv4_endpoint(uint8_t a, uint8_t b, uint8_t c, uint8_t d, uint16_t port) {
  Endpoint endpoint;
  std::memcpy(endpoint.ip.data(), kMappedPrefix, sizeof kMappedPrefix);
  endpoint.ip[12] = a;
  endpoint.ip[13] = b;
  endpoint.ip[14] = c;
  endpoint.ip[15] = d;
  endpoint.port = port;
  return endpoint;
}

std::string ip_to_string(const Endpoint& endpoint) {
  char text[INET6_ADDRSTRLEN];
  if (is_ipv4(endpoint)) {
    inet_ntop(AF_INET, endpoint.ip.data() + 12, text, sizeof text);
    return text;
  }
  inet_ntop(AF_INET6, endpoint.ip.data(), text, sizeof text);
  return endpoint.scope == 0 ? std::string(text) : std::string(text) + '%' + std::to_string(endpoint.scope);
}

std::string to_string(const Endpoint& endpoint) {
  const std::string ip = ip_to_string(endpoint);
  const std::string port = std::to_string(endpoint.port);
  return is_ipv4(endpoint) ? ip + ':' + port : '[' + ip + "]:" + port;
}

Result<Endpoint> parse_ip(std::string_view text) {
  Endpoint endpoint;
  std::string address(text);
  if (const size_t percent = address.find('%'); percent != std::string::npos) {
    if (!parse_number(std::string_view(address).substr(percent + 1), &endpoint.scope) ||
        endpoint.scope == 0) {
      return Error{EINVAL, "'" + address + "': after % comes the number of an interface (ip link shows it)"};
    }
    address.resize(percent);
  }
  in_addr v4{};
  if (endpoint.scope == 0 && inet_pton(AF_INET, address.c_str(), &v4) == 1) {
    std::memcpy(endpoint.ip.data(), kMappedPrefix, sizeof kMappedPrefix);
    std::memcpy(endpoint.ip.data() + 12, &v4, 4);
    return endpoint;
  }
  if (inet_pton(AF_INET6, address.c_str(), endpoint.ip.data()) == 1) return endpoint;
  return Error{EINVAL, "'" + std::string(text) + "' is not a numeric IPv4 or IPv6 address"};
}

Result<Endpoint> parse_endpoint(std::string_view text) {
  std::string_view ip;
  std::string_view port;
  const bool bracketed = !text.empty() && text.front() == '[';
  if (bracketed) {
    const size_t close = text.find(']');
    if (close == std::string_view::npos || close + 1 >= text.size() || text[close + 1] != ':') {
      return not_an_endpoint(text, "an opening bracket needs ]:port");
    }
    ip = text.substr(1, close - 1);
    port = text.substr(close + 2);
  } else {
    const size_t colon = text.rfind(':');
    if (colon == std::string_view::npos) return not_an_endpoint(text, "no port");
    ip = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (ip.find(':') != std::string_view::npos) return not_an_endpoint(text, "IPv6 goes in brackets");
  }
  auto endpoint = parse_ip(ip);
  if (!endpoint.ok()) return not_an_endpoint(text, "no numeric address");
  if (bracketed && is_ipv4(*endpoint) && ip.find(':') == std::string_view::npos) {
    return not_an_endpoint(text, "IPv4 goes without brackets");
  }
  if (!parse_number(port, &endpoint->port))
    return not_an_endpoint(text, "the port is a number from 0 to 65535");
  return endpoint;
}

}  // namespace sluice::port
