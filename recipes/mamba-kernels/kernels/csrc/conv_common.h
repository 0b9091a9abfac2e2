// Common parts of the causal convolution: y[t] = bias + sum over k of weight[k] x[t - width + 1 + k], then silu if
// asked for. The kernels are bound by memory: a lane has several independent loads in flight, rereads its neighbours'
// times from the cache, and waits for no other lane.
// Equation: y[t] as above; its silu is y[t] / (1 + exp(-y[t])).
// Tiling: blocks of 128 threads; 32 lanes are a logical warp on every GPU.
#pragma once

#include <type_traits>

#include "device_math.h"

namespace conv {

constexpr int THREADS = 128;
// Lanes that work side by side, at any warp size (CUB's logical warp).
constexpr int LOGICAL_WARP = 32;
constexpr int LOGICAL_WARPS = THREADS / LOGICAL_WARP;

DEVICE int logical_warp() { return thread_index() / LOGICAL_WARP; }
DEVICE int lane() { return thread_index() % LOGICAL_WARP; }
template <class I>
DEVICE I minimum(I a, I b) {
  return a < b ? a : b;
}

template <class I>
DEVICE I maximum(I a, I b) {
  return a > b ? a : b;
}

// A 64-bit division takes some ninety instructions; most operands are small.
DEVICE int64_t divide(int64_t a, int64_t b) {
  if (static_cast<uint64_t>(a | b) >> 32) return a / b;
  return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}
DEVICE int64_t ceil_div(int64_t a, int64_t b) { return divide(a + b - 1, b); }

// COUNT adjacent elements in the registers they were loaded into. The compiler unpacks an array of elements at once,
// and so waits for the load where it is issued.
template <class T, int COUNT>
struct RawVector {
  static constexpr int SIZE = COUNT * sizeof(T) / 4;
  uint32_t word[SIZE] = {};

  DEVICE RawVector zero_unless(bool condition) const {
    RawVector y;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) y.word[i] = condition ? word[i] : 0;
    return y;
  }
  DEVICE static RawVector of(const Vector<T, COUNT>& x) {
    RawVector y;
    __builtin_memcpy(y.word, &x, sizeof(y.word));
    return y;
  }
  DEVICE void to_floats(float (&x)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      if constexpr (sizeof(T) == 4) {
        x[i] = bits_float(word[i]);
      } else {
        unpack<T>(word[i], x[2 * i], x[2 * i + 1]);
      }
    }
  }
};

// A filter of more than TAPS / 2 and up to TAPS weights, the last for the present time. The taps that a narrower filter
// lacks are skipped: zero times an infinite input would be NaN.
template <int TAPS>
struct Filter {
  int unused_taps;
  float weight[TAPS], bias;

  DEVICE Filter(const float* weights, const float* biases, int64_t width, int64_t channel)
      : unused_taps(TAPS - static_cast<int>(width)), bias(biases ? biases[channel] : 0.0f) {
#pragma unroll
    for (int k = 0; k < TAPS; ++k) weight[k] = used<false>(k) ? weights[channel * width + k - unused_taps] : 0.0f;
  }
  template <bool EXACT>
  DEVICE bool used(int k) const {
    return EXACT || k >= TAPS / 2 || k >= unused_taps;
  }
  DEVICE Filter scaled(float factor) const {
    Filter y = *this;
    y.bias *= factor;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) y.weight[k] *= factor;
    return y;
  }
};

// Calls body with a compile-time condition.
template <class Body>
DEVICE void bool_switch(bool condition, const Body& body) {
  condition ? body(std::true_type()) : body(std::false_type());
}

// One channel of one sequence. Times fit 32 bits, offsets do not.
template <class T>
struct Row {
  // No choice between a tensor and null: the compiler would no longer know that it is global memory.
  T* data;
  bool given;
  int64_t stride;
  int length;

  DEVICE Row(const Sequence& s, int64_t batch, int64_t channel, int64_t length)
      : data(static_cast<T*>(s.data) + batch * s.batch + channel * s.channel),
        given(s.data != nullptr),
        stride(s.time),
        length(static_cast<int>(length)) {}
  DEVICE T& operator[](int time) const { return data[time * stride]; }

  // Elements from the preceding 16-byte boundary to the row's start. Vectors begin that much before time 0, so that all
  // but a row's first and last are whole and aligned.
  DEVICE int misalignment() const {
    return static_cast<int>(reinterpret_cast<uintptr_t>(data) / sizeof(T) % (16 / sizeof(T)));
  }
  DEVICE bool aligned(int shift) const { return stride == 1 && misalignment() == shift; }

