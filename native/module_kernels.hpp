// The part of the Python module that shows the kernels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace gradwire {

void register_kernels(nanobind::module_& module);

}  // namespace gradwire
