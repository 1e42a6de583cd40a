#include "transport/wire/rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/assert.h"

namespace sluice::wire {
namespace {

constexpr uint32_t kMostGapBytes = 5;  // of one position: 32 bits, 7 a byte
constexpr uint32_t kChunk = 32;        // rows that are looked at together

constexpr uint32_t padded(uint32_t bytes) { return (bytes + 3) & ~3U; }

// Compares and adds, which the compiler makes vectors of; a count of leading zeros it does not.
constexpr uint32_t gap_length(uint32_t gap) {
  return 1U + (gap >= 1U << 7 ? 1U : 0U) + (gap >= 1U << 14 ? 1U : 0U) + (gap >= 1U << 21 ? 1U : 0U) +
         (gap >= 1U << 28 ? 1U : 0U);
}

RowFormat best_format(uint32_t rows, uint32_t span, uint32_t gaps, uint32_t* bytes) {
  RowFormat best = RowFormat::kGaps;
  *bytes = coded_bytes(RowFormat::kGaps, rows, span, gaps);
  for (const RowFormat format : {RowFormat::kCoo, RowFormat::kBitmap, RowFormat::kDense}) {
    if (format == RowFormat::kDense && rows != span) continue;
    const uint32_t needed = coded_bytes(format, rows, span, gaps);
    if (needed > *bytes || (needed == *bytes && format > best)) continue;
    best = format;
    *bytes = needed;
  }
  return best;
}

std::byte* put_gap(std::byte* out, uint32_t gap) {
  // Nearly all gaps have one byte or two: both are written, and one is kept.
  const auto more = static_cast<uint32_t>(gap > 0x7F);
  const auto both = static_cast<uint16_t>((gap & 0x7F) | more << 7 | gap >> 7 << 8);
  std::memcpy(out, &both, 2);
  if (gap < 1U << 14) return out + 1 + more;
  ++out;
  for (gap >>= 7; gap >= 1U << 7; gap >>= 7) *out++ = static_cast<std::byte>((gap & 0x7F) | 0x80);
  *out++ = static_cast<std::byte>(gap);
  return out;
}

// Reads `rows` gaps from [at, end); null: malformed.
const std::byte* take_gaps(const std::byte* at, const std::byte* end, uint32_t rows, const RowsHead& head,
                           uint32_t* positions) {
  uint64_t next = head.first;  // the lowest position that may come
  uint32_t i = 0;
  // One byte or two, and no look at the end, as long as the rest may be that long.
  for (; i < rows && end - at >= 2; ++i) {
    const auto low = static_cast<uint32_t>(at[0]);
    const auto high = static_cast<uint32_t>(at[1]);
    const uint32_t more = low >> 7;
    if ((more & high >> 7) != 0) break;
    if ((more & (high == 0 ? 1U : 0U)) != 0) return nullptr;  // longer than it has to be
    const uint64_t position = next + (low & 0x7F) + (more * high << 7);
    positions[i] = static_cast<uint32_t>(position);
    next = position + 1;
    at += 1 + more;
    if (position >= head.end) return nullptr;
  }
  for (; i < rows; ++i) {
    uint64_t gap = 0;
    for (uint32_t shift = 0;; shift += 7) {
      if (at == end || shift > 28) return nullptr;
      const auto byte = static_cast<uint32_t>(*at++);
      gap |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if ((byte & 0x80) != 0) continue;
      if (byte == 0 && shift > 0) return nullptr;
      break;
    }
    const uint64_t position = next + gap;
    if (position >= head.end) return nullptr;
    positions[i] = static_cast<uint32_t>(position);
    next = position + 1;
  }
  return at;
}

const std::byte* take_bitmap(const std::byte* at, const std::byte* end, uint32_t rows, const RowsHead& head,
                             uint32_t* positions) {
  const uint32_t span = head.end - head.first;
  const size_t bytes = (static_cast<size_t>(span) + 7) / 8;
  if (static_cast<size_t>(end - at) < bytes) return nullptr;
  uint32_t found = 0;
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, at + i, std::min<size_t>(8, bytes - i));
    if (found + static_cast<uint32_t>(std::popcount(word)) > rows) return nullptr;
    for (; word != 0; word &= word - 1) {
      const size_t bit = i * 8 + static_cast<size_t>(std::countr_zero(word));
      if (bit >= span) return nullptr;
      positions[found++] = head.first + static_cast<uint32_t>(bit);
    }
  }
  return found == rows ? at + bytes : nullptr;
}

const std::byte* take_coo(const std::byte* at, const std::byte* end, uint32_t rows, const RowsHead& head,
                          uint32_t* positions) {
  if (static_cast<uint64_t>(end - at) < uint64_t{4} * rows) return nullptr;
  uint64_t next = head.first;
  for (uint32_t i = 0; i < rows; ++i, at += 4) {
    uint32_t offset = 0;
    std::memcpy(&offset, at, 4);
    const uint64_t position = uint64_t{head.first} + offset;
    if (position < next || position >= head.end) return nullptr;
    positions[i] = static_cast<uint32_t>(position);
    next = position + 1;
  }
  return at;
}

}  // namespace

uint32_t coded_bytes(RowFormat format, uint32_t rows, uint32_t span, uint32_t gaps) {
  switch (format) {
    case RowFormat::kDense:
      return 0;
    case RowFormat::kBitmap:
      return padded(span / 8 + (span % 8 != 0 ? 1 : 0));
    case RowFormat::kGaps:
      return padded(gaps);
    case RowFormat::kCoo:
      return 4 * rows;
  }
  return 0;
}

