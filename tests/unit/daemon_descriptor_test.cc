// What a lane takes from a client's ring, and what it does not.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "daemon/engine/lane_worker.h"

namespace sluice::daemon {
namespace {

constexpr uint64_t kArena = 1 << 20, kMaxOp = 1 << 18;

ipc::Descriptor good() {
  ipc::Descriptor d;
  d.request = static_cast<uint32_t>(ipc::Request::kAllreduce);
  d.count = 1000;
  d.contribution = 64;
  d.result = 8192;
  return d;
}

TEST(Descriptor, GoodOnesPass) {
  EXPECT_EQ(check_descriptor(good(), kArena, kMaxOp), nullptr);
  for (uint8_t type = 0; type < kElementTypes; ++type) {
    ipc::Descriptor d = good();
    d.element_type = d.wire_type = type;
    EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr) << static_cast<int>(type);
  }
  ipc::Descriptor d = good();
  d.count = 0;
  d.contribution = d.result = kArena;  // nothing of nothing may lie at the end
  EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr);
  d = good();
  d.count = kMaxOp / 4;
  d.contribution = 0;
  d.result = kArena - kMaxOp;  // up to the very end
  EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr);
  d.result = kMaxOp;  // side by side
  EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr);
  d = good();
  d.op_class = static_cast<uint8_t>(OpClass::kConsistent);
  d.kind = static_cast<uint8_t>(ReduceKind::kMean);
  EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr);
  d.op_class = static_cast<uint8_t>(OpClass::kBestEffort);
  d.loss_scale = 65536;
  EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr);
  d.loss_scale = 1;
  d.flags = ipc::kFlagScaled;
  EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr);
}

// kTakeCarry has one slot, of accumulators, and no contribution.
TEST(Descriptor, OfATake) {
  ipc::Descriptor d = good();
  d.request = static_cast<uint32_t>(ipc::Request::kTakeCarry);
  d.contribution = 3;
  d.element_type = d.wire_type = static_cast<uint8_t>(ElementType::kF16);
  d.result = kArena - 4032;  // 1000 floats fit, 4000 bytes
  EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr);
  d.result = kArena - 3968;
  ASSERT_NE(check_descriptor(d, kArena, kMaxOp), nullptr);
  EXPECT_NE(std::string(check_descriptor(d, kArena, kMaxOp)).find("outside"), std::string::npos);
  d.flags = ipc::kFlagDrop;
  EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr) << "there is no slot";
  d.flags = ipc::kFlagDrop | ipc::kFlagCorrection;
  EXPECT_NE(check_descriptor(d, kArena, kMaxOp), nullptr) << "a correction has a slot";
  d.flags = ipc::kFlagCorrection;
  EXPECT_NE(check_descriptor(d, kArena, kMaxOp), nullptr) << "which lies in the arena";
  d.result = kArena - 4032;
  EXPECT_EQ(check_descriptor(d, kArena, kMaxOp), nullptr);
  d.flags = ipc::kFlagScaled;
  EXPECT_NE(check_descriptor(d, kArena, kMaxOp), nullptr);
}

TEST(Descriptor, BadOnesAreNamed) {
  struct Case {
    const char* what;
    void (*change)(ipc::Descriptor*);
  };
  constexpr uint64_t kHuge = ~uint64_t{0};
  const Case cases[] = {
      {"unknown request", [](ipc::Descriptor* d) { d->request = 0; }},
      {"unknown request", [](ipc::Descriptor* d) { d->request = 3; }},
      {"unknown element type", [](ipc::Descriptor* d) { d->element_type = d->wire_type = kElementTypes; }},
      {"unknown element type", [](ipc::Descriptor* d) { d->element_type = d->wire_type = 255; }},
      {"wire type", [](ipc::Descriptor* d) { d->wire_type = 1; }},
      {"unknown kind", [](ipc::Descriptor* d) { d->kind = 2; }},
      {"mean of integers",
       [](ipc::Descriptor* d) {
         d->kind = 1;
         d->element_type = d->wire_type = static_cast<uint8_t>(ElementType::kI32);
       }},
      {"class", [](ipc::Descriptor* d) { d->op_class = 9; }},
      {"best_effort",
       [](ipc::Descriptor* d) {
         d->op_class = static_cast<uint8_t>(OpClass::kBestEffort);
         d->element_type = d->wire_type = static_cast<uint8_t>(ElementType::kI64);
       }},
      {"loss_scale", [](ipc::Descriptor* d) { d->loss_scale = 0; }},
      {"loss_scale", [](ipc::Descriptor* d) { d->loss_scale = -1; }},
      {"loss_scale", [](ipc::Descriptor* d) { d->loss_scale = std::numeric_limits<float>::quiet_NaN(); }},
      {"loss_scale", [](ipc::Descriptor* d) { d->loss_scale = std::numeric_limits<float>::infinity(); }},
      {"loss_scale",
       [](ipc::Descriptor* d) {
         d->loss_scale = 2;
         d->element_type = d->wire_type = static_cast<uint8_t>(ElementType::kU8);
       }},
      {"loss_scale",
       [](ipc::Descriptor* d) {
         d->flags = ipc::kFlagScaled;
         d->element_type = d->wire_type = static_cast<uint8_t>(ElementType::kU8);
       }},
      {"flags", [](ipc::Descriptor* d) { d->flags = 1; }},
      {"flags", [](ipc::Descriptor* d) { d->flags = 8; }},
      {"max_op_bytes", [](ipc::Descriptor* d) { d->count = kMaxOp / 4 + 1; }},
      {"max_op_bytes", [](ipc::Descriptor* d) { d->count = kHuge; }},
      {"max_op_bytes", [](ipc::Descriptor* d) { d->count = kHuge / 4 + 1; }},  // x 4 overflows to 0
      {"max_op_bytes",
       [](ipc::Descriptor* d) { d->count = (kHuge / 4) + 1 + 250; }},  // x 4 overflows to 1000
      {"aligned", [](ipc::Descriptor* d) { d->contribution = 32; }},
      {"aligned", [](ipc::Descriptor* d) { d->result = 8193; }},
      {"outside", [](ipc::Descriptor* d) { d->contribution = kArena; }},
      {"outside",
       [](ipc::Descriptor* d) { d->result = kArena - 3968; }},  // 4000 bytes from there end behind it
      {"outside", [](ipc::Descriptor* d) { d->contribution = kHuge - 63; }},  // + bytes overflows
      {"outside", [](ipc::Descriptor* d) { d->result = kHuge - 63; }},
      {"overlap", [](ipc::Descriptor* d) { d->result = d->contribution; }},
      {"overlap", [](ipc::Descriptor* d) { d->result = d->contribution + 3968; }},
      {"overlap",
       [](ipc::Descriptor* d) {
         d->contribution = 8192 + 64;
         d->result = 8192;
       }},
  };
  for (const Case& one : cases) {
    ipc::Descriptor d = good();
    one.change(&d);
    const char* wrong = check_descriptor(d, kArena, kMaxOp);
    ASSERT_NE(wrong, nullptr) << one.what;
    EXPECT_NE(std::string(wrong).find(one.what), std::string::npos) << one.what << ": " << wrong;
  }
  ipc::Descriptor d = good();
  EXPECT_NE(check_descriptor(d, 0, kMaxOp), nullptr);
  EXPECT_NE(check_descriptor(d, 4096, kMaxOp), nullptr);
}

}  // namespace
}  // namespace sluice::daemon
