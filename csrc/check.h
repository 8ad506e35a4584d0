// Checks of arrays at the border between Python and C++: a wrong dtype is a TypeError, a wrong shape or layout a
// ValueError, both with the argument's name. Values that index memory are checked by who uses them (program_run.cpp).
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

namespace octavo::check {

using AnyArray = nanobind::ndarray<nanobind::ro>;

constexpr int64_t kAny = -1;  // a dimension of any size

template <class T>
const char* dtype_name() {
  if constexpr (std::is_same_v<T, float>) return "float32";
  if constexpr (std::is_same_v<T, int32_t>) return "int32";
  if constexpr (std::is_same_v<T, uint16_t>) return "float16";
  return "uint8";
}

template <class T>
bool has_dtype(const AnyArray& a) {
  if constexpr (std::is_same_v<T, uint16_t>) {  // halves are handled as their bits
    return a.dtype() == nanobind::dlpack::dtype{static_cast<uint8_t>(nanobind::dlpack::dtype_code::Float), 16, 1};
  } else {
    return a.dtype() == nanobind::dtype<T>();
  }
}

inline std::string shape_text(const AnyArray& a) {
  std::string text = "(";
  for (size_t i = 0; i < a.ndim(); ++i) text += (i ? ", " : "") + std::to_string(a.shape(i));
  return text + (a.ndim() == 1 ? ",)" : ")");
}

inline nanobind::builtin_exception wrong(const char* name, const std::string& why) {
  return nanobind::value_error((name + (": " + why)).c_str());
}

template <class T>
void host_array(const AnyArray& a, const char* name) {
  const std::string prefix = std::string(name) + ": must ";
  if (a.device_type() != nanobind::device::cpu::value) throw nanobind::type_error((prefix + "be a NumPy array").c_str());
  if (!has_dtype<T>(a)) throw nanobind::type_error((prefix + "have dtype " + dtype_name<T>()).c_str());
}

// Raises unless `a` is a host array of T [rows][columns], each row contiguous; returns its data and the row stride.
template <class T>
std::pair<const T*, int64_t> rows(const AnyArray& a, const char* name) {
  host_array<T>(a, name);
  if (a.ndim() != 2) throw wrong(name, "has shape " + shape_text(a) + ", expected (any, any)");
  const bool is_packed = a.shape(1) <= 1 || a.stride(1) == 1;
  const bool is_apart = a.shape(0) <= 1 || a.stride(0) >= static_cast<int64_t>(a.shape(1));
  if (!is_packed || !is_apart) throw wrong(name, "rows must be contiguous; use numpy.ascontiguousarray");
  return {static_cast<const T*>(a.data()), a.stride(0)};
}

// Raises unless `a` is a C-contiguous host array of T with this shape; returns its data.
template <class T>
const T* array(const AnyArray& a, const char* name, std::initializer_list<int64_t> shape) {
  host_array<T>(a, name);
  bool fits = a.ndim() == shape.size();
  std::string expected;
  size_t i = 0;
  for (int64_t size : shape) {
    fits = fits && (size == kAny || static_cast<int64_t>(a.shape(i)) == size);
    expected += (i++ ? ", " : "") + (size == kAny ? std::string("any") : std::to_string(size));
  }
  if (!fits) throw wrong(name, "has shape " + shape_text(a) + ", expected (" + expected + ")");
  int64_t stride = 1;
  for (size_t d = a.ndim(); d-- > 0;) {
    const bool is_packed = a.shape(d) == 1 || a.size() == 0 || a.stride(d) == stride;
    if (!is_packed) throw wrong(name, "must be C-contiguous; use numpy.ascontiguousarray");
    stride *= static_cast<int64_t>(a.shape(d));
  }
  return static_cast<const T*>(a.data());
}

// An array's dimension as int, which every size inside the kernels is.
inline int dimension(const AnyArray& a, size_t axis, const char* name) {
  if (a.ndim() <= axis) throw nanobind::value_error((std::string(name) + ": has too few dimensions").c_str());
  if (a.shape(axis) > INT32_MAX) throw nanobind::value_error((std::string(name) + ": is too large").c_str());
  return static_cast<int>(a.shape(axis));
}

}  // namespace octavo::check