  template <int COUNT>
  DEVICE RawVector<T, COUNT> load_vector(int time) const {
    return RawVector<T, COUNT>::of(load<COUNT>(data + time));
  }
  template <int COUNT>
  DEVICE void store_vector(int time, const float (&x)[COUNT]) const {
    store(data + time, Vector<T, COUNT>::from_floats(x));
  }
  // The same at an edge, or unvectorized: times outside the row read zero and are not stored.
  template <int COUNT>
  DEVICE RawVector<T, COUNT> read(int time, bool vectors) const {
    if (vectors && time >= 0 && time + COUNT <= length) return load_vector<COUNT>(time);
    const T* start = data + time * stride;
    Vector<T, COUNT> x;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x.value[i] = contains(time + i) ? start[i * stride] : T{};
    return RawVector<T, COUNT>::of(x);
  }
  template <int COUNT>
  DEVICE void write(int time, bool vectors, const float (&x)[COUNT]) const {
    if (vectors && time >= 0 && time + COUNT <= length) return store_vector(time, x);
    T* start = data + time * stride;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (contains(time + i)) start[i * stride] = from_float<T>(x[i]);
  }
  DEVICE bool contains(int time) const { return static_cast<unsigned>(time) < static_cast<unsigned>(length); }
};

// COLUMNS adjacent channels of one sequence, token-major.
template <class T, int COLUMNS>
struct Columns {
  char* data;
  int64_t channel, time_bytes;
  int count;

  DEVICE Columns(const Sequence& s, int64_t channels, int64_t batch, int64_t first)
      : data(reinterpret_cast<char*>(static_cast<T*>(s.data) + batch * s.batch + first * s.channel)),
        channel(s.channel),
        time_bytes(s.time * static_cast<int64_t>(sizeof(T))),
        count(static_cast<int>(minimum<int64_t>(channels - first, COLUMNS))) {}
  DEVICE bool vectors() const {
    const uintptr_t apart = reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(time_bytes);
    return count == COLUMNS && channel == 1 && apart % Vector<T, COLUMNS>::ALIGNMENT == 0;
  }
  // Two instructions: no time is negative here.
  DEVICE T* at(int t) const { return reinterpret_cast<T*>(data + static_cast<uint32_t>(t) * time_bytes); }
  template <bool VECTORS>
  DEVICE RawVector<T, COLUMNS> read(int t) const {
    const T* start = at(t);
    if constexpr (VECTORS) return RawVector<T, COLUMNS>::of(load<COLUMNS>(start));
    Vector<T, COLUMNS> x;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) x.value[c] = c < count ? start[c * channel] : T{};
    return RawVector<T, COLUMNS>::of(x);
  }
  template <bool VECTORS>
  DEVICE void write(int t, const float (&x)[COLUMNS]) const {
    T* start = at(t);
    if constexpr (VECTORS) return store(start, Vector<T, COLUMNS>::from_floats(x));
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      if (c < count) start[c * channel] = from_float<T>(x[c]);
  }
};

// The sequence that each time belongs to. Times before 0 belong to the first.
struct Segments {
  const int32_t* row;
  bool given;
  int length;

  DEVICE Segments(const int32_t* segment, int64_t length, int64_t batch)
      : row(segment + batch * length), given(segment != nullptr), length(static_cast<int>(length)) {}
  DEVICE int32_t at(int time) const { return row[time < 0 ? 0 : minimum(time, length - 1)]; }
  DEVICE bool same(int a, int b) const { return !given || at(a) == at(b); }
};

// Which of COUNT consecutive times belong to the same sequence.
template <int COUNT, bool SEGMENTED>
struct SameSegment {
  int32_t id[SEGMENTED ? COUNT : 1];

  DEVICE SameSegment(const Segments& segments, int time) {
    if constexpr (SEGMENTED) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) id[i] = segments.at(time + i);
    }
  }
  DEVICE bool same(int i, int j) const {
    if constexpr (SEGMENTED) return id[i] == id[j];
    return true;
  }
};

// The input at any time: before time 0 the initial state, and zeros before that.
template <class T>
DEVICE T input_at(const Row<T>& x, const Row<T>& initial, int time) {
  if (time >= 0) return x[time];
  return initial.given && time >= -initial.length ? initial[time + initial.length] : T{};
}

// Replaces the zeros that were read before time 0 by the initial state; x[0] is at `time`.
template <class T, int COUNT>
DEVICE void add_initial(float (&x)[COUNT], const Row<T>& initial, int time) {
  if (!initial.given || time >= 0) return;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (initial.contains(time + i + initial.length)) x[i] = to_float(initial[time + i + initial.length]);
}

// Concatenates the times before a vector, of which all but the first element count, and the vector's eight.
template <class T, int TAPS>
DEVICE void concatenate(float (&x)[TAPS - 1 + 8], const RawVector<T, TAPS>& before, const RawVector<T, 8>& now) {
  float past[TAPS], present[8];
  before.to_floats(past);
  now.to_floats(present);
#pragma unroll
  for (int i = 0; i < TAPS - 1; ++i) x[i] = past[1 + i];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[TAPS - 1 + i] = present[i];
}

