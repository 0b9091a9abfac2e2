// Selective scan, backward. Chunks of 32 steps from last to first; in each the states are computed again from
// the checkpoint that the forward pass left, then with g_t = dL/dh_t = C_t dy_t + a_{t+1} g_{t+1}
//   dB_t = sum over channels of dt u g_t          dC_t = sum over channels of dy_t h_t
//   d(dt u) = sum over states of B_t g_t          d(dt) = u d(dt u) + sum over states of A a_t g_t h_{t-1}
// Every sum has one order: results repeat bit for bit.
#pragma once

#include "scan_splits.h"

// Steps whose intermediate values a lane keeps in registers.
constexpr int STEPS = 8;
// States before each eight steps of a chunk but the last. With tensor cores in shared memory, because the recurrence
// needs the registers; else in registers, because the recurrence needs the shared memory.
constexpr int STARTS = CHUNK / STEPS - 1;
// u, delta, the gradient of out, and z: read twice a chunk, from shared memory where there is room.
constexpr int INPUTS = 4;
template <class T>
constexpr bool KEEPS_INPUTS = HAS_MATRIX_TF32 && sizeof(T) == 2;

struct BackwardShared {
  float dt[CHANNELS * ROW], dy[CHANNELS * ROW];
  // Sums over states. With a single slab d(dt u) takes the place of dt u, which is not needed again.
  float sums[STATE_SUMS * CHANNELS * ROW];
  float b[CHUNK * QUAD_ROW], c[CHUNK * QUAD_ROW];
  float state_stage[QuadLane::WAVES * QuadStateSums::STAGE];
  float channel_stage[QuadLane::WAVES * QuadChannelSums<false, false>::STAGE];
  float projections[QuadLane::WAVES * 2 * CHUNK * SLAB];
  // Each thread's strips of the inputs, as they came.
  uint32_t inputs[KEEPS_INPUTS<bf16> ? INPUTS * 4 * THREADS : 4];
  float starts[HAS_MATRIX_TF32 ? STARTS * THREADS * 4 : 4];
  // Masks of matrix operands: where the row of lanes is the column.
  float ones[8 * 8];
  float joins[CHUNK], bias[CHANNELS], d[CHANNELS];
  // Gradients of D and of the bias.
  LongSum d_total[CHANNELS], bias_total[CHANNELS];
  Rows<7> rows;
  // Where this block's parts of dB and dC start, each state of the first slab of B and C, each channel's checkpoints:
  // addresses take 64-bit products, and registers that the recurrence needs.
  uintptr_t partial[2], projection_rows[2][SLAB], checkpoint_rows[CHANNELS];
  int broken;
  int unused[3];
};
static_assert(sizeof(BackwardShared) % 16 == 0);

// Behind it dt u of several slabs, then the slots.
constexpr int SLAB_INPUT = CHANNELS * ROW;
template <bool MANY>
DEVICE float* dtu_rows(BackwardShared& s) {
  return MANY ? reinterpret_cast<float*>(&s + 1) : s.sums + SUM_INPUT * CHANNELS * ROW;
}

