// Rows of a sparse tensor in a packet (protocol, sections 11 and 14): which positions of the shard it answers for, which
// of them were touched, and their values.
//
// Payload: RowsHead, coded positions padded with zeros to a multiple of 4, then the values of the rows in order of their
// positions; a PULL has its verdict list behind them. A packet answers for [first, end): a position in it that is not
// named was not touched. Packets of one sender for one shard tile the shard. Nothing here allocates; positions are those
// inside the shard, ascending, without duplicates; bytes come from anybody and are checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sluice::wire {

enum class RowFormat : uint8_t {
  kDense = 0,   // all positions of the range: no bytes for them
  kBitmap = 1,  // a bit per position of the range, lowest first
  kGaps =
      2,  // positions skipped since the one before (or since `first`), 7 bits a byte, lowest first (LEB128)
  kCoo = 3,  // position - first, 4 bytes each
};
inline constexpr uint8_t kRowFormats = 4;

struct RowsHead {
  uint32_t first = 0, end = 0;
  uint8_t format = 0;
  uint8_t value_type = 0;  // ElementType of the values
  uint16_t width = 0;      // values of a row; a wider row is cut in chunks, each a row of its own
};
static_assert(sizeof(RowsHead) == 12);

// Bytes of `rows` coded positions in a range of `span` positions, padded; `gaps`: of the gap code (gap_bytes()). The
// least of them is what a sender takes, and of equals the first.
uint32_t coded_bytes(RowFormat format, uint32_t rows, uint32_t span, uint32_t gaps);
// Bytes of the gap code before padding.
uint32_t gap_bytes(std::span<const uint32_t> positions, uint32_t first);

// What goes into one packet.
struct RowsCut {
  uint32_t rows = 0;  // the first so many
  uint32_t end = 0;   // of the range
  RowFormat format = RowFormat::kDense;
  uint32_t coded = 0;  // bytes of coded positions, padded
};

// Takes the longest run of rows that fits `room` bytes behind the RowsHead, the values of a row being `row_bytes`. The
// range begins at `first` (at most positions[0]) and ends behind the last row, with the last rows at `shard_rows`. At
// least one row fits: room >= row_bytes + 8. No positions left: no rows, and the range is the rest of the shard.
RowsCut cut_rows(std::span<const uint32_t> positions, uint32_t first, uint32_t shard_rows, uint32_t row_bytes,
                 uint32_t room);

// Writes cut.coded bytes for the first cut.rows positions.
void encode_positions(std::span<const uint32_t> positions, uint32_t first, const RowsCut& cut,
                      std::byte* out);

// Reads a payload (without verdict list) of `rows` rows of `row_bytes` bytes: the head, the positions, where the values
// begin. False: it is malformed: a range that is empty though rows are in it, positions that do not ascend or leave the
// range, a number of rows or bytes that does not fit, padding that is not zero. `positions` has room for `rows`.
bool decode_rows(std::span<const std::byte> payload, uint32_t rows, uint32_t row_bytes, RowsHead* head,
                 uint32_t* positions, const std::byte** values);

}  // namespace sluice::wire
