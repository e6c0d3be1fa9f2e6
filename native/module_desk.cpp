#include "module_desk.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <array>
#include <unordered_map>
#include <unordered_set>

#include "engine.hpp"

namespace gradwire {

namespace {

constexpr std::size_t MOST_FORMS = 512;
constexpr npy_intp SMALLEST_KEPT = 128 << 10, LARGEST_KEPT = 64 << 20;  // bytes of a result whose memory serves again
constexpr double FIRST_SECONDS = 0.01;  // then Python looks at signals, deadlines and the alarm's reason

enum Operation : int { ALL_REDUCE = 0, BROADCAST, REDUCE_SCATTER, BARRIER, ALL_GATHER, ALL_GATHER_ROWS };
constexpr std::array NAMES = {"all_reduce", "broadcast", "reduce_scatter", "barrier", "all_gather", "all_gather"};

// A kind of call, as it can be told from its arguments. `how` is the op or the root; of arrays that are joined the shape
// of a row matters too.
struct Form {
    int operation;
    PyObject* dtype;
    PyObject* how;
    npy_intp count;
    npy_intp row[3];
    bool operator==(const Form&) const = default;
};
struct HashOfForm {
    std::size_t operator()(const Form& form) const {
        std::size_t hash = static_cast<std::size_t>(form.operation);
        for (const std::uint64_t part :
             {reinterpret_cast<std::uintptr_t>(form.dtype), reinterpret_cast<std::uintptr_t>(form.how),
              static_cast<std::uintptr_t>(form.count), static_cast<std::uintptr_t>(form.row[0])})
            hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
        return hash ^ hash >> 32;
    }
};
struct Known {
    nb::object dtype, how, plan, meaning;  // kept alive
    const Program* program;                // the plan's
    std::uint64_t fingerprint;
    std::vector<std::int64_t> rows;  // of all ranks, in an all_gather
};

nb::object owned(PyObject* object) {
    if (!object) throw nb::python_error();
    return nb::steal(object);
}

}  // namespace

class Desk {
  public:
    // resume(status, operation, sequence) goes on where the core would have to wait for long, or has failed;
    // complete(x, rows, out, sequence) ends an all_gather whose rows are known but new;
    // wake() lets others know that a turn is over; `events` is the dictionary of the events' module.
    Desk(nb::object engine, nb::object turns, nb::object ring, std::size_t size, nb::object resume, nb::object complete,
         nb::object wake, nb::dict events, nb::tuple inside, double awake_for)
        : kept_(nb::make_tuple(engine, turns, ring)),
          engine_(nb::cast<Engine&>(engine)),
          turns_(nb::cast<Turns&>(turns)),
          ring_(nb::cast<CallRing&>(ring)),
          resume_(std::move(resume)),
          complete_(std::move(complete)),
          wake_(std::move(wake)),
          events_(std::move(events)),
          inside_(std::move(inside)),
          awake_for_(awake_for),
          rows_(size) {}

    // Calls of this form run this plan. `count` is of elements, or the rows of all ranks.
    void learn(int operation, nb::object dtype, nb::object how, nb::handle count, nb::tuple row, nb::object plan,
               nb::object meaning, const Program& program, std::uint64_t fingerprint) {
        Form form{operation, dtype.ptr(), how.ptr(), 0, {-1, -1, -1}};
        if (row.size() > std::size(form.row)) return;
        for (std::size_t i = 0; i < row.size(); ++i) form.row[i] = nb::cast<npy_intp>(row[i]);
        std::vector<std::int64_t> rows;
        if (nb::isinstance<nb::tuple>(count))
            for (nb::handle one : nb::borrow<nb::tuple>(count)) form.count += rows.emplace_back(nb::cast<std::int64_t>(one));
        else
            form.count = nb::cast<npy_intp>(count);
        if (known_.size() >= MOST_FORMS) known_.clear();
        known_.insert_or_assign(form, Known{std::move(dtype), std::move(how), std::move(plan), std::move(meaning), &program,
                                            fingerprint, std::move(rows)});
    }
    void halt() { halted_ = true; }

