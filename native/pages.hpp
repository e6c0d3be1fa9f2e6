// Remaps pages of an arena in place: private to this process, or shared again.
#pragma once

#include <cstddef>

namespace gradwire {

// Makes these bytes private: their content stays, and later writes of other processes are not visible. Threads of this
// process may read and write them during the call; no write is lost. Returns false if the system has no memory left.
//
// The file's memory is freed piece by piece as it is copied: other processes then read zeros, and at most one piece
// exists twice at any time.
bool map_private(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset);

// Maps the file's bytes again, shared; the private copy is discarded.
bool map_shared(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset);

}  // namespace gradwire
