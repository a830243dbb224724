#include <nanobind/nanobind.h>

#include "bind.hpp"
#include "linear.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace kvferry::engine {

void bind_linear(nb::module_& module) {
  using Address = std::uintptr_t;
  using Numbers = const std::uint16_t;
  module.def("packed_size", &packed_size, nb::arg("out"), nb::arg("in_"));
  module.def(
      "pack",
      [](Address weight, std::int64_t out, std::int64_t in, Address panels) {
        pack(reinterpret_cast<Numbers*>(weight), out, in, reinterpret_cast<std::uint16_t*>(panels));
      },
      nb::kw_only(), nb::arg("weight"), nb::arg("out"), nb::arg("in_"), nb::arg("panels"),
      nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "linear",
      [](Address rows, std::int64_t num_rows, Address panels, Address bias, std::int64_t out, std::int64_t in,
         Address output) {
        const Linear layer{reinterpret_cast<Numbers*>(rows),
                           reinterpret_cast<Numbers*>(panels),
                           reinterpret_cast<Numbers*>(bias),
                           reinterpret_cast<std::uint16_t*>(output),
                           num_rows,
                           in,
                           out};
        KVFERRY_DISPATCH(linear, layer);
      },
      nb::kw_only(), nb::arg("rows"), nb::arg("num_rows"), nb::arg("panels"), nb::arg("bias"), nb::arg("out"),
      nb::arg("in_"), nb::arg("output"), nb::call_guard<nb::gil_scoped_release>());
  module.def("use_threads", &use_threads, nb::arg("count"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace kvferry::engine
