// Python bindings of the native heartbeat thread (lifeline.hpp) and of remapped memory (pages.hpp).
#include "module_lifeline.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "lifeline.hpp"
#include "pages.hpp"

namespace gradwire {

namespace nb = nanobind;

namespace {

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

std::string text(const nb::bytes& record) { return {record.c_str(), record.size()}; }

}  // namespace

void register_lifeline(nb::module_& module) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Lifeline>(module, "Lifeline")
        .def(nb::init<double>())
        .def("write_to", [](Lifeline& self, std::uintptr_t arena) { self.write_to(pointer(arena)); }, Release())
        .def("add",
             [](Lifeline& self, int socket, nb::bytes record) {
                 std::string repeated = text(record);
                 nb::gil_scoped_release released;
                 self.add(socket, std::move(repeated));
             })
        .def("add_tokens", &Lifeline::add_tokens, Release())
        .def("feed",
             [](Lifeline& self, int socket, nb::bytes given) {
                 std::string tokens = text(given);
                 nb::gil_scoped_release released;
                 self.feed(socket, std::move(tokens));
             })
        .def("ahead", &Lifeline::ahead, Release())
        .def("drop", &Lifeline::drop, Release())
        .def("start", &Lifeline::start, Release())
        .def("stop", &Lifeline::stop, Release());

    // The last heartbeat of each arena's owner.
    module.def("beats", [](const std::vector<std::uintptr_t>& arenas) {
        std::vector<std::uint64_t> found;
        for (std::uintptr_t arena : arenas) found.push_back(Pulse::of(pointer(arena)).beat.load(std::memory_order_acquire));
        return found;
    });

    // Regions are (offset, bytes) of an arena. Returns false if some of them could not be mapped. Marks the arena
    // first, for peers that read it.
    using Regions = std::vector<std::pair<std::size_t, std::size_t>>;
    module.def(
        "map_private",
        [](std::uintptr_t arena, int descriptor, const Regions& regions) {
            bool all = true;
            Pulse::of(pointer(arena)).reclaimed.store(1);
            for (auto [offset, nbytes] : regions) all = map_private(pointer(arena) + offset, nbytes, descriptor, offset) && all;
            return all;
        },
        Release());
    module.def("map_shared", [](std::uintptr_t arena, int descriptor, std::size_t offset, std::size_t nbytes) {
        return map_shared(pointer(arena) + offset, nbytes, descriptor, offset);
    });
}

}  // namespace gradwire
