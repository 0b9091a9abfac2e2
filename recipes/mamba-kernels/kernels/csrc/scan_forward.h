// Selective scan, forward: h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = C_t h_t + D u_t, out_t = y_t silu(z_t).
#pragma once

#include "waves.h"

// A times log2(e) for the lane's elements; zero beyond the last state or channel, where h stays zero.
DEVICE void load_decay(float (&a)[4], const float* source, const ScanSizes& s, const Place& place, const Lane& lane,
                       int64_t slab) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int channel = lane.channel(e / Lane::STATES_EACH);
    const int64_t n = slab * SLAB + lane.state() + e % Lane::STATES_EACH;
    const bool inside = channel < place.channels && n < s.states;
    a[e] = inside ? source[(place.first + channel) * s.states + n] * LOG2_E : 0.0f;
  }
}

// A lane's adjacent states.
DEVICE void load_states(float* h, const float* from) {
  if constexpr (Lane::STATES_EACH == 2) {
    load_two(h, from);
  } else {
    load_four(h, from);
  }
}
DEVICE void store_states(float* to, const float* h) {
  if constexpr (Lane::STATES_EACH == 2) {
    store_two(to, h[0], h[1]);
  } else {
    store_four(to, h[0], h[1], h[2], h[3]);
  }
}

// The lane's elements of a (batch, channels, chunks, states) tensor.
struct StateAddress {
  int64_t start[Lane::CHANNELS_EACH];
  int states;
  bool whole;

  DEVICE StateAddress(const ScanSizes& s, const Place& place, const Lane& lane, int64_t slab, int64_t chunks) {
    const int64_t n = slab * SLAB + lane.state();
    states = n < s.states ? static_cast<int>(s.states - n < 4 ? s.states - n : 4) : 0;
#pragma unroll
    for (int c = 0; c < Lane::CHANNELS_EACH; ++c) {
      const int channel = lane.channel(c);
      start[c] = ((place.batch * s.channels + place.first + channel) * chunks) * s.states + n;
      if (channel >= place.channels) start[c] = -1;
    }
    whole = place.channels == CHANNELS && s.states % SLAB == 0;
  }
  DEVICE void load(float (&h)[4], const float* from, int64_t offset) const {
    if (whole) {
#pragma unroll
      for (int c = 0; c < Lane::CHANNELS_EACH; ++c) load_states(h + c * Lane::STATES_EACH, from + start[c] + offset);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = e / Lane::STATES_EACH, j = e % Lane::STATES_EACH;
      h[e] = start[c] >= 0 && j < states ? from[start[c] + offset + j] : 0.0f;
    }
  }
  DEVICE void store(float* to, int64_t offset, const float (&h)[4]) const {
    if (whole) {
#pragma unroll
      for (int c = 0; c < Lane::CHANNELS_EACH; ++c) store_states(to + start[c] + offset, h + c * Lane::STATES_EACH);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = e / Lane::STATES_EACH, j = e % Lane::STATES_EACH;
      if (start[c] >= 0 && j < states) to[start[c] + offset + j] = h[e];
    }
  }
};

// dt, and dt u, of a strip; zero outside the tensor, where the state then stays as it is.
template <class T, bool WHOLE>
DEVICE void step_sizes(float (&dt)[8], float (&dtu)[8], const Packed<T>& delta, const Packed<T>& u,
                       const float (&bias)[8], bool soft, int inside) {
  float x[8], v[8];
  delta.to_floats(x);
  u.to_floats(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) dt[i] = x[i] + bias[i];
  if (soft) {
#pragma unroll
    for (int i = 0; i < 8; ++i) dt[i] = softplus(dt[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!WHOLE && i >= inside) dt[i] = 0.0f;
    dtu[i] = WHOLE || i < inside ? dt[i] * v[i] : 0.0f;
  }
}

// A per-channel parameter to shared memory, and from there for the elements of a strip.
DEVICE void put_parameter(float* to, const float* source, const Place& place) {
  const int channel = thread_index();
  if (channel < CHANNELS) to[channel] = source && channel < place.channels ? source[place.first + channel] : 0.0f;
}
template <class S>
DEVICE void strip_parameter(float (&x)[8], const float* values, S) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = values[S::channel_of(i)];
}

