// Tiles, thread items and global memory access of the scan, outside the recurrence.
// Tiling: a block has a tile of 32 channels, chunks of 32 steps and 16 states at once; a thread has 8 items of a
//   chunk.
#pragma once

#include "device_math.h"

// A block scans a tile of CHANNELS channels, in chunks of CHUNK steps with one checkpoint each.
constexpr int CHANNELS = 32;
constexpr int CHUNK = 32;
constexpr int THREADS = 128;
// A state tile: the states of one pass over a chunk. More states take several passes.
constexpr int STATE_TILE = 16;
// A state tile of a block's channels in shared memory, four states a thread.
constexpr int STATES_BYTES = THREADS * 4 * sizeof(float);

// Row strides of shared arrays, in floats, free of bank conflicts. Per channel: elementwise threads write 16 bytes, mma
// operands are read word by word.
constexpr int ROW = CHUNK + 4;
// Per time: B and C over states.
constexpr int STATE_ROW = STATE_TILE + 8;

// exp(dt A), with a = A log2(e).
DEVICE float decay_factor(float dt, float a) {
  return exp2_approx(EXP2_CORRECTION == 0.0f ? dt * a : __builtin_fmaf(dt, a, EXP2_CORRECTION));
}

// A block's tile: at most 32 channels of one group of one sequence.
struct ChannelTile {
  int64_t batch, group, block, blocks, first;
  int channels;

