// Selective scan, backward. Chunks of 32 steps from last to first; in each the states are computed again from
// the checkpoint that the forward pass left, then with g_t = dL/dh_t = C_t dy_t + a_{t+1} g_{t+1}
//   dB_t = sum over channels of dt u g_t          dC_t = sum over channels of dy_t h_t
//   d(dt u) = sum over states of B_t g_t          d(dt) = u d(dt u) + sum over states of A a_t g_t h_{t-1}
// Every sum has one order: results repeat bit for bit.
#pragma once

#include "scan_forward.h"

// Sums over the channels of a wave, four steps at a time, through shared memory.
struct ChannelSum {
  // Per row: two kinds (B, C) x four steps x the wave's states, and room that keeps rows off each other's banks.
  static constexpr int VALUES = 2 * 4 * Lane::WAVE_STATES;
  static constexpr int STRIDE = VALUES + 8;
  static constexpr int SIZE = Lane::ROWS * STRIDE;

  static DEVICE void put(float* stage, const Lane& lane, int kind, int step, const float (&x)[4]) {
    float* to = stage + lane.row * STRIDE + (kind * 4 + step % 4) * Lane::WAVE_STATES + lane.column * Lane::STATES_EACH;
    if constexpr (Lane::STATES_EACH == 2) {
      store_two(to, x[0], x[1]);
    } else {
      store_four(to, x[0], x[1], x[2], x[3]);
    }
  }
  // Adds the rows and writes [kind][time][state] of the group.
  static DEVICE void finish(float* sums, const float* stage, const Lane& lane, int first) {
    const int l = thread_index() % WAVE;
#pragma unroll
    for (int base = 0; base < VALUES; base += 2 * WAVE) {
      const int at = base + 2 * l;
      float total[2] = {};
#pragma unroll
      for (int row = 0; row < Lane::ROWS; ++row) {
        float x[2];
        load_two(x, stage + row * STRIDE + at);
        total[0] += x[0];
        total[1] += x[1];
      }
      const int kind = at / (4 * Lane::WAVE_STATES), step = at / Lane::WAVE_STATES % 4, n = at % Lane::WAVE_STATES;
      store_two(sums + ((lane.group * 2 + kind) * CHUNK + first + step) * SLAB + lane.part * Lane::WAVE_STATES + n,
                total[0], total[1]);
    }
  }
};

// Orders shared memory between the lanes of a wave.
DEVICE void wave_barrier() {
#if defined(__CUDACC__)
  __syncwarp();
#elif defined(__HIP__)
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
#else
  shuffle_xor<1>(0.0f);
#endif
}

// States before each eight steps of a chunk but the last. With tensor cores in shared memory, because the recurrence
// needs the registers; else in registers, because the recurrence needs the shared memory.
constexpr int STARTS = CHUNK / STEPS - 1;

struct BackwardShared {
  float dt[CHANNELS * ROW], dtu[CHANNELS * ROW], dy[CHANNELS * ROW];
  // Over [part][channel][time]: y, d(dt u), and the states' part of d(dt) over ln 2.
  float y[Lane::PARTS * CHANNELS * ROW], input[Lane::PARTS * CHANNELS * ROW], decay[Lane::PARTS * CHANNELS * ROW];
  float b[CHUNK * STATE_ROW], c[CHUNK * STATE_ROW];
  float stage[Lane::WAVES * ChannelSum::SIZE];
  float projections[Lane::GROUPS * 2 * CHUNK * SLAB];
  float starts[HAS_MATRIX_TF32 ? STARTS * THREADS * 4 : 4];
  float joins[CHUNK], bias[CHANNELS], d[CHANNELS];
  Rows<7> rows;
  int broken;
  int unused[3];
};
static_assert(sizeof(BackwardShared) % 16 == 0);

enum BackwardTensor {
  BACKWARD_U,
  BACKWARD_DELTA,
  BACKWARD_Z,
  BACKWARD_OUT_GRADIENT,
  BACKWARD_U_GRADIENT,
  BACKWARD_DELTA_GRADIENT,
  BACKWARD_Z_GRADIENT
};

struct Starts {
  float kept[HAS_MATRIX_TF32 ? 1 : STARTS][4];

