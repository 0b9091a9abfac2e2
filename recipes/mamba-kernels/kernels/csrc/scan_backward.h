// Selective scan, backward. Chunks of 32 steps from last to first; each recomputes its states from the forward pass's
// checkpoint. With g_t = dL/dh_t = C_t dy_t + a_{t+1} g_{t+1}:
//   dB_t = sum over channels of dt u g_t          dC_t = sum over channels of dy_t h_t
//   d(dt u) = sum over states of B_t g_t          d(dt) = u d(dt u) + sum over states of A a_t g_t h_{t-1}
// Every sum has one order: results repeat bit for bit.
// Equation: as above.
// Tiling: a block has 32 channels of one sequence, a warp 8 channels x 4 lanes x 4 states; a chunk's states are
//   computed again eight steps at a time.
// Alone: pytest recipes/mamba-kernels/tests/test_scan.py -k emulated
#pragma once

#include "scan_backward_sums.h"
#include "scan_split_state.h"

// Steps whose intermediate values a lane keeps in registers.
constexpr int REGISTER_STEPS = 8;
// States saved before each eight steps of a chunk but the last. With tensor cores in shared memory, because the
// recurrence needs the registers; without, in registers, because it needs the shared memory.
constexpr int SAVED_STATES = CHUNK / REGISTER_STEPS - 1;
// u, delta, the gradient of out, and z: read twice a chunk, from shared memory where it has room.
constexpr int INPUTS = 4;
template <class T>
constexpr bool STAGES_INPUTS = HAS_MMA_TF32 && sizeof(T) == 2;

struct BackwardShared {
  float dt[CHANNELS * ROW], dy[CHANNELS * ROW];
  // Sums over states. With one state tile d(dt u) takes the place of dt u.
  float sums[STATE_SUMS * CHANNELS * ROW];
  float b[CHUNK * STATE_VECTOR_ROW], c[CHUNK * STATE_VECTOR_ROW];
  float state_stage[VectorThreadMap::WARPS * StateReduction::STAGE];
  float channel_stage[VectorThreadMap::WARPS * ChannelReduction<false, false>::STAGE];
  float projections[VectorThreadMap::WARPS * 2 * CHUNK * STATE_TILE];
  // Each thread's items of the inputs, as loaded.
  uint32_t inputs[STAGES_INPUTS<bf16> ? INPUTS * 4 * THREADS : 4];
  float saved_states[HAS_MMA_TF32 ? SAVED_STATES * THREADS * 4 : 4];
  // Masks of mma operands: one where the row of lanes is the column.
  float ones[8 * 8];
  float continues[CHUNK], bias[CHANNELS], d[CHANNELS];
  // Gradients of D and of delta's bias.
  CompensatedSum d_total[CHANNELS], bias_total[CHANNELS];
  RowPointers<7> rows;
  // Pointers to this block's partial dB and dC, to each state of the first state tile of B and C, and to each channel's
  // checkpoints: computing one takes 64-bit products, and registers that the recurrence needs.
  uintptr_t partial[2], projection_rows[2][STATE_TILE], checkpoint_rows[CHANNELS];
  int non_finite;
  int unused[3];
};
static_assert(sizeof(BackwardShared) % 16 == 0);

// Behind it lie dt u of several state tiles, then the carry slots.
constexpr int TILED_INPUT = CHANNELS * ROW;
template <bool MULTI_TILE>
DEVICE float* dtu_rows(BackwardShared& s) {
  return MULTI_TILE ? reinterpret_cast<float*>(&s + 1) : s.sums + SUM_INPUT * CHANNELS * ROW;
}

