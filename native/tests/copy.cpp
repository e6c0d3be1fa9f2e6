// Tests copies at every relative page offset of source and target.
#include <vector>

#include "check.hpp"
#include "copy.hpp"

using namespace gradwire;

namespace {

constexpr std::size_t PAGE = 4096;

void copy_at_any_page_offset_writes_exactly_its_bytes() {
    std::vector<std::byte> source(4 * PAGE), target(4 * PAGE), expected;
    Random random(1);
    for (std::byte& one : source) one = std::byte(random.below(256));
    for (const std::size_t nbytes : {0ul, 1ul, 127ul, 2047ul, 2048ul, 2049ul, 2 * PAGE, 2 * PAGE + 127})
        for (std::size_t ahead = 0; ahead < 40; ++ahead) {
            const std::size_t from = random.below(PAGE), to = (from + ahead) % PAGE;
            for (std::byte& one : target) one = std::byte(random.below(256));
            expected = target;
            for (std::size_t i = 0; i < nbytes; ++i) expected[to + i] = source[from + i];
            const std::vector<std::byte> before = target;
            copy_bytes(target.data() + to, source.data() + from, nbytes);
            CHECK(target == expected);
            target = before;
            stream_bytes(target.data() + to, source.data() + from, nbytes);
            CHECK(target == expected);
        }
}

void copy_of_overlapping_memory_keeps_all_bytes() {
    for (const std::size_t ahead : {16ul, PAGE + 16}) {
        std::vector<std::byte> memory(6 * PAGE);
        Random random(2);
        for (std::byte& one : memory) one = std::byte(random.below(256));
        const std::vector<std::byte> before = memory;
        copy_bytes(memory.data() + ahead, memory.data(), 4 * PAGE);
        for (std::size_t i = 0; i < 4 * PAGE; ++i) CHECK(memory[ahead + i] == before[i]);
    }
}

}  // namespace

int main() {
    RUN(copy_at_any_page_offset_writes_exactly_its_bytes);
    RUN(copy_of_overlapping_memory_keeps_all_bytes);
}
