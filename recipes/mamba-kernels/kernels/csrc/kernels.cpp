// Every kernel, for every dtype.
#include "portable.h"
#include "conv_kernels.h"
#include "scan_kernels.h"
