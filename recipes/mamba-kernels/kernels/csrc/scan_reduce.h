// Reduction of the backward pass's partial sums: dB and dC over blocks; dA, dD and the gradient of delta's bias over
// splits and batch.
// Equation: dB, dC = sum over blocks; dA, dD, dbias = sum over splits and batch.
// Tiling: a block has 32 steps of dB or dC of a group, or 128 elements of the others; sums go by eights, pairwise
//   within.
#pragma once

#include "scan_common.h"

// Sums of four adjacent states of one time, from `first` on; zero beyond `states`.
DEVICE void sum_four_states(float (&total)[4], const float* from, const ScanReduce& p, int64_t first) {
  const int64_t area = p.length * p.states;
#pragma unroll
  for (int j = 0; j < 4; ++j) total[j] = 0.0f;
  if (p.states % 4 != 0) {
    for (int j = 0; j < 4 && first + j < p.states; ++j) total[j] = strided_sum(from + j, p.blocks, area);
    return;
  }
  if (first >= p.states) return;
  // As in strided_sum.
  CompensatedSum sums[4] = {};
#pragma unroll 1
  for (int64_t block = 0; block < p.blocks; block += 8) {
    float x[4][8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float four[4] = {};
      if (block + i < p.blocks) load_float4(four, from + (block + i) * area);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j][i] = four[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j].add(pairwise_sum8(x[j]));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) total[j] = sums[j].sum;
}

// 32 steps of a group of dB or dC, in the input's dtype.
template <class T>
DEVICE void reduce_projection(const ScanReduce& p, const float* partial, const Projection& gradient, int64_t group,
                              int64_t chunk) {
  SHARED float tile[CHUNK * STATE_ROW];
  const int64_t left = p.length - chunk * CHUNK;
  const int time = thread_index() / 4, n = thread_index() % 4 * 4;
  const float* from = partial + (group * p.blocks * p.length + chunk * CHUNK + time) * p.states + n;
  T* out = static_cast<T*>(gradient.data) + group / p.groups * gradient.batch + group % p.groups * gradient.group +
           chunk * CHUNK * gradient.time;
  for (int64_t state_tile = 0; state_tile < p.states; state_tile += STATE_TILE) {
    float total[4] = {};
    if (time < left) sum_four_states(total, from + state_tile, p, state_tile + n);
    store_float4(tile + time * STATE_ROW + n, total[0], total[1], total[2], total[3]);
    barrier();
#pragma unroll
    for (int i = 0; i < CHUNK * STATE_TILE / THREADS; ++i) {
      const int at = i * THREADS + thread_index(), step = at % CHUNK, state = at / CHUNK;
      if (step < left && state_tile + state < p.states) {
        out[(state_tile + state) * gradient.state + step * gradient.time] =
            from_float<T>(tile[step * STATE_ROW + state]);
      }
    }
    barrier();
  }
}

// dA, dD and the gradient of delta's bias, concatenated: one element a thread.
DEVICE void reduce_parameters(const ScanReduce& p, int64_t block) {
  int64_t index = block * THREADS + thread_index(), size = p.channels * p.states;
  const float* partial = p.a_partial;
  float* gradient = p.a_gradient;
  if (index >= size) {
    index -= size;
    size = p.channels;
    const bool first = index < size;
    if (!first) index -= size;
    partial = first ? p.d_partial : p.bias_partial;
    gradient = first ? p.d_gradient : p.bias_gradient;
  }
  if (index < size && gradient) gradient[index] = strided_sum(partial + index, p.parts, size);
}

template <class T>
DEVICE void scan_reduce(const ScanReduce& p) {
  wait_on_dependent_grids();
  const int64_t chunks = (p.length + CHUNK - 1) / CHUNK, each = p.batch * p.groups * chunks;
  const int64_t block = block_index();
  if (block >= 2 * each) return reduce_parameters(p, block - 2 * each);
  const bool b = block < each;
  const int64_t index = b ? block : block - each;
  reduce_projection<T>(p, b ? p.b_partial : p.c_partial, b ? p.b_gradient : p.c_gradient, index / chunks,
                       index % chunks);
}
