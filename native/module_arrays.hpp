// Access of the fast path to NumPy arrays, and the memory of its results.
//
// Only one translation unit may include this, and it must call PyArray_ImportNumPyAPI().
#pragma once

#include <nanobind/nanobind.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace gradwire {

namespace nb = nanobind;

inline nb::object owned(PyObject* object) {
    if (!object) throw nb::python_error();
    return nb::steal(object);
}

inline PyArrayObject* as_array(nb::handle object) { return reinterpret_cast<PyArrayObject*>(object.ptr()); }
inline PyObject* dtype_of(PyArrayObject* array) { return reinterpret_cast<PyObject*>(PyArray_DESCR(array)); }

// Returns x if it is an array with these flags; otherwise null.
inline PyArrayObject* usable(nb::handle x, int flags) {
    return PyArray_CheckExact(x.ptr()) && PyArray_CHKFLAGS(as_array(x), flags) ? as_array(x) : nullptr;
}
inline bool overlap(PyArrayObject* a, PyArrayObject* b) {
    const auto x = reinterpret_cast<std::uintptr_t>(PyArray_DATA(a)), y = reinterpret_cast<std::uintptr_t>(PyArray_DATA(b));
    return x < y + static_cast<std::uintptr_t>(PyArray_NBYTES(b)) && y < x + static_cast<std::uintptr_t>(PyArray_NBYTES(a));
}

// Memory for new results. New memory costs more than writing the result, because the system has to clear it. The last
// two results are therefore reused if they have the right size and the program has dropped them. Two are needed because
// a program usually still holds one result when it asks for the next.
class ResultPool {
  public:
    // An uninitialised array of `rows` rows like those of `like`.
    nb::object empty(PyArrayObject* like, npy_intp rows) {
        npy_intp shape[NPY_MAXDIMS];
        std::copy_n(PyArray_DIMS(like), PyArray_NDIM(like), shape);
        shape[0] = rows;
        for (const nb::object& result : last_)
            if (result.is_valid() && is_free(result) && fits(result, like, shape)) return result;
        PyArray_Descr* dtype = PyArray_DESCR(like);
        Py_INCREF(dtype);
        std::swap(last_[0], last_[1]);
        last_[0].reset();
        nb::object made = owned(PyArray_Empty(PyArray_NDIM(like), shape, dtype, 0));
        const npy_intp nbytes = PyArray_NBYTES(as_array(made));
        if (nbytes >= SMALLEST_REUSED && nbytes <= LARGEST_REUSED) last_[0] = made;
        return made;
    }

  private:
    static constexpr npy_intp SMALLEST_REUSED = 128 << 10, LARGEST_REUSED = 64 << 20;  // bytes

    static bool is_free(const nb::object& array) {
        const Py_ssize_t weak = Py_TYPE(array.ptr())->tp_weaklistoffset;
        const bool has_weak_references =
            weak > 0 && *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(array.ptr()) + weak);
        return Py_REFCNT(array.ptr()) == 1 && !has_weak_references;
    }
    // Checks everything: the program may have changed the array's shape, or made it read-only.
    static bool fits(const nb::object& object, PyArrayObject* like, const npy_intp* shape) {
        PyArrayObject* array = as_array(object);
        return PyArray_CHKFLAGS(array, NPY_ARRAY_CARRAY) && PyArray_DESCR(array) == PyArray_DESCR(like) &&
               PyArray_NDIM(array) == PyArray_NDIM(like) &&
               std::equal(shape, shape + PyArray_NDIM(array), PyArray_DIMS(array));
    }

    std::array<nb::object, 2> last_;
};

}  // namespace gradwire
