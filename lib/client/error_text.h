// The calling thread's last failure, as sluice_last_error() gives it, and the errors of the library.
//
// Inside the library a function that can fail returns Result<T> whose Error::code is a sluice_error (negative), or
// calls fail() and returns its value. Any thread; nothing here allocates.
#pragma once

#include <string_view>

#include "base/result.h"
#include "lib/client/sluice.h"

namespace sluice::client {

// Remembers `text` (cut to what fits) for the calling thread and returns `error`.
int fail(int error, std::string_view text) noexcept;
inline int fail(const Error& error) noexcept { return fail(error.code, error.message); }

const char* last_error() noexcept;

}  // namespace sluice::client
