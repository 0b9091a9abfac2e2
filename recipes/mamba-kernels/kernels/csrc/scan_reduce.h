// What a backward pass leaves to be summed: dB and dC over blocks; dA, dD and the gradient of delta's bias over splits and
// batch.
#pragma once

#include "elements.h"

// Four adjacent states, from `first` on, of one time; those beyond `states` are zero.
DEVICE void sum_of_four(float (&total)[4], const float* from, const ScanReduce& p, int64_t first) {
  const int64_t area = p.length * p.states;
#pragma unroll
  for (int j = 0; j < 4; ++j) total[j] = 0.0f;
  if (p.states % 4 != 0) {
    for (int j = 0; j < 4 && first + j < p.states; ++j) total[j] = sum_of(from + j, p.blocks, area);
    return;
  }
  if (first >= p.states) return;
  // As sum_of does it.
  LongSum sums[4] = {};
#pragma unroll 1
  for (int64_t block = 0; block < p.blocks; block += 8) {
    float x[4][8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float four[4] = {};
      if (block + i < p.blocks) load_four(four, from + (block + i) * area);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j][i] = four[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j].add(sum_of_eight(x[j]));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) total[j] = sums[j].sum;
}

// 32 steps of a group of dB or dC, in the input's type.
template <class T>
DEVICE void reduce_projection(const ScanReduce& p, const float* partial, const Projection& gradient, int64_t group,
                              int64_t chunk) {
  SHARED float tile[CHUNK * STATE_ROW];
  const int64_t left = p.length - chunk * CHUNK;
  const int time = thread_index() / 4, n = thread_index() % 4 * 4;
  const float* from = partial + (group * p.blocks * p.length + chunk * CHUNK + time) * p.states + n;
  T* out = static_cast<T*>(gradient.data) + group / p.groups * gradient.batch + group % p.groups * gradient.group +
           chunk * CHUNK * gradient.time;
  for (int64_t slab = 0; slab < p.states; slab += SLAB) {
    float total[4] = {};
    if (time < left) sum_of_four(total, from + slab, p, slab + n);
    store_four(tile + time * STATE_ROW + n, total[0], total[1], total[2], total[3]);
    barrier();
#pragma unroll
    for (int i = 0; i < CHUNK * SLAB / THREADS; ++i) {
      const int at = i * THREADS + thread_index(), step = at % CHUNK, state = at / CHUNK;
      if (step < left && slab + state < p.states) {
        out[(slab + state) * gradient.state + step * gradient.time] = from_float<T>(tile[step * STATE_ROW + state]);
      }
    }
    barrier();
  }
}

// One element a thread of dA, dD and the gradient of delta's bias, side by side.
DEVICE void reduce_parameters(const ScanReduce& p, int64_t block) {
  int64_t place = block * THREADS + thread_index(), size = p.channels * p.states;
  const float* partial = p.a_partial;
  float* gradient = p.a_gradient;
  if (place >= size) {
    place -= size;
    size = p.channels;
    const bool first = place < size;
    if (!first) place -= size;
    partial = first ? p.d_partial : p.bias_partial;
    gradient = first ? p.d_gradient : p.bias_gradient;
  }
  if (place < size && gradient) gradient[place] = sum_of(partial + place, p.parts, size);
}

template <class T>
DEVICE void scan_reduce(const ScanReduce& p) {
  wait_for_kernel_before();
  const int64_t chunks = (p.length + CHUNK - 1) / CHUNK, each = p.batch * p.groups * chunks;
  const int64_t block = block_index();
  if (block >= 2 * each) return reduce_parameters(p, block - 2 * each);
  const bool b = block < each;
  const int64_t index = b ? block : block - each;
  reduce_projection<T>(p, b ? p.b_partial : p.c_partial, b ? p.b_gradient : p.c_gradient, index / chunks, index % chunks);
}
