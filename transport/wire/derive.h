// HKDF-SHA-256 (RFC 5869) and HMAC-SHA-256, by OpenSSL. Internal to wire/. They allocate inside OpenSSL: keys
// are derived when a view is entered, and once per sender when a phase changes, never per packet.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace sluice::wire {

using Bytes32 = std::array<uint8_t, 32>;
using ByteSpan = std::span<const uint8_t>;

Bytes32 sha256(std::initializer_list<ByteSpan> parts);
Bytes32 hmac_sha256(ByteSpan key, std::initializer_list<ByteSpan> parts);
Bytes32 hkdf_extract(ByteSpan salt, ByteSpan key);
// Fills `out`, at most 255 x 32 bytes.
void hkdf_expand(const Bytes32& prk, ByteSpan info, std::span<uint8_t> out);

}  // namespace sluice::wire
