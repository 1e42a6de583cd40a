// Cuts the bytes of a fuzz input into values. Past the end it yields zeros, so that every input means something.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace sluice {

class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : rest_(data, size) {}

  bool empty() const { return rest_.empty(); }
  template <typename T>
  T take() {
    T value{};
    const size_t length = std::min(sizeof(T), rest_.size());
    std::memcpy(&value, rest_.data(), length);
    rest_ = rest_.subspan(length);
    return value;
  }
  // A copy, so that a sanitizer sees a read one byte beyond it. Fewer bytes when there are no more.
  std::vector<std::byte> bytes(size_t length) {
    length = std::min(length, rest_.size());
    const auto part = std::as_bytes(rest_.first(length));
    rest_ = rest_.subspan(length);
    return {part.begin(), part.end()};
  }
  std::vector<std::byte> rest() { return bytes(rest_.size()); }

 private:
  std::span<const uint8_t> rest_;
};

}  // namespace sluice
