// NumPy arrays as the fast path sees them, and the memory of its results.
//
// One translation unit includes this, and calls PyArray_ImportNumPyAPI().
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

// The array, if it is one with these flags; else null.
inline PyArrayObject* usable(nb::handle x, int flags) {
    return PyArray_CheckExact(x.ptr()) && PyArray_CHKFLAGS(as_array(x), flags) ? as_array(x) : nullptr;
}
inline bool overlap(PyArrayObject* a, PyArrayObject* b) {
    const auto x = reinterpret_cast<std::uintptr_t>(PyArray_DATA(a)), y = reinterpret_cast<std::uintptr_t>(PyArray_DATA(b));
    return x < y + static_cast<std::uintptr_t>(PyArray_NBYTES(b)) && y < x + static_cast<std::uintptr_t>(PyArray_NBYTES(a));
}

// Memory for new results. Fresh memory costs more than writing the result, because the system has to clear it: the last two
// results are used again if they have the right size and the program has dropped them. Two, because a program usually still
// holds one while it asks for the next.
class ResultPool {
  public:
    // An uninitialised array of `rows` rows like those of `like`.
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
        const npy_intp nbytes = PyArray_NBYTES(as_array(made));
        if (nbytes >= SMALLEST_REUSED && nbytes <= LARGEST_REUSED) last_[0] = made;
        return made;
    }

  private:
    static constexpr npy_intp SMALLEST_REUSED = 128 << 10, LARGEST_REUSED = 64 << 20;  // bytes

    static bool is_free(const nb::object& array) {
        const Py_ssize_t weak = Py_TYPE(array.ptr())->tp_weaklistoffset;
        const bool watched = weak > 0 && *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(array.ptr()) + weak);
        return Py_REFCNT(array.ptr()) == 1 && !watched;
    }
    // The program may have changed its shape, or made it read-only.
    static bool fits(const nb::object& array, PyArrayObject* like, const npy_intp* shape) {
        PyArrayObject* one = as_array(array);
        return PyArray_CHKFLAGS(one, NPY_ARRAY_CARRAY) && PyArray_DESCR(one) == PyArray_DESCR(like) &&
               PyArray_NDIM(one) == PyArray_NDIM(like) && std::equal(shape, shape + PyArray_NDIM(one), PyArray_DIMS(one));
    }

    std::array<nb::object, 2> last_;
};

}  // namespace gradwire
