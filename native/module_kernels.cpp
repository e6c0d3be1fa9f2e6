// Python bindings of the kernels (gradwire._native.kernels, for tests and measurements), of the checks of gradients,
// and of the flush of malloc's cache. All arrays are contiguous buffers.

#include "module_kernels.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "tcache_flush.hpp"
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

Kernels defined(const Kernels& found) {
    if (!found.fold) throw std::invalid_argument("the op is not defined for the dtype");
    return found;
}

Kernels find(const std::string& name, DType dtype, ReduceOp op) {
    for (auto [known, build] : BUILDS)
        if (name == known && runs(build)) return defined(kernels(build, dtype, op));
    throw std::invalid_argument("no kernels for " + name + " on this processor");
}

std::vector<std::string> builds() {
    std::vector<std::string> names;
    for (auto [name, build] : BUILDS)
        if (runs(build)) names.emplace_back(name);
    return names;
}

void fold(const std::string& build, DType dtype, ReduceOp op, nb::handle result, nb::sequence terms) {
    const Kernels found = find(build, dtype, op);
    const Buffer to(result, true);
    const std::size_t count = to.count(found.accumulator);
    const Terms from(terms, count, found);
    nb::gil_scoped_release released;
    found.fold(to.data(), from.terms.data(), from.terms.size(), count);
}

void finish(const std::string& build, DType dtype, ReduceOp op, nb::handle result, nb::handle partial, std::size_t divisor) {
    const Kernels found = find(build, dtype, op);
    const Buffer to(result, true), from(partial, false);
    const std::size_t count = to.count(found.element);
    from.check(count, found.accumulator);
    nb::gil_scoped_release released;
    found.finish(to.data(), from.data(), count, divisor);
}

void reduce(const std::string& build, DType dtype, ReduceOp op, nb::handle result, nb::sequence terms, std::size_t divisor) {
    const Kernels found = find(build, dtype, op);
    const Buffer to(result, true);
    const std::size_t count = to.count(found.element);
    const Terms from(terms, count, found);
    nb::gil_scoped_release released;
    found.reduce(to.data(), from.terms.data(), from.terms.size(), count, divisor);
}

Checks find_checks(const std::string& name, DType dtype) {
    for (auto [known, build] : BUILDS) {
        if (!name.empty() && (name != known || !runs(build))) continue;
        const Checks found = name.empty() ? checks(dtype) : checks(build, dtype);
        if (!found.all_finite) throw std::invalid_argument("the dtype has no NaN and no infinity");
        return found;
    }
    throw std::invalid_argument("no kernels for " + name + " on this processor");
}

// Applies a check to one array.
template <auto check>
auto checked(DType dtype, nb::handle array, const std::string& build) {
    const Checks found = find_checks(build, dtype);
    const Buffer buffer(array, false);
    const std::size_t count = buffer.count(found.element);
    nb::gil_scoped_release released;
    return (found.*check)(buffer.data(), count);
}

bool copy_finite(DType dtype, nb::handle to, nb::handle from, const std::string& build) {
    const Checks found = find_checks(build, dtype);
    const Buffer target(to, true), source(from, false);
    const std::size_t count = target.count(found.element);
    source.check(count, found.element);
    nb::gil_scoped_release released;
    return found.copy_finite(target.data(), source.data(), count);
}

// One tensor's memory in a bucket. The framework passes the addresses of its gradients: getting a buffer object for
// each would take longer than copying most of them.
class BucketSlot {
  public:
    // streams: copy with non-temporal stores, for buckets that exceed the caches before they are exchanged.
    BucketSlot(DType dtype, nb::handle array, bool streams)
        : found_(find_checks("", dtype)), to_(array, true), count_(to_.count(found_.element)), streams_(streams) {}

    // Copies the gradient at this address and returns whether all of it is finite. Does nothing and returns None if the
    // address is null or within the slot.
    std::optional<bool> copy_from(std::uintptr_t address) const {
        const auto own = reinterpret_cast<std::uintptr_t>(to_.data());
        const std::size_t nbytes = count_ * found_.element;
        if (address == 0 || (address < own + nbytes && own < address + nbytes)) return std::nullopt;
        std::optional<nb::gil_scoped_release> released;
        if (nbytes > SMALLEST_UNLOCKED) released.emplace();
        const auto* from = reinterpret_cast<const std::byte*>(address);
        return streams_ ? stream_finite(from, nbytes) : found_.copy_finite(to_.data(), from, count_);
    }

  private:
    // Works by blocks that stay in the first-level cache between the check and the copy.
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

    static constexpr std::size_t SMALLEST_UNLOCKED = 32 << 10;  // bytes: fewer are copied faster than the lock is reacquired
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

Kernels defined_kernels(DType dtype, ReduceOp op) { return defined(kernels(dtype, op)); }

void register_kernels(nb::module_& module) {
    nb::enum_<DType>(module, "DType")
        .value("float16", DType::f16)
        .value("bfloat16", DType::bf16)
        .value("float32", DType::f32)
        .value("float64", DType::f64)
        .value("int8", DType::i8)
        .value("int16", DType::i16)
        .value("int32", DType::i32)
        .value("int64", DType::i64)
        .value("uint8", DType::u8)
        .value("uint16", DType::u16)
        .value("uint32", DType::u32)
        .value("uint64", DType::u64)
        .value("bool", DType::boolean)
        .value("complex64", DType::c64)
        .value("complex128", DType::c128);
    nb::enum_<ReduceOp>(module, "ReduceOp")
        .value("sum", ReduceOp::sum)
        .value("min", ReduceOp::min)
        .value("max", ReduceOp::max)
        .value("prod", ReduceOp::prod);
    nb::class_<BucketSlot>(module, "BucketSlot")
        .def(nb::init<DType, nb::handle, bool>(), nb::arg("dtype"), nb::arg("array"), nb::arg("streams"))
        .def("copy_from", &BucketSlot::copy_from);
    module.def("flush_tcache", &flush_tcache, nb::arg("largest"));
    module.def("all_finite", &checked<&Checks::all_finite>, nb::arg("dtype"), nb::arg("array"), nb::arg("build") = "");
    module.def("copy_finite", &copy_finite, nb::arg("dtype"), nb::arg("to"), nb::arg("source"), nb::arg("build") = "");
    module.def("sum_squares", &checked<&Checks::sum_squares>, nb::arg("dtype"), nb::arg("array"), nb::arg("build") = "");
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
