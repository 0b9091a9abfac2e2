// A chunk of one state tile, backwards: its states again, eight steps at a time, then those steps in reverse.
// Equation: g_t = C_t dy_t + a_{t+1} g_{t+1}, and what scan_backward.h sums of it.
// Tiling: a lane has four states of a channel; eight steps are in its registers.
#pragma once

#include "scan_backward_shared.h"

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
