// What each part of the module offers to Python.
#pragma once

#include <nanobind/nanobind.h>

namespace kvferry::engine {

void bind_isa(nanobind::module_& module);

}  // namespace kvferry::engine
