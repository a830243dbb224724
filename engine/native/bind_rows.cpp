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
      "rotate",
      [](Address x, std::int64_t tokens, std::int64_t heads, std::int64_t width, std::int64_t token_stride,
         std::int64_t head_stride, Address cosine, Address sine, Address output) {
        const Rotary rotary{reinterpret_cast<Numbers*>(x),
                            reinterpret_cast<Numbers*>(cosine),
                            reinterpret_cast<Numbers*>(sine),
                            reinterpret_cast<std::uint16_t*>(output),
                            tokens,
                            heads,
                            width,
                            token_stride,
                            head_stride};
        KVFERRY_DISPATCH(rotate, rotary);
      },
      nb::kw_only(), nb::arg("x"), nb::arg("tokens"), nb::arg("heads"), nb::arg("width"), nb::arg("token_stride"),
      nb::arg("head_stride"), nb::arg("cosine"), nb::arg("sine"), nb::arg("output"),
      nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "summarize",
      [](Address logits, std::int64_t rows, std::int64_t width, Address largest, Address normalizer) {
        const Summary summary{reinterpret_cast<const float*>(logits), rows, width,
                              reinterpret_cast<std::int64_t*>(largest), reinterpret_cast<float*>(normalizer)};
        KVFERRY_DISPATCH(summarize, summary);
      },
      nb::kw_only(), nb::arg("logits"), nb::arg("rows"), nb::arg("width"), nb::arg("largest"), nb::arg("normalizer"),
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace kvferry::engine
