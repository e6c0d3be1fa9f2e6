// Remaps pages of an arena: private to this process, or shared again.
#include "pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace gradwire {

namespace {

constexpr std::size_t PIECE = 16 << 20;

bool map(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset, int kind) {
    return ::mmap(address, nbytes, PROT_READ | PROT_WRITE, kind | MAP_FIXED | MAP_NORESERVE, descriptor,
                  static_cast<off_t>(offset)) != MAP_FAILED;
}

// Turns private pages into copies of the file's pages.
void copy_pages(std::byte* address, std::size_t nbytes) {
    if (::madvise(address, nbytes, MADV_POPULATE_WRITE) == 0) return;
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));  // before Linux 5.14
    for (std::size_t at = 0; at < nbytes; at += page)
        __atomic_fetch_or(reinterpret_cast<unsigned char*>(address + at), static_cast<unsigned char>(0), __ATOMIC_RELAXED);
}

}  // namespace

bool map_private(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset) {
    // A private page is the file's until the first write, and a copy from then on. Copying explicitly instead would
    // lose writes of other threads between the copy and its mapping.
    if (!map(address, nbytes, descriptor, offset, MAP_PRIVATE)) return false;
    for (std::size_t at = 0; at < nbytes; at += PIECE) {
        const std::size_t length = std::min(PIECE, nbytes - at);
        copy_pages(address + at, length);
        // Some sandboxes do not support this. The file then keeps its memory until the array is freed.
        static_cast<void>(::fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                      static_cast<off_t>(offset + at), static_cast<off_t>(length)));
    }
    return true;
}

bool map_shared(std::byte* address, std::size_t nbytes, int descriptor, std::size_t offset) {
    return map(address, nbytes, descriptor, offset, MAP_SHARED);
}

}  // namespace gradwire
