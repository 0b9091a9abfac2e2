// How the lanes of a wave share the forward scan, and its sums across lanes.
//
// A lane keeps four elements of the state h[channel][state]. Per step the scan needs an outer product, dt u (x) B,
// and a contraction over states, y. Read from shared memory, those operands alone fill its 128 bytes a clock. With
// tensor cores both are matrix instructions whose operands are read once for four steps: of the outer product's one
// is masked to the step at hand, and of y's result one column counts.
#pragma once

#include "shares.h"

// Lanes of four columns. With tensor cores a wave has 16 channels x 8 states, laid out as a 16 x 8 result:
// a lane has channels row and row + 8, states 2 column and 2 column + 1. Else it has WAVE / 4 channels x
// 16 states, and a lane channel row, states 4 column to 4 column + 3.
struct Lane {
  static constexpr int CHANNELS_EACH = HAS_MATRIX_TF32 ? 2 : 1;
  static constexpr int STATES_EACH = 4 / CHANNELS_EACH;
  static constexpr int ROWS = WAVE / 4;
  static constexpr int WAVE_CHANNELS = ROWS * CHANNELS_EACH;
  static constexpr int WAVE_STATES = 4 * STATES_EACH;
  static constexpr int WAVES = THREADS / WAVE;
  static constexpr int GROUPS = CHANNELS / WAVE_CHANNELS;
  // Waves that share channels and split a slab's states.
  static constexpr int PARTS = SLAB / WAVE_STATES;
  static_assert(GROUPS * PARTS == WAVES);

  int row, column, group, part;

  DEVICE Lane() {
    const int lane = thread_index() % WAVE, wave = thread_index() / WAVE;
    row = lane / 4;
    column = lane % 4;
    group = wave / PARTS;
    part = wave % PARTS;
  }
  // Within the block: channel of elements [c * STATES_EACH, (c + 1) * STATES_EACH).
  DEVICE int channel(int c) const { return group * WAVE_CHANNELS + row + c * ROWS; }
  // Within the slab: first of the lane's adjacent states.
  DEVICE int state() const { return part * WAVE_STATES + column * STATES_EACH; }
  // In an array over [thread][4] of all lanes' elements, where a channel's state is.
  DEVICE static int place_of(int channel, int state) {
    const int in_group = channel % WAVE_CHANNELS, in_part = state % WAVE_STATES;
    const int wave = channel / WAVE_CHANNELS * PARTS + state / WAVE_STATES;
    const int thread = wave * WAVE + in_group % ROWS * 4 + in_part / STATES_EACH;
    return thread * 4 + in_group / ROWS * STATES_EACH + in_part % STATES_EACH;
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

// What tensor cores keep of a float: 10 of 23 bits of the fraction. The rest fits into a second such number.
DEVICE float high_part(float x) { return bits_float(float_bits(x) & 0xffffe000u); }
// The nearest of such numbers, which leaves a bit less, of either sign; for one instruction more.
DEVICE float near_part(float x) { return bits_float((float_bits(x) + 0x1000u) & 0xffffe000u); }
DEVICE float masked(float x, uint32_t mask) { return bits_float(float_bits(x) & mask); }

// 16-bit inputs are exact in high_part; products of float inputs take further parts.
template <class T>
constexpr bool INPUT_IS_EXACT = sizeof(T) == 2;
// bf16 results round at 2^-9: there y, dB and dC may take high_part alone.
template <class T>
constexpr bool SUMS_ARE_EXACT = true;
template <>
inline constexpr bool SUMS_ARE_EXACT<bf16> = false;
// high_part cuts off 2^-11 / m of a number with fraction m on average; with the logarithm of m evenly
// distributed that is 2^-11 / (2 ln 2), given back here.
constexpr float CUT_OFF = 1.0f + 0.7213f / 2048.0f;

// Keeps the compiler from deriving a value again at each use, which costs more than its register.
DEVICE uint32_t kept(uint32_t x) {
#if defined(__CUDACC__)
  asm("" : "+r"(x));
#endif
  return x;
}

// An index that a loop advances. Else clang advances every address in the loop by itself: 24 of the forward pass's
// 154 slots for four steps, where bases and immediate offsets need 15.
DEVICE int advanced(int index) {
#if defined(__HIP__)
  asm("" : "+v"(index));
#endif
  return index;
}

// All ones where this lane's operand belongs to the step, else zero.
struct StepMasks {
  uint32_t column[4];

  DEVICE explicit StepMasks(const Lane& lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) column[i] = kept(lane.column == i ? 0xffffffffu : 0u);
  }
};

// x[channel][state] = left[channel][time] * right[time][state], a step at a time through a chunk: operands of four
// steps are read while the four before are used.
template <class T, bool PLAIN>
struct OuterProduct {
  static constexpr bool MATRIX = HAS_MATRIX_TF32 && !PLAIN;
  const float* left;   // at the lane's first channel
  const float* right;  // at the lane's states
  // In both, of the steps to be read next or, read where they are used, of the present ones.
  int step = 0, step_row = 0;
  const StepMasks& masks;
  float read[2], read_other, parts[4], other, other_low;