  DEVICE void put(BackwardShared& s, int index, const float (&h)[4]) {
    if constexpr (HAS_MATRIX_TF32) {
      store_four(s.starts + (index * THREADS + thread_index()) * 4, h[0], h[1], h[2], h[3]);
    } else {
#pragma unroll
      for (int i = 0; i < STARTS; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) kept[i][e] = i == index ? h[e] : kept[i][e];
      }
    }
  }
  DEVICE void get(float (&h)[4], const BackwardShared& s, int index) const {
    if constexpr (HAS_MATRIX_TF32) {
      load_four(h, s.starts + (index * THREADS + thread_index()) * 4);
    } else {
#pragma unroll
      for (int i = 0; i < STARTS; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) h[e] = i == index ? kept[i][e] : h[e];
      }
    }
  }
};

// States before each of eight steps and after the last, and decays.
struct Steps {
  float h[STEPS + 1][4], a[STEPS][4];
};

// Eight steps forward; KEEP: with all that the way back needs.
template <class T, bool PLAIN, bool SEGMENTED, bool KEEP>
DEVICE void recompute(Steps& steps, float (&h)[4], const float (&a)[4], BackwardShared& s, int first, const Lane& lane,
                      const StepMasks& masks) {
  Outer<T, PLAIN> input(s.dtu, s.b, first, lane, masks);
  const float* dt_row = s.dt + lane.channel(0) * ROW + first;
#pragma unroll
  for (int quad = 0; quad < STEPS / 4; ++quad) {
    float dt[Lane::CHANNELS_EACH][4];
#pragma unroll
    for (int c = 0; c < Lane::CHANNELS_EACH; ++c) load_four(dt[c], dt_row + c * Lane::ROWS * ROW + quad * 4);
    input.load(quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = quad * 4 + i;
      float x[4];
      input.set(x, step);
      const bool restart = SEGMENTED && s.joins[first + step] == 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float decay = exp2_fast(dt[e / Lane::STATES_EACH][i] * a[e]);
        if constexpr (KEEP) {
          steps.h[step][e] = h[e];
          steps.a[step][e] = decay;
        }
        h[e] = restart ? x[e] : decay * h[e] + x[e];
      }
    }
  }
  if constexpr (KEEP) {
#pragma unroll
    for (int e = 0; e < 4; ++e) steps.h[STEPS][e] = h[e];
  }
}

// Eight steps back: `carry` is a_{t+1} g_{t+1} of the step after, on return of the first.
template <class T, bool PLAIN, bool SEGMENTED>
DEVICE void reverse(float (&carry)[4], float (&a_gradient)[4], const Steps& steps, const float (&a)[4],
                    BackwardShared& s, int first, const Lane& lane, const StepMasks& masks, bool accumulate) {
  Outer<T, PLAIN> output(s.dy, s.c, first, lane, masks);
  StateSum<T, PLAIN, Y_IS_EXACT<T>> y(s.c, first, lane, masks);
  StateSum<T, PLAIN, true> input(s.b, first, lane, masks);
  StateSum<T, PLAIN, true, true> decay(s.b, first, lane, masks);
  float* stage = s.stage + (thread_index() / WAVE) * ChannelSum::SIZE;
  const int row = lane.channel(0) * ROW + first;
#pragma unroll
  for (int quad = STEPS / 4 - 1; quad >= 0; --quad) {
    output.load(quad);
    wave_barrier();
#pragma unroll
    for (int pair = 1; pair >= 0; --pair) {
      float dt[Lane::CHANNELS_EACH][2], dtu[Lane::CHANNELS_EACH][2], dy[Lane::CHANNELS_EACH][2];
#pragma unroll
      for (int c = 0; c < Lane::CHANNELS_EACH; ++c) {
        const int at = row + c * Lane::ROWS * ROW + quad * 4 + pair * 2;
        load_two(dt[c], s.dt + at);
        load_two(dtu[c], s.dtu + at);
        load_two(dy[c], s.dy + at);
      }
#pragma unroll
      for (int i = 1; i >= 0; --i) {
        const int step = quad * 4 + pair * 2 + i;
        y.add(steps.h[step + 1], step);
        float g[4], b[4], c[4], q[4];
        output.set(g, step);
        const bool restart = SEGMENTED && s.joins[first + step] == 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) g[e] += carry[e];
        input.add(g, step);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int k = e / Lane::STATES_EACH, j = e % Lane::STATES_EACH;
          b[j] = k ? b[j] + dtu[k][i] * g[e] : dtu[k][i] * g[e];
          c[j] = k ? c[j] + dy[k][i] * steps.h[step + 1][e] : dy[k][i] * steps.h[step + 1][e];
          carry[e] = restart ? 0.0f : g[e] * steps.a[step][e];
          q[e] = restart ? 0.0f : carry[e] * steps.h[step][e];
          a_gradient[e] += dt[k][i] * q[e];
          q[e] *= a[e];
        }
        decay.add(q, step);
        ChannelSum::put(stage, lane, 0, step, b);
        ChannelSum::put(stage, lane, 1, step, c);
      }
    }
    wave_barrier();
    ChannelSum::finish(s.projections, stage, lane, first + quad * 4);
  }
  y.finish();
  input.finish();
  decay.finish();
  y.store(s.y, first, accumulate);
  input.store(s.input, first, accumulate);
  decay.store(s.decay, first, accumulate);
}

