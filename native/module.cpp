// The Python face of the core: gradwire._native.

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NO_IMPORT_ARRAY
#include <numpy/arrayobject.h>

#include <stdexcept>

#include "engine.hpp"
#include "module_calls.hpp"
#include "module_desk.hpp"
#include "module_kernels.hpp"
#include "module_lifeline.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

Slice to_slice(nb::handle value) {
    auto [buffer, first, count] = nb::cast<std::tuple<int, std::uint32_t, std::uint32_t>>(value);
    return {static_cast<std::uint8_t>(buffer), first, count};
}

// (kind, dst slice, src slice or None, peers, terms), a term being a slice or (rank, partial).
Operation to_operation(nb::tuple row) {
    Operation operation{};
    operation.kind = static_cast<Kind>(nb::cast<int>(row[0]));
    operation.dst = to_slice(row[1]);
    if (!row[2].is_none()) operation.src = to_slice(row[2]);
    operation.peers = nb::cast<std::vector<std::uint32_t>>(row[3]);
    for (nb::handle item : nb::cast<nb::tuple>(row[4])) {
        auto term = nb::cast<nb::tuple>(item);
        if (term.size() == 2)
            operation.terms.push_back({true, nb::cast<bool>(term[1]), nb::cast<std::uint32_t>(term[0]), {}});
        else
            operation.terms.push_back({false, false, 0, to_slice(term)});
    }
    return operation;
}

void make_program(Program* self, nb::list rounds, std::vector<std::int64_t> lengths, std::vector<std::int64_t> in_home,
                  std::vector<std::int64_t> out_home, std::vector<std::int64_t> scratch_index, std::size_t tile,
                  std::size_t tiles, std::size_t stride, std::size_t in_flight, std::size_t homeless, int dtype, int op,
                  std::size_t divisor, bool folds_last, std::size_t item, std::size_t out_count, bool one_shot,
                  bool mirrored) {
    new (self) Program();
    for (nb::handle round : rounds) {
        self->rounds.emplace_back();
        for (nb::handle row : nb::cast<nb::tuple>(round)) self->rounds.back().push_back(to_operation(nb::cast<nb::tuple>(row)));
    }
    self->lengths = std::move(lengths);
    self->in_home = std::move(in_home);
    self->out_home = std::move(out_home);
    self->scratch_index = std::move(scratch_index);
    self->tile = tile;
    self->tiles = tiles;
    self->stride = stride;
    self->in_flight = in_flight;
    self->homeless = homeless;
    self->divisor = divisor;
    self->folds_last = folds_last;
    self->item = item;
    self->one_shot = one_shot;
    self->mirrored = mirrored;
    if (op >= 0) {
        self->reduces = true;
        self->kernels = kernels(static_cast<DType>(dtype), static_cast<Op>(op));
        if (!self->kernels.fold) throw std::invalid_argument("the op has no meaning for the dtype");
        self->widens = self->kernels.element != self->kernels.accumulator;
    }
    self->out_bytes = out_count * self->element();
    self->prepare();
}

void* data(nb::handle array) { return PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())); }

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a process that ends in the middle of a call says nothing about it
    register_kernels(module);
    register_calls(module);
    nb::class_<Program>(module, "Program").def("__init__", &make_program);

    nb::class_<Engine>(module, "Engine")
        .def("__init__",
             [](Engine* self, std::uint64_t job, std::uint32_t generation, std::uint64_t group, std::uint32_t rank,
                std::uint32_t size, int alarm) {
                 new (self) Engine(Sheet{job, generation, group, rank, 0, 0}, size, alarm);
             })
        .def("connect", &Engine::connect)
        .def("open",
             [](Engine& self, std::uintptr_t arena, std::size_t nbytes, std::uint64_t region, std::size_t staging) {
                 return self.open(pointer(arena), nbytes, region, staging);
             })
        .def("withdraw", &Engine::withdraw)
        .def("map", [](Engine& self, std::uint32_t peer, std::uintptr_t arena,
                       std::size_t nbytes) { self.map(peer, pointer(arena), nbytes); })
        .def("run",
             [](Engine& self, const Program& program, nb::handle x, nb::handle out, std::uint64_t sequence,
                std::uint64_t fingerprint, double awake_for, double seconds) {
                 self.begin(program, data(x), data(out), sequence, fingerprint, awake_for);
                 nb::gil_scoped_release released;
                 return static_cast<int>(self.advance(seconds));
             })
        .def("advance", [](Engine& self, double seconds) { return static_cast<int>(self.advance(seconds)); },
             nb::call_guard<nb::gil_scoped_release>())
        .def_ro("culprit", &Engine::culprit)
        .def_prop_ro("sent", &Engine::sent)
        .def_prop_ro("heard", [](const Engine& self) { return nb::bytes(&self.heard, sizeof(Header)); })
        .def_static("region_bytes", [](std::size_t size, std::size_t staging) { return lanes_bytes(size) + staging; });
    register_desk(module);
    register_lifeline(module);
}