template <class T>
DEVICE void put_addresses(const ScanBackward& p, BackwardShared& s, const Place& place) {
  const ScanSizes& sizes = p.sizes;
  const int i = thread_index();
  if (i < 2) {
    const int64_t part = (place.batch * sizes.groups + place.group) * place.blocks + place.block;
    s.partial[i] = reinterpret_cast<uintptr_t>((i ? p.c_partial : p.b_partial) + part * sizes.length * sizes.states);
  }
  if (i < 2 * SLAB) {
    const bool is_c = i >= SLAB;
    const int64_t at = place.batch * (is_c ? p.c.batch : p.b.batch) + place.group * (is_c ? p.c.group : p.b.group) +
                       i % SLAB * (is_c ? p.c.state : p.b.state);
    const T* data = static_cast<const T*>(is_c ? p.c.data : p.b.data);
    s.projection_rows[is_c][i % SLAB] = reinterpret_cast<uintptr_t>(data + at);
  }
  if (i < CHANNELS) {
    const int64_t chunks = (sizes.length + CHUNK - 1) / CHUNK, channel = place.batch * sizes.channels + place.first + i;
    s.checkpoint_rows[i] = reinterpret_cast<uintptr_t>(p.checkpoints + channel * chunks * sizes.states);
  }
}

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

  // The first one from global memory.
  DEVICE static void copy(BackwardShared& s, const float* from) { copy_async(s.starts + thread_index() * 4, from); }
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
template <bool SEGMENTED, bool KEEP>
DEVICE void recompute(Steps& steps, float (&h)[4], const float (&a)[4], const BackwardShared& s,
                      const float* dtu_rows, int first, const QuadLane& lane) {
  const int row = lane.channel() * ROW + first;
#pragma unroll
  for (int quad = 0; quad < STEPS; quad += QUAD) {
    float dt[QUAD], dtu[QUAD];
    load_four(dt, s.dt + row + quad);
    load_four(dtu, dtu_rows + row + quad);
#pragma unroll
    for (int i = 0; i < QUAD; ++i) {
      const int step = quad + i;
      float b[4];
      load_four(b, s.b + (first + step) * QUAD_ROW + lane.state);
      const bool restart = SEGMENTED && s.joins[first + step] == 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float decay = decay_of(dt[i], a[e]);
        if constexpr (KEEP) {
          steps.h[step][e] = h[e];
          steps.a[step][e] = decay;
        }
        const float x = dtu[i] * b[e];
        h[e] = restart ? x : decay * h[e] + x;
      }
    }
  }
  if constexpr (KEEP) {
#pragma unroll
    for (int e = 0; e < 4; ++e) steps.h[STEPS][e] = h[e];
  }
}

DEVICE float dot(const float (&x)[4], const float (&y)[4]) {
  return x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
}

// Eight steps back: `carry` is a_{t+1} g_{t+1} of the step after, on return of the first. Steps from `inside` on are beyond
// the end, where an infinite state would meet steps of size 0.
template <class T, bool PLAIN, bool SEGMENTED>
DEVICE void reverse(float (&carry)[4], float (&a_gradient)[4], const Steps& steps, const float (&a)[4],
                    BackwardShared& s, const float* dtu_rows, int first, int inside, const QuadLane& lane, bool accumulate) {
  float* state_stage = s.state_stage + lane.wave * QuadStateSums::STAGE;
  float* channel_stage = s.channel_stage + lane.wave * QuadChannelSums<PLAIN, false>::STAGE;
#pragma unroll
  for (int quad = STEPS - QUAD; quad >= 0; quad -= QUAD) {
    QuadStateSums state_sums;
    QuadChannelSums<PLAIN, SUMS_ARE_EXACT<T>> channel_sums;
    float dt[QUAD], dtu[QUAD], dy[QUAD];
    const int row = lane.channel() * ROW + first + quad;
    load_four(dt, s.dt + row);
    load_four(dtu, dtu_rows + row);
    load_four(dy, s.dy + row);
    float one[8];
    load_four(one, s.ones + lane.lane / 4 * 8);
    load_four(one + 4, s.ones + lane.lane / 4 * 8 + 4);
#pragma unroll
    for (int i = QUAD - 1; i >= 0; --i) {
      const int step = quad + i;
      float b[4], c[4], g[4], q[4], x[4];
      load_four(b, s.b + (first + step) * QUAD_ROW + lane.state);
      load_four(c, s.c + (first + step) * QUAD_ROW + lane.state);
      const bool restart = SEGMENTED && s.joins[first + step] == 0.0f, outside = PLAIN && first + step >= inside;
      state_sums.value[SUM_Y][i] = dot(c, steps.h[step + 1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = dy[i] * steps.h[step + 1][e];
        g[e] = dy[i] * c[e] + carry[e];
      }
      channel_sums.add(channel_stage, lane, one, 1, i, x);
      state_sums.value[SUM_INPUT][i] = dot(b, g);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = dtu[i] * g[e];
        carry[e] = restart ? 0.0f : g[e] * steps.a[step][e];
        q[e] = restart || outside ? 0.0f : carry[e] * steps.h[step][e];
        a_gradient[e] += dt[i] * q[e];
      }
      channel_sums.add(channel_stage, lane, one, 0, i, x);
      state_sums.value[SUM_DECAY][i] = dot(a, q);
    }
    state_sums.store(s.sums, state_stage, lane, first + quad, accumulate);
    channel_sums.store(s.projections, channel_stage, lane, first + quad);
  }
}