// A chunk of one slab: `h` before it, `carry` and `a_gradient` after it; the latter two on return before it.
template <class T, bool PLAIN, bool SEGMENTED>
DEVICE void backward_chunk(float (&h)[4], float (&carry)[4], float (&a_gradient)[4], const float (&a)[4],
                           BackwardShared& s, const Lane& lane, const StepMasks& masks, bool accumulate) {
  Steps steps;
  Starts starts;
#pragma unroll 1
  for (int i = 0; i < STARTS; ++i) {
    starts.put(s, i, h);
    recompute<T, PLAIN, SEGMENTED, false>(steps, h, a, s, i * STEPS, lane, masks);
  }
#pragma unroll 1
  for (int i = STARTS; i >= 0; --i) {
    if (i < STARTS) starts.get(h, s, i);
    recompute<T, PLAIN, SEGMENTED, true>(steps, h, a, s, i * STEPS, lane, masks);
    if (!PLAIN && i == STARTS && !is_finite(h[0] + h[1] + h[2] + h[3])) s.broken = 1;
    reverse<T, PLAIN, SEGMENTED>(carry, a_gradient, steps, a, s, i * STEPS, lane, masks, accumulate);
  }
  if (!PLAIN && !is_finite(carry[0] + carry[1] + carry[2] + carry[3])) s.broken = 1;
}

// Sums over a block's channels to this block's part of dB and dC, [time][state].
DEVICE void store_projections(const ScanBackward& p, const BackwardShared& s, const Place& place, int64_t slab,
                              int64_t chunk) {
  const ScanSizes& sizes = p.sizes;
  const int64_t base = ((place.batch * sizes.groups + place.group) * place.blocks + place.block) * sizes.length;
  const int64_t left = sizes.length - chunk * CHUNK;
  const int time = thread_index() / 4, n = thread_index() % 4 * 4;
  const int64_t to = (base + chunk * CHUNK + time) * sizes.states + slab * SLAB + n;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    float total[4];
    load_four(total, s.projections + (kind * CHUNK + time) * SLAB + n);
#pragma unroll
    for (int group = 1; group < Lane::GROUPS; ++group) {
      float x[4];
      load_four(x, s.projections + ((group * 2 + kind) * CHUNK + time) * SLAB + n);
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += x[i];
    }
    float* partial = (kind ? p.c_partial : p.b_partial) + to;
    if (time >= left) continue;
    if (sizes.states % 4 == 0) {
      if (slab * SLAB + n < sizes.states) store_four(partial, total[0], total[1], total[2], total[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (slab * SLAB + n + i < sizes.states) partial[i] = total[i];
      }
    }
  }
}

// Sums over time of what a thread's strips hold: one channel along time, else eight.
template <bool ALONG_TIME>
struct ChannelTotal {
  static constexpr int COUNT = ALONG_TIME ? 1 : 8;
  float value[COUNT] = {};

  DEVICE void add(int i, float x) { value[ALONG_TIME ? 0 : i] += x; }
};