// silu and its derivative take y = z / SILU_SCALE: a filter scaled by it gives z, whose exponential needs no further
// product. Not in fp32, where the rounding of every weight would show.
template <class T>
constexpr float SILU_SCALE = sizeof(T) == 4 ? 1.0f : -LOG2_E;
// exp(-y).
template <class T>
DEVICE float exp_negative(float z) {
  return exp2_approx(sizeof(T) == 4 ? z * -LOG2_E : z);
}
template <class T>
DEVICE float silu(float z) {
  return z * reciprocal(SILU_SCALE<T> * exp_negative<T>(z) + SILU_SCALE<T>);
}
// Times `factor`.
template <class T>
DEVICE float silu_derivative(float z, float factor = 1.0f) {
  const float s = reciprocal(1.0f + exp_negative<T>(z)), per_z = factor / SILU_SCALE<T>;
  return s * (factor + z * (per_z - per_z * s));
}

// Eight times of one channel, before silu, from the inputs since `time` - TAPS + 1. EXACT: no tap is unused.
template <int TAPS, bool SEGMENTED, bool EXACT>
DEVICE void convolve(float (&y)[8], const float (&x)[TAPS - 1 + 8], const Filter<TAPS>& filter,
                     const Segments& segments, int time) {
  constexpr int PAST = TAPS - 1;
  const SameSegment<PAST + 8, SEGMENTED> same_segment(segments, time - PAST);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    y[i] = filter.bias;
#pragma unroll
    for (int k = 0; k < TAPS; ++k)
      if (filter.template used<EXACT>(k) && same_segment.same(i + k, i + PAST)) y[i] += filter.weight[k] * x[i + k];
  }
}

// The filters of COLUMNS adjacent channels.
template <int TAPS, int COLUMNS>
struct Filters {
  int unused_taps;
  float weight[COLUMNS][TAPS], bias[COLUMNS];

  DEVICE Filters(const float* weights, const float* biases, int64_t width, int64_t first, int count)
      : unused_taps(TAPS - static_cast<int>(width)) {
    const uintptr_t starts = reinterpret_cast<uintptr_t>(weights) | reinterpret_cast<uintptr_t>(biases);
    if constexpr (TAPS == 4) {
      // Element by element, lanes would read a filter apart: as many cache lines for a quarter of their content.
      if (unused_taps == 0 && count == COLUMNS && starts % 16 == 0) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          load_float4(weight[c], weights + (first + c) * TAPS);
          bias[c] = 0.0f;
        }
        if (biases) COLUMNS == 4 ? load_float4(bias, biases + first) : load_float2(bias, biases + first);
        return;
      }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const Filter<TAPS> one(weights, biases, width, first + (c < count ? c : 0));
      bias[c] = one.bias;
#pragma unroll
      for (int k = 0; k < TAPS; ++k) weight[c][k] = one.weight[k];
    }
  }
  DEVICE bool used(int k) const { return k >= TAPS / 2 || k >= unused_taps; }
  DEVICE Filters scaled(float factor) const {
    Filters y = *this;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      y.bias[c] *= factor;
#pragma unroll
      for (int k = 0; k < TAPS; ++k) y.weight[c][k] *= factor;
    }
    return y;
  }
  // Step s of the inputs x, before silu.
  template <bool SEGMENTED, int COUNT, int ROWS>
  DEVICE void apply(float (&y)[COLUMNS], const float (&x)[ROWS][COLUMNS],
                    const SameSegment<COUNT, SEGMENTED>& same_segment, int s) const {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) y[c] = bias[c];
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
      if (!used(k) || !same_segment.same(s + k, s + TAPS - 1)) continue;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) y[c] += weight[c][k] * x[s + k][c];
    }
  }
};

// COUNT times from `time` on, with all loads in flight together. A time outside the row repeats another; mask_rows()
// follows.
template <bool VECTORS, class T, int COLUMNS, int COUNT>
DEVICE void load_rows(RawVector<T, COLUMNS> (&rows)[COUNT], const Columns<T, COLUMNS>& in, int time, int length) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) rows[i] = in.template read<VECTORS>(maximum(minimum(time + i, length - 1), 0));
}

// Zeros outside the row, and before time 0 the initial state of `history` inputs.
template <bool VECTORS, class T, int COLUMNS, int COUNT>
DEVICE void mask_rows(RawVector<T, COLUMNS> (&rows)[COUNT], const Columns<T, COLUMNS>& initial, int history, int time,
                      int length) {
  if (time >= 0 && time + COUNT <= length) return;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int t = time + i;
    rows[i] = rows[i].zero_unless(t >= 0 && t < length);
    if (t < 0 && t >= -history) rows[i] = initial.template read<false>(t + history);
  }
}

}  // namespace conv
