// Python bindings of the reduction kernels, the dtypes and the reduce ops.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels.hpp"

namespace gradwire {

// The best kernels for this processor; raises ValueError if the op is not defined for the dtype.
Kernels defined_kernels(DType dtype, ReduceOp op);

void register_kernels(nanobind::module_& module);

}  // namespace gradwire
