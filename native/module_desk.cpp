#include "module_desk.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

#include <unordered_map>
#include <unordered_set>

#include "engine.hpp"

namespace gradwire {

namespace {

constexpr std::size_t MOST_FORMS = 512;
constexpr double FIRST_SECONDS = 0.01;  // then Python looks at signals, deadlines and the alarm's reason

// A kind of call, as it can be told from its arguments: `how` is the op or the root.
struct Form {
    int operation;
    PyObject* dtype;
    PyObject* how;
    npy_intp count;
    bool operator==(const Form&) const = default;
};
struct HashOfForm {
    std::size_t operator()(const Form& form) const {
        std::size_t hash = reinterpret_cast<std::uintptr_t>(form.dtype) ^ reinterpret_cast<std::uintptr_t>(form.how) << 1;
        return (hash ^ static_cast<std::size_t>(form.count) << 20) * 0x9E3779B97F4A7C15u + static_cast<std::size_t>(form.operation);
    }
};
struct Known {
    nb::object dtype, how, plan, meaning;  // kept alive
    const Program* program;                // the plan's
    std::uint64_t fingerprint;
};

}  // namespace

class Desk {
  public:
    // `resume(status, operation, sequence)` goes on where the core has to wait for long or has failed;
    // `wake()` lets others know that a turn is over; `subscribers` is looked up in the dictionary of the events' module.
    Desk(nb::object engine, nb::object turns, nb::object ring, nb::object resume, nb::object wake, nb::dict events,
         nb::str package, bool spins)
        : kept_(nb::make_tuple(engine, turns, ring)),
          engine_(nb::cast<Engine&>(engine)),
          turns_(nb::cast<Turns&>(turns)),
          ring_(nb::cast<CallRing&>(ring)),
          resume_(std::move(resume)),
          wake_(std::move(wake)),
          events_(std::move(events)),
          package_(std::move(package)),
          spins_(spins) {}

    void learn(int operation, nb::object dtype, nb::object how, npy_intp count, nb::object plan, nb::object meaning,
               const Program& program, std::uint64_t fingerprint) {
        if (known_.size() >= MOST_FORMS) known_.clear();
        const Form form{operation, dtype.ptr(), how.ptr(), count};
        known_.insert_or_assign(form, Known{std::move(dtype), std::move(how), std::move(plan), std::move(meaning),
                                            &program, fingerprint});
    }
    void halt() { halted_ = true; }

    // The result, or None if the call has to be made the long way; then nothing has happened.
    nb::object all_reduce(nb::handle x, nb::handle op, nb::handle out, nb::handle algorithm, nb::handle timeout) {
        PyArrayObject* from = usable(x);
        if (!from || !is_default(algorithm, timeout)) return nb::none();
        PyArrayObject* to = from;
        if (!out.is_none()) {
            to = usable(out);
            if (!to || PyArray_DESCR(to) != PyArray_DESCR(from) || PyArray_SIZE(to) != PyArray_SIZE(from)) return nb::none();
            if (to != from && overlap(from, to)) return nb::none();
        }
        return run(ALL_REDUCE, from, op, PyArray_DATA(from), PyArray_DATA(to), out.is_none() ? x : out);
    }

    nb::object broadcast(nb::handle x, nb::handle root, nb::handle algorithm, nb::handle timeout) {
        PyArrayObject* array = usable(x);
        if (!array || !is_default(algorithm, timeout)) return nb::none();
        return run(BROADCAST, array, root, PyArray_DATA(array), PyArray_DATA(array), x);
    }

    static constexpr int ALL_REDUCE = 0, BROADCAST = 1;

