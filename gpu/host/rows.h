// Rows of a sparse gradient on the host: coalescing, and the partition over shards in two passes (design, section 7).
//
// Ids are int32 or int64 as PyTorch and C callers have them; ids that are no row of the tensor are found before anything
// is written. No function allocates unless it says so; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"
#include "gpu/row_map.h"

namespace sluice::codec {

inline constexpr size_t kAllValid = SIZE_MAX;

// Pass 1: counts[shard] rows of `ids` go to each shard; counts has map.shards() elements. Returns the index of the first
// id that is negative or at least map.rows(), else kAllValid; with an invalid one counts mean nothing.
template <typename Id>
size_t count_rows(const RowMap& map, std::span<const Id> ids, uint32_t* counts);

// Pass 2: for each id, in order, positions[next[shard]] and source[next[shard]] (the index of the id), and next[shard] one
// on. `next` begins with the sums of the counts before each shard. Ids that ascend give ascending positions in each shard.
template <typename Id>
void scatter_rows(const RowMap& map, std::span<const Id> ids, uint32_t* next, uint32_t* positions,
                  uint32_t* source);

// Whether ids ascend without duplicates, as those of a coalesced tensor do.
template <typename Id>
bool ascending(std::span<const Id> ids);

// Which inputs make one row of the coalesced tensor: row r is the sum of the inputs source[first[r]] .. source[first[r +
// 1] - 1], in the order in which they came.
template <typename Id>
struct Coalesced {
  std::vector<Id> ids;          // ascending
  std::vector<uint32_t> first;  // ids.size() + 1
  std::vector<uint32_t> source;
};
// Allocates. Fewer than 2^32 ids, none negative and all below 2^32 (count_rows() has looked).
template <typename Id>
Coalesced<Id> coalesce(std::span<const Id> ids);

// out[i] = the sum of the rows of `values` that `first` and `source` name, rows of `width` elements: as Coalesced has them.
// 16-bit floats are summed in f32 (`scratch`: width floats; unused by other types) and rounded once.
void sum_rows(ElementType type, std::span<const uint32_t> first, std::span<const uint32_t> source,
              const std::byte* values, size_t width, std::byte* out, std::byte* scratch);

// out[i] = values[source[i]], rows of `bytes` bytes.
void gather_rows(std::span<const uint32_t> source, const std::byte* values, size_t bytes, std::byte* out);

}  // namespace sluice::codec
