// Python bindings of the lifeline and of page remapping.
#pragma once

#include <nanobind/nanobind.h>

namespace gradwire {

void register_lifeline(nanobind::module_& module);

}  // namespace gradwire
