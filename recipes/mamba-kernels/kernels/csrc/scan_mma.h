// The thread map of the forward recurrence, and its two contractions.
//
// A lane holds four elements of the state h[channel][state]. A step needs an outer product, dt u (x) B, and a
// contraction over states, y; their operands alone would take all 128 bytes a clock of shared memory. With tensor cores
// both are mma instructions whose operands are read once for four steps: one operand of the outer product is masked to
// the step, and one column of y's result counts.
// Equation: h += dt u (x) B, y = sum over states of C h.
#pragma once

#include "scan_splits.h"

// With tensor cores a warp has 16 channels x 8 states, in the layout of a 16 x 8 mma result: a lane has channels row
// and row + 8, states 2 column and 2 column + 1. Without, a warp has WARP_SIZE / 4 channels x 16 states: a lane has
// channel row, states 4 column to 4 column + 3.
struct MmaThreadMap {
  static constexpr int CHANNELS_EACH = HAS_MMA_TF32 ? 2 : 1;
  static constexpr int STATES_EACH = 4 / CHANNELS_EACH;
  static constexpr int ROWS = WARP_SIZE / 4;
  static constexpr int WARP_CHANNELS = ROWS * CHANNELS_EACH;
  static constexpr int WARP_STATES = 4 * STATES_EACH;
  static constexpr int WARPS = THREADS / WARP_SIZE;
  static constexpr int GROUPS = CHANNELS / WARP_CHANNELS;
  // Warps that share channels, each with a part of the states of a state tile.
  static constexpr int PARTS = STATE_TILE / WARP_STATES;
  static_assert(GROUPS * PARTS == WARPS);

  int row, column, group, part;

  DEVICE MmaThreadMap() {
    const int lane = thread_index() % WARP_SIZE, warp = thread_index() / WARP_SIZE;
    row = lane / 4;
    column = lane % 4;
    group = warp / PARTS;
    part = warp % PARTS;
  }
  // Within the tile: the channel of elements [c * STATES_EACH, (c + 1) * STATES_EACH).
  DEVICE int channel(int c) const { return group * WARP_CHANNELS + row + c * ROWS; }
  // Within the state tile: the first of the lane's adjacent states.
  DEVICE int state() const { return part * WARP_STATES + column * STATES_EACH; }
  // Offset of a channel's state in an array [thread][4] of all lanes' elements.
  DEVICE static int offset_of(int channel, int state) {
    const int in_group = channel % WARP_CHANNELS, in_part = state % WARP_STATES;
    const int warp = channel / WARP_CHANNELS * PARTS + state / WARP_STATES;
    const int thread = warp * WARP_SIZE + in_group % ROWS * 4 + in_part / STATES_EACH;
    return thread * 4 + in_group / ROWS * STATES_EACH + in_part % STATES_EACH;
  }
};

// Truncation to tf32: 10 of 23 fraction bits. The remainder fits into a second tf32 number.
DEVICE float truncate_tf32(float x) { return bits_float(float_bits(x) & 0xffffe000u); }
// Rounding to the nearest tf32, which leaves a smaller remainder of either sign, for one more instruction.
DEVICE float round_tf32(float x) { return bits_float((float_bits(x) + 0x1000u) & 0xffffe000u); }
DEVICE float masked(float x, uint32_t mask) { return bits_float(float_bits(x) & mask); }

// 16-bit inputs are exact in tf32; products of fp32 inputs take a second part.
template <class T>
constexpr bool INPUT_IS_TF32 = sizeof(T) == 2;
// bf16 rounds results at 2^-9, so y, dB and dC take the truncated part alone.
template <class T>
constexpr bool SUM_BOTH_PARTS = true;
template <>
inline constexpr bool SUM_BOTH_PARTS<bf16> = false;
// Truncation cuts off 2^-11 / m of a number with fraction m on average, and 2^-11 / (2 ln 2) where log m is evenly
// distributed: the correction gives that back.
constexpr float TRUNCATION_CORRECTION = 1.0f + 0.7213f / 2048.0f;

// All ones where this lane's operand belongs to the step, else zero.
struct StepMasks {
  uint32_t column[4];

  DEVICE explicit StepMasks(const MmaThreadMap& lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) column[i] = opaque(lane.column == i ? 0xffffffffu : 0u);
  }
};

// x[channel][state] = left[channel][time] * right[time][state], step by step through a chunk; the operands of four
// steps are read while those of the four before are used.
template <class T, bool NO_MMA>
struct OuterProduct {
  static constexpr bool MMA = HAS_MMA_TF32 && !NO_MMA;
  const float* left;   // at the lane's first channel
  const float* right;  // at the lane's states
  // Offsets of the steps to be read next, or, without mma, of the present steps.
  int step = 0, step_row = 0;
  const StepMasks& masks;
  float read[2], read_other, parts[4], other, other_low;