template <class T>
DEVICE void store_addresses(const ScanBackward& p, BackwardShared& s, const ChannelTile& tile) {
  const ScanSizes& sizes = p.sizes;
  const int i = thread_index();
  if (i < 2) {
    const int64_t part = (tile.batch * sizes.groups + tile.group) * tile.blocks + tile.block;
    s.partial[i] = reinterpret_cast<uintptr_t>((i ? p.c_partial : p.b_partial) + part * sizes.length * sizes.states);
  }
  if (i < 2 * STATE_TILE) {
    const bool is_c = i >= STATE_TILE;
    const int64_t at = tile.batch * (is_c ? p.c.batch : p.b.batch) + tile.group * (is_c ? p.c.group : p.b.group) +
                       i % STATE_TILE * (is_c ? p.c.state : p.b.state);
    const T* data = static_cast<const T*>(is_c ? p.c.data : p.b.data);
    s.projection_rows[is_c][i % STATE_TILE] = reinterpret_cast<uintptr_t>(data + at);
  }
  if (i < CHANNELS) {
    const int64_t chunks = (sizes.length + CHUNK - 1) / CHUNK, channel = tile.batch * sizes.channels + tile.first + i;
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

struct SavedStates {
  float kept[HAS_MMA_TF32 ? 1 : SAVED_STATES][4];

  // Copies the first saved state from global memory.
  DEVICE static void copy(BackwardShared& s, const float* from) { cp_async(s.saved_states + thread_index() * 4, from); }
  DEVICE void store_shared(BackwardShared& s, int index, const float (&h)[4]) {
    if constexpr (HAS_MMA_TF32) {
      store_float4(s.saved_states + (index * THREADS + thread_index()) * 4, h[0], h[1], h[2], h[3]);
    } else {
#pragma unroll
      for (int i = 0; i < SAVED_STATES; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) kept[i][e] = i == index ? h[e] : kept[i][e];
      }
    }
  }
  DEVICE void load_shared(float (&h)[4], const BackwardShared& s, int index) const {
    if constexpr (HAS_MMA_TF32) {
      load_float4(h, s.saved_states + (index * THREADS + thread_index()) * 4);
    } else {
#pragma unroll
      for (int i = 0; i < SAVED_STATES; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) h[e] = i == index ? kept[i][e] : h[e];
      }
    }
  }
};

// States before each of eight steps and after the last, and decays.
struct StepValues {
  float h[REGISTER_STEPS + 1][4], a[REGISTER_STEPS][4];
};

// Recomputes eight steps; KEEP: and keeps what the reverse steps need.
template <bool SEGMENTED, bool KEEP>
DEVICE void recompute(StepValues& steps, float (&h)[4], const float (&a)[4], const BackwardShared& s,
                      const float* dtu_rows, int first, const VectorThreadMap& lane) {
  const int row = lane.channel() * ROW + first;
#pragma unroll
  for (int group = 0; group < REGISTER_STEPS; group += VECTOR_STEPS) {
    float dt[VECTOR_STEPS], dtu[VECTOR_STEPS];
    load_float4(dt, s.dt + row + group);
    load_float4(dtu, dtu_rows + row + group);
#pragma unroll
    for (int i = 0; i < VECTOR_STEPS; ++i) {
      const int step = group + i;
      float b[4];
      load_float4(b, s.b + (first + step) * STATE_VECTOR_ROW + lane.state);
      const bool reset = SEGMENTED && s.continues[first + step] == 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float decay = decay_factor(dt[i], a[e]);
        if constexpr (KEEP) {
          steps.h[step][e] = h[e];
          steps.a[step][e] = decay;
        }
        const float x = dtu[i] * b[e];
        h[e] = reset ? x : decay * h[e] + x;
      }
    }
  }
  if constexpr (KEEP) {
#pragma unroll
    for (int e = 0; e < 4; ++e) steps.h[REGISTER_STEPS][e] = h[e];
  }
}

DEVICE float dot(const float (&x)[4], const float (&y)[4]) {
  return x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
}

