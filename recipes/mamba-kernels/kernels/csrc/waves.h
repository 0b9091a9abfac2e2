// How the lanes of a wave share a piece of the scan, and the sums across lanes.
//
// A lane keeps four elements of the state h[channel][state]. Per step the scan needs one outer product,
// dt u (x) B, and contractions over states (y) and over channels (gradients of B and C). Read from shared
// memory, those operands alone fill its 128 bytes a clock. With tensor cores the outer product and the
// contractions over states are matrix instructions whose operands are read once for eight steps: one
// operand is masked to the step at hand, so a result of several columns collects several steps.
#pragma once

#include "elements.h"

// Steps whose intermediate values a lane keeps in registers.
constexpr int STEPS = 8;

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
};

struct alignas(8) Two {
  float value[2];
};
DEVICE void load_two(float* x, const float* from) {
  const Two two = *reinterpret_cast<const Two*>(from);
  x[0] = two.value[0];
  x[1] = two.value[1];
}
DEVICE void store_two(float* to, float x, float y) { *reinterpret_cast<Two*>(to) = {x, y}; }

DEVICE bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

// What tensor cores keep of a float: 10 of 23 bits of the fraction. The rest fits into a second such number.
DEVICE float high_part(float x) { return bits_float(float_bits(x) & 0xffffe000u); }
DEVICE float masked(float x, uint32_t mask) { return bits_float(float_bits(x) & mask); }

// 16-bit inputs are exact in high_part; products of float inputs take further parts.
template <class T>
constexpr bool INPUT_IS_EXACT = sizeof(T) == 2;
// bf16 results round at 2^-9: there y may take high_part alone. Gradients may not, since sums of them over time
// can cancel: that of one channel's bias was off by 3 %.
template <class T>
constexpr bool Y_IS_EXACT = true;
template <>
inline constexpr bool Y_IS_EXACT<bf16> = false;
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

// All ones where this lane's operand belongs to the step, else zero.
struct StepMasks {
  uint32_t column[4], row[8];

  DEVICE explicit StepMasks(const Lane& lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) column[i] = kept(lane.column == i ? 0xffffffffu : 0u);
#pragma unroll
    for (int i = 0; i < 8; ++i) row[i] = kept(lane.row == i ? 0xffffffffu : 0u);
  }
};

// x[channel][state] += left[channel][time] * right[time][state], one step at a time.
template <class T, bool PLAIN>
struct Outer {
  const float* left;   // at the lane's first channel and the first of eight steps
  const float* right;  // at the first of eight steps, first state of the slab
  const Lane& lane;
  const StepMasks& masks;
  float parts[4], other, other_low;

  DEVICE Outer(const float* rows, const float* states, int first, const Lane& lane, const StepMasks& masks)
      : left(rows + lane.channel(0) * ROW + first), right(states + first * STATE_ROW), lane(lane), masks(masks) {}

  // Fetches the operands of steps [4 quad, 4 quad + 4).
  DEVICE void load(int quad) {
    if constexpr (HAS_MATRIX_TF32 && !PLAIN) {
      const float x = left[quad * 4 + lane.column];
      const float y = left[Lane::ROWS * ROW + quad * 4 + lane.column];
      other = right[(quad * 4 + lane.column) * STATE_ROW + lane.part * Lane::WAVE_STATES + lane.row];
      parts[0] = high_part(x);
      parts[1] = high_part(y);
      parts[2] = x - parts[0];
      parts[3] = y - parts[1];
      if constexpr (!INPUT_IS_EXACT<T>) other_low = other - high_part(other);
    }
  }

  // x = the product.
  DEVICE void set(float (&x)[4], int step) const {
    if constexpr (HAS_MATRIX_TF32 && !PLAIN) {
      const float b = masked(other, masks.column[step % 4]);
      const float both[2] = {b, b};
      product_tf32_16x8x8(x, parts, both);
      if constexpr (!INPUT_IS_EXACT<T>) mma_tf32_16x8x4(x, parts, masked(other_low, masks.column[step % 4]));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = 0.0f;
      add(x, step);
    }
  }