    // Each returns the result, or None if the call has to be made the long way; then nothing has happened.
    nb::object all_reduce(nb::handle x, nb::handle op, nb::handle out, nb::handle algorithm, nb::handle timeout) {
        PyArrayObject* from = usable(x, NPY_ARRAY_CARRAY);
        if (!from || !is_default(algorithm, timeout)) return nb::none();
        PyArrayObject* to = from;
        if (!out.is_none()) {
            to = usable(out, NPY_ARRAY_CARRAY);
            if (!to || PyArray_DESCR(to) != PyArray_DESCR(from) || PyArray_SIZE(to) != PyArray_SIZE(from)) return nb::none();
            if (to != from && overlap(from, to)) return nb::none();
        }
        const Known* known = find(ALL_REDUCE, from, op);
        if (!known) return nb::none();
        Turn turn(*this);
        run(ALL_REDUCE, *known, PyArray_DATA(from), PyArray_DATA(to));
        return nb::borrow(out.is_none() ? x : out);
    }

    nb::object broadcast(nb::handle x, nb::handle root, nb::handle algorithm, nb::handle timeout) {
        PyArrayObject* array = usable(x, NPY_ARRAY_CARRAY);
        if (!array || !is_default(algorithm, timeout)) return nb::none();
        const Known* known = find(BROADCAST, array, root);
        if (!known) return nb::none();
        Turn turn(*this);
        run(BROADCAST, *known, PyArray_DATA(array), PyArray_DATA(array));
        return nb::borrow(x);
    }

    nb::object reduce_scatter(nb::handle x, nb::handle op, nb::handle counts, nb::handle out, nb::handle algorithm,
                              nb::handle timeout) {
        PyArrayObject* array = usable(x, NPY_ARRAY_CARRAY_RO);
        if (!array || !counts.is_none() || !is_default(algorithm, timeout)) return nb::none();
        if (PyArray_NDIM(array) < 1 || PyArray_DIM(array, 0) % static_cast<npy_intp>(rows_.size())) return nb::none();
        const Known* known = find(REDUCE_SCATTER, array, op);
        if (!known) return nb::none();
        nb::object result = room(array, PyArray_DIM(array, 0) / static_cast<npy_intp>(rows_.size()), out);
        if (!result.is_valid()) return nb::none();
        Turn turn(*this);
        run(REDUCE_SCATTER, *known, PyArray_DATA(array), data(result));
        return result;
    }

    nb::object barrier(nb::handle algorithm, nb::handle timeout) {
        const Known* known = is_default(algorithm, timeout) ? find({BARRIER, Py_None, Py_None, 0, {-1, -1, -1}}) : nullptr;
        if (!known) return nb::none();
        Turn turn(*this);
        run(BARRIER, *known, &token_, &token_);
        return nb::bool_(true);
    }

    nb::object all_gather(nb::handle x, nb::handle out, nb::handle algorithm, nb::handle timeout) {
        PyArrayObject* array = usable(x, NPY_ARRAY_CARRAY_RO);
        if (!array || !is_default(algorithm, timeout) || PyArray_NDIM(array) < 1 || PyArray_NDIM(array) > 4) return nb::none();
        Form form{ALL_GATHER, reinterpret_cast<PyObject*>(PyArray_DESCR(array)), Py_None, 0, {-1, -1, -1}};
        for (int i = 1; i < PyArray_NDIM(array); ++i) form.row[i - 1] = PyArray_DIM(array, i);
        const Known* known = find(form);
        if (!known) return nb::none();
        if (!out.is_none()) {  // only its size may turn out to be wrong when others wait for this rank already
            PyArrayObject* to = usable(out, NPY_ARRAY_CARRAY);
            if (!to || PyArray_DESCR(to) != PyArray_DESCR(array) || overlap(array, to)) return nb::none();
        }
        Turn turn(*this);
        // What is gathered may be of any length: first how many rows everybody brings, then the rows.
        std::int64_t own = PyArray_DIM(array, 0);
        const std::uint64_t sequence = run(ALL_GATHER, *known, &own, rows_.data());
        form.operation = ALL_GATHER_ROWS;
        form.count = 0;
        for (std::int64_t rows : rows_) form.count += rows;
        const auto found = known_.find(form);
        const bool knows = found != known_.end() && found->second.rows == rows_;
        nb::object result;
        try {
            if (knows) result = room(array, form.count, out);
        } catch (nb::python_error&) {  // no memory: the long way says so, to all
        }
        if (!result.is_valid()) {
            nb::list rows;
            for (std::int64_t one : rows_) rows.append(one);
            return complete_(x, rows, out, sequence);
        }
        run(ALL_GATHER_ROWS, found->second, PyArray_DATA(array), data(result));
        return result;
    }