  DEVICE OuterProduct(const float* rows, const float* states, const Lane& lane, const StepMasks& masks) : masks(masks) {
    left = rows + lane.channel(0) * ROW + (MATRIX ? lane.column : 0);
    right = states + (MATRIX ? lane.column * STATE_ROW + lane.part * Lane::WAVE_STATES + lane.row : lane.state());
    if (!MATRIX) move(-1);
  }
  DEVICE void move(int quads) {
    step = advanced(step + 4 * quads);
    step_row = advanced(step_row + 4 * quads * STATE_ROW);
  }
  // Reads the next four steps. After the last these are others' memory, of which nothing is used.
  DEVICE void fetch() {
    if constexpr (MATRIX) {
      read[0] = left[step];
      read[1] = left[step + Lane::ROWS * ROW];
      read_other = right[step_row];
      move(1);
    }
  }
  // Makes what was read last the present four steps.
  DEVICE void take() {
    if constexpr (MATRIX) {
      if constexpr (INPUT_IS_EXACT<T>) {
        other = read_other;
        parts[0] = read[0];
        parts[1] = read[1];
        parts[2] = read[0] - high_part(read[0]);
        parts[3] = read[1] - high_part(read[1]);
      } else {
        other = near_part(read_other);
        other_low = read_other - other;
        parts[0] = near_part(read[0]);
        parts[1] = near_part(read[1]);
        parts[2] = read[0] - parts[0];
        parts[3] = read[1] - parts[1];
      }
    } else {
      move(1);
    }
  }
  // x = the product of one of the present steps.
  DEVICE void set(float (&x)[4], int i) const {
    if constexpr (MATRIX) {
      // High and low part of the left side meet the same right side.
      const float b = masked(other, masks.column[i]);
      const float both[2] = {b, b};
      product_tf32_16x8x8(x, parts, both);
      if constexpr (!INPUT_IS_EXACT<T>) mma_tf32_16x8x4(x, parts, masked(other_low, masks.column[i]));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = left[step + e / Lane::STATES_EACH * Lane::ROWS * ROW + i] *
               right[step_row + i * STATE_ROW + e % Lane::STATES_EACH];
      }
    }
  }
};

// y of four steps after four: sums[part][channel][time] = sum over the wave's states of weight[time][state] *
// x[channel][state], still to be multiplied with SCALE.
template <class T, bool PLAIN, bool EXACT>
struct StateSum {
  static constexpr bool MATRIX = HAS_MATRIX_TF32 && !PLAIN;
  static constexpr float SCALE = MATRIX && !EXACT ? CUT_OFF : 1.0f;
  const float* right;  // at the lane's states
  float* sums;         // where the lane stores
  int step = 0, step_row = 0;
  const Lane& lane;
  float weight[2], value[4], each[Lane::CHANNELS_EACH][4];

