// gradwire._native.kernels: the kernels on their own, for tests and measurements; those that look at gradients; and what
// becomes of the memory that these leave. All arrays are contiguous buffers.

#include "module_kernels.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "copying.hpp"
#include "kernels.hpp"
#include "slivers.hpp"
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace nb = nanobind;

namespace gradwire {

namespace {

class Buffer {
  public:
    Buffer(nb::handle object, bool writable) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
            throw nb::python_error();
    }
    Buffer(Buffer&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    void* data() const { return view_.buf; }
    std::size_t count(std::size_t item) const {
        const auto nbytes = static_cast<std::size_t>(view_.len);
        if (nbytes % item != 0) throw std::invalid_argument("a buffer ends within an element");
        return nbytes / item;
    }
    void check(std::size_t count, std::size_t item) const {
        if (this->count(item) != count) throw std::invalid_argument("buffers differ in their number of elements");
    }

  private:
    Py_buffer view_{};
};

struct Terms {
    std::vector<Buffer> buffers;
    std::vector<Term> terms;

    Terms(nb::sequence given, std::size_t count, const Kernels& kernels) {
        for (nb::handle item : given) {
            const auto [object, partial] = nb::cast<std::pair<nb::object, bool>>(item);
            const Buffer& buffer = buffers.emplace_back(object, false);
            buffer.check(count, partial ? kernels.accumulator : kernels.element);
            terms.push_back({buffer.data(), partial});
        }
        if (terms.empty()) throw std::invalid_argument("a fold needs a term");
    }
};

const std::pair<const char*, Build> BUILDS[] = {{"base", Build::base}, {"avx2", Build::avx2}};

Kernels find(const std::string& name, int dtype, int op) {
    for (auto [known, build] : BUILDS) {
        if (name != known || !runs(build)) continue;
        const Kernels found = kernels(build, static_cast<DType>(dtype), static_cast<Op>(op));
        if (!found.fold) throw std::invalid_argument("the op has no meaning for the dtype");
        return found;
    }
    throw std::invalid_argument("no kernels for " + name + " here");
}

std::vector<std::string> builds() {
    std::vector<std::string> names;
    for (auto [name, build] : BUILDS)
        if (runs(build)) names.emplace_back(name);
    return names;
}

void fold(const std::string& build, int dtype, int op, nb::handle result, nb::sequence terms) {
    const Kernels found = find(build, dtype, op);
    const Buffer to(result, true);
    const std::size_t count = to.count(found.accumulator);
    const Terms from(terms, count, found);
    nb::gil_scoped_release released;
    found.fold(to.data(), from.terms.data(), from.terms.size(), count);
}

void finish(const std::string& build, int dtype, int op, nb::handle result, nb::handle partial, std::size_t divisor) {
    const Kernels found = find(build, dtype, op);
    const Buffer to(result, true), from(partial, false);
    const std::size_t count = to.count(found.element);
    from.check(count, found.accumulator);
    nb::gil_scoped_release released;
    found.finish(to.data(), from.data(), count, divisor);
}

void reduce(const std::string& build, int dtype, int op, nb::handle result, nb::sequence terms, std::size_t divisor) {
    const Kernels found = find(build, dtype, op);
    const Buffer to(result, true);
    const std::size_t count = to.count(found.element);
    const Terms from(terms, count, found);
    nb::gil_scoped_release released;
    found.reduce(to.data(), from.terms.data(), from.terms.size(), count, divisor);
}

Checks find_checks(const std::string& name, int dtype) {
    for (auto [known, build] : BUILDS) {
        if (!name.empty() && (name != known || !runs(build))) continue;
        const auto type = static_cast<DType>(dtype);
        const Checks found = name.empty() ? checks(type) : checks(build, type);
        if (!found.all_finite) throw std::invalid_argument("the dtype has numbers only");
        return found;
    }
    throw std::invalid_argument("no kernels for " + name + " here");
}

// What a check says of one array.
template <auto check>
auto look(int dtype, nb::handle array, const std::string& build) {
    const Checks found = find_checks(build, dtype);
    const Buffer buffer(array, false);
    const std::size_t count = buffer.count(found.element);
    nb::gil_scoped_release released;
    return (found.*check)(buffer.data(), count);
}

bool copy_finite(int dtype, nb::handle to, nb::handle from, const std::string& build) {
    const Checks found = find_checks(build, dtype);
    const Buffer target(to, true), source(from, false);
    const std::size_t count = target.count(found.element);
    source.check(count, found.element);
    nb::gil_scoped_release released;
    return found.copy_finite(target.data(), source.data(), count);
}

// Where gradients of one tensor go. They come from a framework, as an address: to ask for a buffer each time would take
// longer than to copy most of them.
class Place {
  public:
    // streams: past the caches, which would not hold all gradients until they are exchanged.
    Place(int dtype, nb::handle array, bool streams)
        : found_(find_checks("", dtype)), to_(array, true), count_(to_.count(found_.element)), streams_(streams) {}

