// The ports that the conformance suite runs over. A new port adds a World of its own (a few nodes of that kind that
// reach each other on this machine) and one line to port_kinds().
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "base/result.h"
#include "transport/port/port.h"

namespace sluice::port::testing {

struct WorldOptions {
  uint32_t nodes = 3;
  uint32_t queues = 1;
  // A way out that is slow and has little room, so that send() soon comes back short. A kind that cannot have one
  // returns an Error that says what is missing; the test is then skipped with that text.
  bool slow = false;
};

// A few nodes of one kind. The members are called from the thread of the test, except where said.
class World {
 public:
  virtual ~World() = default;
  virtual Port& port(size_t node) = 0;
  // Lets at most a few milliseconds pass: the simulator advances its clock, others wait.
  virtual void pass_time() = 0;
  // Sends bytes to `to` past all limits of the port, from an endpoint that no queue knows. False: this kind cannot.
  virtual bool send_raw(const Endpoint& to, const std::vector<std::byte>& bytes) = 0;
};

struct PortKind {
  std::string name;  // letters, digits and _; part of the test names
  std::function<Result<std::unique_ptr<World>>(const WorldOptions&)> open;
};

inline void PrintTo(const PortKind& kind, std::ostream* out) { *out << kind.name; }  // for GoogleTest

std::vector<PortKind> port_kinds();

}  // namespace sluice::port::testing