// Adds over the threads that share a channel, in order.
template <bool ALONG_TIME>
DEVICE void store_channel_total(float* to, const ChannelTotal<ALONG_TIME>& x, float* scratch, const ScanSizes& sizes,
                                const Place& place) {
  constexpr int COUNT = ChannelTotal<ALONG_TIME>::COUNT;
  barrier();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) scratch[thread_index() * COUNT + i] = x.value[i];
  barrier();
  const int channel = thread_index();
  if (channel < place.channels) {
    float total = 0.0f;
    for (int i = 0; i < THREADS * COUNT / CHANNELS; ++i) {
      total += scratch[ALONG_TIME ? channel * 4 + i : (i * 4 + channel / 8) * 8 + channel % 8];
    }
    to[place.batch * sizes.channels + place.first + channel] = total;
  }
}

// The inputs of a strip, as they lie in memory.
template <class T>
struct BackwardInputs {
  Packed<T> u, delta, gradient, z;

  template <bool WHOLE, class S>
  DEVICE void load(const ScanBackward& p, const BackwardShared& s, int64_t chunk, int inside, S strip) {
    const T* u_start = s.rows.template strip<T, WHOLE>(BACKWARD_U, p.u, chunk, strip);
    const T* delta_start = s.rows.template strip<T, WHOLE>(BACKWARD_DELTA, p.delta, chunk, strip);
    const T* gradient_start = s.rows.template strip<T, WHOLE>(BACKWARD_OUT_GRADIENT, p.out_gradient, chunk, strip);
    const T* z_start = s.rows.template strip<T, WHOLE>(BACKWARD_Z, p.z, chunk, strip);
    load_strip<T, WHOLE>(u, u_start, p.u, inside, strip);
    load_strip<T, WHOLE>(delta, delta_start, p.delta, inside, strip);
    load_strip<T, WHOLE>(gradient, gradient_start, p.out_gradient, inside, strip);
    if (p.z.data) load_strip<T, WHOLE>(z, z_start, p.z, inside, strip);
  }
};

// dt, dt u and dy of a strip to shared memory.
template <class T, bool WHOLE, class S>
DEVICE void put_inputs(const ScanBackward& p, BackwardShared& s, int inside, const BackwardInputs<T>& inputs, S strip) {
  float dt[8], dtu[8], dy[8], bias[8];
  strip_parameter(bias, s.bias, strip);
  step_sizes<T, WHOLE>(dt, dtu, inputs.delta, inputs.u, bias, p.sizes.softplus != 0, inside);
  inputs.gradient.to_floats(dy);
  if (p.z.data) {
    float v[8];
    inputs.z.to_floats(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) dy[i] = WHOLE || i < inside ? dy[i] * v[i] * sigmoid(v[i]) : 0.0f;
  }
  put_strip(s.dt, dt, strip);
  put_strip(s.dtu, dtu, strip);
  put_strip(s.dy, dy, strip);
}

// Gradients of u, delta and z of a strip, from the sums over states.
template <class T, bool WHOLE, bool ALONG_TIME>
DEVICE void store_gradients(const ScanBackward& p, const BackwardShared& s, int64_t chunk, int inside,
                            const BackwardInputs<T>& inputs, ChannelTotal<ALONG_TIME>& d_total,
                            ChannelTotal<ALONG_TIME>& bias_total, Strip<ALONG_TIME> strip) {
  float v[8], x[8], d[8], bias[8];
  strip_parameter(d, s.d, strip);
  strip_parameter(bias, s.bias, strip);
  inputs.u.to_floats(v);
  if (p.z.data) {
    float y[8], w[8], g[8];
    get_sums(y, s.y, strip);
    inputs.z.to_floats(w);
    inputs.gradient.to_floats(g);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float gate = sigmoid(w[i]);
      x[i] = g[i] * (y[i] + d[i] * v[i]) * gate * (1.0f + w[i] * (1.0f - gate));
    }
    T* to = s.rows.template strip<T, WHOLE>(BACKWARD_Z_GRADIENT, p.z_gradient, chunk, strip);
    store_strip<T, WHOLE>(to, p.z_gradient, inside, x, strip);
  }
  float input[8], dt[8], dy[8];
  get_sums(input, s.input, strip);
  get_strip(dt, s.dt, strip);
  get_strip(dy, s.dy, strip);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = dt[i] * input[i] + d[i] * dy[i];
    d_total.add(i, WHOLE || i < inside ? dy[i] * v[i] : 0.0f);
  }
  T* to = s.rows.template strip<T, WHOLE>(BACKWARD_U_GRADIENT, p.u_gradient, chunk, strip);
  store_strip<T, WHOLE>(to, p.u_gradient, inside, x, strip);
  float decay[8], raw[8];
  get_sums(decay, s.decay, strip);
  inputs.delta.to_floats(raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float slope = p.sizes.softplus ? sigmoid(raw[i] + bias[i]) : 1.0f;
    x[i] = (v[i] * input[i] + decay[i] * LN_2) * slope;
    bias_total.add(i, WHOLE || i < inside ? x[i] : 0.0f);
  }
  to = s.rows.template strip<T, WHOLE>(BACKWARD_DELTA_GRADIENT, p.delta_gradient, chunk, strip);
  store_strip<T, WHOLE>(to, p.delta_gradient, inside, x, strip);
}