// Reverses eight steps: `carry` is a_{t+1} g_{t+1} of the next step on entry, of the first on return. Steps from
// `valid` on lie beyond the end, where an infinite state would meet a step of size 0.
template <class T, bool NO_MMA, bool SEGMENTED>
DEVICE void reverse_steps(float (&carry)[4], float (&a_gradient)[4], const StepValues& steps, const float (&a)[4],
                          BackwardShared& s, const float* dtu_rows, int first, int valid, const VectorThreadMap& lane,
                          bool accumulate) {
  float* state_stage = s.state_stage + lane.warp * StateReduction::STAGE;
  float* channel_stage = s.channel_stage + lane.warp * ChannelReduction<NO_MMA, false>::STAGE;
#pragma unroll
  for (int group = REGISTER_STEPS - VECTOR_STEPS; group >= 0; group -= VECTOR_STEPS) {
    StateReduction state_sums;
    ChannelReduction<NO_MMA, SUM_BOTH_PARTS<T>> channel_sums;
    float dt[VECTOR_STEPS], dtu[VECTOR_STEPS], dy[VECTOR_STEPS];
    const int row = lane.channel() * ROW + first + group;
    load_float4(dt, s.dt + row);
    load_float4(dtu, dtu_rows + row);
    load_float4(dy, s.dy + row);
    float one[8];
    load_float4(one, s.ones + lane.lane / 4 * 8);
    load_float4(one + 4, s.ones + lane.lane / 4 * 8 + 4);
#pragma unroll
    for (int i = VECTOR_STEPS - 1; i >= 0; --i) {
      const int step = group + i;
      float b[4], c[4], g[4], q[4], x[4];
      load_float4(b, s.b + (first + step) * STATE_VECTOR_ROW + lane.state);
      load_float4(c, s.c + (first + step) * STATE_VECTOR_ROW + lane.state);
      const bool reset = SEGMENTED && s.continues[first + step] == 0.0f, outside = NO_MMA && first + step >= valid;
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
        carry[e] = reset ? 0.0f : g[e] * steps.a[step][e];
        q[e] = reset || outside ? 0.0f : carry[e] * steps.h[step][e];
        a_gradient[e] += dt[i] * q[e];
      }
      channel_sums.add(channel_stage, lane, one, 0, i, x);
      state_sums.value[SUM_DECAY][i] = dot(a, q);
    }
    state_sums.store(s.sums, state_stage, lane, first + group, accumulate);
    channel_sums.store(s.projections, channel_stage, lane, first + group);
  }
}

