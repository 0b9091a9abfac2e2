// What leaves a split when nothing enters; see shares.h.
#pragma once

#include "quads.h"
#include "scan_forward.h"

// dt of a strip; zero outside the tensor, where the carry then stays as it is.
template <class T, bool WHOLE>
DEVICE void steps_of(float (&dt)[8], const Packed<T>& delta, const float (&bias)[8], bool soft, int inside) {
  delta.to_floats(dt);
#pragma unroll
  for (int i = 0; i < 8; ++i) dt[i] += bias[i];
  if (soft) {
#pragma unroll
    for (int i = 0; i < 8; ++i) dt[i] = softplus(dt[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) dt[i] = WHOLE || i < inside ? dt[i] : 0.0f;
}

// dy of a strip: the gradient of out past the gate.
template <class T, bool WHOLE>
DEVICE void ungated(float (&dy)[8], const Packed<T>& gradient, const Packed<T>& z, bool gated, int inside) {
  gradient.to_floats(dy);
  if (!gated) return;
  float v[8];
  z.to_floats(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) dy[i] = WHOLE || i < inside ? dy[i] * v[i] * sigmoid(v[i]) : 0.0f;
}

// A strip of an input that no other block reads.
template <class T, bool WHOLE, class S>
DEVICE void load_input(Packed<T>& x, const T* start, const Sequence& s, int inside, S strip) {
  if constexpr (WHOLE) {
    x.load_once(start);
  } else {
    load_strip<T, false>(x, start, s, inside, strip);
  }
}

struct SplitShared {
  // What enters at a step is this times B forward, times C backward.
  float dt[CHANNELS * ROW], input[CHANNELS * ROW];
  float b[CHUNK * QUAD_ROW], c[CHUNK * QUAD_ROW];
  float joins[CHUNK], bias[CHANNELS];
  Rows<3> rows;
};

// The way forward: the inputs dt u.
template <class T>
struct ForwardSplit {
  using Params = ScanForward;
  static constexpr bool FORWARD = true;
  enum Tensor { DELTA, U };
  Packed<T> delta, u;

  template <class S>
  DEVICE static void put_rows(const ScanForward& p, SplitShared& s, const Place& place, S strip) {
    s.rows.template put<T>(DELTA, p.delta, place, strip);
    s.rows.template put<T>(U, p.u, place, strip);
  }
  template <bool WHOLE, class S>
  DEVICE void load(const ScanForward& p, const SplitShared& s, int64_t chunk, int inside, S strip) {
    const T* delta_start = s.rows.template strip<T, WHOLE>(DELTA, p.delta, chunk, strip);
    const T* u_start = s.rows.template strip<T, WHOLE>(U, p.u, chunk, strip);
    load_strip<T, WHOLE>(delta, delta_start, p.delta, inside, strip);
    load_strip<T, WHOLE>(u, u_start, p.u, inside, strip);
  }
  template <bool WHOLE, class S>
  DEVICE void put(const ScanForward& p, SplitShared& s, int inside, S strip) const {
    float dt[8], dtu[8], bias[8];
    strip_parameter(bias, s.bias, strip);
    step_sizes<T, WHOLE>(dt, dtu, delta, u, bias, p.sizes.softplus != 0, inside);
    put_strip(s.dt, dt, strip);
    put_strip(s.input, dtu, strip);
  }
};

// The way back: the gradients dy.
template <class T>
struct BackwardSplit {
  using Params = ScanBackward;
  static constexpr bool FORWARD = false;
  enum Tensor { DELTA, Z, OUT_GRADIENT };
  Packed<T> delta, gradient, z;

  template <class S>
  DEVICE static void put_rows(const ScanBackward& p, SplitShared& s, const Place& place, S strip) {
    s.rows.template put<T>(DELTA, p.delta, place, strip);
    s.rows.template put<T>(Z, p.z, place, strip);
    s.rows.template put<T>(OUT_GRADIENT, p.out_gradient, place, strip);
  }
  template <bool WHOLE, class S>
  DEVICE void load(const ScanBackward& p, const SplitShared& s, int64_t chunk, int inside, S strip) {
    const T* delta_start = s.rows.template strip<T, WHOLE>(DELTA, p.delta, chunk, strip);
    const T* gradient_start = s.rows.template strip<T, WHOLE>(OUT_GRADIENT, p.out_gradient, chunk, strip);
    const T* z_start = s.rows.template strip<T, WHOLE>(Z, p.z, chunk, strip);
    load_input<T, WHOLE>(delta, delta_start, p.delta, inside, strip);
    load_input<T, WHOLE>(gradient, gradient_start, p.out_gradient, inside, strip);
    if (p.z.data) load_input<T, WHOLE>(z, z_start, p.z, inside, strip);
  }
  template <bool WHOLE, class S>
  DEVICE void put(const ScanBackward& p, SplitShared& s, int inside, S strip) const {
    float dt[8], dy[8], bias[8];
    strip_parameter(bias, s.bias, strip);
    steps_of<T, WHOLE>(dt, delta, bias, p.sizes.softplus != 0, inside);
    ungated<T, WHOLE>(dy, gradient, z, p.z.data != nullptr, inside);
    put_strip(s.dt, dt, strip);
    put_strip(s.input, dy, strip);
  }
};

// Over a chunk, from its first step or from its last.
template <bool FORWARD, bool SEGMENTED>
DEVICE void split_chunk(float (&carry)[4], Span& span, const float (&a)[4], const SplitShared& s, const QuadLane& lane) {
  const float* rows = FORWARD ? s.b : s.c;
#pragma unroll 2
  for (int turn = 0; turn < CHUNK; turn += QUAD) {
    const int quad = FORWARD ? turn : CHUNK - QUAD - turn;
    float dt[QUAD], input[QUAD];
    load_four(dt, s.dt + lane.channel() * ROW + quad);
    load_four(input, s.input + lane.channel() * ROW + quad);
#pragma unroll
    for (int k = 0; k < QUAD; ++k) {
      const int i = FORWARD ? k : QUAD - 1 - k;
      float weight[4];
      load_four(weight, rows + (quad + i) * QUAD_ROW + lane.state);
      const bool restart = SEGMENTED && s.joins[quad + i] == 0.0f;
      span.length += dt[i];
      if (restart) span.restarts = 1.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float enters = input[i] * weight[e], decay = decay_of(dt[i], a[e]);
        if constexpr (FORWARD) {
          carry[e] = restart ? enters : decay * carry[e] + enters;
        } else {
          carry[e] = restart ? 0.0f : (enters + carry[e]) * decay;
        }
      }
    }
  }
}

// Every split but the one that nothing follows. A block has one slab.
template <class Way, class T, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_split(const typename Way::Params& p) {
  SHARED SplitShared s;
  let_next_start();
  const ScanSizes& sizes = p.sizes;
  const int64_t followed = p.splits - 1, outermost = Share::outermost(sizes), slab = outermost / followed;
  const Share share(sizes, p.splits, outermost % followed + (Way::FORWARD ? 0 : 1));
  const Strip<ALONG_TIME> strip;
  const QuadLane lane(thread_index());
  Way::put_rows(p, s, share.place, strip);
  const Parameter bias(p.delta_bias, share.place);
  barrier();

  const Vectorised vectorised(sizes, p.b, p.c, ALONG_TIME || share.place.channels == CHANNELS);
  auto inside = [&](int64_t chunk) { return strip.inside(share.place.channels, sizes.length - chunk * CHUNK); };
  Way inputs;
  ProjectionStrip<T> projections;
  const T* projections_start = projections.start(p.b, p.c, share.place);
  auto fetch = [&](int chunk) {
    if (vectorised.strips(chunk)) {
      inputs.template load<true>(p, s, chunk, 8, strip);
    } else {
      inputs.template load<false>(p, s, chunk, inside(chunk), strip);
    }
    if (vectorised.projections(chunk)) {
      projections.template load<true>(projections_start, p.b, p.c, sizes, slab, chunk);
    } else {
      projections.template load<false>(projections_start, p.b, p.c, sizes, slab, chunk);
    }
  };
  constexpr int STEP = Way::FORWARD ? 1 : -1;
  const int first = Way::FORWARD ? share.begin : share.end - 1, last = Way::FORWARD ? share.end - 1 : share.begin;
  float a[4], carry[4] = {};
  Span span;
  load_quad_decay(a, p.a, sizes, share.place, lane, slab);
  fetch(first);
  bias.put(s.bias);
  barrier();
  for (int chunk = first;; chunk += STEP) {
    if (vectorised.strips(chunk)) {
      inputs.template put<true>(p, s, 8, strip);
    } else {
      inputs.template put<false>(p, s, inside(chunk), strip);
    }
    put_projections(projections, s.b, s.c);
    if (SEGMENTED) put_joins(s.joins, p.segment, share.place, sizes.length, chunk);
    barrier();
    if (chunk != last) fetch(chunk + STEP);
    split_chunk<Way::FORWARD, SEGMENTED>(carry, span, a, s, lane);
    if (chunk == last) break;
    barrier();
  }
  QuadAddress(sizes, share.part, lane, slab).store(p.carries, carry);
  if (slab == 0 && lane.state == 0 && lane.channel() < share.place.channels) {
    span.write(p.spans + Span::index(sizes, share.part, 0, lane.channel()));
  }
}