// Where carries and gradients of A wait while other slabs have the registers. With tensor cores in shared memory,
// two copies by the chunk's parity, because a chunk can be repeated the plain way; else where they end.
struct Slots {
  const ScanBackward& p;
  const Place& place;
  const Lane& lane;
  float* shared;

  DEVICE float* slot(int64_t slab, int which, int64_t chunk) const {
    return shared + (((slab * 2 + which) * 2 + (chunk + 1) % 2) * THREADS + thread_index()) * 4;
  }
  DEVICE StateAddress address(int64_t slab) const { return StateAddress(p.sizes, place, lane, slab, 1); }
  DEVICE void load(float (&carry)[4], float (&a_gradient)[4], int64_t slab, int64_t chunk) const {
    if constexpr (HAS_MATRIX_TF32) {
      load_four(carry, slot(slab, 0, chunk));
      load_four(a_gradient, slot(slab, 1, chunk));
    } else {
      address(slab).load(carry, p.initial_gradient, 0);
      address(slab).load(a_gradient, p.a_gradient, 0);
    }
  }
  DEVICE void store(const float (&carry)[4], const float (&a_gradient)[4], int64_t slab, int64_t chunk) const {
    if constexpr (HAS_MATRIX_TF32) {
      store_four(slot(slab, 0, chunk), carry[0], carry[1], carry[2], carry[3]);
      store_four(slot(slab, 1, chunk), a_gradient[0], a_gradient[1], a_gradient[2], a_gradient[3]);
    } else {
      address(slab).store(p.initial_gradient, 0, carry);
      address(slab).store(p.a_gradient, 0, a_gradient);
    }
  }
};