// Per step of a chunk 0 where a new sequence starts, else 1.
DEVICE void put_joins(float* joins, const int32_t* segment, const Place& place, int64_t length, int64_t chunk) {
  const int64_t t = chunk * CHUNK + thread_index();
  if (thread_index() < CHUNK) {
    const int32_t* s = segment + place.batch * length;
    joins[thread_index()] = t > 0 && t < length && s[t] != s[t - 1] ? 0.0f : 1.0f;
  }
}

// A scan goes the matrix way as long as all is finite: a matrix instruction multiplies masked steps too, and
// 0 * inf is NaN. From the first chunk that is not, it goes the plain way (PLAIN), where a NaN reaches no step
// before its own.

// Which chunks can be read and written 16 bytes at once.
struct Vectorised {
  bool possible;

  DEVICE Vectorised(const ScanSizes& sizes, const Place& place, const Projection& b, const Projection& c) {
    possible = sizes.aligned && place.channels == CHANNELS && vectors(b) && vectors(c) && sizes.states % SLAB == 0;
  }
  DEVICE bool whole(const ScanSizes& sizes, int64_t chunk) const {
    return possible && (chunk + 1) * CHUNK <= sizes.length;
  }
};

struct ForwardShared {
  float dt[CHANNELS * ROW], dtu[CHANNELS * ROW];
  float y[Lane::PARTS * CHANNELS * ROW];
  float b[CHUNK * STATE_ROW], c[CHUNK * STATE_ROW];
  float joins[CHUNK], bias[CHANNELS], d[CHANNELS];
  Rows<4> rows;
  int broken;
};

// Of the states between slabs, by the chunk's parity: the plain way repeats a chunk, and itself none.
constexpr int FORWARD_COPIES = HAS_MATRIX_TF32 ? 2 : 1;

enum ForwardTensor { FORWARD_U, FORWARD_DELTA, FORWARD_Z, FORWARD_OUT };

// Eight steps of the recurrence: h in and out, y to shared memory.
template <class T, bool PLAIN, bool SEGMENTED>
DEVICE void forward_steps(float (&h)[4], const float (&a)[4], ForwardShared& s, int first, const Lane& lane,
                          const StepMasks& masks, bool accumulate) {
  Outer<T, PLAIN> input(s.dtu, s.b, first, lane, masks);
  StateSum<T, PLAIN, Y_IS_EXACT<T>> output(s.c, first, lane, masks);
  const float* dt_row = s.dt + lane.channel(0) * ROW + first;
#pragma unroll
  for (int quad = 0; quad < STEPS / 4; ++quad) {
    float dt[Lane::CHANNELS_EACH][4];
#pragma unroll
    for (int c = 0; c < Lane::CHANNELS_EACH; ++c) load_four(dt[c], dt_row + c * Lane::ROWS * ROW + quad * 4);
    input.load(quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = quad * 4 + i;
      float x[4];
      input.set(x, step);
      const bool restart = SEGMENTED && s.joins[first + step] == 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float decay = exp2_fast(dt[e / Lane::STATES_EACH][i] * a[e]);
        h[e] = restart ? x[e] : decay * h[e] + x[e];
      }
      output.add(h, step);
    }
  }
  output.finish();
  output.store(s.y, first, accumulate);
}

// The inputs of a strip, as they lie in memory.
template <class T>
struct ForwardInputs {
  Packed<T> u, delta, z;