// A chunk of dB and dC, summed over a block's channels, to this block's part of them, [time][state].
DEVICE void store_projections(const ScanBackward& p, BackwardShared& s, int64_t slab, int chunk, float scale) {
  const ScanSizes& sizes = p.sizes;
  const int row = thread_index() / 4, n = thread_index() % 4 * 4;
  const int64_t time = int64_t(chunk) * CHUNK + row, left = sizes.states - slab * SLAB - n;
  const int64_t to = time * sizes.states + slab * SLAB + n;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    float total[4];
    load_four(total, s.projections + projection_at(0, kind, row, n));
#pragma unroll
    for (int wave = 1; wave < QuadLane::WAVES; ++wave) {
      add_four(total, s.projections + projection_at(wave, kind, row, n));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] *= scale;
    if (HAS_MATRIX_TF32 && !is_finite(total[0] + total[1] + total[2] + total[3])) s.broken = 1;
    if (time >= sizes.length) continue;
    float* partial = reinterpret_cast<float*>(s.partial[kind]) + to;
    if (sizes.states % 4 == 0) {
      if (left > 0) store_global(partial, Vector<float, 4>{{total[0], total[1], total[2], total[3]}});
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < left) partial[i] = total[i];
      }
    }
  }
}

// A chunk of one slab: `h` before it, `carry` after it, on return before it; `a_gradient` of the chunk alone.
template <class T, bool MANY, bool PLAIN, bool SEGMENTED>
DEVICE void backward_chunk(const ScanBackward& p, BackwardShared& s, const QuadLane& lane, int64_t slab,
                           int chunk, float (&h)[4], float (&carry)[4], float (&a_gradient)[4],
                           const float (&a)[4]) {
  constexpr float SCALE = QuadChannelSums<PLAIN, SUMS_ARE_EXACT<T>>::SCALE;
  const float* dtu = dtu_rows<MANY>(s);
  const int64_t left = p.sizes.length - int64_t{chunk} * CHUNK;
  const int inside = static_cast<int>(left < CHUNK ? left : CHUNK);
  Steps steps;
  Starts starts;
#pragma unroll 1
  for (int i = 0; i < STARTS; ++i) {
    starts.put(s, i, h);
    recompute<SEGMENTED, false>(steps, h, a, s, dtu, i * STEPS, lane);
  }
#pragma unroll 1
  for (int i = STARTS; i >= 0; --i) {
    if (i < STARTS) starts.get(h, s, i);
    recompute<SEGMENTED, true>(steps, h, a, s, dtu, i * STEPS, lane);
    reverse<T, PLAIN, SEGMENTED>(carry, a_gradient, steps, a, s, dtu, i * STEPS, inside, lane, slab > 0);
  }
  barrier();
  store_projections(p, s, slab, chunk, SCALE);
}

// What a chunk adds to the gradients of D and the bias, a channel's sum over its steps in four threads. Nobody but the first
// of them touches the channel's long sums, which so need no barrier.
template <bool ALONG_TIME>
struct ChannelTerms {
  float d, bias;

  // Where channels are adjacent a strip has eight of them: it leaves its terms where its dt and dy were.
  DEVICE void put(BackwardShared& s, const float (&of_d)[8], const float (&of_bias)[8], Strip<ALONG_TIME> strip) {
    if constexpr (ALONG_TIME) {
      d = sum_of_eight(of_d);
      bias = sum_of_eight(of_bias);
    } else {
      put_strip(s.dt, of_d, strip);
      put_strip(s.dy, of_bias, strip);
    }
  }
  // Behind a barrier.
  DEVICE void add_to_totals(BackwardShared& s) {
    const Strip<true> strip;
    if constexpr (!ALONG_TIME) {
      float x[8];
      get_strip(x, s.dt, strip);
      d = sum_of_eight(x);
      get_strip(x, s.dy, strip);
      bias = sum_of_eight(x);
    }
    d += shuffle_xor<1>(d);
    bias += shuffle_xor<1>(bias);
    d += shuffle_xor<2>(d);
    bias += shuffle_xor<2>(bias);
    if (strip.minor() == 0) {
      s.d_total[strip.channel()].add(d);
      s.bias_total[strip.channel()].add(bias);
    }
    if constexpr (!ALONG_TIME) barrier();
  }
};

