// Pages of an arena, mapped anew where they are: for this process alone, or as all see them.
#pragma once

#include <cstddef>

namespace gradwire {

// From now on these bytes are this process's own: they stay as they are, and what other processes write there is not seen.
// Threads of this process may read and write them meanwhile, nothing of that is lost. False if the system has no memory.
//
// The file gives its memory back, piece by piece as it is copied: other processes find zeros there, and no more than a piece is
// ever held twice.
bool map_alone(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset);

// The bytes that the descriptor's file has there, shared again; this process's own are forgotten.
bool map_jointly(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset);

}  // namespace gradwire