  DEVICE OuterProduct(const float* rows, const float* states, const MmaThreadMap& lane, const StepMasks& masks)
      : masks(masks) {
    left = rows + lane.channel(0) * ROW + (MMA ? lane.column : 0);
    right = states + (MMA ? lane.column * STATE_ROW + lane.part * MmaThreadMap::WARP_STATES + lane.row : lane.state());
    if (!MMA) move(-1);
  }
  DEVICE void move(int groups) {
    step = opaque_index(step + 4 * groups);
    step_row = opaque_index(step_row + 4 * groups * STATE_ROW);
  }
  // Reads the operands of the next four steps. After the last steps it reads past the rows, and nothing uses that.
  DEVICE void fetch() {
    if constexpr (MMA) {
      read[0] = left[step];
      read[1] = left[step + MmaThreadMap::ROWS * ROW];
      read_other = right[step_row];
      move(1);
    }
  }
  // Makes the operands that were read last the present ones.
  DEVICE void consume() {
    if constexpr (MMA) {
      if constexpr (INPUT_IS_TF32<T>) {
        other = read_other;
        parts[0] = read[0];
        parts[1] = read[1];
        parts[2] = read[0] - truncate_tf32(read[0]);
        parts[3] = read[1] - truncate_tf32(read[1]);
      } else {
        other = round_tf32(read_other);
        other_low = read_other - other;
        parts[0] = round_tf32(read[0]);
        parts[1] = round_tf32(read[1]);
        parts[2] = read[0] - parts[0];
        parts[3] = read[1] - parts[1];
      }
    } else {
      move(1);
    }
  }
  // x = the product at one of the present steps.
  DEVICE void set(float (&x)[4], int i) const {
    if constexpr (MMA) {
      // High and low part of the left operand meet the same right operand.
      const float b = masked(other, masks.column[i]);
      const float both[2] = {b, b};
      product_tf32_16x8x8(x, parts, both);
      if constexpr (!INPUT_IS_TF32<T>) mma_tf32_16x8x4(x, parts, masked(other_low, masks.column[i]));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = left[step + e / MmaThreadMap::STATES_EACH * MmaThreadMap::ROWS * ROW + i] *
               right[step_row + i * STATE_ROW + e % MmaThreadMap::STATES_EACH];
      }
    }
  }
};

// y, four steps at a time: sums[part][channel][time] = sum over the warp's states of weight[time][state] *
// x[channel][state], to be multiplied by SCALE.
template <class T, bool NO_MMA, bool BOTH_PARTS>
struct StateContraction {
  static constexpr bool MMA = HAS_MMA_TF32 && !NO_MMA;
  static constexpr float SCALE = MMA && !BOTH_PARTS ? TRUNCATION_CORRECTION : 1.0f;
  const float* right;  // at the lane's states
  float* sums;         // where the lane stores
  int step = 0, step_row = 0;
  const MmaThreadMap& lane;
  float weight[2], value[4], each[MmaThreadMap::CHANNELS_EACH][4];

  DEVICE StateContraction(float* sums, const float* states, const MmaThreadMap& lane)
      : right(states + lane.state()), sums(sums + (lane.part * CHANNELS + lane.channel(0)) * ROW), lane(lane) {
    if constexpr (MMA) {
      // Both halves of the result's columns hold the four steps; each half stores half of the channels.
      right += lane.row % 4 * STATE_ROW;
      this->sums += (lane.column & 2 ? MmaThreadMap::ROWS * ROW : 0) + lane.column % 2 * 2;
    } else {
      this->sums += lane.column;
    }
  }