// Goes through the chunks from `chunk` down and returns the last that it could not: -1, the plain way. The carry
// and gradient of A after that chunk are in `carry` and `a_gradient` or, with several slabs, in the slots of
// its parity.
template <class T, bool MANY, bool ALONG_TIME, bool PLAIN, bool SEGMENTED>
DEVICE int64_t backward_chunks(const ScanBackward& p, BackwardShared& s, const Slots& slots, const Place& place,
                               const Lane& lane, int64_t chunk, float (&carry)[4], float (&a_gradient)[4],
                               ChannelTotal<ALONG_TIME>& d_total, ChannelTotal<ALONG_TIME>& bias_total) {
  const ScanSizes& sizes = p.sizes;
  const Strip<ALONG_TIME> strip;
  const StepMasks masks(lane);
  const Vectorised vectorised(sizes, place, p.b, p.c);
  const int64_t chunks = (sizes.length + CHUNK - 1) / CHUNK;
  const int64_t slabs = MANY ? (sizes.states + SLAB - 1) / SLAB : 1;
  auto inside = [&](int64_t chunk) { return strip.inside(place.channels, sizes.length - chunk * CHUNK); };
  float a[4];
  load_decay(a, p.a, sizes, place, lane, 0);
  ProjectionStrip<T> projections;
  const T* projections_start = projections.start(p.b, p.c, place);
  BackwardInputs<T> inputs;
  auto fetch = [&](int64_t chunk) {
    if (vectorised.whole(sizes, chunk)) {
      inputs.template load<true>(p, s, chunk, 8, strip);
      projections.template load<true>(projections_start, p.b, p.c, sizes, 0, chunk);
    } else {
      inputs.template load<false>(p, s, chunk, inside(chunk), strip);
      projections.template load<false>(projections_start, p.b, p.c, sizes, 0, chunk);
    }
  };
  float h[4];
  fetch(chunk);
  if constexpr (!MANY) StateAddress(sizes, place, lane, 0, chunks).load(h, p.checkpoints, chunk * sizes.states);
  for (; chunk >= 0; --chunk) {
    const bool whole = vectorised.whole(sizes, chunk);
    if (whole) {
      put_inputs<T, true>(p, s, 8, inputs, strip);
    } else {
      put_inputs<T, false>(p, s, inside(chunk), inputs, strip);
    }
    projections.put(s.b, s.c);
    if (SEGMENTED) put_joins(s.joins, p.segment, place, sizes.length, chunk);
    barrier();

    const float carry_after[4] = {carry[0], carry[1], carry[2], carry[3]};
    const float gradient_after[4] = {a_gradient[0], a_gradient[1], a_gradient[2], a_gradient[3]};
    for (int64_t slab = 0; slab < slabs; ++slab) {
      if constexpr (MANY) {
        if (slab > 0) {
          ProjectionStrip<T> more;
          more.template load<false>(projections_start, p.b, p.c, sizes, slab, chunk);
          barrier();
          store_projections(p, s, place, slab - 1, chunk);
          more.put(s.b, s.c);
          barrier();
        }
        load_decay(a, p.a, sizes, place, lane, slab);
        slots.load(carry, a_gradient, slab, chunk);
        StateAddress(sizes, place, lane, slab, chunks).load(h, p.checkpoints, chunk * sizes.states);
      }
      backward_chunk<T, PLAIN, SEGMENTED>(h, carry, a_gradient, a, s, lane, masks, slab > 0);
      if constexpr (MANY) {
        slots.store(carry, a_gradient, slab, chunk - 1);
      }
    }
    // Again, because to keep them would cost the recurrence 16 registers.
    if (whole) {
      inputs.template load<true>(p, s, chunk, 8, strip);
    } else {
      inputs.template load<false>(p, s, chunk, inside(chunk), strip);
    }
    barrier();
    if (!PLAIN && s.broken) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        carry[e] = carry_after[e];
        a_gradient[e] = gradient_after[e];
      }
      return chunk;
    }
    // Reads ahead of what the next chunk starts with.
    const BackwardInputs<T> now = inputs;
    if (chunk > 0) {
      fetch(chunk - 1);
      if constexpr (!MANY) StateAddress(sizes, place, lane, 0, chunks).load(h, p.checkpoints, (chunk - 1) * sizes.states);
    }
    store_projections(p, s, place, slabs - 1, chunk);
    if (whole) {
      store_gradients<T, true>(p, s, chunk, 8, now, d_total, bias_total, strip);
    } else {
      store_gradients<T, false>(p, s, chunk, inside(chunk), now, d_total, bias_total, strip);
    }
    barrier();
  }
  return chunk;
}

