// The fast path: runs repeated calls of a collective entirely in the core.
#pragma once

#include "module_calls.hpp"

namespace gradwire {

void register_fast_path(nb::module_& module);

}  // namespace gradwire
