// What a parameter keeps, for Python to write to a file and to read back: its sizes and its memory.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>

#include "aligned_buffer.h"

namespace octavo {

template <class Parameter>
void bind_buffers(nanobind::class_<Parameter>& type) {
  namespace nb = nanobind;
  using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::c_contig>;
  type.def_static(
          "empty", [](const typename Parameter::Sizes& sizes) { return Parameter(sizes); }, nb::arg("sizes"),
          "A parameter of these sizes whose buffers are to be filled before it is used.")
      .def_prop_ro("sizes", &Parameter::sizes)
      .def_prop_ro(
          "buffers",
          [](nb::handle self) {
            nb::list found;
            for (const AlignedBuffer* buffer : nb::cast<const Parameter&>(self).buffers()) {
              found.append(Bytes(buffer->as<uint8_t>(), {buffer->bytes()}, self));
            }
            return found;
          },
          "Its memory, uint8 arrays that may be written to before it is used.");
}

}  // namespace octavo