DEVICE void clear_totals(BackwardShared& s) {
  const Strip<true> strip;
  if (strip.minor() == 0) s.d_total[strip.channel()] = s.bias_total[strip.channel()] = {0.0f, 0.0f};
}

DEVICE void store_totals(float* to, const LongSum* totals, const ScanSizes& sizes, const Place& place) {
  const Strip<true> strip;
  const int channel = strip.channel();
  if (strip.minor() != 0 || channel >= place.channels) return;
  to[place.batch * sizes.channels + place.first + channel] = totals[channel].sum;
}

// A thread's own strip of 16 bytes, to shared memory and back.
template <class T>
DEVICE void keep_strip(uint32_t* room, int index, const Packed<T>& x) {
  Vector<uint32_t, 4> words;
  __builtin_memcpy(&words, x.word, sizeof(words));
  store(room + (index * THREADS + thread_index()) * 4, words);
}
template <class T>
DEVICE void kept_strip(Packed<T>& x, const uint32_t* room, int index) {
  const Vector<uint32_t, 4> words = load<4>(room + (index * THREADS + thread_index()) * 4);
  __builtin_memcpy(x.word, &words, sizeof(words));
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
    load_input<T, WHOLE>(u, u_start, p.u, inside, strip);
    load_input<T, WHOLE>(delta, delta_start, p.delta, inside, strip);
    load_input<T, WHOLE>(gradient, gradient_start, p.out_gradient, inside, strip);
    if (p.z.data) load_input<T, WHOLE>(z, z_start, p.z, inside, strip);
  }

  // All of a chunk that is whole, to where get() finds it.
  template <class S>
  DEVICE void copy(const ScanBackward& p, BackwardShared& s, int64_t chunk, S strip) const {
    copy_strip(s, 0, s.rows.template strip<T, true>(BACKWARD_U, p.u, chunk, strip));
    copy_strip(s, 1, s.rows.template strip<T, true>(BACKWARD_DELTA, p.delta, chunk, strip));
    copy_strip(s, 2, s.rows.template strip<T, true>(BACKWARD_OUT_GRADIENT, p.out_gradient, chunk, strip));
    if (p.z.data) copy_strip(s, 3, s.rows.template strip<T, true>(BACKWARD_Z, p.z, chunk, strip));
  }
  DEVICE static void copy_strip(BackwardShared& s, int index, const T* from) {
    copy_async(s.inputs + (index * THREADS + thread_index()) * 4, from);
  }
  DEVICE void keep(uint32_t* room) const {
    keep_strip(room, 0, u);
    keep_strip(room, 1, delta);
    keep_strip(room, 2, gradient);
    keep_strip(room, 3, z);
  }
  DEVICE void get(const uint32_t* room) {
    kept_strip(u, room, 0);
    kept_strip(delta, room, 1);
    kept_strip(gradient, room, 2);
    kept_strip(z, room, 3);
  }
};

// dt, dt u and dy of a strip to shared memory.
template <class T, bool MANY, bool WHOLE, class S>
DEVICE void put_inputs(const ScanBackward& p, BackwardShared& s, int inside, const BackwardInputs<T>& inputs, S strip) {
  float dt[8], dtu[8], dy[8], bias[8];
  strip_parameter(bias, s.bias, strip);
  steps_of<T, WHOLE>(dt, inputs.delta, bias, p.sizes.softplus != 0, inside);
  ungated<T, WHOLE>(dy, inputs.gradient, inputs.z, p.z.data != nullptr, inside);
  inputs.u.to_floats(dtu);
#pragma unroll
  for (int i = 0; i < 8; ++i) dtu[i] = WHOLE || i < inside ? dt[i] * dtu[i] : 0.0f;
  put_strip(s.dt, dt, strip);
  put_strip(dtu_rows<MANY>(s), dtu, strip);
  put_strip(s.dy, dy, strip);
}

