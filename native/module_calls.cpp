// Python bindings of the log of calls and of the order of turns.
#include "module_calls.hpp"

namespace gradwire {

void register_calls(nb::module_& module) {
    nb::class_<Turns>(module, "Turns")
        .def(nb::init<>())
        .def("take", [](Turns& self) { return self.issued++; })
        .def("pass_on", [](Turns& self) { return ++self.serving; })
        .def_ro("issued", &Turns::issued)
        .def_ro("serving", &Turns::serving);

    nb::class_<CallRing>(module, "CallRing")
        .def(nb::init<std::size_t>())
        .def("record", &CallRing::record)
        .def("call",
             [](const CallRing& self, std::uint64_t sequence) -> nb::object {
                 const CallRing::Call* call = self.call(sequence);
                 if (!call) return nb::none();
                 return nb::make_tuple(call->chain, call->description, call->code, call->instruction);
             })
        .def_ro("sequence", &CallRing::sequence)
        .def_ro("chain", &CallRing::chain)
        .def_rw("finished", &CallRing::finished);
}

}  // namespace gradwire
