// Every kernel, for every element type.
#include "portable.h"
#include "conv_kernels.h"
#include "scan.h"
