// The sums of the backward pass within a block: over states, and over channels.
// Equation: y_t = sum over states of C_t h_t, and likewise d(dt), d(dt u); dB_t, dC_t = sums over channels.
// Tiling: sums over states go through a stage of a warp, four steps at once; sums over channels through its mma tiles,
//   then over the block's warps.
#pragma once

#include "scan_mma.h"
#include "scan_state_vector.h"

// The values that are summed over states: y, the states' part of d(dt) over ln 2, and d(dt u).
enum StateSumKind { SUM_Y, SUM_DECAY, SUM_INPUT };
constexpr int STATE_SUMS = 3;

// Sums over the states of a channel, of VECTOR_STEPS steps, in a shared array [kind][channel][time].
struct StateReduction {
  // Floats of workspace of a warp.
  static constexpr int STAGE = HAS_MMA_TF32 ? STATE_SUMS * WARP_SIZE * VECTOR_STEPS : 4;
  float value[STATE_SUMS][VECTOR_STEPS];

  // Writes steps from `first` on, or adds them after the first state tile.
  DEVICE void store(float* sums, float* stage, const VectorThreadMap& lane, int first, bool accumulate) const {
    if constexpr (HAS_MMA_TF32) {
      warp_sync();
#pragma unroll
      for (int kind = 0; kind < STATE_SUMS; ++kind) {
        const float* x = value[kind];
        store_float4(stage + (kind * WARP_SIZE + lane.lane) * VECTOR_STEPS, x[0], x[1], x[2], x[3]);
      }
      warp_sync();
      constexpr int C = VectorThreadMap::WARP_CHANNELS;
      if (lane.lane < STATE_SUMS * C) {
        const int kind = lane.lane / C, channel = lane.lane % C;
        const float* from = stage + (kind * WARP_SIZE + channel) * VECTOR_STEPS;
        float total[4];
        load_float4(total, from);
#pragma unroll
        for (int i = 1; i < WARP_SIZE / C; ++i) add_four(total, from + i * C * VECTOR_STEPS);
        float* to = sums + (kind * CHANNELS + lane.warp * C + channel) * ROW + first;
        if (accumulate) add_four(total, to);
        store_float4(to, total[0], total[1], total[2], total[3]);
      }
    } else {
#pragma unroll
      for (int kind = 0; kind < STATE_SUMS; ++kind) {
        float* to = sums + (kind * CHANNELS + lane.channel()) * ROW + first + lane.column;
        const float total = transposed_sum(value[kind], lane.column);
        *to = accumulate ? *to + total : total;
      }
    }
  }

 private:
  // Lane `column` of four gets the sum of x[column] over the four.
  DEVICE static float transposed_sum(const float (&x)[4], int column) {
    const bool upper = column & 2, odd = column & 1;
    float half[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = x[i], high = x[2 + i];
      half[i] = (upper ? high : low) + shuffle_xor<2>(upper ? low : high);
    }
    const float first = half[0], second = half[1];
    return (odd ? second : first) + shuffle_xor<1>(odd ? first : second);
  }
};

// Offset of a warp's sum of dB or dC for four adjacent states, in [warp][kind][time][state] of a chunk. Groups of four
// states are swizzled: lanes that write at once, for four steps and both kinds, meet different banks.
DEVICE int projection_offset(int warp, int kind, int time, int state) {
  const int exchanged = HAS_MMA_TF32 ? (time / 2 % 2 + kind * 2) * 4 : 0;
  return ((warp * 2 + kind) * CHUNK + time) * STATE_TILE + (state ^ exchanged);
}

// Sums of dB and dC over the channels of a warp, of VECTOR_STEPS steps, at projection_offset. NO_MMA: for chunks that
// are not finite, because an mma multiplies masked steps too and 0 * inf is NaN. BOTH_PARTS: takes both tf32 parts of a
// number.
template <bool NO_MMA, bool BOTH_PARTS>
struct ChannelReduction {
  // Floats of workspace of a warp.
  static constexpr int VALUES = 2 * VECTOR_STEPS * STATE_TILE, STRIDE = VALUES + 8;
  static constexpr int STAGE = HAS_MMA_TF32 ? 4 : VectorThreadMap::WARP_CHANNELS * STRIDE;
  // The remaining factor of the sums.
  static constexpr float SCALE = !HAS_MMA_TF32 || NO_MMA || BOTH_PARTS ? 1.0f : TRUNCATION_CORRECTION;
  float total[2][4] = {};

  DEVICE void add(float* stage, const VectorThreadMap& lane, const float (&one)[8], int kind, int step,
                  const float (&x)[4]) {
    step %= VECTOR_STEPS;
    if constexpr (!HAS_MMA_TF32) {
      store_float4(stage + lane.warp_channel * STRIDE + (kind * VECTOR_STEPS + step) * STATE_TILE + lane.state, x[0],
                   x[1], x[2], x[3]);
    } else if constexpr (NO_MMA) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float pair = x[e] + shuffle_xor<1>(x[e]);
        const float sum = pair + shuffle_xor<2>(pair);
        if (lane.column == step) total[kind][e] = sum;
      }
    } else {
      // Columns 2 step and 2 step + 1 of the result take the operand's depths below 4 and from 4 on.
      const float ones[2] = {one[2 * step], one[2 * step + 1]};
      const float high[4] = {x[0], x[2], x[1], x[3]};
      mma_tf32_16x8x8(total[kind], high, ones);
      if constexpr (BOTH_PARTS) {
        float low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = high[i] - truncate_tf32(high[i]);
        mma_tf32_16x8x8(total[kind], low, ones);
      }
    }
  }

  DEVICE void store(float* sums, const float* stage, const VectorThreadMap& lane, int first) const {
    if constexpr (HAS_MMA_TF32) {
      // Two rows of lanes have four channels each: one adds both for dB, the other for dC.
      const bool upper = lane.warp_channel >= 4;
      float sum[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float keep = upper ? total[1][e] : total[0][e], send = upper ? total[0][e] : total[1][e];
        sum[e] = keep + shuffle_xor<4>(send);
      }
      store_float4(sums + projection_offset(lane.warp, upper, first + lane.column, lane.state), sum[0], sum[1], sum[2],
                   sum[3]);
    } else {
      warp_sync();
#pragma unroll
      for (int at = 2 * lane.lane; at < VALUES; at += 2 * WARP_SIZE) {
        float sum[2] = {};
#pragma unroll
        for (int channel = 0; channel < VectorThreadMap::WARP_CHANNELS; ++channel) {
          float x[2];
          load_float2(x, stage + channel * STRIDE + at);
          sum[0] += x[0];
          sum[1] += x[1];
        }
        const int kind = at / (VECTOR_STEPS * STATE_TILE), step = at / STATE_TILE % VECTOR_STEPS, n = at % STATE_TILE;
        store_float2(sums + projection_offset(lane.warp, kind, first + step, n), sum[0], sum[1]);
      }
      warp_sync();
    }
  }
};
