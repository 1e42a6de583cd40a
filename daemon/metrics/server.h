// The HTTP side: /metrics (text format of Prometheus), /healthz and /readyz (200 or 503, one line for each reason).
// Serves on threads of its own (civetweb's, two); they call the functions that were given.
#pragma once

#include <prometheus/metric_family.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "daemon/metrics/health.h"

namespace sluice::daemon {

class MetricsServer {
 public:
  struct Functions {
    std::function<std::vector<prometheus::MetricFamily>()> metrics;
    std::function<Health::Verdict()> health;
  };

  // `listen` is "address:port"; port 0 takes any. The error names the address, what is wrong and, where it can be seen,
  // who has it.
  static Result<std::unique_ptr<MetricsServer>> start(const std::string& listen, Functions functions);
  ~MetricsServer();

  const std::string& address() const;  // "127.0.0.1:9477", with the real port

 private:
  struct State;
  explicit MetricsServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace sluice::daemon
