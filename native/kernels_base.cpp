// The reduction kernels, compiled for any x86-64 or other processor.
#define NAMESPACE base
#include "kernels.inc"
