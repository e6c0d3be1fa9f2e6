// The fast path: repeated calls of a collective, made entirely in the core.
#pragma once

#include "module_calls.hpp"

namespace gradwire {

void register_fast_path(nb::module_& module);

}  // namespace gradwire
