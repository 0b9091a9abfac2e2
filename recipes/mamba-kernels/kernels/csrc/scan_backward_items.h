// The elementwise work of the scan's backward pass: dt, dt u and dy before a chunk's recurrence, and after it the
// gradients of u, delta, z, D and of delta's bias.
// Equation: du = dt d(dt u) + D dy, d(delta) = d(dt) softplus'(delta + bias), dz = y silu'(z) d(out).
// Tiling: a thread has eight adjacent items of a chunk.
#pragma once

#include "scan_backward_shared.h"

// A chunk's gradients of D and of delta's bias: four threads have the steps of a channel. The first of them alone adds
// to the channel's totals, so no barrier is needed.
template <bool ALONG_TIME>
struct ChannelGradients {
  float d, bias;

  // Token-major items span eight channels: their terms replace their dt and dy in shared memory.
  DEVICE void store_shared(BackwardShared& s, const float (&d_terms)[8], const float (&bias_terms)[8],
                           ThreadItems<ALONG_TIME> items) {
    if constexpr (ALONG_TIME) {
      d = pairwise_sum8(d_terms);
      bias = pairwise_sum8(bias_terms);
    } else {
      store_shared_items(s.dt, d_terms, items);
      store_shared_items(s.dy, bias_terms, items);
    }
  }
  // Behind a barrier.
  DEVICE void add_to_totals(BackwardShared& s) {
    const ThreadItems<true> items;
    if constexpr (!ALONG_TIME) {
      float x[8];
      load_shared_items(x, s.dt, items);
      d = pairwise_sum8(x);
      load_shared_items(x, s.dy, items);
      bias = pairwise_sum8(x);
    }
    d += shuffle_xor<1>(d);
    bias += shuffle_xor<1>(bias);
    d += shuffle_xor<2>(d);
    bias += shuffle_xor<2>(bias);
    if (items.minor() == 0) {
      s.d_total[items.channel()].add(d);
      s.bias_total[items.channel()].add(bias);
    }
    if constexpr (!ALONG_TIME) barrier();
  }
};

DEVICE void clear_totals(BackwardShared& s) {
  const ThreadItems<true> items;
  if (items.minor() == 0) s.d_total[items.channel()] = s.bias_total[items.channel()] = {0.0f, 0.0f};
}

DEVICE void store_totals(float* to, const CompensatedSum* totals, const ScanSizes& sizes, const ChannelTile& tile) {
  const ThreadItems<true> items;
  const int channel = items.channel();
  if (items.minor() != 0 || channel >= tile.channels) return;
  to[tile.batch * sizes.channels + tile.first + channel] = totals[channel].sum;
}

// A thread's own 16 bytes of items, to shared memory and back.
template <class T>
DEVICE void stash_items(uint32_t* room, int index, const RawItems<T>& x) {
  Vector<uint32_t, 4> words;
  __builtin_memcpy(&words, x.word, sizeof(words));
  store(room + (index * THREADS + thread_index()) * 4, words);
}
template <class T>
DEVICE void unstash_items(RawItems<T>& x, const uint32_t* room, int index) {
  const Vector<uint32_t, 4> words = load<4>(room + (index * THREADS + thread_index()) * 4);
  __builtin_memcpy(x.word, &words, sizeof(words));
}

// A thread's items of the inputs, as loaded.
template <class T>
struct BackwardInputs {
  RawItems<T> u, delta, gradient, z;

  template <bool FULL, class S>
  DEVICE void load(const ScanBackward& p, const BackwardShared& s, int64_t chunk, int valid, S items) {
    const T* u_start = s.rows.template items<T, FULL>(BACKWARD_U, p.u, chunk, items);
    const T* delta_start = s.rows.template items<T, FULL>(BACKWARD_DELTA, p.delta, chunk, items);
    const T* gradient_start = s.rows.template items<T, FULL>(BACKWARD_OUT_GRADIENT, p.out_gradient, chunk, items);
    const T* z_start = s.rows.template items<T, FULL>(BACKWARD_Z, p.z, chunk, items);
    load_input<T, FULL>(u, u_start, p.u, valid, items);
    load_input<T, FULL>(delta, delta_start, p.delta, valid, items);
    load_input<T, FULL>(gradient, gradient_start, p.out_gradient, valid, items);
    if (p.z.data) load_input<T, FULL>(z, z_start, p.z, valid, items);
  }

