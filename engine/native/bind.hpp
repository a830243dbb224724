// What each part of the module offers to Python. Memory is handed over as addresses: Python checks what lies there.
#pragma once

#include <nanobind/nanobind.h>

namespace kvferry::engine {

void bind_attention(nanobind::module_& module);
void bind_isa(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_rows(nanobind::module_& module);

}  // namespace kvferry::engine