// Gradients of u, delta and z of a strip, from the sums over states.
template <class T, bool WHOLE, bool ALONG_TIME>
DEVICE void store_gradients(const ScanBackward& p, BackwardShared& s, int64_t chunk, int inside,
                            const BackwardInputs<T>& inputs, ChannelTerms<ALONG_TIME>& terms, Strip<ALONG_TIME> strip) {
  float v[8], x[8], d[8], bias[8];
  strip_parameter(d, s.d, strip);
  strip_parameter(bias, s.bias, strip);
  inputs.u.to_floats(v);
  if (p.z.data) {
    float y[8], w[8], g[8];
    get_strip(y, s.sums + SUM_Y * CHANNELS * ROW, strip);
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
  float input[8], dt[8], dy[8], of_d[8], of_bias[8];
  get_strip(input, s.sums + SUM_INPUT * CHANNELS * ROW, strip);
  get_strip(dt, s.dt, strip);
  get_strip(dy, s.dy, strip);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = dt[i] * input[i] + d[i] * dy[i];
    of_d[i] = WHOLE || i < inside ? dy[i] * v[i] : 0.0f;
  }
  T* to = s.rows.template strip<T, WHOLE>(BACKWARD_U_GRADIENT, p.u_gradient, chunk, strip);
  store_strip<T, WHOLE>(to, p.u_gradient, inside, x, strip);
  float decay[8], raw[8];
  get_strip(decay, s.sums + SUM_DECAY * CHANNELS * ROW, strip);
  inputs.delta.to_floats(raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float slope = p.sizes.softplus ? sigmoid(raw[i] + bias[i]) : 1.0f;
    x[i] = (v[i] * input[i] + decay[i] * LN_2) * slope;
    of_bias[i] = WHOLE || i < inside ? x[i] : 0.0f;
  }
  terms.put(s, of_d, of_bias, strip);
  to = s.rows.template strip<T, WHOLE>(BACKWARD_DELTA_GRADIENT, p.delta_gradient, chunk, strip);
  store_strip<T, WHOLE>(to, p.delta_gradient, inside, x, strip);
}

enum Slot { CARRY, A_GRADIENT };

// Where carries and gradients of A wait while other slabs have the registers. With tensor cores in shared memory,
// two copies by the chunk's parity, because a chunk can be repeated the plain way; else where they end.
struct Slots {
  const ScanBackward& p;
  const Place& place;
  const QuadLane& lane;
  float* shared;

  DEVICE QuadAddress address(int64_t slab) const { return QuadAddress(p.sizes, place, lane, slab); }
  DEVICE float* slot(int64_t slab, Slot which, int chunk) const {
    return shared + (((slab * 2 + which) * 2 + (chunk + 1) % 2) * THREADS + thread_index()) * 4;
  }
  DEVICE float* kept(Slot which) const { return which == CARRY ? p.initial_gradient : p.a_gradient; }
  DEVICE void load(float (&x)[4], int64_t slab, Slot which, int chunk) const {
    if constexpr (HAS_MATRIX_TF32) {
      load_four(x, slot(slab, which, chunk));
    } else {
      address(slab).load(x, kept(which));
    }
  }
  DEVICE void store(const float (&x)[4], int64_t slab, Slot which, int chunk) const {
    if constexpr (HAS_MATRIX_TF32) {
      store_four(slot(slab, which, chunk), x[0], x[1], x[2], x[3]);
    } else {
      address(slab).store(kept(which), x);
    }
  }
};

