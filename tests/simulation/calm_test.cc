// A network without faults and trainers that are on time: every world size, count, element type, kind and class. All
// results are OK, exact to the last bit, every rank is counted in every block, and nothing is dropped but duplicates.
#include <gtest/gtest.h>

#include "tests/simulation/run.h"
#include "transport/wire/packet.h"

namespace sluice::simulation {
namespace {

struct World {
  std::vector<uint32_t> ranks_of_node;
  uint32_t payload;
  uint32_t lanes;
  wire::Sealing sealing;
};

Options calm(const World& world) {
  Options options;
  options.scenario = "matrix";
  options.seed = 1;
  options.ranks_of_node = world.ranks_of_node;
  options.payload = world.payload;
  options.lanes = world.lanes;
  options.sealing = world.sealing;
  options.hard_deadline = 20'000;
  options.in_flight = 3;
  options.step_ops = 3;
  options.compute = 500;
  options.compute_spread = 0.1;
  options.plan.everywhere.latency = 30;
  options.plan.everywhere.jitter = 10;
  options.plan.bits_per_second = 10'000'000'000;
  return options;
}

void expect_calm(const Options& options) {
  const RunResult result = run(options);
  ASSERT_TRUE(result.ok()) << report(options, result);
  EXPECT_EQ(result.facts.results[static_cast<size_t>(Status::kOk)], options.program.size() * options.ranks());
  EXPECT_EQ(result.shares.uncounted, 0U);
  EXPECT_EQ(result.shares.skipped, 0U);
  for (size_t reason = 1; reason < std::size(result.facts.drops); ++reason) {
    const auto drop = static_cast<wire::Drop>(reason);
    // The second ANNOUNCE and the second tail come as they should, and may come late.
    if (drop == wire::Drop::kDuplicate || drop == wire::Drop::kLate || drop == wire::Drop::kRetired) continue;
    if (drop == wire::Drop::kReplay) continue;  // what comes again after the end
    EXPECT_EQ(result.facts.drops[reason], 0U) << wire::drop_name(drop);
  }
}

class CalmTest : public testing::TestWithParam<World> {};

TEST_P(CalmTest, EveryTypeKindClassAndCount) {
  Options options = calm(GetParam());
  for (uint8_t type = 0; type < kElementTypes; ++type) {
    OpShape shape;
    shape.type = static_cast<ElementType>(type);
    const uint64_t e = wire::elements_per_block(options.payload, shape.type);
    for (const uint64_t count : {uint64_t{0}, uint64_t{1}, e - 1, e, e + 1, e * options.nodes() + 1}) {
      shape.count = count;
      for (const ReduceKind kind : {ReduceKind::kSum, ReduceKind::kMean}) {
        if (kind == ReduceKind::kMean && !is_float(shape.type)) continue;
        shape.kind = kind;
        for (const OpClass op_class : {OpClass::kExact, OpClass::kConsistent}) {
          shape.op_class = op_class;
          shape.tag = options.program.size();
          options.program.push_back(shape);
        }
      }
    }
  }
  expect_calm(options);
}

INSTANTIATE_TEST_SUITE_P(Worlds, CalmTest,
                         testing::Values(World{{1}, 1408, 1, wire::Sealing::kNone},
                                         World{{1, 1}, 1408, 1, wire::Sealing::kAuth},
                                         World{{1, 1, 1}, 192, 1, wire::Sealing::kNone},
                                         World{{1, 1, 1, 1, 1}, 1408, 1, wire::Sealing::kAuth},
                                         World{std::vector<uint32_t>(8, 1), 1408, 1, wire::Sealing::kNone},
                                         World{std::vector<uint32_t>(16, 1), 1408, 1, wire::Sealing::kNone},
                                         World{{2}, 1408, 1, wire::Sealing::kNone},
                                         World{{2, 1, 2}, 1024, 1, wire::Sealing::kAuth},
                                         World{{1, 1}, 1408, 2, wire::Sealing::kAuth},
                                         World{{1, 2, 1}, 1408, 4, wire::Sealing::kNone}),
                         [](const auto& param) {
                           uint32_t ranks = 0;
                           for (const uint32_t n : param.param.ranks_of_node) ranks += n;
                           return "Nodes" + std::to_string(param.param.ranks_of_node.size()) + "Ranks" +
                                  std::to_string(ranks) + "Lanes" + std::to_string(param.param.lanes);
                         });

TEST(CalmLargeTest, AMillionAndSevenElements) {
  for (const uint32_t nodes : {1U, 2U, 3U}) {
    Options options = calm({std::vector<uint32_t>(nodes, 1), 1408, 1, wire::Sealing::kNone});
    options.hard_deadline = 400'000;
    options.in_flight = 2;
    for (const ElementType type : {ElementType::kF32, ElementType::kBf16}) {
      for (const OpClass op_class : {OpClass::kExact, OpClass::kConsistent}) {
        OpShape shape;
        shape.type = type;
        shape.count = 1'000'007;
        shape.kind = type == ElementType::kBf16 ? ReduceKind::kMean : ReduceKind::kSum;
        shape.op_class = op_class;
        options.program.push_back(shape);
      }
    }
    expect_calm(options);
  }
}

}  // namespace
}  // namespace sluice::simulation