  DEVICE explicit ChannelTile(const ScanSizes& s) {
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

// Eight adjacent elements in the registers they were loaded into. The compiler unpacks an array of elements at once,
// and so waits for the load where it is issued.
template <class T>
struct RawItems {
  uint32_t word[2 * sizeof(T)];

  DEVICE void load(const T* from) {
    const Vector8<T> x = load_vector8(from);
    __builtin_memcpy(word, &x, sizeof(word));
  }
  DEVICE void load_no_allocate(const T* from) {
    const Vector8<T> x = load_global_no_allocate<8>(from);
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

// A thread's items: eight adjacent elements of a chunk, along time (channel-first) or along channels (token-major). A
// chunk has THREADS times eight.
template <bool ALONG_TIME>
struct ThreadItems {
  static constexpr bool along_time = ALONG_TIME;
  int index;

  DEVICE explicit ThreadItems(int index = thread_index()) : index(index) {}
  DEVICE int major() const { return index / 4; }
  DEVICE int minor() const { return index % 4 * 8; }
  DEVICE int channel() const { return along_time ? major() : minor(); }
  DEVICE int time() const { return along_time ? minor() : major(); }
  DEVICE int channel_of(int i) const { return along_time ? major() : minor() + i; }

  // The number of items inside the tensor (CUB's valid_items).
  DEVICE int valid(int channels, int64_t steps) const {
    const bool other = along_time ? major() < channels : major() < steps;
    const int64_t left = (along_time ? steps : static_cast<int64_t>(channels)) - minor();
    return !other || left <= 0 ? 0 : left < 8 ? static_cast<int>(left) : 8;
  }
};

// Row pointers of each tensor: of the tile's 32 channels, or of the first chunk's 32 times. Reading one costs less than
// the product of a 64-bit stride. A missing channel takes the last channel's pointer.
template <int TENSORS>
struct RowPointers {
  uintptr_t start[TENSORS][32];

  template <class T, class S>
  DEVICE void store_shared(int tensor, const Sequence& s, const ChannelTile& tile, S) {
    if (thread_index() < 32) {
      const int channel = thread_index() < tile.channels ? thread_index() : tile.channels - 1;
      const int64_t row = S::along_time ? channel * s.channel : thread_index() * s.time;
      start[tensor][thread_index()] =
          reinterpret_cast<uintptr_t>(static_cast<T*>(s.data) + tile.batch * s.batch + tile.first * s.channel + row);
    }
  }
  template <class T, bool FULL, class S>
  DEVICE T* items(int tensor, const Sequence& s, int64_t chunk, S items) const {
    T* row = global_pointer<T>(start[tensor][items.major()]);
    if constexpr (FULL && S::along_time) return row + (chunk * CHUNK + items.minor());
    return row + chunk * CHUNK * s.time + items.minor() * (S::along_time ? s.time : s.channel);
  }
};

// Whether thread items are one vectorized access.
template <class T>
DEVICE bool is_vector_access(const T* start, int64_t stride, int64_t valid) {
  return stride == 1 && valid >= 8 && reinterpret_cast<uintptr_t>(start) % 16 == 0;
}

// FULL: the chunk lies inside its tensors and all items are aligned to 16 bytes. In another chunk some items may still
// be: those of a channel that exists in a tile with missing channels.
template <class T, bool FULL, class S>
DEVICE void load_items(RawItems<T>& x, const T* start, const Sequence& s, int valid, S) {
  const int64_t stride = S::along_time ? s.time : s.channel;
  if (FULL || is_vector_access(start, stride, valid)) {
    x.load(start);
  } else if (valid <= 0) {
    x.clear();
  } else {
    float value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = i < valid ? to_float(start[i * stride]) : 0.0f;
    x.set(value);
  }
}

template <class T, bool FULL, class S>
DEVICE void store_items(T* start, const Sequence& s, int valid, const float (&x)[8], S) {
  const int64_t stride = S::along_time ? s.time : s.channel;
  if (FULL || is_vector_access(start, stride, valid)) {
    store_global(start, Vector8<T>::from_floats(x));
  } else if (valid > 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < valid) start[i * stride] = from_float<T>(x[i]);
    }
  }
}

// Eight items in a shared array [channel][time].
template <class S>
DEVICE void store_shared_items(float* rows, const float (&x)[8], S items) {
  float* start = rows + items.channel() * ROW + items.time();
  if constexpr (S::along_time) {
    store_float4(start, x[0], x[1], x[2], x[3]);
    store_float4(start + 4, x[4], x[5], x[6], x[7]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) start[i * ROW] = x[i];
  }
}

template <class S>
DEVICE void load_shared_items(float (&x)[8], const float* rows, S items) {
  const float* start = rows + items.channel() * ROW + items.time();
  if constexpr (S::along_time) {
    load_float4(x, start);
    load_float4(x + 4, start + 4);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = start[i * ROW];
  }
}

// Whether items of B or C are vectorized accesses.
DEVICE bool is_vectorized(const Projection& s) {
  const int64_t strides = s.batch | s.group | s.state;
  return s.time == 1 && strides % 8 == 0 && reinterpret_cast<uintptr_t>(s.data) % 16 == 0;
}

// The chunks whose accesses are all vectorized: of thread items, and of B and C.
struct VectorizedChunks {
  // Chunks before this number.
  int item_chunks, projection_chunks;

  // `full`: no channel of the tile is missing, or another stands in for it.
  DEVICE VectorizedChunks(const ScanSizes& sizes, const Projection& b, const Projection& c, bool full) {
    const int chunks = static_cast<int>(sizes.length / CHUNK);
    item_chunks = full && sizes.aligned ? chunks : 0;
    projection_chunks = is_vectorized(b) && is_vectorized(c) && sizes.states % STATE_TILE == 0 ? chunks : 0;
  }
  DEVICE bool items(int chunk) const { return chunk < item_chunks; }
  DEVICE bool projections(int chunk) const { return chunk < projection_chunks; }
  DEVICE int both() const { return item_chunks < projection_chunks ? item_chunks : projection_chunks; }
};

// A thread's items of a chunk of B or C: eight steps of one state. Half of the THREADS threads have B, the others C.
template <class T>
struct ProjectionItems {
  int index;
  RawItems<T> value;

  DEVICE explicit ProjectionItems(int index = thread_index()) : index(index) {}
  DEVICE bool is_b() const { return index < THREADS / 2; }
  DEVICE int state() const { return index % STATE_TILE; }
  DEVICE int time() const { return index / STATE_TILE % 4 * 8; }

  // The first step of the first state tile.
  DEVICE const T* start(const Projection& b, const Projection& c, const ChannelTile& tile) const {
    const Projection& s = is_b() ? b : c;
    return static_cast<const T*>(s.data) + tile.batch * s.batch + tile.group * s.group + state() * s.state +
           time() * s.time;
  }

  template <bool FULL>
  DEVICE void load(const T* from, const Projection& b, const Projection& c, const ScanSizes& sizes, int64_t state_tile,
                   int64_t chunk) {
    const Projection& s = is_b() ? b : c;
    if constexpr (FULL) {
      value.load(from + chunk * CHUNK + (state_tile ? state_tile * STATE_TILE * s.state : 0));
    } else {
      const T* at = from + chunk * CHUNK * s.time + state_tile * STATE_TILE * s.state;
      const int64_t left = state_tile * STATE_TILE + state() < sizes.states ? sizes.length - chunk * CHUNK - time() : 0;
      if (is_vector_access(at, s.time, left)) return value.load(at);
      if (left <= 0) return value.clear();
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = i < left ? to_float(at[i * s.time]) : 0.0f;
      value.set(x);
    }
  }
  DEVICE void store_shared(float* b, float* c) const {
    float x[8];
    value.to_floats(x);
    float* to = (is_b() ? b : c) + time() * STATE_ROW + state();
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i * STATE_ROW] = x[i];
  }
};

// dt and dt u of thread items; zero outside the tensor, where the state then stays as it is.
template <class T, bool FULL>
DEVICE void discretize(float (&dt)[8], float (&dtu)[8], const RawItems<T>& delta, const RawItems<T>& u,
                       const float (&bias)[8], bool use_softplus, int valid) {
  float x[8], v[8];
  delta.to_floats(x);
  u.to_floats(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) dt[i] = x[i] + bias[i];
  if (use_softplus) {
#pragma unroll
    for (int i = 0; i < 8; ++i) dt[i] = softplus(dt[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!FULL && i >= valid) dt[i] = 0.0f;
    dtu[i] = FULL || i < valid ? dt[i] * v[i] : 0.0f;
  }
}

// A parameter of each channel, loaded early and stored to shared memory late.
struct ChannelParameter {
  float value = 0.0f;

  DEVICE ChannelParameter(const float* source, const ChannelTile& tile) {
    if (source && thread_index() < tile.channels) value = source[tile.first + thread_index()];
  }
  DEVICE void store_shared(float* to) const {
    if (thread_index() < CHANNELS) to[thread_index()] = value;
  }
};
// The parameter of each of a thread's items.
template <class S>
DEVICE void load_parameter(float (&x)[8], const float* values, S items) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = values[items.channel_of(i)];
}

// For each step of a chunk: 0 where a new sequence starts, else 1.
DEVICE void store_continues(float* continues, const int32_t* segment, const ChannelTile& tile, int64_t length,
                            int64_t chunk, int index = thread_index()) {
  const int64_t t = chunk * CHUNK + index;
  if (index < CHUNK) {
    const int32_t* s = segment + tile.batch * length;
    continues[index] = t > 0 && t < length && s[t] != s[t - 1] ? 0.0f : 1.0f;
  }
}