uint32_t gap_bytes(std::span<const uint32_t> positions, uint32_t first) {
  if (positions.empty()) return 0;
  uint32_t bytes = gap_length(positions[0] - first);
  const uint32_t* at = positions.data();
  for (size_t i = 1; i < positions.size(); ++i) bytes += gap_length(at[i] - at[i - 1] - 1);
  return bytes;
}

RowsCut cut_rows(std::span<const uint32_t> positions, uint32_t first, uint32_t shard_rows, uint32_t row_bytes,
                 uint32_t room) {
  SLUICE_ASSERT(room >= row_bytes + padded(kMostGapBytes) && row_bytes > 0);
  RowsCut cut;
  cut.end = shard_rows;
  if (positions.empty()) {
    cut.format = best_format(0, shard_rows - first, 0, &cut.coded);
    return cut;
  }
  // Bytes of the first `rows` rows, whose gap code has `gaps` bytes.
  const auto bytes_of = [&](size_t rows, uint32_t gaps, RowsCut* out) {
    out->rows = static_cast<uint32_t>(rows);
    out->end = rows == positions.size() ? shard_rows : positions[rows - 1] + 1;
    out->format = best_format(out->rows, out->end - first, gaps, &out->coded);
    return uint64_t{out->rows} * row_bytes + out->coded;
  };
  // No more than these can fit. They are taken by chunks, which is quick, then the chunk that is too much row by row: a
  // row more never needs fewer bytes.
  const size_t most = std::min<size_t>(positions.size(), room / row_bytes);
  size_t rows = 0;
  uint32_t gaps = 0;
  const auto gaps_to = [&](size_t next) {
    return gaps + (rows == 0 ? gap_bytes(positions.first(next), first)
                             : gap_bytes(positions.subspan(rows, next - rows), positions[rows - 1] + 1));
  };
  for (size_t chunk = kChunk; chunk > 0; chunk = chunk == 1 ? 0 : 1) {
    while (rows < most) {
      const size_t next = std::min(most, rows + chunk);
      const uint32_t with = gaps_to(next);
      RowsCut longer;
      if (bytes_of(next, with, &longer) > room) break;
      cut = longer;
      rows = next;
      gaps = with;
    }
  }
  SLUICE_ASSERT(rows > 0);
  return cut;
}

void encode_positions(std::span<const uint32_t> positions, uint32_t first, const RowsCut& cut,
                      std::byte* out) {
  if (cut.coded == 0) return;  // `out` may then be null
  std::byte* const end = out + cut.coded;
  switch (cut.format) {
    case RowFormat::kDense:
      return;
    case RowFormat::kBitmap:
      std::memset(out, 0, cut.coded);
      for (uint32_t i = 0; i < cut.rows; ++i) {
        const uint32_t bit = positions[i] - first;
        out[bit / 8] |= static_cast<std::byte>(1 << bit % 8);
      }
      return;
    case RowFormat::kGaps: {
      uint32_t next = first;
      uint32_t i = 0;
      // put_gap() writes a byte more than it keeps, which the last few must not.
      for (; i < cut.rows && end - out >= 8; ++i) {
        out = put_gap(out, positions[i] - next);
        next = positions[i] + 1;
      }
      std::byte last[8 * kMostGapBytes + 1];
      std::byte* at = last;
      for (; i < cut.rows; ++i) {
        at = put_gap(at, positions[i] - next);
        next = positions[i] + 1;
      }
      const auto kept = static_cast<size_t>(at - last);
      SLUICE_ASSERT(kept <= static_cast<size_t>(end - out));
      std::memcpy(out, last, kept);
      std::fill(out + kept, end, std::byte{0});
      return;
    }
    case RowFormat::kCoo:
      for (uint32_t i = 0; i < cut.rows; ++i, out += 4) {
        const uint32_t offset = positions[i] - first;
        std::memcpy(out, &offset, 4);
      }
      return;
  }
}

bool decode_rows(std::span<const std::byte> payload, uint32_t rows, uint32_t row_bytes, RowsHead* head,
                 uint32_t* positions, const std::byte** values) {
  if (payload.size() < sizeof(RowsHead)) return false;
  std::memcpy(head, payload.data(), sizeof(RowsHead));
  if (head->format >= kRowFormats || head->first > head->end || rows > head->end - head->first) return false;
  const std::byte* at = payload.data() + sizeof(RowsHead);
  const std::byte* const end = payload.data() + payload.size();
  const std::byte* const start = at;
  switch (static_cast<RowFormat>(head->format)) {
    case RowFormat::kDense:
      if (rows != head->end - head->first) return false;
      for (uint32_t i = 0; i < rows; ++i) positions[i] = head->first + i;
      break;
    case RowFormat::kBitmap:
      at = take_bitmap(at, end, rows, *head, positions);
      break;
    case RowFormat::kGaps:
      at = take_gaps(at, end, rows, *head, positions);
      break;
    case RowFormat::kCoo:
      at = take_coo(at, end, rows, *head, positions);
      break;
  }
  if (at == nullptr) return false;
  for (; (at - start) % 4 != 0; ++at) {
    if (at == end || *at != std::byte{0}) return false;
  }
  if (static_cast<uint64_t>(end - at) != uint64_t{rows} * row_bytes) return false;
  *values = at;
  return true;
}

}  // namespace sluice::wire