  // Reads the weights of the first or the next four steps.
  DEVICE void fetch() {
    if constexpr (MMA) load_float2(weight, right + step_row);
  }
  DEVICE void add(const float (&x)[4], int i) {
    if constexpr (MMA) {
      // The result has the sums with the weights of all four steps; one column counts. Columns 2 q and 2 q + 1 take the
      // operand's depths q and q + 4.
      const float all[4] = {x[0], x[2], x[1], x[3]};
      float total[4], low[4];
      if constexpr (INPUT_IS_TF32<T>) {
        product_tf32_16x8x8(total, all, weight);
#pragma unroll
        for (int j = 0; j < 4; ++j) low[j] = all[j] - truncate_tf32(all[j]);
        if constexpr (BOTH_PARTS) mma_tf32_16x8x8(total, low, weight);
      } else {
        const float main[2] = {round_tf32(weight[0]), round_tf32(weight[1])};
        const float rest[2] = {weight[0] - main[0], weight[1] - main[1]};
        float high[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          high[j] = round_tf32(all[j]);
          low[j] = all[j] - high[j];
        }
        product_tf32_16x8x8(total, high, main);
        mma_tf32_16x8x8(total, low, main);
        mma_tf32_16x8x8(total, high, rest);
      }
      value[i] = lane.column & 2 ? total[2 + i % 2] : total[i % 2];
    } else {
#pragma unroll
      for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < MmaThreadMap::STATES_EACH; ++j)
          sum += right[step_row + i * STATE_ROW + j] * x[c * MmaThreadMap::STATES_EACH + j];
        each[c][i] = sum;
      }
    }
  }

  // Writes four steps, or adds them after the first state tile, and advances.
  DEVICE void store(bool accumulate) {
    const bool upper = lane.column & 2, odd = lane.column & 1;
    if constexpr (MMA) {
      float sum[2] = {odd ? value[2] : value[0], odd ? value[3] : value[1]};
      if (accumulate) {
        float old[2];
        load_float2(old, sums + step);
        sum[0] += old[0];
        sum[1] += old[1];
      }
      store_float2(sums + step, sum[0], sum[1]);
    } else {
#pragma unroll
      for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c) {
        float half[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float keep = upper ? each[c][2 + i] : each[c][i], send = upper ? each[c][i] : each[c][2 + i];
          half[i] = keep + shuffle_xor<2>(send);
        }
        const float keep = odd ? half[1] : half[0], send = odd ? half[0] : half[1];
        float* to = sums + step + c * MmaThreadMap::ROWS * ROW;
        const float sum = keep + shuffle_xor<1>(send);
        *to = accumulate ? *to + sum : sum;
      }
    }
    step = opaque_index(step + 4);
    step_row = opaque_index(step_row + 4 * STATE_ROW);
  }
};

// The sum over the parts of a state tile of what StateContraction stored, for a thread's items.
template <class S>
DEVICE void load_contraction(float (&x)[8], const float* sums, S items) {
  load_shared_items(x, sums, items);
#pragma unroll
  for (int part = 1; part < MmaThreadMap::PARTS; ++part) {
    float y[8];
    load_shared_items(y, sums + part * CHANNELS * ROW, items);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += y[i];
  }
}

// A log2(e) of the lane's elements; zero beyond the last state or channel, where h stays zero.
DEVICE void load_decay_rates(float (&a)[4], const float* source, const ScanSizes& s, const ChannelTile& tile,
                             const MmaThreadMap& lane, int64_t state_tile) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int channel = lane.channel(e / MmaThreadMap::STATES_EACH);
    const int64_t n = state_tile * STATE_TILE + lane.state() + e % MmaThreadMap::STATES_EACH;
    const bool valid = channel < tile.channels && n < s.states;
    a[e] = valid ? source[(tile.first + channel) * s.states + n] * LOG2_E : 0.0f;
  }
}

// A lane's adjacent states.
DEVICE void load_states(float* h, const float* from) {
  if constexpr (MmaThreadMap::STATES_EACH == 2) {
    load_float2(h, from);
  } else {
    load_float4(h, from);
  }
}
DEVICE void store_states(float* to, const float* h) {
  if constexpr (MmaThreadMap::STATES_EACH == 2) {
    store_float2(to, h[0], h[1]);
  } else {
    store_float4(to, h[0], h[1], h[2], h[3]);
  }
}

// The lane's elements of a tensor (batch, channels, chunks, states).
struct StateAccess {
  int64_t start[MmaThreadMap::CHANNELS_EACH];
  int states;
  bool is_full;

  DEVICE StateAccess(const ScanSizes& s, const ChannelTile& tile, const MmaThreadMap& lane, int64_t state_tile,
                     int64_t chunks) {
    const int64_t n = state_tile * STATE_TILE + lane.state();
    states = n < s.states ? static_cast<int>(s.states - n < 4 ? s.states - n : 4) : 0;
#pragma unroll
    for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c) {
      const int channel = lane.channel(c);
      start[c] = ((tile.batch * s.channels + tile.first + channel) * chunks) * s.states + n;
      if (channel >= tile.channels) start[c] = -1;
    }
    is_full = tile.channels == CHANNELS && s.states % STATE_TILE == 0;
  }
  DEVICE void load(float (&h)[4], const float* from, int64_t offset) const {
    if (is_full) {
#pragma unroll
      for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c)
        load_states(h + c * MmaThreadMap::STATES_EACH, from + start[c] + offset);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = e / MmaThreadMap::STATES_EACH, j = e % MmaThreadMap::STATES_EACH;
      h[e] = start[c] >= 0 && j < states ? from[start[c] + offset + j] : 0.0f;
    }
  }
  DEVICE void store(float* to, int64_t offset, const float (&h)[4]) const {
    if (is_full) {
#pragma unroll
      for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c)
        store_states(to + start[c] + offset, h + c * MmaThreadMap::STATES_EACH);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = e / MmaThreadMap::STATES_EACH, j = e % MmaThreadMap::STATES_EACH;
      if (start[c] >= 0 && j < states) to[start[c] + offset + j] = h[e];
    }
  }
};