  // x += the product.
  DEVICE void add(float (&x)[4], int step) const {
    if constexpr (HAS_MATRIX_TF32 && !PLAIN) {
      const float b = masked(other, masks.column[step % 4]);
      // High and low part of the left side meet the same right side.
      const float both[2] = {b, b};
      mma_tf32_16x8x8(x, parts, both);
      if constexpr (!INPUT_IS_EXACT<T>) mma_tf32_16x8x4(x, parts, masked(other_low, masks.column[step % 4]));
    } else {
      const float* states = right + step * STATE_ROW + lane.state();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = left[e / Lane::STATES_EACH * Lane::ROWS * ROW + step];
        x[e] += weight * states[e % Lane::STATES_EACH];
      }
    }
  }
};

// sum[channel][time] = sum over the wave's states of weight[time][state] * x[channel][state], over eight steps.
// EXACT: with both parts of x.
template <class T, bool PLAIN, bool EXACT, bool ONES = false>
struct StateSum {
  const float* right;
  const Lane& lane;
  const StepMasks& masks;
  float weight[2];
  float total[4] = {};
  float each[Lane::CHANNELS_EACH][STEPS];

  DEVICE StateSum(const float* states, int first, const Lane& lane, const StepMasks& masks)
      : right(states + first * STATE_ROW + lane.state()), lane(lane), masks(masks) {
    if constexpr (HAS_MATRIX_TF32 && !PLAIN) {
      weight[0] = weight[1] = 1.0f;
      if constexpr (!ONES) load_two(weight, right + lane.row * STATE_ROW);
    }
  }

  DEVICE void add(const float (&x)[4], int step) {
    if constexpr (HAS_MATRIX_TF32 && !PLAIN) {
      const uint32_t mask = masks.row[step];
      const float b[2] = {masked(weight[0], mask), masked(weight[1], mask)};
      // The result's columns 2 q and 2 q + 1 are the operand's depths q and q + 4.
      const float high[4] = {x[0], x[2], x[1], x[3]};
      mma_tf32_16x8x8(total, high, b);
      if constexpr (EXACT) {
        float low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = high[i] - high_part(high[i]);
        mma_tf32_16x8x8(total, low, b);
        if constexpr (!INPUT_IS_EXACT<T> && !ONES) {
          const float rest[2] = {b[0] - high_part(b[0]), b[1] - high_part(b[1])};
          mma_tf32_16x8x8(total, high, rest);
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < Lane::CHANNELS_EACH; ++c) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < Lane::STATES_EACH; ++j) {
          const float w = ONES ? 1.0f : right[step * STATE_ROW + j];
          sum += w * x[c * Lane::STATES_EACH + j];
        }
        each[c][step] = sum;
      }
    }
  }

  // Adds over the four columns; column q then has steps 2 q and 2 q + 1 of its channels.
  DEVICE void finish() {
    if constexpr (!HAS_MATRIX_TF32 || PLAIN) {
      const bool upper = lane.column & 2, odd = lane.column & 1;
#pragma unroll
      for (int c = 0; c < Lane::CHANNELS_EACH; ++c) {
        float half[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float keep = upper ? each[c][4 + i] : each[c][i], send = upper ? each[c][i] : each[c][4 + i];
          half[i] = keep + shuffle_xor<2>(send);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float keep = odd ? half[2 + i] : half[i], send = odd ? half[i] : half[2 + i];
          total[c * 2 + i] = keep + shuffle_xor<1>(send);
        }
      }
    }
  }

  // Writes, or after a first slab adds, to sums[part][channel][time].
  DEVICE void store(float* sums, int first, bool accumulate) const {
    float* start = sums + (lane.part * CHANNELS + lane.channel(0)) * ROW + first + lane.column * 2;
#pragma unroll
    for (int c = 0; c < Lane::CHANNELS_EACH; ++c) {
      float* to = start + c * Lane::ROWS * ROW;
      const float scale = HAS_MATRIX_TF32 && !PLAIN && !EXACT ? CUT_OFF : 1.0f;
      float sum[2] = {total[c * 2] * scale, total[c * 2 + 1] * scale};
      if (accumulate) {
        float old[2];
        load_two(old, to);
        sum[0] += old[0];
        sum[1] += old[1];
      }
      store_two(to, sum[0], sum[1]);
    }
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
