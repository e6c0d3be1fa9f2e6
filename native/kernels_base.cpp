#define NAMESPACE base
#include "kernels.inc"
