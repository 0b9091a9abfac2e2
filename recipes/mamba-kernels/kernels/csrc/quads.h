// How the lanes of a wave share the backward pass, and its sums across lanes.
//
// A lane has four adjacent states of one channel, a wave all 16 states of a slab. Six values a step leave a lane:
// y, d(dt u) and the states' part of d(dt) want the sum over the four lanes of a channel, dB and dC of a state
// the sum over the wave's channels. With tensor cores the channels lie along the columns of a matrix operand:
// an instruction that multiplies by ones, masked to the step at hand, adds four channels of four states, and
// its result collects four steps. The other sum goes through shared memory, four steps at a time, exact.
// Without tensor cores it is the other way round: a channel's lanes are neighbours, which exchange cheaply.
#pragma once

#include "elements.h"
#include "waves.h"

// Steps that the sums are collected over.
constexpr int QUAD = 4;

struct QuadLane {
  static constexpr int WAVES = THREADS / WAVE;
  static constexpr int WAVE_CHANNELS = CHANNELS / WAVES;
  int lane, wave, column, in_wave, state;

  DEVICE explicit QuadLane(int thread) {
    lane = thread % WAVE;
    wave = thread / WAVE;
    column = lane % 4;
    in_wave = HAS_MATRIX_TF32 ? lane % WAVE_CHANNELS : lane / 4;
    state = (HAS_MATRIX_TF32 ? lane / WAVE_CHANNELS : column) * 4;
  }
  // Within the block.
  DEVICE int channel() const { return wave * WAVE_CHANNELS + in_wave; }
};

// B and C of a chunk over [time][state]: a wave reads few words at once, all of one time.
constexpr int QUAD_ROW = SLAB;
template <class T>
DEVICE void put_projections(const ProjectionStrip<T>& strip, float* b, float* c) {
  float x[8];
  strip.value.to_floats(x);
  float* to = (strip.is_b() ? b : c) + strip.time() * QUAD_ROW + strip.state();
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i * QUAD_ROW] = x[i];
}

DEVICE void add_four(float (&x)[4], const float* from) {
  float y[4];
  load_four(y, from);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] += y[i];
}

// How many of the lane's four states there are, and whether they can be read at once.
struct QuadAccess {
  int inside;
  bool wide;

  DEVICE QuadAccess(const ScanSizes& s, const Place& place, const QuadLane& lane, int64_t slab) {
    const int64_t left = lane.channel() < place.channels ? s.states - slab * SLAB - lane.state : 0;
    inside = left < 0 ? 0 : left < 4 ? static_cast<int>(left) : 4;
    wide = s.states % 4 == 0 && inside == 4;
  }
  DEVICE void load(float (&x)[4], const float* at) const {
    if (wide) {
      load_four(x, at);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = e < inside ? at[e] : 0.0f;
    }
  }
  DEVICE void store(float* at, const float (&x)[4]) const {
    if (wide) {
      store_four(at, x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < inside) at[e] = x[e];
      }
    }
  }
};

// The lane's elements of a (batch, channels, states) tensor.
struct QuadAddress {
  int64_t start;
  QuadAccess access;

  DEVICE QuadAddress(const ScanSizes& s, const Place& place, const QuadLane& lane, int64_t slab)
      : start((place.batch * s.channels + place.first + lane.channel()) * s.states + slab * SLAB + lane.state),
        access(s, place, lane, slab) {}
  DEVICE void load(float (&x)[4], const float* from) const { access.load(x, from + start); }
  DEVICE void store(float* to, const float (&x)[4]) const { access.store(to + start, x); }
};

// A times log2(e) for the lane's elements; zero beyond the last state or channel, where h stays zero.
DEVICE void load_quad_decay(float (&a)[4], const float* source, const ScanSizes& s, const Place& place,
                            const QuadLane& lane, int64_t slab) {
  Place anywhere = place;
  anywhere.batch = 0;
  QuadAddress(s, anywhere, lane, slab).load(a, source);
#pragma unroll
  for (int e = 0; e < 4; ++e) a[e] *= LOG2_E;
}

// What leaves a lane for sums over states: y, the states' part of d(dt) over ln 2, and d(dt u).
enum StateSumKind { SUM_Y, SUM_DECAY, SUM_INPUT };
constexpr int STATE_SUMS = 3;

// Adds them over the lanes of a channel, for four steps, to [kind][channel][time] of the block.
struct QuadStateSums {
  // Room of a wave.
  static constexpr int STAGE = HAS_MATRIX_TF32 ? STATE_SUMS * WAVE * QUAD : 4;
  float value[STATE_SUMS][QUAD];