// Stores a chunk of dB and dC, summed over the block's channels, to this block's partial sums, [time][state].
DEVICE void store_projections(const ScanBackward& p, BackwardShared& s, int64_t state_tile, int chunk, float scale) {
  const ScanSizes& sizes = p.sizes;
  const int row = thread_index() / 4, n = thread_index() % 4 * 4;
  const int64_t time = int64_t(chunk) * CHUNK + row, left = sizes.states - state_tile * STATE_TILE - n;
  const int64_t to = time * sizes.states + state_tile * STATE_TILE + n;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    float total[4];
    load_float4(total, s.projections + projection_offset(0, kind, row, n));
#pragma unroll
    for (int warp = 1; warp < VectorThreadMap::WARPS; ++warp) {
      add_four(total, s.projections + projection_offset(warp, kind, row, n));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] *= scale;
    if (HAS_MMA_TF32 && !is_finite(total[0] + total[1] + total[2] + total[3])) s.non_finite = 1;
    if (time >= sizes.length) continue;
    float* partial = global_pointer<float>(s.partial[kind]) + to;
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

// A chunk of one state tile: `h` before it; `carry` after it, on return before it; `a_gradient` of this chunk alone.
template <class T, bool MULTI_TILE, bool NO_MMA, bool SEGMENTED>
DEVICE void backward_chunk(const ScanBackward& p, BackwardShared& s, const VectorThreadMap& lane, int64_t state_tile,
                           int chunk, float (&h)[4], float (&carry)[4], float (&a_gradient)[4], const float (&a)[4]) {
  constexpr float SCALE = ChannelReduction<NO_MMA, SUM_BOTH_PARTS<T>>::SCALE;
  const float* dtu = dtu_rows<MULTI_TILE>(s);
  const int64_t left = p.sizes.length - int64_t{chunk} * CHUNK;
  const int valid = static_cast<int>(left < CHUNK ? left : CHUNK);
  StepValues steps;
  SavedStates saved_states;
#pragma unroll 1
  for (int i = 0; i < SAVED_STATES; ++i) {
    saved_states.store_shared(s, i, h);
    recompute<SEGMENTED, false>(steps, h, a, s, dtu, i * REGISTER_STEPS, lane);
  }
#pragma unroll 1
  for (int i = SAVED_STATES; i >= 0; --i) {
    if (i < SAVED_STATES) saved_states.load_shared(h, s, i);
    recompute<SEGMENTED, true>(steps, h, a, s, dtu, i * REGISTER_STEPS, lane);
    reverse_steps<T, NO_MMA, SEGMENTED>(carry, a_gradient, steps, a, s, dtu, i * REGISTER_STEPS, valid, lane,
                                        state_tile > 0);
  }
  barrier();
  store_projections(p, s, state_tile, chunk, SCALE);
}

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

enum CarryKind { CARRY, A_GRADIENT };
// Slots of a state tile: each kind by the chunk's parity.
constexpr int CARRIES = 4;

// Whether carries have no registers between chunks.
template <bool MULTI_TILE>
constexpr bool STORES_CARRY = MULTI_TILE || HAS_MMA_TF32;

// Storage of carries and of A's gradient while other state tiles have the registers. With tensor cores in shared
// memory, in two copies by the chunk's parity, because a chunk may be repeated without mma; without, in the output
// tensors.
struct CarryStorage {
  const ScanBackward& p;
  const ChannelTile& tile;
  const VectorThreadMap& lane;
  float* shared;

  DEVICE StateVectorAccess address(int64_t state_tile) const {
    return StateVectorAccess(p.sizes, tile, lane, state_tile);
  }
  DEVICE float* slot(int64_t state_tile, CarryKind which, int chunk) const {
    return shared + (((state_tile * 2 + which) * 2 + (chunk + 1) % 2) * THREADS + thread_index()) * 4;
  }
  DEVICE float* kept(CarryKind which) const { return which == CARRY ? p.initial_gradient : p.a_gradient; }
  DEVICE void load(float (&x)[4], int64_t state_tile, CarryKind which, int chunk) const {
    if constexpr (HAS_MMA_TF32) {
      load_float4(x, slot(state_tile, which, chunk));
    } else {
      address(state_tile).load(x, kept(which));
    }
  }
  DEVICE void store(const float (&x)[4], int64_t state_tile, CarryKind which, int chunk) const {
    if constexpr (HAS_MMA_TF32) {
      store_float4(slot(state_tile, which, chunk), x[0], x[1], x[2], x[3]);
    } else {
      address(state_tile).store(kept(which), x);
    }
  }
  // Adds a chunk's gradient of A to that of the chunks after it, and stores both for the chunk before.
  template <bool MULTI_TILE>
  DEVICE void add_chunk(const float (&carry)[4], float (&a_gradient)[4], const float (&of_chunk)[4], int64_t state_tile,
                        int chunk) const {
    if constexpr (STORES_CARRY<MULTI_TILE>) load(a_gradient, state_tile, A_GRADIENT, chunk);
#pragma unroll
    for (int e = 0; e < 4; ++e) a_gradient[e] += of_chunk[e];
    if constexpr (STORES_CARRY<MULTI_TILE>) {
      store(carry, state_tile, CARRY, chunk - 1);
      store(a_gradient, state_tile, A_GRADIENT, chunk - 1);
    }
  }
};

// The state before a chunk is copied without registers; with several state tiles the next copy would come too early.
template <bool MULTI_TILE>
constexpr bool COPIES_STATES = HAS_MMA_TF32 && !MULTI_TILE;

// Loads a state tile of a chunk: items of B and C, the state before it and, with several state tiles, A.
template <class T, bool MULTI_TILE>
DEVICE void load_state_tile(ProjectionItems<T>& projections, float (&a)[4], float (&h)[4], const ScanBackward& p,
                            BackwardShared& s, const ChannelTile& tile, int64_t state_tile, int chunk,
                            int full_chunks) {
  const ScanSizes& sizes = p.sizes;
  const int thread = reload_thread_index();
  const VectorThreadMap lane(thread);
  // As in ProjectionItems.
  const int kind = thread / (THREADS / 2), time = thread / STATE_TILE % 4 * 8;
  const T* row = global_pointer<const T>(s.projection_rows[kind][thread % STATE_TILE]);
  if (chunk < full_chunks) {
    projections.template load<true>(row + time, p.b, p.c, sizes, state_tile, chunk);
  } else {
    projections.template load<false>(row + time * (kind ? p.c.time : p.b.time), p.b, p.c, sizes, state_tile, chunk);
  }
  if (MULTI_TILE) load_decay_rates(a, p.a, sizes, tile, lane, state_tile);
  const float* states = global_pointer<const float>(s.checkpoint_rows[lane.channel()]);
  states += chunk * sizes.states + state_tile * STATE_TILE + lane.state;
  const StateVector access(sizes, tile, lane, state_tile);
  if (COPIES_STATES<MULTI_TILE> && access.vectorized) {
    SavedStates::copy(s, states);
  } else {
    access.load(h, states);
    if constexpr (COPIES_STATES<MULTI_TILE>) SavedStates().store_shared(s, 0, h);
  }
}

DEVICE void copy_states(float (&h)[4], float (&a)[4], const float (&from_h)[4], const float (&from_a)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    h[e] = from_h[e];
    a[e] = from_a[e];
  }
}

