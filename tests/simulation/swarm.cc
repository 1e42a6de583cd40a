#include "tests/simulation/swarm.h"

#include <algorithm>
#include <initializer_list>

#include "base/assert.h"
#include "base/prng.h"
#include "tests/simulation/gradients.h"
#include "tests/simulation/hash.h"
#include "transport/wire/packet.h"

namespace sluice::simulation {
namespace {

// Packets that a seed may cost, so that thousands of seeds stay affordable.
constexpr uint64_t kPacketBudget = 40'000;

// Draws without logarithms, which differ in the last bit between C libraries.
class Random : public Prng {
 public:
  using Prng::Prng;
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }
  double real(double low, double high) {
    return low + (high - low) * (static_cast<double>(next() >> 11) * 0x1p-53);
  }
  // Mostly small, at times up to `max`.
  double rate(double max) {
    const double x = real(0, 1);
    return max * x * x;
  }
};

Options begin(const char* scenario, uint64_t seed) {
  Options options;
  options.scenario = scenario;
  options.seed = seed;
  return options;
}

OpShape draw_shape(Random* random, const Options& options, OpClass op_class) {
  OpShape shape;
  shape.op_class = op_class;
  shape.type = static_cast<ElementType>(random->below(kElementTypes));
  shape.kind = is_float(shape.type) && random->chance(0.5) ? ReduceKind::kMean : ReduceKind::kSum;
  shape.tag = random->next();
  const uint64_t e = wire::elements_per_block(options.payload, shape.type);
  switch (random->below(10)) {
    case 0:
      shape.count = random->below(2);
      break;  // nothing, or one element
    case 1:
      shape.count = e - 1 + random->below(3);
      break;  // a block, one less, one more
    case 2:
      shape.count = e * options.nodes() - 1 + random->below(3);
      break;
    case 3:
      shape.count = 1 + random->below(e * 2);
      break;
    default:
      shape.count =
          static_cast<uint64_t>(random->log_between(static_cast<int64_t>(e), static_cast<int64_t>(200 * e)));
  }
  return shape;
}

uint64_t packets_of(const Options& options, const OpShape& shape) {
  const uint64_t blocks = shape.count / wire::elements_per_block(options.payload, shape.type) + 1;
  const uint64_t n = options.nodes();
  return 2 * blocks * (n - 1) + 6 * n * n;
}

// Tags that come again and again, as buckets of gradients do: what carry-over is about.
struct Buckets {
  std::vector<OpShape> shapes;
  std::vector<uint32_t> steps, most;  // ops of each so far, and how many the oracle can tell apart
  std::vector<uint32_t> scale_every;  // the loss scale changes after so many ops; 0: there is none
};

Buckets draw_buckets(Random* random, const Options& options, bool tiny) {
  Buckets buckets;
  for (int64_t tags = random->between(1, 3); tags > 0; --tags) {
    OpShape shape = draw_shape(random, options, OpClass::kConsistent);
    const uint64_t e = wire::elements_per_block(options.payload, shape.type);
    shape.count %= (tiny ? 4 : 60) * e;
    if (shape.count == 0 && !random->chance(0.1)) shape.count = 3 * e;
    const uint64_t most = exact_bits(shape.type, shape.kind) * e / options.ranks();
    buckets.shapes.push_back(shape);
    buckets.steps.push_back(0);
    buckets.most.push_back(static_cast<uint32_t>(most));
    const bool scaled = options.carry_over && is_float(shape.type) && random->chance(0.3);
    buckets.scale_every.push_back(scaled ? static_cast<uint32_t>(random->between(1, 6)) : 0);
    buckets.shapes.back().scaled = scaled;
    if (scaled)
      buckets.shapes.back().loss_scale = static_cast<float>(random->pick({0.25, 1.0, 1.0, 8.0, 16.0}));
  }
  return buckets;
}

OpShape next_of(Random* random, Buckets* buckets) {
  const size_t i = random->below(buckets->shapes.size());
  OpShape& shape = buckets->shapes[i];
  const uint32_t step = buckets->steps[i]++;
  if (buckets->scale_every[i] != 0 && step > 0 && step % buckets->scale_every[i] == 0)
    shape.loss_scale = static_cast<float>(random->pick({0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0}));
  OpShape op = shape;
  op.retire = random->chance(0.02);  // (without carry-over that is nothing)
  if (step >= buckets->most[i]) {    // the oracle's code is used up: an op of a tag of its own
    op.tag = random->next();
    op.retire = false;
  }
  return op;
}

// The estimates and policies of 200 ops and more: bounds come into force at op 178 at the earliest.
void draw_long_program(Random* random, Options* options) {
  const auto ops = static_cast<uint32_t>(random->between(220, 330));
  const double exact_share = random->pick({0.0, 0.1, 0.3}), best_share = random->pick({0.0, 0.0, 0.2});
  Buckets buckets = draw_buckets(random, *options, true);
  OpShape best = draw_shape(random, *options, OpClass::kBestEffort);
  best.type = ElementType::kF32;
  best.count %= 4 * wire::elements_per_block(options->payload, best.type);
  for (uint32_t op = 0; op < ops; ++op) {
    OpShape shape = next_of(random, &buckets);
    if (random->chance(exact_share)) {
      shape.op_class = OpClass::kExact;
      shape.tag ^= 1;
      shape.loss_scale = 1;
      shape.scaled = false;
      shape.retire = false;
    } else if (random->chance(best_share)) {
      best.tag = random->next();
      shape = best;
    }
    options->program.push_back(shape);
  }
}

void draw_program(Random* random, Options* options) {
  const bool tiny = random->chance(0.15);  // many small ops: the window of 64 goes round
  const auto ops = static_cast<uint32_t>(tiny ? random->between(100, 180) : random->between(10, 40));
  const double exact_share = random->pick({0.0, 0.0, 0.3, 0.3, 1.0});
  const double best_share = random->pick({0.0, 0.0, 0.2, 0.5});
  const double bucket_share = options->carry_over ? random->pick({0.5, 1.0, 1.0}) : 0.0;
  Buckets buckets = draw_buckets(random, *options, tiny);
  uint64_t packets = 0;
  for (uint32_t op = 0; op < ops; ++op) {
    const OpClass op_class = random->chance(exact_share)  ? OpClass::kExact
                             : random->chance(best_share) ? OpClass::kBestEffort
                                                          : OpClass::kConsistent;
    OpShape shape = draw_shape(random, *options, op_class);
    if (op_class == OpClass::kBestEffort) {
      // What fills holes is scaled by the ranks: the oracle follows that in floats only.
      if (!is_float(shape.type)) shape.type = ElementType::kF32;
    } else if (op_class == OpClass::kConsistent && random->chance(bucket_share)) {
      shape = next_of(random, &buckets);
    }
    if (tiny) shape.count %= 3 * wire::elements_per_block(options->payload, shape.type);
    if (random->chance(0.1)) shape.deadline = -1;  // one of its own, once H is known
    packets += packets_of(*options, shape);
    options->program.push_back(shape);
    if (packets > kPacketBudget && options->program.size() >= 8) break;
  }
  if (random->chance(0.02) && options->payload >= 1024) {
    options->in_flight = std::min(options->in_flight, 2U);
    options->flow_window_min = 64 * 1024;
    options->flow_window = 256 * 1024;
    options->plan.bits_per_second = 10'000'000'000;
    OpShape& shape = options->program[random->below(options->program.size())];
    shape.count = 1'000'007;
    if (element_size(shape.type) > 4)
      shape = {.count = shape.count, .op_class = shape.op_class, .tag = shape.tag};
    shape.tag ^= 1;  // not of a bucket, whose ops have one size
    shape.loss_scale = 1;
    shape.scaled = false;
    shape.retire = false;
  }
}

// H and the like must be possible on this network once it is well: four times the time of one direction (protocol,
// section 4), for all that can be in flight, and for a flow window that starts at its smallest.
Micros least_deadline(const Options& options) {
  const Micros rtt = 2 * (options.plan.everywhere.latency + options.plan.everywhere.jitter);
  const auto bytes = static_cast<double>(options.largest_op_bytes()) * options.in_flight * 1.2;
  const double transfer = bytes * 8e6 / static_cast<double>(options.plan.bits_per_second);
  const double windows = bytes / options.nodes() / options.flow_window_min + 1;
  return static_cast<Micros>(8 * (transfer + windows * static_cast<double>(rtt))) + 20 * rtt;
}

void draw_job(Random* random, Options* options) {
  const auto nodes = random->pick<uint32_t>({1, 2, 2, 3, 3, 3, 5, 5, 8, 8, 16});
  options->ranks_of_node.assign(nodes, 1);
  if (random->chance(0.3)) {
    for (uint32_t& ranks : options->ranks_of_node) ranks = static_cast<uint32_t>(random->pick({1, 2, 2, 3}));
  }
  options->lanes = random->chance(0.15) ? 2 : 1;
  // At times the 32 bits of a stamp run over during the run.
  if (random->chance(0.3)) options->clock = (int64_t{1} << 32) - random->between(0, 500'000);
  options->payload = random->chance(0.5) ? 1408 : static_cast<uint32_t>(random->between(3, 22)) * 64;
  options->sealing = random->chance(0.4) ? wire::Sealing::kAuth : wire::Sealing::kNone;
  options->pull_patience = random->pick<uint32_t>({0, 2, 4, 4, 8});
  options->min_contribution = random->pick({0.5, 0.5, 0.5, 0.3, 0.8, 1.0, 0.0});
  options->max_lag = random->pick<uint32_t>({1, 2, 4, 8, 32});
  options->incast =
      static_cast<uint32_t>(random->between(1, std::max(1, std::min<int>(4, static_cast<int>(nodes) - 1))));
  options->flow_window_min = static_cast<uint32_t>(random->between(4, 32)) * 1024;
  options->flow_window = options->flow_window_min * static_cast<uint32_t>(random->between(1, 16));
  options->plan.everywhere.latency = random->between(5, 200);
  options->plan.everywhere.jitter = random->between(0, 50);
  options->plan.bits_per_second = random->pick<uint64_t>({1, 10, 10, 100}) * 1'000'000'000;
  options->burst = random->pick<uint32_t>({2, 3, 8, 32});
  options->in_flight = static_cast<uint32_t>(random->between(1, 8));
  options->step_ops = static_cast<uint32_t>(random->between(1, 4));
  options->pool_ops = random->pick<uint32_t>({1, 2, 4, 64, 64, 64});
  options->carry_over = random->chance(0.6);
  options->carry_max_ops = random->pick<uint32_t>({0, 0, 0, 1, 3});
  options->fill_own = random->chance(0.5);
  options->adaptive = nodes > 1 && nodes <= 5 && random->chance(0.15);
  if (options->adaptive) {
    options->warmup_ops = static_cast<uint32_t>(random->between(5, 20));
    options->h_factor = random->real(2, 6);
    options->compute_spread = random->real(0, 0.3);
    draw_long_program(random, options);
  } else {
    draw_program(random, options);
  }
  options->hard_deadline = std::max(random->between(2'000, 20'000), least_deadline(*options));
  for (OpShape& shape : options->program) {
    if (shape.deadline == 0) continue;
    shape.deadline = shape.op_class == OpClass::kExact
                         ? 20'000'000
                         : random->between(options->hard_deadline, 3 * options->hard_deadline);
  }
  options->hard_deadline_min = options->hard_deadline;
  options->compute = random->between(0, std::min<Micros>(options->hard_deadline, 50'000));
  if (options->adaptive) options->hard_deadline *= random->between(1, 10);
}

// How long the program may take, roughly.
Micros length_of(const Options& options) {
  const auto late = static_cast<Micros>(options.late_share * static_cast<double>(options.late_max));
  return static_cast<Micros>(options.program.size()) * (options.compute / options.step_ops + late + 1'000);
}

void draw_late(Random* random, Options* options) {
  options->late_share = random->real(0.12, 0.2);
  options->late_max = std::min<Micros>(4 * options->hard_deadline, 1'000'000);
}

void draw_faults(Random* random, Options* options) {
  port::sim::FaultPlan& plan = options->plan;
  port::sim::LinkFaults& f = plan.everywhere;
  if (random->chance(0.6)) f.loss = random->rate(0.3);
  if (random->chance(0.2)) {
    f.burst_enter = random->real(0.0005, 0.01);
    f.burst_leave = random->real(0.05, 0.3);
    f.burst_loss = random->real(0.3, 1.0);
    // A path turns good again by what is sent on it: an idle one that is bad may lose many PINGs in a row.
    options->peer_timeout = 30'000'000;
  }
  if (random->chance(0.4)) f.duplicate = random->rate(0.2);
  if (random->chance(0.4)) {
    f.reorder = random->real(0, 0.5);
    f.reorder_delay = random->log_between(20, 20'000);
  }
  if (random->chance(0.2)) {
    f.tail_probability = random->rate(0.05);
    f.tail_max = std::max<Micros>(f.tail_min, 2 * options->hard_deadline);
  }
  if (random->chance(0.4)) f.replay = random->rate(0.05);
  if (random->chance(0.3)) f.truncate = random->rate(0.05);
  if (options->sealing ==
      wire::Sealing::kAuth) {  // without tags nothing tells a changed packet from a true one
    if (random->chance(0.5)) f.corrupt = random->rate(0.1);
    if (random->chance(0.5)) options->forge = random->rate(0.1);
  }
  if (random->chance(0.3)) options->misroute = random->rate(0.05);
  const auto nodes = options->nodes();
  if (random->chance(0.2)) {  // one node's cable is bad
    const auto node = static_cast<uint32_t>(random->below(nodes));
    port::sim::LinkFaults bad = f;
    bad.loss = random->rate(0.5);
    plan.rules.push_back({node, port::sim::kAnyNode, bad});
    plan.rules.push_back({port::sim::kAnyNode, node, bad});
  }
  if (nodes > 1 && random->chance(0.2)) {  // one path in one direction
    const auto from = static_cast<uint32_t>(random->below(nodes));
    port::sim::LinkFaults bad = f;
    bad.loss = random->rate(0.7);
    plan.rules.push_back({from, (from + 1 + static_cast<uint32_t>(random->below(nodes - 1))) % nodes, bad});
  }
  if (random->chance(0.3)) {
    const auto pauses = random->between(1, 12);
    const Micros horizon = length_of(*options);
    for (int64_t i = 0; i < pauses; ++i) {
      const Micros start = options->clock + random->between(0, horizon);
      const Micros longest = std::min<Micros>(4 * options->hard_deadline, 600'000);
      plan.pauses.push_back(
          {static_cast<uint32_t>(random->below(nodes)), start, start + random->between(1, longest)});
    }
  }
  if (nodes > 1 && random->chance(0.2)) {  // one way or both, for less than it takes to be thought lost
    const auto partitions = random->between(1, 4);
    for (int64_t i = 0; i < partitions; ++i) {
      port::sim::Partition partition;
      const Micros horizon = length_of(*options);
      partition.start = options->clock + random->between(0, horizon);
      partition.end =
          partition.start + random->between(1, std::min<Micros>(6 * options->hard_deadline, 600'000));
      for (uint32_t node = 0; node < nodes; ++node) {
        if (random->chance(0.4)) partition.group.push_back(node);
      }
      partition.out = random->chance(0.7);
      partition.into = !partition.out || random->chance(0.7);
      plan.partitions.push_back(partition);
    }
  }
  plan.receive_buffer = random->pick<uint32_t>({64, 1024, 4096, 4096});
}

// Faults that are drawn apart from the others, so that a seed which has none of them is the run that it always was.
void draw_rare_faults(Options* options) {
  Random random(mix(options->seed, 9));
  port::sim::FaultPlan& plan = options->plan;
  const auto nodes = options->nodes();
  if (random.chance(0.25)) options->older_view = random.rate(0.1);
  if (nodes > 1 &&
      random.chance(0.08)) {  // stopped for longer than anything in the protocol but rank_timeout
    options->peer_timeout = 30'000'000;
    for (int64_t pauses = random.between(1, 2); pauses > 0; --pauses) {
      const Micros start = options->clock + random.between(0, length_of(*options));
      plan.pauses.push_back(
          {static_cast<uint32_t>(random.below(nodes)), start, start + random.between(1'000'000, 6'000'000)});
    }
  }
  if (nodes > 2 && random.chance(0.15)) {  // a switch with little room before each node
    plan.switch_queue_bytes = static_cast<uint64_t>(random.between(8, 64)) * 1024;
  }
  if (options->sealing == wire::Sealing::kNone && random.chance(0.3)) options->forge = random.rate(0.1);
}

Options swarm(uint64_t seed) {
  Options options = begin("swarm", seed);
  Random random(mix(seed, 1));
  draw_job(&random, &options);
  if (random.chance(0.75)) draw_late(&random, &options);
  if (random.chance(0.95)) {
    draw_faults(&random, &options);
    draw_rare_faults(&options);
  }
  return options;
}

// The runs of protocol, section 17: small networks on which the traps showed.
Options trap_run(const char* name, uint64_t seed, uint32_t nodes, double loss, double duplicates,
                 double late) {
  Options options = begin(name, seed);
  Random random(mix(seed, 2));
  options.ranks_of_node.assign(nodes, 1);
  options.hard_deadline = 10'000;
  options.compute = 5'000;
  options.max_lag = 4;
  options.in_flight = 2;
  options.plan.bits_per_second = 10'000'000'000;
  for (uint32_t op = 0; op < 80; ++op) {
    OpShape shape;
    shape.type = ElementType::kF32;
    shape.op_class = OpClass::kConsistent;
    shape.kind = random.chance(0.5) ? ReduceKind::kMean : ReduceKind::kSum;
    shape.count =
        wire::elements_per_block(options.payload, shape.type) * static_cast<uint64_t>(random.between(1, 24));
    options.program.push_back(shape);
  }
  options.plan.everywhere.loss = loss;
  options.plan.everywhere.duplicate = duplicates;
  options.plan.everywhere.replay = 0.02;
  options.late_share = late;
  options.late_max = 4 * options.hard_deadline;
  options.heal_at = 0.9;
  return options;
}

Options base_run(uint64_t seed) { return trap_run("base", seed, 3, 0.01, 0, 0.12); }
Options target_run(uint64_t seed) { return trap_run("target", seed, 4, 0.30, 0.20, 0.20); }

Options lanes(uint64_t seed) {
  Options options = begin("lanes", seed);
  Random random(mix(seed, 3));
  draw_job(&random, &options);
  options.lanes = static_cast<uint32_t>(random.between(2, 4));
  if (random.chance(0.5)) draw_late(&random, &options);
  if (random.chance(0.7)) draw_faults(&random, &options);
  return options;
}

// In a job that is meant to end by the loss of a node, nobody else may seem lost.
void without_bursts(Options* options) {
  options->plan.everywhere.burst_enter = 0;
  for (port::sim::LinkRule& rule : options->plan.rules) rule.faults.burst_enter = 0;
  options->peer_timeout = Options().peer_timeout;
}

Options crash(uint64_t seed) {
  Options options = begin("crash", seed);
  Random random(mix(seed, 4));
  draw_job(&random, &options);
  if (options.nodes() == 1) options.ranks_of_node.push_back(1);
  if (random.chance(0.5)) draw_late(&random, &options);
  if (random.chance(0.5)) draw_faults(&random, &options);
  options.heal_at = 2;
  without_bursts(&options);
  options.crash = true;
  options.crash_node = static_cast<uint32_t>(random.below(options.nodes()));
  // Most crashes hit the middle of the program; its length in time is a guess.
  options.crash_at = options.clock + random.between(0, length_of(options));
  options.rejoin = Random(mix(seed, 10)).chance(0.5);
  return options;
}

Options abort(uint64_t seed) {
  Options options = begin("abort", seed);
  Random random(mix(seed, 8));
  draw_job(&random, &options);
  if (random.chance(0.5)) draw_late(&random, &options);
  if (random.chance(0.5)) draw_faults(&random, &options);
  options.heal_at = 2;
  without_bursts(&options);
  options.abort = true;
  options.abort_node = static_cast<uint32_t>(random.below(options.nodes()));
  options.abort_at = options.clock + random.between(0, length_of(options));
  return options;
}

Options mismatch(uint64_t seed) {
  Options options = begin("mismatch", seed);
  Random random(mix(seed, 5));
  do {
    options = begin("mismatch", seed);
    draw_job(&random, &options);
  } while (options.ranks() == 1);
  if (random.chance(0.5)) draw_late(&random, &options);
  if (random.chance(0.3)) draw_faults(&random, &options);
  options.heal_at = 2;
  without_bursts(&options);
  options.mismatch = true;
  options.mismatch_rank = static_cast<uint32_t>(random.below(options.ranks()));
  options.mismatch_op = static_cast<uint32_t>(random.below(options.program.size()));
  OpShape& shape = options.mismatch_shape = options.program[options.mismatch_op];
  switch (random.below(4)) {
    case 0:
      shape.count += 1 + random.below(1000);
      break;
    case 1:
      shape.tag ^= 1ULL << random.below(64);
      break;
    case 2:
      shape.type = static_cast<ElementType>((static_cast<uint32_t>(shape.type) + 1) % kElementTypes);
      shape.kind = ReduceKind::kSum;
      shape.loss_scale = 1;
      shape.scaled = false;
      break;
    default:
      shape.op_class = shape.op_class == OpClass::kExact ? OpClass::kConsistent : OpClass::kExact;
  }
  return options;
}

Options calm(uint64_t seed) {
  Options options = begin("calm", seed);
  Random random(mix(seed, 6));
  draw_job(&random, &options);
  options.compute_spread = 0.1;
  options.pool_ops = 64;
  return options;
}

Options wide(uint64_t seed) {
  Options options = begin("wide", seed);
  Random random(mix(seed, 7));
  options.ranks_of_node.assign(static_cast<size_t>(random.pick({48, 64})), 1);
  options.in_flight = 2;
  options.max_lag = random.pick<uint32_t>({2, 8});
  for (uint32_t op = 0; op < 12; ++op) {
    OpShape shape;
    shape.count = 1 + random.below(400 * 40);
    shape.op_class = random.chance(0.5) ? OpClass::kExact : OpClass::kConsistent;
    options.program.push_back(shape);
  }
  options.hard_deadline = 20'000;
  options.compute = 2'000;
  if (random.chance(0.7)) options.plan.everywhere.loss = random.pick({0.01, 0.05, 0.3});
  if (random.chance(0.5)) draw_late(&random, &options);
  options.flow_window_min = 8 * 1024;
  options.plan.bits_per_second = 10'000'000'000;
  if (Random rare(mix(seed, 11)); rare.chance(0.5)) {
    options.plan.everywhere.duplicate = rare.rate(0.2);
    options.plan.everywhere.reorder = rare.real(0, 0.3);
    options.plan.everywhere.reorder_delay = rare.log_between(100, 20'000);
    if (options.nodes() == 64) {  // half of the nodes miss an op: more than a verdict can list
      options.program[4].op_class = OpClass::kConsistent;
      for (uint32_t rank = 0; rank < 32; ++rank)
        options.delays.push_back({rank, 4, 3 * options.hard_deadline});
    }
  }
  return options;
}

}  // namespace

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = {
      {"swarm", "every knob drawn per seed, all faults, late trainers", swarm},
      {"base", "protocol 17, base run: 3 nodes, 1 % loss, 12 % of ops up to 4 H late", base_run},
      {"target", "protocol 17, target: 4 nodes, 30 % loss, 20 % duplicates, 20 % late", target_run},
      {"lanes", "as swarm, 2 to 4 lanes", lanes},
      {"crash", "one node stops; the others must end in time; at times all of it again, with the node back",
       crash},
      {"abort", "a node ends the job, because a client of it has died", abort},
      {"mismatch", "one rank calls an op with another shape", mismatch},
      {"calm", "as swarm, a network without faults and punctual trainers", calm},
      {"wide", "48 or 64 nodes, small ops", wide},
  };
  return all;
}

const Scenario* find_scenario(std::string_view name) {
  for (const Scenario& scenario : scenarios()) {
    if (scenario.name == name) return &scenario;
  }
  return nullptr;
}

Options draw(std::string_view scenario, uint64_t seed) {
  const Scenario* found = find_scenario(scenario);
  SLUICE_ASSERT(found != nullptr);
  return found->draw(seed);
}

std::string replay_command(const Options& options) {
  return "build/dev/bin/sluice-sim --seed " + std::to_string(options.seed) + " --scenario " +
         options.scenario + " --verbose";
}

}  // namespace sluice::simulation
