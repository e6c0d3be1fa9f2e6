// Selects the reduction kernels for this processor.
#include "kernels.hpp"

namespace gradwire {

namespace base {
Kernels kernels(DType dtype, ReduceOp op);
Checks checks(DType dtype);
}
#if defined(GRADWIRE_AVX2)
namespace avx2 {
Kernels kernels(DType dtype, ReduceOp op);
Checks checks(DType dtype);
}
#endif

bool runs(Build build) {
#if defined(GRADWIRE_AVX2)
    static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    return build == Build::base || (build == Build::avx2 && wide);
#else
    return build == Build::base;
#endif
}

Kernels kernels([[maybe_unused]] Build build, DType dtype, ReduceOp op) {
#if defined(GRADWIRE_AVX2)
    if (build == Build::avx2) return avx2::kernels(dtype, op);
#endif
    return base::kernels(dtype, op);
}

Checks checks([[maybe_unused]] Build build, DType dtype) {
#if defined(GRADWIRE_AVX2)
    if (build == Build::avx2) return avx2::checks(dtype);
#endif
    return base::checks(dtype);
}

namespace {
Build best() { return runs(Build::avx2) ? Build::avx2 : Build::base; }
}  // namespace

Checks checks(DType dtype) { return checks(best(), dtype); }

Kernels kernels(DType dtype, ReduceOp op) { return kernels(best(), dtype, op); }

}  // namespace gradwire
