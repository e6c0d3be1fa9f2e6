// The fast path: a call with the same kind of arguments as an earlier one runs entirely in the core.
//
// `FastCollective::run` is the only entry for all collectives. It finds the cached plan by the call's arguments, takes
// the group's turn, records the call and runs the plan. For a call that it does not handle (a strided array, a queue of
// works, a subscriber of events, a closed group, arguments without a cached plan) it returns None before it has any
// effect. The caller then takes the general path in Python, which caches its plan here.
#include "module_fast_path.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "engine.hpp"
#include "module_arrays.hpp"

namespace gradwire {

using namespace nanobind::literals;

namespace {

constexpr std::size_t MAX_PLANS = 512;
constexpr std::size_t ROW_AXES = 3;  // arrays with more axes take the general path if the shape of a row matters
constexpr double FIRST_SECONDS = 0.01;  // then Python checks signals, deadlines and the reason of an alarm

// How a collective's result relates to its array x. A new collective with one of these layouts needs no change here.
enum class ResultLayout {
    no_array,     // there is no array: the call only synchronises
    elementwise,  // the result has as many elements as x; it is written to `out`, or to x itself
    split_rows,   // this rank's part of x's first axis, which is split evenly over the ranks
    joined_rows,  // the arrays of all ranks joined along the first axis; the ranks exchange their numbers of rows first
};

using RowShape = std::array<npy_intp, ROW_AXES>;
constexpr RowShape NO_ROW = {-1, -1, -1};

// The arguments that select a plan. Objects are compared by identity: dtypes, names of ops and small ranks are
// singletons.
struct CallKey {
    PyObject* dtype;
    PyObject* op;
    PyObject* root;
    npy_intp count;  // elements of x; if arrays are joined, the sum of all ranks' rows
    RowShape row;    // the shape of a row, if arrays are joined
    bool operator==(const CallKey&) const = default;
};
struct CallKeyHash {
    std::size_t operator()(const CallKey& key) const {
        std::size_t hash = 0;
        for (const std::uint64_t part :
             {reinterpret_cast<std::uintptr_t>(key.dtype), reinterpret_cast<std::uintptr_t>(key.op),
              reinterpret_cast<std::uintptr_t>(key.root), static_cast<std::uintptr_t>(key.count),
              static_cast<std::uintptr_t>(key.row[0])})
            hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
        return hash ^ hash >> 32;
    }
};
struct CachedPlan {
    nb::object dtype, op, root, kept_program, description;  // references that keep them alive
    const Program* program;
    std::uint64_t fingerprint;
    std::vector<std::int64_t> rows;  // of each rank, if arrays are joined
};
using PlanCache = std::unordered_map<CallKey, CachedPlan, CallKeyHash>;

nb::object interned(const char* text) { return owned(PyUnicode_InternFromString(text)); }

}  // namespace

// The state that the fast calls of one group share.
class FastPath {
  public:
    struct Parts {
        nb::object engine, turns, calls;
        std::size_t size;
        nb::object resume;           // (status, operation, sequence): continues a call that waits long or has failed
        nb::object complete_gather;  // (x, rows, out, sequence): completes a joined result whose rows have no cached plan
        nb::object wake;             // (): wakes the threads that wait for their turn
        nb::list subscribers;        // of events: if there are any, calls take the general path, which emits events
        nb::tuple library_paths;     // path prefixes of code that is not the user's
        double spin_seconds;
    };

    explicit FastPath(Parts parts)
        : parts_(std::move(parts)),
          engine_(nb::cast<Engine&>(parts_.engine)),
          turns_(nb::cast<Turns&>(parts_.turns)),
          calls_(nb::cast<CallRing&>(parts_.calls)) {}

    void halt() { halted_ = true; }
    std::size_t size() const { return parts_.size; }
    ResultPool results;

