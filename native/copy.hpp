// Copies into memory that another processor will read next.
#pragma once

#include <cstddef>
#include <cstring>

namespace gradwire {

inline void copy(void* to, const void* from, std::size_t nbytes) { std::memcpy(to, from, nbytes); }

}  // namespace gradwire
