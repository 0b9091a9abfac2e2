// Every kernel for the emulator, for warps of EMULATED_WARP_SIZE lanes, in a namespace of their own: one library holds
// both sizes. Standard headers that kernels need must be included outside it.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "emulator.h"

#if EMULATED_WARP_SIZE == 32
namespace warp32 {
#elif EMULATED_WARP_SIZE == 64
namespace warp64 {
#else
#error "EMULATED_WARP_SIZE must be 32 or 64"
#endif
#include "kernels.cpp"
}