    // Returns whether a call with these arguments may run on the fast path now.
    bool accepts(nb::handle algorithm, nb::handle timeout) const {
        return algorithm.ptr() == automatic_.ptr() && timeout.is_none() && !halted_ && turns_.issued == turns_.serving &&
               PyList_GET_SIZE(parts_.subscribers.ptr()) == 0;
    }

    // The group's turn: no other call runs before this object is destroyed.
    struct Turn {
        explicit Turn(FastPath& path) : path(path) { ++path.turns_.issued; }
        ~Turn() {
            ++path.turns_.serving;
            if (path.turns_.issued == path.turns_.serving) return;
            try {
                path.parts_.wake();
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("gradwire");
            }
        }
        FastPath& path;
    };

    // Records the call and runs its plan; returns its sequence number. The caller holds the turn.
    std::uint64_t run(nb::handle name, const CachedPlan& plan, void* in, void* out) {
        const nb::object kept = plan.kept_program;  // another thread may replace the plan while the lock is released
        const std::uint64_t sequence = record(plan);
        engine_.begin(*plan.program, in, out, sequence, plan.fingerprint, parts_.spin_seconds);
        Status status;
        {
            nb::gil_scoped_release released;
            status = engine_.advance(FIRST_SECONDS);
        }
        if (status != Status::done) parts_.resume(status, name, sequence);
        calls_.finished = sequence;
        return sequence;
    }

    nb::object complete_gather(nb::handle x, const std::vector<std::int64_t>& rows, nb::handle out, std::uint64_t sequence) {
        return parts_.complete_gather(x, rows, out, sequence);
    }

  private:
    // The call site is the innermost frame whose code is not the library's.
    std::uint64_t record(const CachedPlan& plan) {
        PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
        while (frame) {
            nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
            PyFrameObject* caller = is_library_code(code) ? PyFrame_GetBack(frame) : nullptr;
            if (!caller) {
                const int instruction = PyFrame_GetLasti(frame);
                Py_DECREF(frame);
                return calls_.record(plan.description, plan.fingerprint, std::move(code), instruction);
            }
            Py_DECREF(frame);
            frame = caller;
        }
        return calls_.record(plan.description, plan.fingerprint, nb::none(), 0);
    }
    bool is_library_code(const nb::object& code) {
        static std::unordered_set<PyObject*> known;  // never freed, so that no other code gets the same address
        if (known.count(code.ptr())) return true;
        nb::object file = owned(PyObject_GetAttr(code.ptr(), filename_.ptr()));
        for (nb::handle path : parts_.library_paths) {
            if (PyUnicode_Tailmatch(file.ptr(), path.ptr(), 0, PY_SSIZE_T_MAX, -1) != 1) continue;
            known.insert(nb::object(code).release().ptr());
            return true;
        }
        return false;
    }

    Parts parts_;
    Engine& engine_;
    Turns& turns_;
    CallRing& calls_;
    bool halted_ = false;
    nb::object automatic_ = interned("auto"), filename_ = interned("co_filename");
};

// The fast calls of one collective of a group.
class FastCollective {
  public:
    FastCollective(nb::object path, nb::object name, ResultLayout result)
        : kept_(path), path_(nb::cast<FastPath&>(path)), name_(std::move(name)), result_(result), rows_(path_.size()) {}

    // Runs this program for later calls with these arguments. With `rows` (of each rank) the program exchanges the rows
    // of a joined result, without `rows` it exchanges the numbers of rows.
    void add_plan(nb::object dtype, nb::object op, nb::object root, npy_intp count, const std::vector<npy_intp>& row_shape,
                  std::optional<std::vector<std::int64_t>> rows, nb::object program, std::uint64_t fingerprint,
                  nb::object description) {
        if (row_shape.size() > ROW_AXES) return;
        CallKey key{dtype.ptr(), op.ptr(), root.ptr(), count, NO_ROW};
        std::copy(row_shape.begin(), row_shape.end(), key.row.begin());
        const auto* known = &nb::cast<const Program&>(program);
        PlanCache& plans = rows ? row_plans_ : plans_;
        if (rows) key.count = total(*rows);
        if (plans.size() >= MAX_PLANS) plans.clear();
        plans.insert_or_assign(key, CachedPlan{std::move(dtype), std::move(op), std::move(root), std::move(program),
                                               std::move(description), known, fingerprint,
                                               std::move(rows).value_or(Rows{})});
    }

