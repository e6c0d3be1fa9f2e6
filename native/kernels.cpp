#include "kernels.hpp"

namespace gradwire {

namespace base {
Kernels kernels(DType dtype, Op op);
}
#if defined(GRADWIRE_AVX2)
namespace avx2 {
Kernels kernels(DType dtype, Op op);
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

Kernels kernels([[maybe_unused]] Build build, DType dtype, Op op) {
#if defined(GRADWIRE_AVX2)
    if (build == Build::avx2) return avx2::kernels(dtype, op);
#endif
    return base::kernels(dtype, op);
}

Kernels kernels(DType dtype, Op op) { return kernels(runs(Build::avx2) ? Build::avx2 : Build::base, dtype, op); }

}  // namespace gradwire
