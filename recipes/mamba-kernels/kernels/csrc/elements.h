// Arithmetic and memory access of single elements, outside the recurrence.
#pragma once

#include "portable.h"

// A block scans CHANNELS channels; time goes in chunks of CHUNK steps, one checkpoint each.
constexpr int CHANNELS = 32;
constexpr int CHUNK = 32;
constexpr int THREADS = 128;
// States that a pass over a chunk handles; d_state above it takes several passes.
constexpr int SLAB = 16;

// Rows of shared memory, in floats; each stride keeps its readers off each other's banks:
// per channel, elementwise threads write 16 bytes and matrix operands read single words;
constexpr int ROW = CHUNK + 4;
// per time, B and C over states.
constexpr int STATE_ROW = SLAB + 8;

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

DEVICE bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

// What a step of size dt leaves of a state, with a = A log2(e).
DEVICE float decay_of(float dt, float a) {
  return exp2_fast(EXPONENT_SHIFT == 0.0f ? dt * a : __builtin_fmaf(dt, a, EXPONENT_SHIFT));
}

DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-x * LOG2_E)); }

// softplus(x) = max(x, 0) + log(1 + t) with t = exp(-|x|). The polynomial is log(1 + t) / t on [0, 1], 1 at 0, with the
// least relative error per 0.3 + t, 3.5e-7: exact where it counts, for a scan with small steps sums what each is off.
DEVICE float softplus(float x) {
  const float t = exp2_fast(-LOG2_E * __builtin_fabsf(x));
  float p = 0.0479126237f - 0.0096224416f * t;
  p = p * t - 0.112987801f;
  p = p * t + 0.181110397f;
  p = p * t - 0.24625358f;
  p = p * t + 0.332976431f;
  p = p * t - 0.499988675f;
  p = p * t + 1.0f;
  return p * t + (x > 0.0f ? x : 0.0f);
}

// Which 32 channels of which sequence a block works on.
struct Place {
  int64_t batch, group, block, blocks, first;
  int channels;

  DEVICE explicit Place(const ScanSizes& s) {
    const int64_t per_group = s.channels / s.groups;
    blocks = (per_group + CHANNELS - 1) / CHANNELS;
    const int64_t index = block_index();
    block = index % blocks;
    group = index / blocks % s.groups;
    batch = index / blocks / s.groups;
    first = group * per_group + block * CHANNELS;
    const int64_t left = per_group - block * CHANNELS;
    channels = left < CHANNELS ? static_cast<int>(left) : CHANNELS;
  }
};

// Eight adjacent elements as the words they are loaded in: taken apart into elements at once, as the compiler
// does with an array of them, they would be waited for where they are loaded.
template <class T>
struct Packed {
  uint32_t word[2 * sizeof(T)];

  DEVICE void load(const T* from) {
    const Eight<T> x = load_eight(from);
    __builtin_memcpy(word, &x, sizeof(word));
  }
  DEVICE void load_once(const T* from) {
    const Eight<T> x = read_once<8>(from);
    __builtin_memcpy(word, &x, sizeof(word));
  }
  DEVICE void clear() {
#pragma unroll
    for (uint32_t& each : word) each = 0;
  }
  DEVICE void set(const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      if constexpr (sizeof(T) == 4) {
        word[i] = float_bits(x[i]);
        word[i + 1] = float_bits(x[i + 1]);
      } else {
        word[i / 2] = pack<T>(x[i], x[i + 1]);
      }
    }
  }
  DEVICE void to_floats(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      if constexpr (sizeof(T) == 4) {
        x[i] = bits_float(word[i]);
        x[i + 1] = bits_float(word[i + 1]);
      } else {
        unpack<T>(word[i / 2], x[i], x[i + 1]);
      }
    }
  }
};

// The eight elements of a chunk that a thread handles: adjacent in memory, in time or in channels. A chunk has
// THREADS strips.
template <bool ALONG_TIME>
struct Strip {
  static constexpr bool along_time = ALONG_TIME;
  int index;

