// The toolchain beside the recipes' kernels: HIP's runtime, hipCUB's reduction in LDS, RCCL's header and library.
#include <hip/hip_runtime.h>
#include <hipcub/hipcub.hpp>
#include <rccl/rccl.h>

#include <cstdio>

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) block_sums(const float* values, float* sums) {
  using Reduce = hipcub::BlockReduce<float, THREADS>;
  __shared__ typename Reduce::TempStorage storage;
  const float sum = Reduce(storage).Sum(values[blockIdx.x * THREADS + threadIdx.x]);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

int main() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return 1;
  std::printf("RCCL answers with version %d\n", version);
  return 0;
}