    // Returns the result (True if there is none), or None, without any effect, if the call must take the general path.
    nb::object run(nb::handle x, nb::handle op, nb::handle root, nb::handle out, nb::handle algorithm, nb::handle timeout) {
        if (!path_.accepts(algorithm, timeout)) return nb::none();
        switch (result_) {
            case ResultLayout::no_array: return synchronise(op, root);
            case ResultLayout::elementwise: return elementwise(x, op, root, out);
            case ResultLayout::split_rows: return split_rows(x, op, root, out);
            case ResultLayout::joined_rows: return joined_rows(x, op, root, out);
        }
        return nb::none();
    }

  private:
    using Rows = std::vector<std::int64_t>;

    nb::object synchronise(nb::handle op, nb::handle root) {
        const CachedPlan* plan = find({Py_None, op.ptr(), root.ptr(), 0, NO_ROW});
        if (!plan) return nb::none();
        FastPath::Turn turn(path_);
        path_.run(name_, *plan, &token_, &token_);
        return nb::bool_(true);
    }

    nb::object elementwise(nb::handle x, nb::handle op, nb::handle root, nb::handle out) {
        PyArrayObject* from = usable(x, NPY_ARRAY_CARRAY);
        if (!from) return nb::none();
        PyArrayObject* to = from;
        if (!out.is_none()) {
            to = usable(out, NPY_ARRAY_CARRAY);
            if (!to || PyArray_DESCR(to) != PyArray_DESCR(from) || PyArray_SIZE(to) != PyArray_SIZE(from)) return nb::none();
            if (to != from && overlap(from, to)) return nb::none();
        }
        const CachedPlan* plan = find({dtype_of(from), op.ptr(), root.ptr(), PyArray_SIZE(from), NO_ROW});
        if (!plan) return nb::none();
        FastPath::Turn turn(path_);
        path_.run(name_, *plan, PyArray_DATA(from), PyArray_DATA(to));
        return nb::borrow(out.is_none() ? x : out);
    }

    nb::object split_rows(nb::handle x, nb::handle op, nb::handle root, nb::handle out) {
        PyArrayObject* array = usable(x, NPY_ARRAY_CARRAY_RO);
        const auto size = static_cast<npy_intp>(path_.size());
        if (!array || PyArray_NDIM(array) < 1 || PyArray_DIM(array, 0) % size) return nb::none();
        const CachedPlan* plan = find({dtype_of(array), op.ptr(), root.ptr(), PyArray_SIZE(array), NO_ROW});
        if (!plan) return nb::none();
        nb::object result = result_array(array, PyArray_DIM(array, 0) / size, out);
        if (!result.is_valid()) return nb::none();
        FastPath::Turn turn(path_);
        path_.run(name_, *plan, PyArray_DATA(array), PyArray_DATA(as_array(result)));
        return result;
    }

    nb::object joined_rows(nb::handle x, nb::handle op, nb::handle root, nb::handle out) {
        PyArrayObject* array = usable(x, NPY_ARRAY_CARRAY_RO);
        const int axes = array ? PyArray_NDIM(array) : 0;
        if (axes < 1 || axes > static_cast<int>(ROW_AXES) + 1) return nb::none();
        CallKey key{dtype_of(array), op.ptr(), root.ptr(), 0, NO_ROW};
        std::copy(PyArray_DIMS(array) + 1, PyArray_DIMS(array) + axes, key.row.begin());
        const CachedPlan* plan = find(key);
        if (!plan) return nb::none();
        if (!out.is_none()) {  // checked before the exchange; only the size of `out` can be checked later
            PyArrayObject* to = usable(out, NPY_ARRAY_CARRAY);
            if (!to || PyArray_DESCR(to) != PyArray_DESCR(array) || overlap(array, to)) return nb::none();
        }
        FastPath::Turn turn(path_);
        std::int64_t own = PyArray_DIM(array, 0);
        const std::uint64_t sequence = path_.run(name_, *plan, &own, rows_.data());
        key.count = total(rows_);
        const auto found = row_plans_.find(key);
        nb::object result;
        try {
            if (found != row_plans_.end() && found->second.rows == rows_) result = result_array(array, key.count, out);
        } catch (nb::python_error&) {  // no memory: the general path raises the error on all ranks
        }
        if (!result.is_valid()) return path_.complete_gather(x, rows_, out, sequence);
        path_.run(name_, found->second, PyArray_DATA(array), PyArray_DATA(as_array(result)));
        return result;
    }

