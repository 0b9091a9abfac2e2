// All kernels again for the emulator, for waves of EMULATED_WAVE lanes: in a namespace of their own, so that
// one library holds both. What the kernels include from the standard library must come before it.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "emulator.h"

#if EMULATED_WAVE == 32
namespace wave32 {
#elif EMULATED_WAVE == 64
namespace wave64 {
#else
#error "EMULATED_WAVE must be 32 or 64"
#endif
#include "kernels.cpp"
}