  template <bool WHOLE, class S>
  DEVICE void load(const ScanForward& p, const ForwardShared& s, int64_t chunk, int inside, S strip) {
    const T* u_start = s.rows.template strip<T, WHOLE>(FORWARD_U, p.u, chunk, strip);
    const T* delta_start = s.rows.template strip<T, WHOLE>(FORWARD_DELTA, p.delta, chunk, strip);
    const T* z_start = s.rows.template strip<T, WHOLE>(FORWARD_Z, p.z, chunk, strip);
    load_strip<T, WHOLE>(u, u_start, p.u, inside, strip);
    load_strip<T, WHOLE>(delta, delta_start, p.delta, inside, strip);
    if (p.z.data) load_strip<T, WHOLE>(z, z_start, p.z, inside, strip);
  }
};

template <class T, bool WHOLE, class S>
DEVICE void store_outputs(const ScanForward& p, const ForwardShared& s, int64_t chunk, int inside,
                          const ForwardInputs<T>& inputs, S strip) {
  float y[8], v[8], d[8];
  strip_parameter(d, s.d, strip);
  get_sums(y, s.y, strip);
  inputs.u.to_floats(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] += d[i] * v[i];
  if (p.z.data) {
    inputs.z.to_floats(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] *= v[i] * sigmoid(v[i]);
  }
  store_strip<T, WHOLE>(s.rows.template strip<T, WHOLE>(FORWARD_OUT, p.out, chunk, strip), p.out, inside, y, strip);
}

// Scans the chunks from `chunk` on and returns the first that it could not: all, the plain way. The state before
// that chunk is in h or, with several slabs, in the slots of its parity.
template <class T, bool MANY, bool ALONG_TIME, bool PLAIN, bool SEGMENTED>
DEVICE int64_t forward_chunks(const ScanForward& p, ForwardShared& s, const Place& place, const Lane& lane,
                              int64_t chunk, float (&h)[4]) {
  const ScanSizes& sizes = p.sizes;
  const Strip<ALONG_TIME> strip;
  const StepMasks masks(lane);
  const Vectorised vectorised(sizes, place, p.b, p.c);
  const int64_t chunks = (sizes.length + CHUNK - 1) / CHUNK;
  const int64_t slabs = MANY ? (sizes.states + SLAB - 1) / SLAB : 1;
  auto inside = [&](int64_t chunk) { return strip.inside(place.channels, sizes.length - chunk * CHUNK); };
  auto slot = [&](int64_t slab, int64_t chunk) {
    return dynamic_shared() + ((slab * FORWARD_COPIES + chunk % FORWARD_COPIES) * THREADS + thread_index()) * 4;
  };
  float a[4];
  load_decay(a, p.a, sizes, place, lane, 0);

  ForwardInputs<T> next;
  ProjectionStrip<T> projections;
  const T* projections_start = projections.start(p.b, p.c, place);
  auto fetch = [&](int64_t chunk) {
    if (vectorised.whole(sizes, chunk)) {
      next.template load<true>(p, s, chunk, 8, strip);
      projections.template load<true>(projections_start, p.b, p.c, sizes, 0, chunk);
    } else {
      next.template load<false>(p, s, chunk, inside(chunk), strip);
      projections.template load<false>(projections_start, p.b, p.c, sizes, 0, chunk);
    }
  };
  fetch(chunk);
  for (; chunk < chunks; ++chunk) {
    const ForwardInputs<T> inputs = next;
    {
      float dt[8], dtu[8], bias[8];
      strip_parameter(bias, s.bias, strip);
      if (vectorised.whole(sizes, chunk)) {
        step_sizes<T, true>(dt, dtu, inputs.delta, inputs.u, bias, sizes.softplus != 0, 8);
      } else {
        step_sizes<T, false>(dt, dtu, inputs.delta, inputs.u, bias, sizes.softplus != 0, inside(chunk));
      }
      put_strip(s.dt, dt, strip);
      put_strip(s.dtu, dtu, strip);
    }
    projections.put(s.b, s.c);
    if (SEGMENTED) put_joins(s.joins, p.segment, place, sizes.length, chunk);
    barrier();
    if (chunk + 1 < chunks) fetch(chunk + 1);

    const float start[4] = {h[0], h[1], h[2], h[3]};
    for (int64_t slab = 0; slab < slabs; ++slab) {
      if constexpr (MANY) {
        if (slab > 0) {
          ProjectionStrip<T> more;
          more.template load<false>(projections_start, p.b, p.c, sizes, slab, chunk);
          barrier();
          more.put(s.b, s.c);
          barrier();
        }
        load_decay(a, p.a, sizes, place, lane, slab);
        load_four(h, slot(slab, chunk));
      }
      if (p.checkpoints) {
        StateAddress(sizes, place, lane, slab, chunks).store(p.checkpoints, chunk * sizes.states, h);
      }
#pragma unroll 1
      for (int first = 0; first < CHUNK; first += STEPS) {
        forward_steps<T, PLAIN, SEGMENTED>(h, a, s, first, lane, masks, slab > 0);
      }
      if (!PLAIN && !is_finite(h[0] + h[1] + h[2] + h[3])) s.broken = 1;
      if constexpr (MANY) store_four(slot(slab, chunk + 1), h[0], h[1], h[2], h[3]);
    }
    barrier();
    if (!PLAIN && s.broken) {
#pragma unroll
      for (int e = 0; e < 4; ++e) h[e] = start[e];
      return chunk;
    }
    if (vectorised.whole(sizes, chunk)) {
      store_outputs<T, true>(p, s, chunk, 8, inputs, strip);
    } else {
      store_outputs<T, false>(p, s, chunk, inside(chunk), inputs, strip);
    }
  }
  return chunk;
}

