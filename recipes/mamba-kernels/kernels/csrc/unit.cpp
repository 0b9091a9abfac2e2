// One kernel: -DUNIT=scan_kernels.h -DSELECT_scan_forward_bf16=SELECTED.
#include "portable.h"
#define QUOTED_(x) #x
#define QUOTED(x) QUOTED_(x)
#include QUOTED(UNIT)