    // Copy what lies there, and tell whether all of it is finite; nothing is done, and none returned, if it lies here or
    // nowhere.
    std::optional<bool> take(std::uintptr_t address) const {
        const auto own = reinterpret_cast<std::uintptr_t>(to_.data());
        const std::size_t nbytes = count_ * found_.element;
        if (address == 0 || (address < own + nbytes && own < address + nbytes)) return std::nullopt;
        std::optional<nb::gil_scoped_release> released;
        if (nbytes > KEEPS_THE_LOCK) released.emplace();
        const auto* from = reinterpret_cast<const std::byte*>(address);
        return streams_ ? stream_finite(from, nbytes) : found_.copy_finite(to_.data(), from, count_);
    }

  private:
    // By blocks that stay in the nearest cache between the look and the copy.
    bool stream_finite(const std::byte* from, std::size_t nbytes) const {
        constexpr std::size_t BLOCK = 8 << 10;
        auto* to = static_cast<std::byte*>(to_.data());
        bool finite = true;
        for (std::size_t at = 0; at < nbytes; at += BLOCK) {
            const std::size_t length = std::min(BLOCK, nbytes - at);
            finite = found_.all_finite(from + at, length / found_.element) && finite;
            stream_bytes(to + at, from + at, length);
        }
        return finite;
    }

    static constexpr std::size_t KEEPS_THE_LOCK = 32 << 10;  // bytes, which take less time than to get it back
    Checks found_;
    Buffer to_;
    std::size_t count_;
    bool streams_;
};

// Flush-to-zero and denormals-are-zero, as torch.set_flush_denormal and -ffast-math set them.
#if defined(__SSE__)
std::uint64_t float_state() { return _mm_getcsr() & ~0x3fu; }
void set_float_state(std::uint64_t state) { _mm_setcsr(static_cast<unsigned>(state)); }
constexpr std::uint64_t FLUSHES = 0x8040, UPWARDS = 0x4000;
#elif defined(__aarch64__)
std::uint64_t float_state() {
    std::uint64_t state;
    asm volatile("mrs %0, fpcr" : "=r"(state));
    return state;
}
void set_float_state(std::uint64_t state) { asm volatile("msr fpcr, %0" ::"r"(state) : "memory"); }
constexpr std::uint64_t FLUSHES = 1u << 24, UPWARDS = 1u << 22;
#else
std::uint64_t float_state() { return 0; }
void set_float_state(std::uint64_t) {}
constexpr std::uint64_t FLUSHES = 0, UPWARDS = 0;
#endif

}  // namespace

void register_kernels(nb::module_& module) {
    nb::class_<Place>(module, "Place")
        .def(nb::init<int, nb::handle, bool>(), nb::arg("dtype"), nb::arg("array"), nb::arg("streams"))
        .def("take", &Place::take);
    module.def("join_slivers", &join_slivers, nb::arg("largest"));
    module.def("all_finite", &look<&Checks::all_finite>, nb::arg("dtype"), nb::arg("array"), nb::arg("build") = "");
    module.def("copy_finite", &copy_finite, nb::arg("dtype"), nb::arg("to"), nb::arg("source"), nb::arg("build") = "");
    module.def("sum_squares", &look<&Checks::sum_squares>, nb::arg("dtype"), nb::arg("array"), nb::arg("build") = "");
    nb::module_ kernels = module.def_submodule("kernels");
    kernels.def("builds", &builds);
    kernels.def("fold", &fold);
    kernels.def("finish", &finish);
    kernels.def("reduce", &reduce);
    kernels.def("float_state", &float_state);
    kernels.def("set_float_state", &set_float_state);
    kernels.attr("FLUSHES") = FLUSHES;
    kernels.attr("UPWARDS") = UPWARDS;
}

}  // namespace gradwire