  private:
    static PyArrayObject* usable(nb::handle x) {
        if (!PyArray_CheckExact(x.ptr())) return nullptr;
        auto* array = reinterpret_cast<PyArrayObject*>(x.ptr());
        return PyArray_CHKFLAGS(array, NPY_ARRAY_CARRAY) ? array : nullptr;
    }
    static bool overlap(PyArrayObject* a, PyArrayObject* b) {
        const auto x = reinterpret_cast<std::uintptr_t>(PyArray_DATA(a)), y = reinterpret_cast<std::uintptr_t>(PyArray_DATA(b));
        return x < y + static_cast<std::uintptr_t>(PyArray_NBYTES(b)) && y < x + static_cast<std::uintptr_t>(PyArray_NBYTES(a));
    }
    bool is_default(nb::handle algorithm, nb::handle timeout) const {
        return algorithm.ptr() == automatic_.ptr() && timeout.is_none();
    }
    bool observed() const {
        PyObject* subscribers = PyDict_GetItemWithError(events_.ptr(), subscribers_.ptr());
        return !subscribers || !PyTuple_Check(subscribers) || PyTuple_GET_SIZE(subscribers) != 0;
    }

    nb::object run(int operation, PyArrayObject* array, nb::handle how, void* in, void* out, nb::handle result) {
        if (halted_ || turns_.issued != turns_.serving || observed()) return nb::none();
        const auto found = known_.find(
            Form{operation, reinterpret_cast<PyObject*>(PyArray_DESCR(array)), how.ptr(), PyArray_SIZE(array)});
        if (found == known_.end()) return nb::none();
        const Known& known = found->second;
        const Program& program = *known.program;
        const nb::object plan = known.plan;  // others may call `learn` while the lock is released
        const std::uint64_t sequence = record(known);
        ++turns_.issued;
        engine_.begin(program, in, out, sequence, known.fingerprint, spins_);
        Status status;
        {
            nb::gil_scoped_release released;
            status = engine_.advance(FIRST_SECONDS);
        }
        if (status != Status::done) return nb::borrow(resume(status, operation, sequence, result));
        ring_.finished = sequence;
        next();
        return nb::borrow(result);
    }

    nb::handle resume(Status status, int operation, std::uint64_t sequence, nb::handle result) {
        struct Turn {
            Desk& desk;
            ~Turn() {
                try {
                    desk.next();
                } catch (nb::python_error& error) {
                    error.discard_as_unraisable("gradwire");
                }
            }
        } turn{*this};
        resume_(static_cast<int>(status), operation == ALL_REDUCE ? "all_reduce" : "broadcast", sequence);
        return result;
    }

    void next() {
        ++turns_.serving;
        if (turns_.issued != turns_.serving) wake_();
    }

    // The innermost frame outside this package is where the user made the call.
    std::uint64_t record(const Known& known) {
        PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
        while (frame) {
            nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
            PyFrameObject* caller = is_ours(code) ? PyFrame_GetBack(frame) : nullptr;
            if (!caller) {
                const int instruction = PyFrame_GetLasti(frame);
                Py_DECREF(frame);
                return ring_.record(known.meaning, known.fingerprint, std::move(code), instruction);
            }
            Py_DECREF(frame);
            frame = caller;
        }
        return ring_.record(known.meaning, known.fingerprint, nb::none(), 0);
    }
    bool is_ours(const nb::object& code) {
        if (ours_.count(code.ptr())) return true;
        nb::handle file = reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename;
        if (PyUnicode_Tailmatch(file.ptr(), package_.ptr(), 0, PY_SSIZE_T_MAX, -1) != 1) return false;
        ours_.insert(nb::object(code).release().ptr());  // kept for good: its address stays its own
        return true;
    }

    nb::tuple kept_;
    Engine& engine_;
    Turns& turns_;
    CallRing& ring_;
    nb::object resume_, wake_;
    nb::dict events_;
    nb::str package_;
    bool spins_;
    bool halted_ = false;
    nb::object automatic_ = nb::steal(PyUnicode_InternFromString("auto"));
    nb::object subscribers_ = nb::steal(PyUnicode_InternFromString("_subscribers"));
    std::unordered_map<Form, Known, HashOfForm> known_;
    inline static std::unordered_set<PyObject*> ours_;
};

void register_desk(nb::module_& module) {
    if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
    nb::class_<Desk>(module, "Desk")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::dict, nb::str, bool>())
        .def("learn", &Desk::learn)
        .def("halt", &Desk::halt)
        .def("all_reduce", &Desk::all_reduce, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("broadcast", &Desk::broadcast, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none());
}

}  // namespace gradwire