// Goes through the share's chunks from `chunk` down and returns the last that it could not. What is
// carried waits in the slots, or with a single slab and no plain way in `carry` and `a_gradient`.
template <class T, bool MANY, bool ALONG_TIME, bool PLAIN, bool SEGMENTED>
DEVICE int backward_chunks(const ScanBackward& p, BackwardShared& s, const Slots& slots, const Share& share,
                               const QuadLane& lane, int chunk, float (&carry)[4], float (&a_gradient)[4]) {
  constexpr bool SLOTS = MANY || HAS_MATRIX_TF32;
  // The state before a chunk comes without registers; of several slabs the next one's would come too early.
  constexpr bool COPIES = HAS_MATRIX_TF32 && !MANY;
  const ScanSizes& sizes = p.sizes;
  const Place& place = share.place;
  const Strip<ALONG_TIME> strip;
  const int whole_chunks = Vectorised(sizes, p.b, p.c, place.channels == CHANNELS).with_both();
  const int64_t slabs = MANY ? (sizes.states + SLAB - 1) / SLAB : 1;
  auto inside = [&](int chunk) { return strip.inside(place.channels, sizes.length - int64_t(chunk) * CHUNK); };
  float h[4], a[4];
  BackwardInputs<T> inputs;
  ProjectionStrip<T> projections;
  auto fetch = [&](int chunk) {
    if (chunk >= whole_chunks) {
      inputs.template load<false>(p, s, chunk, inside(chunk), strip);
      if constexpr (KEEPS_INPUTS<T>) inputs.keep(s.inputs);
    } else if constexpr (KEEPS_INPUTS<T>) {
      inputs.copy(p, s, chunk, strip);
    } else {
      inputs.template load<true>(p, s, chunk, 8, strip);
    }
  };
  auto fetch_slab = [&](int64_t slab, int chunk) {
    const int thread = thread_index_again();
    const QuadLane lane(thread);
    // As ProjectionStrip says.
    const int kind = thread / (THREADS / 2), time = thread / SLAB % 4 * 8;
    const T* row = reinterpret_cast<const T*>(s.projection_rows[kind][thread % SLAB]);
    if (chunk < whole_chunks) {
      projections.template load<true>(row + time, p.b, p.c, sizes, slab, chunk);
    } else {
      projections.template load<false>(row + time * (kind ? p.c.time : p.b.time), p.b, p.c, sizes, slab, chunk);
    }
    if (MANY) load_quad_decay(a, p.a, sizes, place, lane, slab);
    const float* states = reinterpret_cast<const float*>(s.checkpoint_rows[lane.channel()]);
    states += chunk * sizes.states + slab * SLAB + lane.state;
    const QuadAccess access(sizes, place, lane, slab);
    if (COPIES && access.wide) {
      Starts::copy(s, states);
    } else {
      access.load(h, states);
      if constexpr (COPIES) Starts().put(s, 0, h);
    }
  };
  if (!MANY) load_quad_decay(a, p.a, sizes, place, lane, 0);
  fetch(chunk);
  fetch_slab(0, chunk);
  for (; chunk >= share.begin; --chunk) {
    const bool whole = chunk < whole_chunks;
    copies_done();
    if constexpr (KEEPS_INPUTS<T>) inputs.get(s.inputs);
    if constexpr (COPIES) Starts().get(h, s, 0);
    if (whole) {
      put_inputs<T, MANY, true>(p, s, 8, inputs, strip);
    } else {
      put_inputs<T, MANY, false>(p, s, inside(chunk), inputs, strip);
    }
    if (SEGMENTED) put_joins(s.joins, p.segment, place, sizes.length, chunk);
    for (int64_t slab = 0; slab < slabs; ++slab) {
      put_projections(projections, s.b, s.c);
      barrier();
      float h_now[4], a_now[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        h_now[e] = h[e];
        a_now[e] = a[e];
      }
      if (MANY && slab + 1 < slabs) fetch_slab(slab + 1, chunk);
      if constexpr (SLOTS) slots.load(carry, slab, CARRY, chunk);
      // Of 4096 steps, one sum would be off by 1e-6 of itself.
      float of_chunk[4] = {};
      backward_chunk<T, MANY, PLAIN, SEGMENTED>(p, s, lane, slab, chunk, h_now, carry, of_chunk, a_now);
      if constexpr (SLOTS) slots.load(a_gradient, slab, A_GRADIENT, chunk);
#pragma unroll
      for (int e = 0; e < 4; ++e) a_gradient[e] += of_chunk[e];
      if constexpr (SLOTS) {
        slots.store(carry, slab, CARRY, chunk - 1);
        slots.store(a_gradient, slab, A_GRADIENT, chunk - 1);
      }
    }
    // Again, because to hold them would cost the recurrence 16 registers.
    BackwardInputs<T> now;
    if constexpr (KEEPS_INPUTS<T>) {
      now.get(s.inputs);
    } else {
      fetch(chunk);
      now = inputs;
    }
    // Reads ahead of what the next chunk starts with.
    if (chunk > share.begin) {
      fetch(chunk - 1);
      fetch_slab(0, chunk - 1);
    }
    ChannelTerms<ALONG_TIME> terms;
    if (whole) {
      store_gradients<T, true>(p, s, chunk, 8, now, terms, strip);
    } else {
      store_gradients<T, false>(p, s, chunk, inside(chunk), now, terms, strip);
    }
    barrier();
    if (!PLAIN && s.broken) return chunk;
    terms.add_to_totals(s);
  }
  return chunk;
}