template <class T, bool MANY, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_backward(const ScanBackward& p) {
  BackwardShared& s = *reinterpret_cast<BackwardShared*>(dynamic_shared());
  const ScanSizes& sizes = p.sizes;
  const Place place(sizes);
  const Strip<ALONG_TIME> strip;
  const Lane lane;
  const int64_t chunks = (sizes.length + CHUNK - 1) / CHUNK;
  const int64_t slabs = MANY ? (sizes.states + SLAB - 1) / SLAB : 1;
  const Slots slots{p, place, lane, dynamic_shared() + sizeof(BackwardShared) / sizeof(float)};
  s.rows.template put<T>(BACKWARD_U, p.u, place, strip);
  s.rows.template put<T>(BACKWARD_DELTA, p.delta, place, strip);
  s.rows.template put<T>(BACKWARD_Z, p.z, place, strip);
  s.rows.template put<T>(BACKWARD_OUT_GRADIENT, p.out_gradient, place, strip);
  s.rows.template put<T>(BACKWARD_U_GRADIENT, p.u_gradient, place, strip);
  s.rows.template put<T>(BACKWARD_DELTA_GRADIENT, p.delta_gradient, place, strip);
  s.rows.template put<T>(BACKWARD_Z_GRADIENT, p.z_gradient, place, strip);
  put_parameter(s.bias, p.delta_bias, place);
  put_parameter(s.d, p.d, place);
  if (thread_index() == 0) s.broken = 0;
  float carry[4] = {}, a_gradient[4] = {};
  for (int64_t slab = 0; slab < slabs; ++slab) {
    if (p.last_gradient) StateAddress(sizes, place, lane, slab, 1).load(carry, p.last_gradient, 0);
    if constexpr (MANY) {
      slots.store(carry, a_gradient, slab, chunks - 1);
    }
  }
  barrier();

  ChannelTotal<ALONG_TIME> d_total, bias_total;
  int64_t chunk = chunks - 1;
  if constexpr (HAS_MATRIX_TF32) {
    chunk = backward_chunks<T, MANY, ALONG_TIME, false, SEGMENTED>(p, s, slots, place, lane, chunk, carry, a_gradient,
                                                                   d_total, bias_total);
  }
  if (chunk >= 0) {
    backward_chunks<T, MANY, ALONG_TIME, true, SEGMENTED>(p, s, slots, place, lane, chunk, carry, a_gradient, d_total,
                                                          bias_total);
  }
  for (int64_t slab = 0; slab < slabs; ++slab) {
    if constexpr (MANY) {
      slots.load(carry, a_gradient, slab, -1);
    }
    const StateAddress address(sizes, place, lane, slab, 1);
    address.store(p.a_gradient, 0, a_gradient);
    if (p.initial_gradient) address.store(p.initial_gradient, 0, carry);
  }
  if (p.d_gradient) store_channel_total(p.d_gradient, d_total, s.dt, sizes, place);
  if (p.bias_gradient) store_channel_total(p.bias_gradient, bias_total, s.dt, sizes, place);
}

// Adds the blocks' parts of dB or dC in order: 32 steps a block, four adjacent states a thread.
template <class T>
DEVICE void scan_reduce(const ScanReduce& p) {
  SHARED float tile[CHUNK * STATE_ROW];
  const int64_t chunks = (p.length + CHUNK - 1) / CHUNK;
  const int64_t chunk = block_index() % chunks, outer = block_index() / chunks;
  const int64_t left = p.length - chunk * CHUNK, area = p.length * p.states;
  T* out = static_cast<T*>(p.out.data) + outer / p.groups * p.out.batch + outer % p.groups * p.out.group;
  for (int64_t slab = 0; slab * SLAB < p.states; ++slab) {
    const int time = thread_index() / 4, n = thread_index() % 4 * 4;
    const float* from =
        p.partial + outer * p.blocks * area + (chunk * CHUNK + time) * p.states + slab * SLAB + n;
    float total[4] = {};
    if (time < left && p.states % 4 == 0 && slab * SLAB + n < p.states) {
      int64_t block = 0;
      // Loads first: eight in flight hide the memory's latency, one after each sum would not.
      for (; block + 8 <= p.blocks; block += 8) {
        float x[8][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) load_four(x[i], from + (block + i) * area);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) total[j] += x[i][j];
        }
      }
      for (; block < p.blocks; ++block) {
        float x[4];
        load_four(x, from + block * area);
#pragma unroll
        for (int j = 0; j < 4; ++j) total[j] += x[j];
      }
    } else if (time < left) {
      for (int i = 0; i < 4 && slab * SLAB + n + i < p.states; ++i) {
        for (int64_t block = 0; block < p.blocks; ++block) total[i] += from[block * area + i];
      }
    }
    store_four(tile + time * STATE_ROW + n, total[0], total[1], total[2], total[3]);
    barrier();
#pragma unroll
    for (int i = 0; i < CHUNK * SLAB / THREADS; ++i) {
      const int at = i * THREADS + thread_index(), step = at % CHUNK, state = at / CHUNK;
      if (step < left && slab * SLAB + state < p.states) {
        out[(slab * SLAB + state) * p.out.state + (chunk * CHUNK + step) * p.out.time] =
            from_float<T>(tile[step * STATE_ROW + state]);
      }
    }
    barrier();
  }
}