  private:
    // Nobody else runs before this is over.
    struct Turn {
        explicit Turn(Desk& desk) : desk(desk) { ++desk.turns_.issued; }
        ~Turn() {
            ++desk.turns_.serving;
            if (desk.turns_.issued == desk.turns_.serving) return;
            try {
                desk.wake_();
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("gradwire");
            }
        }
        Desk& desk;
    };

    static PyArrayObject* usable(nb::handle x, int flags) {
        if (!PyArray_CheckExact(x.ptr())) return nullptr;
        auto* array = reinterpret_cast<PyArrayObject*>(x.ptr());
        return PyArray_CHKFLAGS(array, flags) ? array : nullptr;
    }
    static bool overlap(PyArrayObject* a, PyArrayObject* b) {
        const auto x = reinterpret_cast<std::uintptr_t>(PyArray_DATA(a)), y = reinterpret_cast<std::uintptr_t>(PyArray_DATA(b));
        return x < y + static_cast<std::uintptr_t>(PyArray_NBYTES(b)) && y < x + static_cast<std::uintptr_t>(PyArray_NBYTES(a));
    }
    // An array of rows like those of `like`. New memory costs more than what is written there, because the system has to
    // clear it: so the last results serve again, if they are as large and nobody refers to them any more. There are two,
    // because a program has one of them in hand until it gets the next.
    nb::object empty(PyArrayObject* like, npy_intp rows) {
        npy_intp shape[NPY_MAXDIMS];
        std::copy_n(PyArray_DIMS(like), PyArray_NDIM(like), shape);
        shape[0] = rows;
        for (const nb::object& one : last_)
            if (one.is_valid() && is_free(one) && fits(one, like, shape)) return one;
        PyArray_Descr* dtype = PyArray_DESCR(like);
        Py_INCREF(dtype);
        std::swap(last_[0], last_[1]);
        last_[0].reset();
        nb::object made = owned(PyArray_Empty(PyArray_NDIM(like), shape, dtype, 0));
        const npy_intp nbytes = PyArray_NBYTES(reinterpret_cast<PyArrayObject*>(made.ptr()));
        if (nbytes >= SMALLEST_KEPT && nbytes <= LARGEST_KEPT) last_[0] = made;
        return made;
    }
    // Where so many rows like those of `like` go: `out`, if there is one, which is not valid if it may not serve.
    nb::object room(PyArrayObject* like, npy_intp rows, nb::handle out) {
        if (out.is_none()) return empty(like, rows);
        PyArrayObject* array = usable(out, NPY_ARRAY_CARRAY);
        const npy_intp width = PyArray_DIM(like, 0) ? PyArray_SIZE(like) / PyArray_DIM(like, 0) : -1;
        if (!array || PyArray_DESCR(array) != PyArray_DESCR(like) || PyArray_SIZE(array) != rows * width ||
            overlap(array, like))
            return nb::object();
        return nb::borrow(out);
    }
    static bool is_free(const nb::object& array) {
        const Py_ssize_t weak = Py_TYPE(array.ptr())->tp_weaklistoffset;
        const bool watched = weak > 0 && *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(array.ptr()) + weak);
        return Py_REFCNT(array.ptr()) == 1 && !watched;
    }
    // Whoever had it may have changed its shape, or forbidden to write into it.
    static bool fits(const nb::object& array, PyArrayObject* like, const npy_intp* shape) {
        auto* one = reinterpret_cast<PyArrayObject*>(array.ptr());
        return PyArray_CHKFLAGS(one, NPY_ARRAY_CARRAY) && PyArray_DESCR(one) == PyArray_DESCR(like) &&
               PyArray_NDIM(one) == PyArray_NDIM(like) && std::equal(shape, shape + PyArray_NDIM(one), PyArray_DIMS(one));
    }
    static void* data(const nb::object& array) { return PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())); }

    bool is_default(nb::handle algorithm, nb::handle timeout) const {
        return algorithm.ptr() == automatic_.ptr() && timeout.is_none();
    }
    bool observed() const {
        PyObject* subscribers = PyDict_GetItemWithError(events_.ptr(), subscribers_.ptr());
        return !subscribers || !PyTuple_Check(subscribers) || PyTuple_GET_SIZE(subscribers) != 0;
    }
    // Null where the call has to be made the long way.
    const Known* find(const Form& form) const {
        if (halted_ || turns_.issued != turns_.serving || observed()) return nullptr;
        const auto found = known_.find(form);
        return found == known_.end() ? nullptr : &found->second;
    }
    const Known* find(int operation, PyArrayObject* array, nb::handle how) const {
        return find({operation, reinterpret_cast<PyObject*>(PyArray_DESCR(array)), how.ptr(), PyArray_SIZE(array), {-1, -1, -1}});
    }

    std::uint64_t run(int operation, const Known& known, void* in, void* out) {
        const nb::object plan = known.plan;  // others may call `learn` while the interpreter's lock is released
        const std::uint64_t sequence = record(known);
        engine_.begin(*known.program, in, out, sequence, known.fingerprint, awake_for_);
        Status status;
        {
            nb::gil_scoped_release released;
            status = engine_.advance(FIRST_SECONDS);
        }
        if (status != Status::done) resume_(static_cast<int>(status), NAMES[static_cast<std::size_t>(operation)], sequence);
        ring_.finished = sequence;
        return sequence;
    }

    // The innermost frame outside of these folders is where the user made the call.
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
        static std::unordered_set<PyObject*> ours;  // kept for good, so that their addresses stay theirs
        if (ours.count(code.ptr())) return true;
        nb::object file = owned(PyObject_GetAttr(code.ptr(), filename_.ptr()));
        for (nb::handle folder : inside_) {
            if (PyUnicode_Tailmatch(file.ptr(), folder.ptr(), 0, PY_SSIZE_T_MAX, -1) != 1) continue;
            ours.insert(nb::object(code).release().ptr());
            return true;
        }
        return false;
    }

    static nb::object interned(const char* text) { return owned(PyUnicode_InternFromString(text)); }

    nb::tuple kept_;
    Engine& engine_;
    Turns& turns_;
    CallRing& ring_;
    nb::object resume_, complete_, wake_;
    nb::dict events_;
    nb::tuple inside_;
    double awake_for_;
    std::vector<std::int64_t> rows_;
    std::uint8_t token_ = 0;
    bool halted_ = false;
    std::array<nb::object, 2> last_;  // results of those that are made here
    nb::object automatic_ = interned("auto"), subscribers_ = interned("_subscribers"), filename_ = interned("co_filename");
    std::unordered_map<Form, Known, HashOfForm> known_;
};

void register_desk(nb::module_& module) {
    if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
    nb::class_<Desk>(module, "Desk")
        .def(nb::init<nb::object, nb::object, nb::object, std::size_t, nb::object, nb::object, nb::object, nb::dict,
                      nb::tuple, double>())
        .def("learn", &Desk::learn, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg())
        .def("halt", &Desk::halt)
        .def("all_reduce", &Desk::all_reduce, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
             nb::arg().none())
        .def("broadcast", &Desk::broadcast, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("reduce_scatter", &Desk::reduce_scatter, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
             nb::arg().none(), nb::arg().none())
        .def("barrier", &Desk::barrier, nb::arg().none(), nb::arg().none())
        .def("all_gather", &Desk::all_gather, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none());
}

}  // namespace gradwire