// Runs the split's chunks from `chunk` down; returns the first that is not finite. Carries are in the slots, or, with
// one state tile and no tensor cores, in `carry` and `a_gradient`.
template <class T, bool MULTI_TILE, bool ALONG_TIME, bool NO_MMA, bool SEGMENTED>
DEVICE int backward_chunks(const ScanBackward& p, BackwardShared& s, const CarryStorage& slots,
                           const SplitTile& split_tile, const VectorThreadMap& lane, int chunk, float (&carry)[4],
                           float (&a_gradient)[4]) {
  const ScanSizes& sizes = p.sizes;
  const ChannelTile& tile = split_tile.tile;
  const ThreadItems<ALONG_TIME> items;
  const int full_chunks = VectorizedChunks(sizes, p.b, p.c, tile.channels == CHANNELS).both();
  const int64_t state_tiles = MULTI_TILE ? (sizes.states + STATE_TILE - 1) / STATE_TILE : 1;
  auto valid = [&](int chunk) { return items.valid(tile.channels, sizes.length - int64_t(chunk) * CHUNK); };
  float h[4], a[4];
  BackwardInputs<T> inputs;
  ProjectionItems<T> projections;
  auto fetch = [&](int chunk) {
    chunk >= full_chunks ? inputs.fetch_partial(p, s, chunk, valid(chunk), items) : inputs.fetch_full(p, s, chunk, items);
  };
  auto fetch_state_tile = [&](int64_t state_tile, int chunk) {
    load_state_tile<T, MULTI_TILE>(projections, a, h, p, s, tile, state_tile, chunk, full_chunks);
  };
  if (!MULTI_TILE) load_decay_rates(a, p.a, sizes, tile, lane, 0);
  fetch(chunk);
  fetch_state_tile(0, chunk);
  for (; chunk >= split_tile.begin; --chunk) {
    const bool is_full = chunk < full_chunks;
    cp_async_wait();
    if constexpr (STAGES_INPUTS<T>) inputs.load_shared(s.inputs);
    if constexpr (COPIES_STATES<MULTI_TILE>) SavedStates().load_shared(h, s, 0);
    is_full ? store_shared_inputs<T, MULTI_TILE, true>(p, s, 8, inputs, items)
            : store_shared_inputs<T, MULTI_TILE, false>(p, s, valid(chunk), inputs, items);
    if (SEGMENTED) store_continues(s.continues, p.segment, tile, sizes.length, chunk);
    for (int64_t state_tile = 0; state_tile < state_tiles; ++state_tile) {
      store_shared_projections(projections, s.b, s.c);
      barrier();
      float h_now[4], a_now[4];
      copy_states(h_now, a_now, h, a);
      if (MULTI_TILE && state_tile + 1 < state_tiles) fetch_state_tile(state_tile + 1, chunk);
      if constexpr (STORES_CARRY<MULTI_TILE>) slots.load(carry, state_tile, CARRY, chunk);
      // One sum of 4096 steps would be off by 1e-6 of itself.
      float of_chunk[4] = {};
      backward_chunk<T, MULTI_TILE, NO_MMA, SEGMENTED>(p, s, lane, state_tile, chunk, h_now, carry, of_chunk, a_now);
      slots.template add_chunk<MULTI_TILE>(carry, a_gradient, of_chunk, state_tile, chunk);
    }
    // Reloaded, because holding them would cost the recurrence 16 registers.
    if constexpr (!STAGES_INPUTS<T>) fetch(chunk);
    BackwardInputs<T> now = inputs;
    if constexpr (STAGES_INPUTS<T>) now.load_shared(s.inputs);
    // Prefetches what the next chunk starts with.
    if (chunk > split_tile.begin) {
      fetch(chunk - 1);
      fetch_state_tile(0, chunk - 1);
    }
    ChannelGradients<ALONG_TIME> terms;
    is_full ? store_gradients<T, true>(p, s, chunk, 8, now, terms, items)
            : store_gradients<T, false>(p, s, chunk, valid(chunk), now, terms, items);
    barrier();
    if (!NO_MMA && s.non_finite) return chunk;
    terms.add_to_totals(s);
  }
  return chunk;
}