  DEVICE explicit Strip(int index = thread_index()) : index(index) {}
  DEVICE int major() const { return index / 4; }
  DEVICE int minor() const { return index % 4 * 8; }
  DEVICE int channel() const { return along_time ? major() : minor(); }
  DEVICE int time() const { return along_time ? minor() : major(); }
  DEVICE int channel_of(int i) const { return along_time ? major() : minor() + i; }

  // How many of the eight lie inside the tensor.
  DEVICE int inside(int channels, int64_t steps) const {
    const bool other = along_time ? major() < channels : major() < steps;
    const int64_t left = (along_time ? steps : static_cast<int64_t>(channels)) - minor();
    return !other || left <= 0 ? 0 : left < 8 ? static_cast<int>(left) : 8;
  }
};

// For each tensor where the block's 32 channels, or the first chunk's 32 times, start: strides are 64-bit
// numbers whose products cost more than to read an address. The last channel stands in for those that lack.
template <int TENSORS>
struct Rows {
  uintptr_t start[TENSORS][32];

  template <class T, class S>
  DEVICE void put(int tensor, const Sequence& s, const Place& place, S) {
    if (thread_index() < 32) {
      const int channel = thread_index() < place.channels ? thread_index() : place.channels - 1;
      const int64_t row = S::along_time ? channel * s.channel : thread_index() * s.time;
      start[tensor][thread_index()] =
          reinterpret_cast<uintptr_t>(static_cast<T*>(s.data) + place.batch * s.batch + place.first * s.channel + row);
    }
  }
  template <class T, bool WHOLE, class S>
  DEVICE T* strip(int tensor, const Sequence& s, int64_t chunk, S strip) const {
    T* row = reinterpret_cast<T*>(start[tensor][strip.major()]);
    if constexpr (WHOLE && S::along_time) return row + (chunk * CHUNK + strip.minor());
    return row + chunk * CHUNK * s.time + strip.minor() * (S::along_time ? s.time : s.channel);
  }
};

// Whether a strip is eight numbers that can be read at once.
template <class T>
DEVICE bool is_vector(const T* start, int64_t stride, int64_t inside) {
  return stride == 1 && inside >= 8 && reinterpret_cast<uintptr_t>(start) % 16 == 0;
}

// WHOLE: all of a chunk lies inside its tensors and its strips start on 16 bytes. Of other chunks some strips do: of a
// channel that is there, of a block in which others are not.
template <class T, bool WHOLE, class S>
DEVICE void load_strip(Packed<T>& x, const T* start, const Sequence& s, int inside, S) {
  const int64_t stride = S::along_time ? s.time : s.channel;
  if (WHOLE || is_vector(start, stride, inside)) {
    x.load(start);
  } else if (inside <= 0) {
    x.clear();
  } else {
    float value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = i < inside ? to_float(start[i * stride]) : 0.0f;
    x.set(value);
  }
}

template <class T, bool WHOLE, class S>
DEVICE void store_strip(T* start, const Sequence& s, int inside, const float (&x)[8], S) {
  const int64_t stride = S::along_time ? s.time : s.channel;
  if (WHOLE || is_vector(start, stride, inside)) {
    store_global(start, Eight<T>::from_floats(x));
  } else if (inside > 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < inside) start[i * stride] = from_float<T>(x[i]);
    }
  }
}

// In pairs, so that no term is added to more than three others.
DEVICE float sum_of_eight(const float* x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// A sum of any length, with what its last addition rounded off.
struct LongSum {
  float sum, excess;

  DEVICE void add(float x) {
    const float missing = x - excess, next = sum + missing;
    // Of an infinite sum the excess would be NaN.
    excess = is_finite(next) ? (next - sum) - missing : 0.0f;
    sum = next;
  }
};

// The sum of `count` floats that are `stride` apart, by eights: their loads do not wait for each other.
DEVICE float sum_of(const float* terms, int64_t count, int64_t stride) {
  LongSum total{};
#pragma unroll 1
  for (int64_t first = 0; first < count; first += 8) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = first + i < count ? terms[(first + i) * stride] : 0.0f;
    total.add(sum_of_eight(x));
  }
  return total.sum;
}

