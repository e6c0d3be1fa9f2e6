// Reduction kernels: the numeric rules of gradwire/executors/numerics.py, vectorised by the compiler.
//
// Terms are folded from left to right, in the accumulator's type A (float for 16-bit floats, otherwise the element type
// T). Integers wrap around. In min and max the result is NaN if an operand is NaN, and −0 < +0. A result may have
// exactly the memory of one of its terms of the same type: every block of terms is read before that block of the result
// is written. No address needs to be aligned.
//
// The kernels compute with the IEEE default environment, even if the process has set other rounding, flush-to-zero or
// traps.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

// Python refers to the members of both enums by name (module_kernels.cpp), never by number.
enum class DType : std::uint8_t { f16, bf16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64, boolean, c64, c128 };
enum class ReduceOp : std::uint8_t { sum, min, max, prod };

struct Term {
    const void* data;
    bool partial;  // of type A, not T
};

// result[i] = term0[i] ∘ term1[i] ∘ …, of type A.
using Fold = void (*)(void* result, const Term* terms, std::size_t number, std::size_t count);
// result[i] = partial[i] / divisor, rounded to the element type; a divisor of 0 means no division.
using Finish = void (*)(void* result, const void* partial, std::size_t count, std::size_t divisor);
// Both in one pass, by blocks that fit the first-level cache. The result, of type T, may have the memory of a term of
// type T.
using Reduce = void (*)(void* result, const Term* terms, std::size_t number, std::size_t count, std::size_t divisor);

// Whether no element is NaN or infinite; for floating-point types.
using AllFinite = bool (*)(const void* data, std::size_t count);
// The same while copying; `to` and `from` do not overlap.
using CopyFinite = bool (*)(void* to, const void* from, std::size_t count);
// The sum of the squares of all elements, in double; for real types.
using SumSquares = double (*)(const void* data, std::size_t count);

struct Checks {
    AllFinite all_finite;
    CopyFinite copy_finite;
    SumSquares sum_squares;
    std::size_t element;  // bytes: a complex number counts as two
};

struct Kernels {
    Fold fold;
    Finish finish;
    Reduce reduce;
    std::size_t element;      // bytes of T
    std::size_t accumulator;  // bytes of A
};

// The same kernels, for different instruction sets.
enum class Build : std::uint8_t { base = 0, avx2 };

// Whether these kernels were compiled, and this processor can run them.
bool runs(Build build);
// The fold is null if the op is not defined for the type. `runs(build)` must be true.
Kernels kernels(Build build, DType dtype, ReduceOp op);
// The kernels of the best build for this processor.
Kernels kernels(DType dtype, ReduceOp op);
// The functions are null for integers.
Checks checks(Build build, DType dtype);
Checks checks(DType dtype);

}  // namespace gradwire
