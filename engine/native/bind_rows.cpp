#include <nanobind/nanobind.h>

#include "bind.hpp"
#include "rows.hpp"

namespace nb = nanobind;

namespace kvferry::engine {

void bind_rows(nb::module_& module) {
  using Address = std::uintptr_t;
  using Numbers = const std::uint16_t;
  module.def(
      "normalize",
      [](Address x, std::int64_t rows, std::int64_t x_stride, Address weight, std::int64_t width, Address output,
         float epsilon, float offset, bool round_first) {
        const Norm norm{reinterpret_cast<Numbers*>(x),
                        reinterpret_cast<Numbers*>(weight),
                        reinterpret_cast<std::uint16_t*>(output),
                        rows,
                        x_stride,
                        width,
                        epsilon,
                        offset,
                        round_first};
        KVFERRY_DISPATCH(normalize, norm);
      },
      nb::kw_only(), nb::arg("x"), nb::arg("rows"), nb::arg("x_stride"), nb::arg("weight"), nb::arg("width"),
      nb::arg("output"), nb::arg("epsilon"), nb::arg("offset"), nb::arg("round_first"),
      nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "gate",
      [](Address gate, std::int64_t gate_stride, Address up, std::int64_t up_stride, std::int64_t rows,
         std::int64_t width, Address output) {
        const Gate gated{reinterpret_cast<Numbers*>(gate),
                         reinterpret_cast<Numbers*>(up),
                         reinterpret_cast<std::uint16_t*>(output),
                         rows,
                         gate_stride,
                         up_stride,
                         width};
        KVFERRY_DISPATCH(gate, gated);
      },
      nb::kw_only(), nb::arg("gate"), nb::arg("gate_stride"), nb::arg("up"), nb::arg("up_stride"), nb::arg("rows"),
      nb::arg("width"), nb::arg("output"), nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "draw",
      [](Address logits, Address changed, std::int64_t rows, std::int64_t width, Address temperatures, Address numbers,
         Address tokens, Address normalizers) {
        const Draw draw{reinterpret_cast<const float*>(logits),
                        reinterpret_cast<const float*>(changed),
                        rows,
                        width,
                        reinterpret_cast<const float*>(temperatures),
                        reinterpret_cast<const double*>(numbers),
                        reinterpret_cast<std::int64_t*>(tokens),
                        reinterpret_cast<float*>(normalizers)};
        KVFERRY_DISPATCH(draw, draw);
      },
      nb::kw_only(), nb::arg("logits"), nb::arg("changed"), nb::arg("rows"), nb::arg("width"), nb::arg("temperatures"),
      nb::arg("numbers"), nb::arg("tokens"), nb::arg("normalizers"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace kvferry::engine
