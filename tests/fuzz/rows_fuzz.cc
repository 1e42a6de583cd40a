// The payload of a sparse packet: any bytes are refused or name positions that ascend inside the range, and what is
// accepted is what the encoder writes for these positions.
//
// Input: number of rows (2 bytes), bytes of a row (1 byte), the payload.
#include <algorithm>
#include <vector>

#include "base/assert.h"
#include "tests/fuzz/fuzz_input.h"
#include "transport/wire/rows.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sluice::wire;
  sluice::FuzzInput input(data, size);
  const uint32_t rows = input.take<uint16_t>() % 4096;
  const uint32_t row_bytes = 1 + input.take<uint8_t>();
  const std::vector<std::byte> payload = input.rest();
  std::vector<uint32_t> positions(rows);
  RowsHead head;
  const std::byte* values = nullptr;
  if (!decode_rows(payload, rows, row_bytes, &head, positions.data(), &values)) return 0;
  SLUICE_ASSERT(std::adjacent_find(positions.begin(), positions.end(), std::greater_equal<>()) ==
                positions.end());
  SLUICE_ASSERT(rows == 0 || (positions.front() >= head.first && positions.back() < head.end));
  SLUICE_ASSERT(values + uint64_t{rows} * row_bytes == payload.data() + payload.size());
  RowsCut cut;
  cut.rows = rows;
  cut.end = head.end;
  cut.format = static_cast<RowFormat>(head.format);
  cut.coded = coded_bytes(cut.format, rows, head.end - head.first, gap_bytes(positions, head.first));
  SLUICE_ASSERT(payload.data() + sizeof head + cut.coded == values);
  std::vector<std::byte> again(cut.coded);
  encode_positions(positions, head.first, cut, again.data());
  SLUICE_ASSERT(std::equal(again.begin(), again.end(), payload.begin() + sizeof head));
  return 0;
}