    const CachedPlan* find(const CallKey& key) const {
        const auto found = plans_.find(key);
        return found == plans_.end() ? nullptr : &found->second;
    }
    // Returns the array for a result of `rows` rows like those of `like`: `out` or a new one. Not valid if `out` does
    // not fit.
    nb::object result_array(PyArrayObject* like, npy_intp rows, nb::handle out) {
        if (out.is_none()) return path_.results.empty(like, rows);
        PyArrayObject* array = usable(out, NPY_ARRAY_CARRAY);
        const npy_intp width = PyArray_DIM(like, 0) ? PyArray_SIZE(like) / PyArray_DIM(like, 0) : -1;
        if (!array || PyArray_DESCR(array) != PyArray_DESCR(like) || PyArray_SIZE(array) != rows * width ||
            overlap(array, like))
            return nb::object();
        return nb::borrow(out);
    }
    static npy_intp total(const Rows& rows) {
        npy_intp sum = 0;
        for (std::int64_t number : rows) sum += number;
        return sum;
    }

    nb::object kept_;
    FastPath& path_;
    nb::object name_;
    ResultLayout result_;
    Rows rows_;
    std::uint8_t token_ = 0;
    PlanCache plans_, row_plans_;
};

void register_fast_path(nb::module_& module) {
    if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
    nb::class_<FastPath>(module, "FastPath")
        .def("__init__",
             [](FastPath* self, nb::object engine, nb::object turns, nb::object calls, std::size_t size, nb::object resume,
                nb::object complete_gather, nb::object wake, nb::list subscribers, nb::tuple library_paths, double spin_seconds) {
                 new (self) FastPath({.engine = engine,
                                      .turns = turns,
                                      .calls = calls,
                                      .size = size,
                                      .resume = resume,
                                      .complete_gather = complete_gather,
                                      .wake = wake,
                                      .subscribers = subscribers,
                                      .library_paths = library_paths,
                                      .spin_seconds = spin_seconds});
             },
             nb::kw_only(), "engine"_a, "turns"_a, "calls"_a, "size"_a, "resume"_a, "complete_gather"_a, "wake"_a,
             "subscribers"_a, "library_paths"_a, "spin_seconds"_a)
        .def("halt", &FastPath::halt);

    nb::enum_<ResultLayout>(module, "ResultLayout")
        .value("NO_ARRAY", ResultLayout::no_array)
        .value("ELEMENTWISE", ResultLayout::elementwise)
        .value("SPLIT_ROWS", ResultLayout::split_rows)
        .value("JOINED_ROWS", ResultLayout::joined_rows);
    nb::class_<FastCollective>(module, "FastCollective")
        .def(nb::init<nb::object, nb::object, ResultLayout>(), nb::kw_only(), "path"_a, "name"_a, "result"_a)
        .def("add_plan", &FastCollective::add_plan, nb::kw_only(), "dtype"_a.none(), "op"_a.none(), "root"_a.none(), "count"_a,
             "row_shape"_a, "rows"_a.none(), "program"_a, "fingerprint"_a, "description"_a)
        .def("run", &FastCollective::run, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
             nb::arg().none(), nb::arg().none());
}

}  // namespace gradwire