  DEVICE StateSum(float* sums, const float* states, const Lane& lane)
      : right(states + lane.state()), sums(sums + (lane.part * CHANNELS + lane.channel(0)) * ROW), lane(lane) {
    if constexpr (MATRIX) {
      // Both halves of the result's columns are for the four steps; one half stores half of the channels.
      right += lane.row % 4 * STATE_ROW;
      this->sums += (lane.column & 2 ? Lane::ROWS * ROW : 0) + lane.column % 2 * 2;
    } else {
      this->sums += lane.column;
    }
  }

  // Reads the weights of the first four steps, or the next.
  DEVICE void fetch() {
    if constexpr (MATRIX) load_two(weight, right + step_row);
  }
  DEVICE void add(const float (&x)[4], int i) {
    if constexpr (MATRIX) {
      // Of the result, sums with the weights of all four steps, one column counts. The result's columns 2 q and
      // 2 q + 1 are the operand's depths q and q + 4.
      const float all[4] = {x[0], x[2], x[1], x[3]};
      float total[4], low[4];
      if constexpr (INPUT_IS_EXACT<T>) {
        product_tf32_16x8x8(total, all, weight);
#pragma unroll
        for (int j = 0; j < 4; ++j) low[j] = all[j] - high_part(all[j]);
        if constexpr (EXACT) mma_tf32_16x8x8(total, low, weight);
      } else {
        const float main[2] = {near_part(weight[0]), near_part(weight[1])};
        const float rest[2] = {weight[0] - main[0], weight[1] - main[1]};
        float high[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          high[j] = near_part(all[j]);
          low[j] = all[j] - high[j];
        }
        product_tf32_16x8x8(total, high, main);
        mma_tf32_16x8x8(total, low, main);
        mma_tf32_16x8x8(total, high, rest);
      }
      value[i] = lane.column & 2 ? total[2 + i % 2] : total[i % 2];
    } else {
#pragma unroll
      for (int c = 0; c < Lane::CHANNELS_EACH; ++c) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < Lane::STATES_EACH; ++j) sum += right[step_row + i * STATE_ROW + j] * x[c * Lane::STATES_EACH + j];
        each[c][i] = sum;
      }
    }
  }

  // Writes, or after a first slab adds, and goes on to the next four.
  DEVICE void store(bool accumulate) {
    const bool upper = lane.column & 2, odd = lane.column & 1;
    if constexpr (MATRIX) {
      float sum[2] = {odd ? value[2] : value[0], odd ? value[3] : value[1]};
      if (accumulate) {
        float old[2];
        load_two(old, sums + step);
        sum[0] += old[0];
        sum[1] += old[1];
      }
      store_two(sums + step, sum[0], sum[1]);
    } else {
#pragma unroll
      for (int c = 0; c < Lane::CHANNELS_EACH; ++c) {
        float half[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float keep = upper ? each[c][2 + i] : each[c][i], send = upper ? each[c][i] : each[c][2 + i];
          half[i] = keep + shuffle_xor<2>(send);
        }
        const float keep = odd ? half[1] : half[0], send = odd ? half[0] : half[1];
        float* to = sums + step + c * Lane::ROWS * ROW;
        const float sum = keep + shuffle_xor<1>(send);
        *to = accumulate ? *to + sum : sum;
      }
    }
    step = advanced(step + 4);
    step_row = advanced(step_row + 4 * STATE_ROW);
  }
};

// Sum over the parts of a slab of what StateSum stored, for a strip.
template <class S>
DEVICE void get_sums(float (&x)[8], const float* sums, S strip) {
  get_strip(x, sums, strip);
#pragma unroll
  for (int part = 1; part < Lane::PARTS; ++part) {
    float y[8];
    get_strip(y, sums + part * CHANNELS * ROW, strip);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += y[i];
  }
}
