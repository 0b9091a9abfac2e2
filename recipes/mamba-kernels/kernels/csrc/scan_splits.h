// Time split over blocks, for batches too small to fill a GPU. Backward, each chunk's first state is known from the
// forward pass, so that only the carry, a_{t+1} g_{t+1}, has to come from later splits. It is linear in the carry
// that enters a split: a first kernel finds what leaves each but the first split when nothing enters, and how
// long the split is in steps dt. Every block then adds up, in order, what reaches its split.
#pragma once

#include "quads.h"
#include "scan_forward.h"

// A block's share of the work: channels of a sequence, and the chunks [begin, end) of it.
struct Share {
  // As the tensors see it; as results see it that are still to be added over splits, which count as batch.
  Place place, part;
  int64_t split;
  int begin, end;

  DEVICE Share(const ScanSizes& sizes, int64_t splits, int64_t split) : place(sizes), part(place), split(split) {
    place.batch %= sizes.batch;
    part.batch = split * sizes.batch + place.batch;
    const int64_t chunks = (sizes.length + CHUNK - 1) / CHUNK, each = (chunks + splits - 1) / splits;
    begin = static_cast<int>(split * each);
    end = static_cast<int>(split * each + each < chunks ? split * each + each : chunks);
  }
  // Blocks go through a sequence's channels first, then through the batch, then through this.
  DEVICE static int64_t outermost(const ScanSizes& sizes) { return Place(sizes).batch / sizes.batch; }
};

// Softplus stage by stage: element by element the compiler makes each wait for its logarithm.
DEVICE void softplus(float (&x)[8]) {
  float e[8], log[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) e[i] = exp2_fast(x[i] * LOG2_E);
#pragma unroll
  for (int i = 0; i < 8; ++i) log[i] = kept(log2_fast(1.0f + e[i]) * LN_2);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = softplus_of(x[i], e[i], [&] { return log[i]; });
}

// dt of a strip; zero outside the tensor, where the carry then stays as it is.
template <class T, bool WHOLE>
DEVICE void steps_of(float (&dt)[8], const Packed<T>& delta, const float (&bias)[8], bool soft, int inside) {
  delta.to_floats(dt);
#pragma unroll
  for (int i = 0; i < 8; ++i) dt[i] += bias[i];
  if (soft) softplus(dt);
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

// The carry that enters a split.
DEVICE void entering(float (&carry)[4], const ScanBackward& p, const Share& share, const QuadLane& lane, int64_t slab) {
#pragma unroll
  for (int e = 0; e < 4; ++e) carry[e] = 0.0f;
  if (p.last_gradient) QuadAddress(p.sizes, share.place, lane, slab).load(carry, p.last_gradient);
  if (share.split + 1 == p.splits) return;
  float a[4];
  load_quad_decay(a, p.a, p.sizes, share.place, lane, slab);
  Place later = share.place;
#pragma unroll 4
  for (int64_t split = p.splits - 1; split > share.split; --split) {
    later.batch = split * p.sizes.batch + share.place.batch;
    float leaves[4];
    QuadAddress(p.sizes, later, lane, slab).load(leaves, p.carries);
    float span[2] = {};
    if (lane.channel() < later.channels) {
      load_two(span, p.spans + (later.batch * p.sizes.channels + later.first + lane.channel()) * 2);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // At least the smallest number, so that an infinite carry stays what it is.
      const float decay = exp2_fast(a[e] * span[0]);
      carry[e] = span[1] != 0.0f ? leaves[e] : (decay < 0x1p-126f ? 0x1p-126f : decay) * carry[e] + leaves[e];
    }
  }
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
  float dt[CHANNELS * ROW], dy[CHANNELS * ROW];
  float b[CHUNK * QUAD_ROW], c[CHUNK * QUAD_ROW];
  float joins[CHUNK], bias[CHANNELS];
  Rows<3> rows;
};

enum SplitTensor { SPLIT_DELTA, SPLIT_Z, SPLIT_OUT_GRADIENT };

template <class T>
struct SplitInputs {
  Packed<T> delta, gradient, z;

  template <bool WHOLE, class S>
  DEVICE void load(const ScanBackward& p, const SplitShared& s, int64_t chunk, int inside, S strip) {
    const T* delta_start = s.rows.template strip<T, WHOLE>(SPLIT_DELTA, p.delta, chunk, strip);
    const T* gradient_start = s.rows.template strip<T, WHOLE>(SPLIT_OUT_GRADIENT, p.out_gradient, chunk, strip);
    const T* z_start = s.rows.template strip<T, WHOLE>(SPLIT_Z, p.z, chunk, strip);
    load_input<T, WHOLE>(delta, delta_start, p.delta, inside, strip);
    load_input<T, WHOLE>(gradient, gradient_start, p.out_gradient, inside, strip);
    if (p.z.data) load_input<T, WHOLE>(z, z_start, p.z, inside, strip);
  }
  // dt and dy to shared memory.
  template <bool WHOLE, class S>
  DEVICE void put(const ScanBackward& p, SplitShared& s, int inside, S strip) const {
    float dt[8], dy[8], bias[8];
    strip_parameter(bias, s.bias, strip);
    steps_of<T, WHOLE>(dt, delta, bias, p.sizes.softplus != 0, inside);
    ungated<T, WHOLE>(dy, gradient, z, p.z.data != nullptr, inside);
    put_strip(s.dt, dt, strip);
    put_strip(s.dy, dy, strip);
  }
};

// A chunk back: the carry after it, on return before it; `span` gets the sum of its steps, and whether a sequence
// starts there.
template <bool SEGMENTED>
DEVICE void carry_chunk(float (&carry)[4], float (&span)[2], const float (&a)[4], const SplitShared& s,
                        const QuadLane& lane) {
#pragma unroll 2
  for (int quad = CHUNK - QUAD; quad >= 0; quad -= QUAD) {
    float dt[QUAD], dy[QUAD];
    load_four(dt, s.dt + lane.channel() * ROW + quad);
    load_four(dy, s.dy + lane.channel() * ROW + quad);
#pragma unroll
    for (int i = QUAD - 1; i >= 0; --i) {
      float c[4];
      load_four(c, s.c + (quad + i) * QUAD_ROW + lane.state);
      const bool restart = SEGMENTED && s.joins[quad + i] == 0.0f;
      span[0] += dt[i];
      if (restart) span[1] = 1.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        carry[e] = restart ? 0.0f : (dy[i] * c[e] + carry[e]) * exp2_fast(dt[i] * a[e]);
      }
    }
  }
}

