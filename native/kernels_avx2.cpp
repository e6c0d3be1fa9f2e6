// The reduction kernels, compiled for AVX2.
#define NAMESPACE avx2
#include "kernels.inc"
