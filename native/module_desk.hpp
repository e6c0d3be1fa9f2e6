// Calls that were made before, in short: for arrays of the same kind everything but the exchange itself is known.
#pragma once

#include "module_calls.hpp"

namespace gradwire {

void register_desk(nb::module_& module);

}  // namespace gradwire