template <class T, bool MANY, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_backward(const ScanBackward& p) {
  constexpr bool SLOTS = MANY || HAS_MATRIX_TF32;
  BackwardShared& s = *reinterpret_cast<BackwardShared*>(dynamic_shared());
  const ScanSizes& sizes = p.sizes;
  const Share share(sizes, p.splits, Share::outermost(sizes));
  const Place& place = share.place;
  const Strip<ALONG_TIME> strip;
  const QuadLane lane(thread_index());
  const int64_t slabs = MANY ? (sizes.states + SLAB - 1) / SLAB : 1;
  const Slots slots{p, share.part, lane, dynamic_shared() + sizeof(BackwardShared) / sizeof(float) + (MANY ? SLAB_INPUT : 0)};
  s.rows.template put<T>(BACKWARD_U, p.u, place, strip);
  s.rows.template put<T>(BACKWARD_DELTA, p.delta, place, strip);
  s.rows.template put<T>(BACKWARD_Z, p.z, place, strip);
  s.rows.template put<T>(BACKWARD_OUT_GRADIENT, p.out_gradient, place, strip);
  s.rows.template put<T>(BACKWARD_U_GRADIENT, p.u_gradient, place, strip);
  s.rows.template put<T>(BACKWARD_DELTA_GRADIENT, p.delta_gradient, place, strip);
  s.rows.template put<T>(BACKWARD_Z_GRADIENT, p.z_gradient, place, strip);
  const Parameter bias(p.delta_bias, place), d(p.d, place);
  bias.put(s.bias);
  d.put(s.d);
  put_addresses<T>(p, s, place);
  if (thread_index() < 64) s.ones[thread_index()] = thread_index() / 8 == thread_index() % 8 ? 1.0f : 0.0f;
  if (thread_index() == 0) s.broken = 0;
  clear_totals(s);
  float carry[4] = {}, a_gradient[4] = {};
  wait_for_kernel_before();
  let_next_start();
  // A lane of its own: what it shared with the loop's, the loop would keep in registers, and others in memory.
  for (int64_t slab = 0; slab < slabs; ++slab) {
    arriving<false, SEGMENTED>(carry, p, p.last_gradient, share, QuadLane(thread_index_again()), slab);
    if constexpr (SLOTS) {
      slots.store(carry, slab, CARRY, share.end - 1);
      slots.store(a_gradient, slab, A_GRADIENT, share.end - 1);
    }
  }
  barrier();

  int chunk = share.end - 1;
  if constexpr (HAS_MATRIX_TF32) {
    chunk = backward_chunks<T, MANY, ALONG_TIME, false, SEGMENTED>(p, s, slots, share, lane, chunk, carry, a_gradient);
  }
  if (chunk >= share.begin) {
    backward_chunks<T, MANY, ALONG_TIME, true, SEGMENTED>(p, s, slots, share, lane, chunk, carry, a_gradient);
  }
  for (int64_t slab = 0; slab < slabs; ++slab) {
    if constexpr (SLOTS) {
      slots.load(carry, slab, CARRY, share.begin - 1);
      slots.load(a_gradient, slab, A_GRADIENT, share.begin - 1);
    }
    const QuadAddress address(sizes, share.part, lane, slab);
    address.store(p.a_gradient, a_gradient);
    if (p.initial_gradient) address.store(p.initial_gradient, carry);
  }
  if (p.d_gradient) store_totals(p.d_gradient, s.d_total, sizes, share.part);
  if (p.bias_gradient) store_totals(p.bias_gradient, s.bias_total, sizes, share.part);
}
