// Reduction kernels: the numeric rules of gradwire/executors/numerics.py, vectorised by the compiler.
//
// Terms are folded from the left, in the accumulator's type A (float for half types, else the element type T). Integers
// wrap. In min and max a NaN wins and −0 < +0. A result may lie exactly on one of its terms of the same type: every
// block of terms is read before that block of the result is written. No address needs to be aligned.
//
// Whatever rounding, flushing of denormals or trapping the process has set, the kernels compute by IEEE's defaults.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

// Codes of gradwire/arrays.py's table.
enum class DType : std::uint8_t { f16 = 1, bf16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64, boolean, c64, c128 };
enum class Op : std::uint8_t { sum = 0, min, max, prod };

struct Term {
    const void* data;
    bool partial;  // of type A, not T
};

// result[i] = term0[i] ∘ term1[i] ∘ …, of type A.
using Fold = void (*)(void* result, const Term* terms, std::size_t number, std::size_t count);
// result[i] = the element type of (partial[i] / divisor); a divisor of 0 divides by nothing.
using Finish = void (*)(void* result, const void* partial, std::size_t count, std::size_t divisor);
// Both at once, by blocks in the first-level cache: result[i], of type T, on no term or exactly on one of type T.
using Reduce = void (*)(void* result, const Term* terms, std::size_t number, std::size_t count, std::size_t divisor);

// Whether no element is NaN or infinite; of types that can be.
using AllFinite = bool (*)(const void* data, std::size_t count);
// The same of what it copies; `to` and `from` do not overlap.
using CopyFinite = bool (*)(void* to, const void* from, std::size_t count);
// The sum of the squares of all elements, in double; of real types.
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

// Whether this processor can run them, and they were compiled.
bool runs(Build build);
// A null fold where the op has no meaning for the type. The build has to run here.
Kernels kernels(Build build, DType dtype, Op op);
// Of the best build that runs here.
Kernels kernels(DType dtype, Op op);
// Null for integers.
Checks checks(Build build, DType dtype);
Checks checks(DType dtype);

}  // namespace gradwire
