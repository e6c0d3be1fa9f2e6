// Python bindings of the core: gradwire._native.
//
// Calls with several fields take them by keyword, or as a struct; enum members are looked up by name. Both are declared
// in src/gradwire/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NO_IMPORT_ARRAY
#include <numpy/arrayobject.h>

#include <optional>
#include <stdexcept>

#include "engine.hpp"
#include "module_calls.hpp"
#include "module_fast_path.hpp"
#include "module_kernels.hpp"
#include "module_lifeline.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;
using namespace gradwire;

namespace {

struct Reduction {
    DType dtype;
    ReduceOp op;
    std::size_t divisor;
};

void register_program(nb::module_& module) {
    nb::enum_<Buffer>(module, "Buffer")
        .value("INPUT", Buffer::input)
        .value("OUTPUT", Buffer::output)
        .value("ACCUMULATOR", Buffer::accumulator);
    nb::class_<Slice>(module, "Slice")
        .def("__init__", [](Slice* self, Buffer buffer, std::uint32_t first,
                            std::uint32_t count) { new (self) Slice{buffer, first, count}; },
             "buffer"_a, "first"_a, "count"_a);
    nb::class_<FoldTerm>(module, "FoldTerm")
        .def_static("local", &FoldTerm::local, "slice"_a)
        .def_static("received", &FoldTerm::from, "rank"_a, "partial"_a);
    nb::class_<Operation>(module, "Operation")
        .def_static("send", &Operation::send, "slice"_a, "to"_a)
        .def_static("recv", &Operation::recv, "slice"_a, "source"_a)
        .def_static("fold", &Operation::fold, "dst"_a, "terms"_a)
        .def_static("finish", &Operation::finish, "dst"_a, "src"_a)
        .def_static("copy", &Operation::copy, "dst"_a, "src"_a);
    using Offsets = std::vector<std::int64_t>;
    nb::class_<Segments>(module, "Segments")
        .def("__init__",
             [](Segments* self, Offsets lengths, Offsets in_offset, Offsets out_offset, Offsets scratch_index) {
                 new (self) Segments{std::move(lengths), std::move(in_offset), std::move(out_offset), std::move(scratch_index)};
             },
             nb::kw_only(), "lengths"_a, "in_offset"_a, "out_offset"_a, "scratch_index"_a);
    nb::class_<Tiling>(module, "Tiling")
        .def("__init__",
             [](Tiling* self, std::size_t tile, std::size_t tiles, std::size_t stride, std::size_t in_flight) {
                 new (self) Tiling{tile, tiles, stride, in_flight};
             },
             nb::kw_only(), "tile"_a, "tiles"_a, "stride"_a, "in_flight"_a);
    nb::class_<Reduction>(module, "Reduction")
        .def("__init__", [](Reduction* self, DType dtype, ReduceOp op,
                            std::size_t divisor) { new (self) Reduction{dtype, op, divisor}; },
             nb::kw_only(), "dtype"_a, "op"_a, "divisor"_a);
    nb::class_<Program>(module, "Program")
        .def("__init__",
             [](Program* self, std::vector<Round> rounds, Segments segments, const Tiling& tiling,
                std::optional<Reduction> reduction, std::size_t itemsize, std::size_t out_count, bool folds_last, bool one_shot,
                bool mirrored) {
                 new (self) Program();
                 self->rounds = std::move(rounds);
                 self->segments = std::move(segments);
                 self->tiling = tiling;
                 self->folds_last = folds_last;
                 self->one_shot = one_shot;
                 self->mirrored = mirrored;
                 self->itemsize = itemsize;
                 if (reduction) self->reduce_with(defined_kernels(reduction->dtype, reduction->op), reduction->divisor);
                 self->out_bytes = out_count * self->itemsize;
                 self->prepare();
             },
             nb::kw_only(), "rounds"_a, "segments"_a, "tiling"_a, "reduction"_a.none(), "itemsize"_a, "out_count"_a,
             "folds_last"_a, "one_shot"_a, "mirrored"_a);
}

void* data(nb::handle array) { return PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())); }

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

void register_engine(nb::module_& module) {
    nb::enum_<Status>(module, "Status")
        .value("DONE", Status::done)
        .value("WAITING", Status::waiting)
        .value("LOST", Status::lost)
        .value("MISMATCH", Status::mismatch)
        .value("ALARMED", Status::alarmed);
    nb::class_<Engine>(module, "Engine")
        .def("__init__",
             [](Engine* self, std::uint8_t message_kind, std::uint64_t job, std::uint32_t generation, std::uint64_t group,
                std::uint32_t rank, std::uint32_t size, int alarm) {
                 const CallHeader call{
                     .kind = message_kind, .job = job, .generation = generation, .group = group, .rank = rank};
                 new (self) Engine(call, size, alarm);
             },
             nb::kw_only(), "message_kind"_a, "job"_a, "generation"_a, "group"_a, "rank"_a, "size"_a, "alarm"_a)
        .def("connect", &Engine::connect)
        .def("open",
             [](Engine& self, std::uintptr_t arena, std::size_t nbytes, std::uint64_t region, std::size_t staging) {
                 return self.open(pointer(arena), nbytes, region, staging);
             },
             nb::kw_only(), "arena"_a, "nbytes"_a, "region"_a, "staging"_a)
        .def("withdraw", &Engine::withdraw)
        .def("map", [](Engine& self, std::uint32_t peer, std::uintptr_t arena,
                       std::size_t nbytes) { self.map(peer, pointer(arena), nbytes); })
        .def("run",
             [](Engine& self, const Program& program, nb::handle x, nb::handle out, std::uint64_t sequence,
                std::uint64_t fingerprint, double spin_seconds, double seconds) {
                 self.begin(program, data(x), data(out), sequence, fingerprint, spin_seconds);
                 nb::gil_scoped_release released;
                 return self.advance(seconds);
             })
        .def("advance", &Engine::advance, nb::call_guard<nb::gil_scoped_release>())
        .def_ro("culprit", &Engine::culprit)
        .def_prop_ro("sent", &Engine::sent)
        .def_prop_ro("received_header", [](const Engine& self) { return nb::bytes(&self.received_header, sizeof(Header)); })
        .def_static("region_bytes", [](std::size_t size, std::size_t staging) { return lanes_bytes(size) + staging; });
    module.attr("LANE_ENTRIES") = LANE_ENTRIES;
    module.attr("RESERVED_BYTES") = RESERVED_BYTES;
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a process may end in the middle of a call
    register_kernels(module);
    register_calls(module);
    register_program(module);
    register_engine(module);
    register_fast_path(module);
    register_lifeline(module);
}
