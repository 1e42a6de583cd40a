#include "daemon/metrics/server.h"

#include <CivetServer.h>
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <thread>

#include "base/unique_fd.h"
#include "daemon/lifecycle/port_owner.h"
#include "transport/port/endpoint.h"

namespace sluice::daemon {
namespace {

void reply(mg_connection* connection, int status, const char* type, const std::string& body, bool head) {
  mg_printf(connection,
            "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nCache-Control: "
            "no-store\r\nConnection: close\r\n\r\n",
            status, status == 200 ? "OK" : "Service Unavailable", type, body.size());
  if (!head) mg_write(connection, body.data(), body.size());
}

bool is_head(mg_connection* connection) {
  return std::strcmp(mg_get_request_info(connection)->request_method, "HEAD") == 0;
}

class MetricsHandler : public CivetHandler {
 public:
  explicit MetricsHandler(const MetricsServer::Functions* functions) : functions_(functions) {}
  bool handleGet(CivetServer*, mg_connection* connection) override {
    std::ostringstream text;
    prometheus::TextSerializer().Serialize(text, functions_->metrics());
    reply(connection, 200, "text/plain; version=0.0.4; charset=utf-8", text.str(), is_head(connection));
    return true;
  }
  bool handleHead(CivetServer* server, mg_connection* connection) override {
    return handleGet(server, connection);
  }

 private:
  const MetricsServer::Functions* functions_;
};

class HealthHandler : public CivetHandler {
 public:
  HealthHandler(const MetricsServer::Functions* functions, bool ready)
      : functions_(functions), ready_(ready) {}
  bool handleGet(CivetServer*, mg_connection* connection) override {
    const Health::Verdict verdict = functions_->health();
    const bool good = ready_ ? verdict.ready() : verdict.alive();
    std::string text;
    for (const std::string& line : verdict.stuck) text += line + "\n";
    for (const std::string& line : verdict.waiting) {
      if (ready_) text += line + "\n";
    }
    reply(connection, good ? 200 : 503, "text/plain; charset=utf-8", text.empty() ? "ok\n" : text,
          is_head(connection));
    return true;
  }
  bool handleHead(CivetServer* server, mg_connection* connection) override {
    return handleGet(server, connection);
  }

 private:
  const MetricsServer::Functions* functions_;
  const bool ready_;
};

Result<UniqueFd> socket_to(const port::Endpoint& endpoint, sockaddr_storage* address, socklen_t* length) {
  const bool v4 = port::is_ipv4(endpoint);
  UniqueFd fd(::socket(v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return Error{errno, std::strerror(errno)};
  *address = {};
  if (v4) {
    auto* in = reinterpret_cast<sockaddr_in*>(address);
    in->sin_family = AF_INET;
    in->sin_port = htons(endpoint.port);
    std::memcpy(&in->sin_addr, endpoint.ip.data() + 12, 4);
    *length = sizeof(sockaddr_in);
  } else {
    auto* in = reinterpret_cast<sockaddr_in6*>(address);
    in->sin6_family = AF_INET6;
    in->sin6_port = htons(endpoint.port);
    std::memcpy(&in->sin6_addr, endpoint.ip.data(), 16);
    *length = sizeof(sockaddr_in6);
  }
  return fd;
}

// civetweb does not say why it cannot listen: try it first.
Result<void> try_listen(const port::Endpoint& endpoint) {
  sockaddr_storage address;
  socklen_t length = 0;
  auto fd = socket_to(endpoint, &address, &length);
  if (!fd) return fd.error();
  const int one = 1;
  ::setsockopt(fd->get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (::bind(fd->get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(fd->get(), 1) != 0) {
    return Error{errno, std::strerror(errno)};
  }
  return {};
}

}  // namespace

struct MetricsServer::State {
  Functions functions;
  std::string address;
  port::Endpoint endpoint;
  std::unique_ptr<MetricsHandler> metrics;
  std::unique_ptr<HealthHandler> health, ready;
  std::unique_ptr<CivetServer> server;  // last: its threads use the handlers
};

MetricsServer::MetricsServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

MetricsServer::~MetricsServer() {
  // civetweb looks at its stop flag when a connection comes, else every two seconds.
  std::atomic<bool> closed{false};
  std::thread waker([&] {
    for (int i = 0; i < 200 && !closed.load(); ++i) {
      sockaddr_storage address;
      socklen_t length = 0;
      if (auto fd = socket_to(state_->endpoint, &address, &length); fd.ok()) {
        const timeval limit{0, 100'000};
        ::setsockopt(fd->get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        [[maybe_unused]] const int ignored =
            ::connect(fd->get(), reinterpret_cast<const sockaddr*>(&address), length);
      }
      ::usleep(10'000);
    }
  });
  state_->server.reset();
  closed.store(true);
  waker.join();
}

const std::string& MetricsServer::address() const { return state_->address; }

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(const std::string& listen, Functions functions) {
  auto endpoint = port::parse_endpoint(listen);
  if (!endpoint)
    return Error{
        EINVAL,
        fmt::format("metrics.listen: '{}' is not address:port, such as 127.0.0.1:9477, nor off", listen)};
  if (auto can = try_listen(*endpoint); !can.ok()) {
    return Error{can.error().code,
                 fmt::format("metrics.listen: cannot listen on {}: {}{}", listen, can.error().message,
                             can.error().code == EADDRINUSE ? port_owner_text("tcp", endpoint->port) : "")};
  }
  auto state = std::make_unique<State>();
  state->functions = std::move(functions);
  state->metrics = std::make_unique<MetricsHandler>(&state->functions);
  state->health = std::make_unique<HealthHandler>(&state->functions, false);
  state->ready = std::make_unique<HealthHandler>(&state->functions, true);
  try {
    const std::vector<std::string> options = {"listening_ports",    listen, "num_threads",           "2",
                                              "request_timeout_ms", "5000", "keep_alive_timeout_ms", "0",
                                              "linger_timeout_ms",  "0"};
    state->server = std::make_unique<CivetServer>(options);
    state->server->addHandler("/metrics", *state->metrics);
    state->server->addHandler("/healthz", *state->health);
    state->server->addHandler("/readyz", *state->ready);
    const std::vector<int> ports = state->server->getListeningPorts();
    if (!ports.empty()) endpoint->port = static_cast<uint16_t>(ports.front());
  } catch (const std::exception& error) {
    return Error{EIO, fmt::format("metrics.listen: cannot listen on {}: {}", listen, error.what())};
  }
  state->endpoint = *endpoint;
  state->address = port::to_string(*endpoint);
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(state)));
}

}  // namespace sluice::daemon