  // Copies all items of a full chunk to where load_shared() reads them.
  template <class S>
  DEVICE void copy(const ScanBackward& p, BackwardShared& s, int64_t chunk, S items) const {
    cp_async_items(s, 0, s.rows.template items<T, true>(BACKWARD_U, p.u, chunk, items));
    cp_async_items(s, 1, s.rows.template items<T, true>(BACKWARD_DELTA, p.delta, chunk, items));
    cp_async_items(s, 2, s.rows.template items<T, true>(BACKWARD_OUT_GRADIENT, p.out_gradient, chunk, items));
    if (p.z.data) cp_async_items(s, 3, s.rows.template items<T, true>(BACKWARD_Z, p.z, chunk, items));
  }
  DEVICE static void cp_async_items(BackwardShared& s, int index, const T* from) {
    cp_async(s.inputs + (index * THREADS + thread_index()) * 4, from);
  }
  DEVICE void keep(uint32_t* room) const {
    stash_items(room, 0, u);
    stash_items(room, 1, delta);
    stash_items(room, 2, gradient);
    stash_items(room, 3, z);
  }
  // Loads the items of a chunk, those of 16 bits to where load_shared() reads them.
  template <class S>
  DEVICE void fetch_partial(const ScanBackward& p, BackwardShared& s, int64_t chunk, int valid, S items) {
    load<false>(p, s, chunk, valid, items);
    if constexpr (STAGES_INPUTS<T>) keep(s.inputs);
  }
  template <class S>
  DEVICE void fetch_full(const ScanBackward& p, BackwardShared& s, int64_t chunk, S items) {
    if constexpr (STAGES_INPUTS<T>) {
      copy(p, s, chunk, items);
    } else {
      load<true>(p, s, chunk, 8, items);
    }
  }
  DEVICE void load_shared(const uint32_t* room) {
    unstash_items(u, room, 0);
    unstash_items(delta, room, 1);
    unstash_items(gradient, room, 2);
    unstash_items(z, room, 3);
  }
};

// Stores dt, dt u and dy of thread items to shared memory.
template <class T, bool MULTI_TILE, bool FULL, class S>
DEVICE void store_shared_inputs(const ScanBackward& p, BackwardShared& s, int valid, const BackwardInputs<T>& inputs,
                                S items) {
  float dt[8], dtu[8], dy[8], bias[8];
  load_parameter(bias, s.bias, items);
  compute_dt<T, FULL>(dt, inputs.delta, bias, p.sizes.softplus != 0, valid);
  apply_gate<T, FULL>(dy, inputs.gradient, inputs.z, p.z.data != nullptr, valid);
  inputs.u.to_floats(dtu);
#pragma unroll
  for (int i = 0; i < 8; ++i) dtu[i] = FULL || i < valid ? dt[i] * dtu[i] : 0.0f;
  store_shared_items(s.dt, dt, items);
  store_shared_items(dtu_rows<MULTI_TILE>(s), dtu, items);
  store_shared_items(s.dy, dy, items);
}

// Gradients of u, delta and z of thread items, from the sums over states.
template <class T, bool FULL, bool ALONG_TIME>
DEVICE void store_gradients(const ScanBackward& p, BackwardShared& s, int64_t chunk, int valid,
                            const BackwardInputs<T>& inputs, ChannelGradients<ALONG_TIME>& terms,
                            ThreadItems<ALONG_TIME> items) {
  float v[8], x[8], d[8], bias[8];
  load_parameter(d, s.d, items);
  load_parameter(bias, s.bias, items);
  inputs.u.to_floats(v);
  if (p.z.data) {
    float y[8], w[8], g[8];
    load_shared_items(y, s.sums + SUM_Y * CHANNELS * ROW, items);
    inputs.z.to_floats(w);
    inputs.gradient.to_floats(g);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float gate = sigmoid(w[i]);
      x[i] = g[i] * (y[i] + d[i] * v[i]) * gate * (1.0f + w[i] * (1.0f - gate));
    }
    T* to = s.rows.template items<T, FULL>(BACKWARD_Z_GRADIENT, p.z_gradient, chunk, items);
    store_items<T, FULL>(to, p.z_gradient, valid, x, items);
  }
  float input[8], dt[8], dy[8], d_terms[8], bias_terms[8];
  load_shared_items(input, s.sums + SUM_INPUT * CHANNELS * ROW, items);
  load_shared_items(dt, s.dt, items);
  load_shared_items(dy, s.dy, items);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = dt[i] * input[i] + d[i] * dy[i];
    d_terms[i] = FULL || i < valid ? dy[i] * v[i] : 0.0f;
  }
  T* to = s.rows.template items<T, FULL>(BACKWARD_U_GRADIENT, p.u_gradient, chunk, items);
  store_items<T, FULL>(to, p.u_gradient, valid, x, items);
  float decay[8], raw[8];
  load_shared_items(decay, s.sums + SUM_DECAY * CHANNELS * ROW, items);
  inputs.delta.to_floats(raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float slope = p.sizes.softplus ? sigmoid(raw[i] + bias[i]) : 1.0f;
    x[i] = (v[i] * input[i] + decay[i] * LN_2) * slope;
    bias_terms[i] = FULL || i < valid ? x[i] : 0.0f;
  }
  terms.store_shared(s, d_terms, bias_terms, items);
  to = s.rows.template items<T, FULL>(BACKWARD_DELTA_GRADIENT, p.delta_gradient, chunk, items);
  store_items<T, FULL>(to, p.delta_gradient, valid, x, items);
}