// What leaves a split when nothing enters. A block has one slab.
template <class T, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_carries(const ScanBackward& p) {
  SHARED SplitShared s;
  const ScanSizes& sizes = p.sizes;
  const int64_t later = p.splits - 1, outermost = Share::outermost(sizes), slab = outermost / later;
  const Share share(sizes, p.splits, outermost % later + 1);
  const Strip<ALONG_TIME> strip;
  const QuadLane lane(thread_index());
  s.rows.template put<T>(SPLIT_DELTA, p.delta, share.place, strip);
  s.rows.template put<T>(SPLIT_Z, p.z, share.place, strip);
  s.rows.template put<T>(SPLIT_OUT_GRADIENT, p.out_gradient, share.place, strip);
  put_parameter(s.bias, p.delta_bias, share.place);
  barrier();

  const Vectorised vectorised(sizes, share.place, p.b, p.c);
  auto inside = [&](int64_t chunk) { return strip.inside(share.place.channels, sizes.length - chunk * CHUNK); };
  SplitInputs<T> inputs;
  ProjectionStrip<T> projections;
  const T* projections_start = projections.start(p.b, p.c, share.place);
  auto fetch = [&](int64_t chunk) {
    if (vectorised.whole(sizes, chunk)) {
      inputs.template load<true>(p, s, chunk, 8, strip);
      projections.template load<true>(projections_start, p.b, p.c, sizes, slab, chunk);
    } else {
      inputs.template load<false>(p, s, chunk, inside(chunk), strip);
      projections.template load<false>(projections_start, p.b, p.c, sizes, slab, chunk);
    }
  };
  float a[4], carry[4] = {}, span[2] = {};
  load_quad_decay(a, p.a, sizes, share.place, lane, slab);
  fetch(share.end - 1);
  for (int chunk = share.end - 1; chunk >= share.begin; --chunk) {
    if (vectorised.whole(sizes, chunk)) {
      inputs.template put<true>(p, s, 8, strip);
    } else {
      inputs.template put<false>(p, s, inside(chunk), strip);
    }
    put_projections(projections, s.b, s.c);
    if (SEGMENTED) put_joins(s.joins, p.segment, share.place, sizes.length, chunk);
    barrier();
    if (chunk > share.begin) fetch(chunk - 1);
    carry_chunk<SEGMENTED>(carry, span, a, s, lane);
    barrier();
  }
  QuadAddress(sizes, share.part, lane, slab).store(p.carries, carry);
  if (slab == 0 && lane.state == 0 && lane.channel() < share.place.channels) {
    store_two(p.spans + (share.part.batch * sizes.channels + share.place.first + lane.channel()) * 2, span[0], span[1]);
  }
}
