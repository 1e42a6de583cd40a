// Bytes that nobody shall find in memory that was given back: wiped when they go. Copies are allowed, and each wipes itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sluice {

template <size_t kBytes>
struct Secret : std::array<uint8_t, kBytes> {
  ~Secret() { wipe(); }
  void wipe() {
    ::explicit_bzero(this->data(), kBytes);
  }  // not optimised away, unlike a memset before the end
};

}  // namespace sluice
