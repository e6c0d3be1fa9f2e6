#define NAMESPACE avx2
#include "kernels.inc"