template <class T, class S>
DEVICE void store_rows(const ScanBackward& p, RowPointers<7>& rows, const ChannelTile& tile, S items) {
  rows.template store_shared<T>(BACKWARD_U, p.u, tile, items);
  rows.template store_shared<T>(BACKWARD_DELTA, p.delta, tile, items);
  rows.template store_shared<T>(BACKWARD_Z, p.z, tile, items);
  rows.template store_shared<T>(BACKWARD_OUT_GRADIENT, p.out_gradient, tile, items);
  rows.template store_shared<T>(BACKWARD_U_GRADIENT, p.u_gradient, tile, items);
  rows.template store_shared<T>(BACKWARD_DELTA_GRADIENT, p.delta_gradient, tile, items);
  rows.template store_shared<T>(BACKWARD_Z_GRADIENT, p.z_gradient, tile, items);
}

template <class T, bool MULTI_TILE, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_backward(const ScanBackward& p) {
  BackwardShared& s = *reinterpret_cast<BackwardShared*>(dynamic_shared());
  const ScanSizes& sizes = p.sizes;
  const SplitTile split_tile(sizes, p.splits, SplitTile::outermost_index(sizes));
  const ChannelTile& tile = split_tile.tile;
  const ThreadItems<ALONG_TIME> items;
  const VectorThreadMap lane(thread_index());
  const int64_t state_tiles = MULTI_TILE ? (sizes.states + STATE_TILE - 1) / STATE_TILE : 1;
  const CarryStorage slots{p, split_tile.partial, lane,
                           dynamic_shared() + sizeof(BackwardShared) / sizeof(float) + (MULTI_TILE ? TILED_INPUT : 0)};
  store_rows<T>(p, s.rows, tile, items);
  const ChannelParameter bias(p.delta_bias, tile), d(p.d, tile);
  bias.store_shared(s.bias);
  d.store_shared(s.d);
  store_addresses<T>(p, s, tile);
  if (thread_index() < 64) s.ones[thread_index()] = thread_index() / 8 == thread_index() % 8 ? 1.0f : 0.0f;
  if (thread_index() == 0) s.non_finite = 0;
  clear_totals(s);
  float carry[4] = {}, a_gradient[4] = {};
  wait_on_dependent_grids();
  launch_dependent_grids();
  // A thread map of its own: one shared with the loop would stay in registers through it, and spill others.
  for (int64_t state_tile = 0; state_tile < state_tiles; ++state_tile) {
    exclusive_prefix<false, SEGMENTED>(carry, p, p.last_gradient, split_tile, VectorThreadMap(reload_thread_index()),
                                       state_tile);
    if constexpr (STORES_CARRY<MULTI_TILE>) {
      slots.store(carry, state_tile, CARRY, split_tile.end - 1);
      slots.store(a_gradient, state_tile, A_GRADIENT, split_tile.end - 1);
    }
  }
  barrier();

  int chunk = split_tile.end - 1;
  if constexpr (HAS_MMA_TF32) {
    chunk = backward_chunks<T, MULTI_TILE, ALONG_TIME, false, SEGMENTED>(p, s, slots, split_tile, lane, chunk, carry,
                                                                         a_gradient);
  }
  if (chunk >= split_tile.begin) {
    backward_chunks<T, MULTI_TILE, ALONG_TIME, true, SEGMENTED>(p, s, slots, split_tile, lane, chunk, carry,
                                                                a_gradient);
  }
  for (int64_t state_tile = 0; state_tile < state_tiles; ++state_tile) {
    if constexpr (STORES_CARRY<MULTI_TILE>) {
      slots.load(carry, state_tile, CARRY, split_tile.begin - 1);
      slots.load(a_gradient, state_tile, A_GRADIENT, split_tile.begin - 1);
    }
    const StateVectorAccess address(sizes, split_tile.partial, lane, state_tile);
    address.store(p.a_gradient, a_gradient);
    if (p.initial_gradient) address.store(p.initial_gradient, carry);
  }
  if (p.d_gradient) store_totals(p.d_gradient, s.d_total, sizes, split_tile.partial);
  if (p.bias_gradient) store_totals(p.bias_gradient, s.bias_total, sizes, split_tile.partial);
}