// Eight floats of a strip in an array of shared memory over [channel][time].
template <class S>
DEVICE void put_strip(float* rows, const float (&x)[8], S strip) {
  float* start = rows + strip.channel() * ROW + strip.time();
  if constexpr (S::along_time) {
    store_four(start, x[0], x[1], x[2], x[3]);
    store_four(start + 4, x[4], x[5], x[6], x[7]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) start[i * ROW] = x[i];
  }
}

template <class S>
DEVICE void get_strip(float (&x)[8], const float* rows, S strip) {
  const float* start = rows + strip.channel() * ROW + strip.time();
  if constexpr (S::along_time) {
    load_four(x, start);
    load_four(x + 4, start + 4);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = start[i * ROW];
  }
}

// Whether strips of B and C can be read 16 bytes at once.
DEVICE bool vectors(const Projection& s) {
  const int64_t strides = s.batch | s.group | s.state;
  return s.time == 1 && strides % 8 == 0 && reinterpret_cast<uintptr_t>(s.data) % 16 == 0;
}

// Which chunks can be read and written 16 bytes at once: their strips, and their B and C.
struct Vectorised {
  // All before these.
  int with_strips, with_projections;

  // `full`: no channel of the block lacks, or another stands in for it.
  DEVICE Vectorised(const ScanSizes& sizes, const Projection& b, const Projection& c, bool full) {
    const int chunks = static_cast<int>(sizes.length / CHUNK);
    with_strips = full && sizes.aligned ? chunks : 0;
    with_projections = vectors(b) && vectors(c) && sizes.states % SLAB == 0 ? chunks : 0;
  }
  DEVICE bool strips(int chunk) const { return chunk < with_strips; }
  DEVICE bool projections(int chunk) const { return chunk < with_projections; }
  DEVICE int with_both() const { return with_strips < with_projections ? with_strips : with_projections; }
};

// One thread's share of a chunk of B or C: a state's eight steps. Of THREADS shares half are B's, the others C's.
template <class T>
struct ProjectionStrip {
  int index;
  Packed<T> value;

  DEVICE explicit ProjectionStrip(int index = thread_index()) : index(index) {}
  DEVICE bool is_b() const { return index < THREADS / 2; }
  DEVICE int state() const { return index % SLAB; }
  DEVICE int time() const { return index / SLAB % 4 * 8; }

  // At the first step of the first slab.
  DEVICE const T* start(const Projection& b, const Projection& c, const Place& place) const {
    const Projection& s = is_b() ? b : c;
    return static_cast<const T*>(s.data) + place.batch * s.batch + place.group * s.group + state() * s.state +
           time() * s.time;
  }

  template <bool WHOLE>
  DEVICE void load(const T* from, const Projection& b, const Projection& c, const ScanSizes& sizes, int64_t slab,
                   int64_t chunk) {
    const Projection& s = is_b() ? b : c;
    if constexpr (WHOLE) {
      value.load(from + chunk * CHUNK + (slab ? slab * SLAB * s.state : 0));
    } else {
      const T* at = from + chunk * CHUNK * s.time + slab * SLAB * s.state;
      const int64_t left = slab * SLAB + state() < sizes.states ? sizes.length - chunk * CHUNK - time() : 0;
      if (is_vector(at, s.time, left)) return value.load(at);
      if (left <= 0) return value.clear();
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = i < left ? to_float(at[i * s.time]) : 0.0f;
      value.set(x);
    }
  }
  DEVICE void put(float* b, float* c) const {
    float x[8];
    value.to_floats(x);
    float* to = (is_b() ? b : c) + time() * STATE_ROW + state();
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i * STATE_ROW] = x[i];
  }
};