  // Writes, or after a first slab adds, steps from `first` on.
  DEVICE void store(float* sums, float* stage, const QuadLane& lane, int first, bool accumulate) const {
    if constexpr (HAS_MATRIX_TF32) {
      wave_barrier();
#pragma unroll
      for (int kind = 0; kind < STATE_SUMS; ++kind) {
        const float* x = value[kind];
        store_four(stage + (kind * WAVE + lane.lane) * QUAD, x[0], x[1], x[2], x[3]);
      }
      wave_barrier();
      constexpr int C = QuadLane::WAVE_CHANNELS;
      if (lane.lane < STATE_SUMS * C) {
        const int kind = lane.lane / C, channel = lane.lane % C;
        const float* from = stage + (kind * WAVE + channel) * QUAD;
        float total[4];
        load_four(total, from);
#pragma unroll
        for (int i = 1; i < WAVE / C; ++i) add_four(total, from + i * C * QUAD);
        float* to = sums + (kind * CHANNELS + lane.wave * C + channel) * ROW + first;
        if (accumulate) add_four(total, to);
        store_four(to, total[0], total[1], total[2], total[3]);
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
  // Lane `column` of four gets the sum over them of x[column].
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

// Where a wave's sum for dB or dC of four adjacent states lies, over [wave][kind][time][state] of a chunk. Groups of
// four are exchanged such that neighbours which write at once, of four steps and both kinds, meet different banks.
DEVICE int projection_at(int wave, int kind, int time, int state) {
  const int exchanged = HAS_MATRIX_TF32 ? (time / 2 % 2 + kind * 2) * 4 : 0;
  return ((wave * 2 + kind) * CHUNK + time) * SLAB + (state ^ exchanged);
}

// For dB and dC, adds over the channels of a wave, for four steps, to places of projection_at; PLAIN: where not
// all is finite, because the masked matrix operand multiplies other steps too, and 0 * inf is NaN. Takes both
// parts of a number only where EXACT.
template <bool PLAIN, bool EXACT>
struct QuadChannelSums {
  // Room of a wave.
  static constexpr int VALUES = 2 * QUAD * SLAB, STRIDE = VALUES + 8;
  static constexpr int STAGE = HAS_MATRIX_TF32 ? 4 : QuadLane::WAVE_CHANNELS * STRIDE;
  // What is left to multiply the sums by.
  static constexpr float SCALE = !HAS_MATRIX_TF32 || PLAIN || EXACT ? 1.0f : CUT_OFF;
  float total[2][4] = {};

  DEVICE void add(float* stage, const QuadLane& lane, const float (&one)[8], int kind, int step,
                  const float (&x)[4]) {
    step %= QUAD;
    if constexpr (!HAS_MATRIX_TF32) {
      store_four(stage + lane.in_wave * STRIDE + (kind * QUAD + step) * SLAB + lane.state, x[0], x[1], x[2], x[3]);
    } else if constexpr (PLAIN) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float pair = x[e] + shuffle_xor<1>(x[e]);
        const float sum = pair + shuffle_xor<2>(pair);
        if (lane.column == step) total[kind][e] = sum;
      }
    } else {
      // The result's columns 2 step and 2 step + 1 take the operand's depths below and from 4 on.
      const float ones[2] = {one[2 * step], one[2 * step + 1]};
      const float high[4] = {x[0], x[2], x[1], x[3]};
      mma_tf32_16x8x8(total[kind], high, ones);
      if constexpr (EXACT) {
        float low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = high[i] - high_part(high[i]);
        mma_tf32_16x8x8(total[kind], low, ones);
      }
    }
  }

  DEVICE void store(float* sums, const float* stage, const QuadLane& lane, int first) const {
    if constexpr (HAS_MATRIX_TF32) {
      // Two rows of lanes have four channels each: one takes both parts of dB, the other those of dC.
      const bool upper = lane.in_wave >= 4;
      float sum[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float keep = upper ? total[1][e] : total[0][e], send = upper ? total[0][e] : total[1][e];
        sum[e] = keep + shuffle_xor<4>(send);
      }
      store_four(sums + projection_at(lane.wave, upper, first + lane.column, lane.state), sum[0], sum[1], sum[2], sum[3]);
    } else {
      wave_barrier();
#pragma unroll
      for (int at = 2 * lane.lane; at < VALUES; at += 2 * WAVE) {
        float sum[2] = {};
#pragma unroll
        for (int channel = 0; channel < QuadLane::WAVE_CHANNELS; ++channel) {
          float x[2];
          load_two(x, stage + channel * STRIDE + at);
          sum[0] += x[0];
          sum[1] += x[1];
        }
        const int kind = at / (QUAD * SLAB), step = at / SLAB % QUAD, n = at % SLAB;
        store_two(sums + projection_at(lane.wave, kind, first + step, n), sum[0], sum[1]);
      }
      wave_barrier();
    }
  }
};
