#include "pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace gradwire {

namespace {

bool map(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset, int kind) {
    return ::mmap(address, nbytes, PROT_READ | PROT_WRITE, kind | MAP_FIXED | MAP_NORESERVE, descriptor,
                  static_cast<off_t>(offset)) != MAP_FAILED;
}

}  // namespace

bool map_alone(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset) {
    // A private page is the file's until it is first written, and a copy from then on. Copying by hand instead would
    // lose what other threads write between the copy and its mapping.
    if (!map(address, nbytes, descriptor, offset, MAP_PRIVATE)) return false;
    if (::madvise(address, nbytes, MADV_POPULATE_WRITE) == 0) return true;
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));  // before Linux 5.14
    for (std::size_t at = 0; at < nbytes; at += page)
        __atomic_fetch_or(reinterpret_cast<unsigned char*>(address + at), static_cast<unsigned char>(0), __ATOMIC_RELAXED);
    return true;
}

bool map_jointly(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset) {
    return map(address, nbytes, descriptor, offset, MAP_SHARED);
}

}  // namespace gradwire
