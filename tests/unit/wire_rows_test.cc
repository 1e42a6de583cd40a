// Rows in packets: cuts that tile a shard, four codes of positions, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/prng.h"
#include "transport/wire/rows.h"

namespace sluice::wire {
namespace {

std::vector<uint32_t> draw(Prng* random, uint32_t shard_rows, double density) {
  std::vector<uint32_t> positions;
  for (uint32_t p = 0; p < shard_rows; ++p)
    if (random->chance(density)) positions.push_back(p);
  return positions;
}

struct Packet {
  std::vector<std::byte> bytes;
  RowsCut cut;
};

Packet pack(std::span<const uint32_t> rest, uint32_t first, const RowsCut& cut, uint32_t row_bytes) {
  Packet packet;
  packet.cut = cut;
  packet.bytes.assign(sizeof(RowsHead) + cut.coded + size_t{cut.rows} * row_bytes, std::byte{0xAA});
  const RowsHead head{first, cut.end, static_cast<uint8_t>(cut.format), 0, 1};
  std::memcpy(packet.bytes.data(), &head, sizeof head);
  encode_positions(rest, first, cut, packet.bytes.data() + sizeof head);
  for (uint32_t i = 0; i < cut.rows; ++i) {
    std::memset(packet.bytes.data() + sizeof head + cut.coded + size_t{i} * row_bytes,
                static_cast<int>(rest[i] % 251), row_bytes);
  }
  return packet;
}

// All positions come back in packets whose ranges tile the shard, whatever the density, width and room.
TEST(Rows, CutsTileTheShardAndReadBack) {
  Prng random(11);
  uint32_t used[kRowFormats] = {};
  for (int round = 0; round < 600; ++round) {
    const auto shard_rows = static_cast<uint32_t>(random.below(6000));
    const double density = 1.0 / static_cast<double>(random.log_between(1, 1000));
    const auto positions = draw(&random, shard_rows, random.chance(0.1) ? 1.0 : density);
    const auto row_bytes = static_cast<uint32_t>(1 + random.below(random.chance(0.5) ? 8 : 1200));
    const uint32_t room = row_bytes + 8 + static_cast<uint32_t>(random.below(1400));
    uint32_t first = 0;
    std::span<const uint32_t> rest(positions);
    do {
      const RowsCut cut = cut_rows(rest, first, shard_rows, row_bytes, room);
      ASSERT_LE(cut.coded + uint64_t{cut.rows} * row_bytes, room);
      ASSERT_TRUE(cut.rows > 0 || rest.empty());
      const Packet packet = pack(rest, first, cut, row_bytes);
      RowsHead head;
      std::vector<uint32_t> found(cut.rows);
      const std::byte* values = nullptr;
      ASSERT_TRUE(decode_rows(packet.bytes, cut.rows, row_bytes, &head, found.data(), &values));
      ASSERT_EQ(head.first, first);
      ASSERT_TRUE(std::equal(found.begin(), found.end(), rest.begin()));
      for (uint32_t i = 0; i < cut.rows; ++i)
        ASSERT_EQ(static_cast<uint32_t>(values[size_t{i} * row_bytes + row_bytes - 1]), rest[i] % 251);
      ++used[head.format];
      rest = rest.subspan(cut.rows);
      first = head.end;
    } while (!rest.empty());
    ASSERT_EQ(first, shard_rows) << "the last range ends with the shard";
  }
  for (uint32_t format = 0; format < kRowFormats; ++format) {
    if (static_cast<RowFormat>(format) == RowFormat::kCoo) continue;  // needs gaps of five bytes
    EXPECT_GT(used[format], 20U) << format;
  }
}

// The cut is the longest that fits, in the format of the fewest bytes: compared with all of them.
TEST(Rows, CutsAreTheLongestInTheShortestCode) {
  Prng random(12);
  for (int round = 0; round < 300; ++round) {
    const auto shard_rows = static_cast<uint32_t>(1 + random.below(800));
    const auto positions = draw(&random, shard_rows, static_cast<double>(random.below(101)) / 100);
    if (positions.empty()) continue;
    const auto row_bytes = static_cast<uint32_t>(1 + random.below(12));
    const auto room = static_cast<uint32_t>(row_bytes + 8 + random.below(600));
    const uint32_t first = static_cast<uint32_t>(random.below(positions[0] + 1));
    const RowsCut cut = cut_rows(positions, first, shard_rows, row_bytes, room);
    const auto least = [&](uint32_t rows, uint32_t end) {
      uint32_t bytes = UINT32_MAX;
      const uint32_t gaps = gap_bytes(std::span(positions).first(rows), first);
      for (uint8_t f = 0; f < kRowFormats; ++f) {
        const auto format = static_cast<RowFormat>(f);
        if (format == RowFormat::kDense && rows != end - first) continue;
        bytes = std::min(bytes, coded_bytes(format, rows, end - first, gaps));
      }
      return bytes;
    };
    const auto end_of = [&](uint32_t rows) {
      return rows == positions.size() ? shard_rows : positions[rows - 1] + 1;
    };
    ASSERT_EQ(cut.end, end_of(cut.rows));
    ASSERT_EQ(cut.coded, least(cut.rows, cut.end));
    if (cut.rows < positions.size()) {
      const uint32_t more = cut.rows + 1;
      ASSERT_GT(least(more, end_of(more)) + uint64_t{more} * row_bytes, room);
    }
  }
}

TEST(Rows, FormulasAreWhatIsWritten) {
  const std::vector<uint32_t> positions{5, 6, 200, 20'000, 3'000'000, 4'000'000'000U};
  // Gaps from 3: 2, 0, 193, 19,799, 2,979,999, 3,996,999,999.
  EXPECT_EQ(gap_bytes(positions, 3), 1U + 1 + 2 + 3 + 4 + 5);
  EXPECT_EQ(gap_bytes({}, 3), 0U);
  EXPECT_EQ(coded_bytes(RowFormat::kGaps, 6, 0, 16), 16U);
  EXPECT_EQ(coded_bytes(RowFormat::kGaps, 6, 0, 17), 20U);
  EXPECT_EQ(coded_bytes(RowFormat::kBitmap, 6, 33, 0), 8U);
  EXPECT_EQ(coded_bytes(RowFormat::kBitmap, 6, UINT32_MAX, 0), 1U << 29);
  EXPECT_EQ(coded_bytes(RowFormat::kCoo, 6, 33, 0), 24U);
  EXPECT_EQ(coded_bytes(RowFormat::kDense, 6, 6, 0), 0U);
  RowsCut cut;
  cut.rows = 6;
  cut.end = UINT32_MAX;
  for (const RowFormat format : {RowFormat::kGaps, RowFormat::kCoo}) {
    cut.format = format;
    cut.coded = coded_bytes(format, 6, 0, 16);
    const Packet packet = pack(positions, 3, cut, 4);
    RowsHead head;
    std::vector<uint32_t> found(6);
    const std::byte* values = nullptr;
    ASSERT_TRUE(decode_rows(packet.bytes, 6, 4, &head, found.data(), &values));
    EXPECT_EQ(found, positions);
  }
}

TEST(Rows, NoRowsIsOnePacket) {
  const RowsCut cut = cut_rows({}, 0, 1000, 4, 100);
  EXPECT_EQ(cut.rows, 0U);
  EXPECT_EQ(cut.end, 1000U);
  EXPECT_EQ(cut.coded, 0U);
  const Packet packet = pack({}, 0, cut, 4);
  RowsHead head;
  const std::byte* values = nullptr;
  EXPECT_TRUE(decode_rows(packet.bytes, 0, 4, &head, nullptr, &values));
  EXPECT_EQ(head.end, 1000U);
}

struct Bad {
  const char* what;
  RowFormat format;
  uint32_t first, end, rows;
  std::vector<uint8_t> coded;
};

TEST(Rows, MalformedPayloadsAreRefused) {
  const std::vector<Bad> all = {
      {"a gap that leaves the range", RowFormat::kGaps, 10, 12, 1, {2, 0, 0, 0}},
      {"gaps that end too early", RowFormat::kGaps, 0, 1000, 5, {1, 1, 1, 1}},
      {"a gap without end", RowFormat::kGaps, 0, 1000, 1, {0x80, 0x80, 0x80, 0x80}},
      {"a gap of six bytes", RowFormat::kGaps, 0, UINT32_MAX, 1, {0x81, 0x80, 0x80, 0x80, 0x80, 1, 0, 0}},
      {"a gap beyond 32 bits", RowFormat::kGaps, 0, UINT32_MAX, 1, {0xFF, 0xFF, 0xFF, 0xFF, 0x7F, 0, 0, 0}},
      {"a gap that is longer than it has to be", RowFormat::kGaps, 0, 1000, 1, {0x85, 0, 0, 0}},
      {"the same, of three bytes", RowFormat::kGaps, 0, 1000, 1, {0x85, 0x80, 0, 0}},
      {"padding that is not zero", RowFormat::kGaps, 0, 1000, 1, {5, 0, 1, 0}},
      {"a bit beyond the range", RowFormat::kBitmap, 0, 9, 1, {0, 2, 0, 0}},
      {"fewer bits than rows", RowFormat::kBitmap, 0, 9, 2, {1, 0, 0, 0}},
      {"more bits than rows", RowFormat::kBitmap, 0, 9, 1, {3, 0, 0, 0}},
      {"a bitmap that is cut off", RowFormat::kBitmap, 0, 1000, 1, {1, 0, 0, 0}},
      {"a position twice", RowFormat::kCoo, 0, 9, 2, {3, 0, 0, 0, 3, 0, 0, 0}},
      {"positions that descend", RowFormat::kCoo, 0, 9, 2, {3, 0, 0, 0, 2, 0, 0, 0}},
      {"a position beyond the range", RowFormat::kCoo, 5, 9, 1, {4, 0, 0, 0}},
      {"one that wraps", RowFormat::kCoo, 5, 9, 1, {0xFF, 0xFF, 0xFF, 0xFF}},
      {"a dense range with holes", RowFormat::kDense, 0, 3, 2, {}},
      {"more rows than the range has", RowFormat::kGaps, 4, 4, 1, {0, 0, 0, 0}},
      {"a range that ends before it begins", RowFormat::kGaps, 5, 4, 0, {}},
      {"no such format", static_cast<RowFormat>(4), 0, 9, 1, {0, 0, 0, 0}},
  };
  for (const Bad& bad : all) {
    constexpr uint32_t kRowBytes = 4;
    const RowsHead head{bad.first, bad.end, static_cast<uint8_t>(bad.format), 0, 1};
    std::vector<std::byte> payload(sizeof head + bad.coded.size() + size_t{bad.rows} * kRowBytes);
    std::memcpy(payload.data(), &head, sizeof head);
    if (!bad.coded.empty()) std::memcpy(payload.data() + sizeof head, bad.coded.data(), bad.coded.size());
    std::vector<uint32_t> found(bad.rows);
    RowsHead out;
    const std::byte* values = nullptr;
    EXPECT_FALSE(decode_rows(payload, bad.rows, kRowBytes, &out, found.data(), &values)) << bad.what;
  }
}

TEST(Rows, CutShortOrTooLongIsRefused) {
  const std::vector<uint32_t> positions{1, 2, 400};
  const RowsCut cut = cut_rows(positions, 0, 1000, 4, 100);
  Packet packet = pack(positions, 0, cut, 4);
  RowsHead head;
  uint32_t found[3];
  const std::byte* values = nullptr;
  for (size_t size = 0; size < packet.bytes.size(); ++size)
    EXPECT_FALSE(decode_rows(std::span(packet.bytes).first(size), 3, 4, &head, found, &values)) << size;
  packet.bytes.push_back(std::byte{0});
  EXPECT_FALSE(decode_rows(packet.bytes, 3, 4, &head, found, &values));
}

}  // namespace
}  // namespace sluice::wire
