#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "isa.hpp"

namespace kvferry::engine {

void bind_isa(nanobind::module_& module) {
  module.def("available_isas", &available_isas);
  module.def("use_isa", &use_isa, nanobind::arg("name"));
}

}  // namespace kvferry::engine

NB_MODULE(_native, module) {
  kvferry::engine::bind_isa(module);
  kvferry::engine::bind_attention(module);
  kvferry::engine::bind_linear(module);
  kvferry::engine::bind_rows(module);
}
