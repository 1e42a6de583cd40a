// Errors that a caller can meet. A function that can fail returns Result<T>; an Error says what went wrong,
// where and what to do next in one line, and carries a code for programs.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "base/assert.h"

namespace sluice {

struct Error {
  int code = 0;         // an errno value, or a sluice status (base/types.h) where the function says so
  std::string message;  // one line for a person: what, where, what to do next
};

// Either a value or an Error. Not for lane threads: an Error owns a string.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  explicit operator bool() const { return ok(); }

  T& value() & {
    SLUICE_ASSERT(ok());
    return *value_;
  }
  const T& value() const& {
    SLUICE_ASSERT(ok());
    return *value_;
  }
  T&& value() && {
    SLUICE_ASSERT(ok());
    return std::move(*value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  const Error& error() const {
    SLUICE_ASSERT(!ok());
    return error_;
  }

 private:
  std::optional<T> value_;
  Error error_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Error& error() const {
    SLUICE_ASSERT(!ok());
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

}  // namespace sluice
