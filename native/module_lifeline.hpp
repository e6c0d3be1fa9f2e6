// The lifeline, and memory that is left behind.
#pragma once

#include <nanobind/nanobind.h>

namespace gradwire {

void register_lifeline(nanobind::module_& module);

}  // namespace gradwire