template <class T, bool MANY, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_forward(const ScanForward& p) {
  SHARED ForwardShared s;
  const ScanSizes& sizes = p.sizes;
  const Place place(sizes);
  const Strip<ALONG_TIME> strip;
  const Lane lane;
  const int64_t chunks = (sizes.length + CHUNK - 1) / CHUNK;
  const int64_t slabs = MANY ? (sizes.states + SLAB - 1) / SLAB : 1;
  auto slot = [&](int64_t slab, int64_t chunk) {
    return dynamic_shared() + ((slab * FORWARD_COPIES + chunk % FORWARD_COPIES) * THREADS + thread_index()) * 4;
  };
  s.rows.template put<T>(FORWARD_U, p.u, place, strip);
  s.rows.template put<T>(FORWARD_DELTA, p.delta, place, strip);
  s.rows.template put<T>(FORWARD_Z, p.z, place, strip);
  s.rows.template put<T>(FORWARD_OUT, p.out, place, strip);
  put_parameter(s.bias, p.delta_bias, place);
  put_parameter(s.d, p.d, place);
  if (thread_index() == 0) s.broken = 0;
  float h[4] = {};
  for (int64_t slab = 0; slab < slabs; ++slab) {
    if (p.initial) StateAddress(sizes, place, lane, slab, 1).load(h, p.initial, 0);
    if constexpr (MANY) store_four(slot(slab, 0), h[0], h[1], h[2], h[3]);
  }
  barrier();

  int64_t chunk = 0;
  if constexpr (HAS_MATRIX_TF32) {
    chunk = forward_chunks<T, MANY, ALONG_TIME, false, SEGMENTED>(p, s, place, lane, 0, h);
  }
  if (chunk < chunks) forward_chunks<T, MANY, ALONG_TIME, true, SEGMENTED>(p, s, place, lane, chunk, h);
  if (p.last) {
    for (int64_t slab = 0; slab < slabs; ++slab) {
      if constexpr (MANY) load_four(h, slot(slab, chunks));
      StateAddress(sizes, place, lane, slab, 1).store(p.last, 0, h);
    }
  }
}
