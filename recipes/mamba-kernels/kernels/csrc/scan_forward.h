// Selective scan, forward: h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = C_t h_t + D u_t, out_t = y_t silu(z_t).
#pragma once

#include "arrivals.h"
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

// A per-channel parameter on its way to shared memory: asked for before and put after what need not wait for it.
struct Parameter {
  float value = 0.0f;

  DEVICE Parameter(const float* source, const Place& place) {
    if (source && thread_index() < place.channels) value = source[place.first + thread_index()];
  }
  DEVICE void put(float* to) const {
    if (thread_index() < CHANNELS) to[thread_index()] = value;
  }
};
// It from there for the elements of a strip.
template <class S>
DEVICE void strip_parameter(float (&x)[8], const float* values, S strip) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = values[strip.channel_of(i)];
}

// Per step of a chunk 0 where a new sequence starts, else 1.
DEVICE void put_joins(float* joins, const int32_t* segment, const Place& place, int64_t length, int64_t chunk,
                      int index = thread_index()) {
  const int64_t t = chunk * CHUNK + index;
  if (index < CHUNK) {
    const int32_t* s = segment + place.batch * length;
    joins[index] = t > 0 && t < length && s[t] != s[t - 1] ? 0.0f : 1.0f;
  }
}

// A scan goes the matrix way as long as all is finite: a matrix instruction multiplies masked steps too, and
// 0 * inf is NaN. From the first chunk that is not, it goes the plain way (PLAIN), where a NaN reaches no step
// before its own.

// With tensor cores half of a block's threads do the recurrence and the others the elementwise work of the chunks
// before and after, so that the exponential unit does not wait for it; that takes two stages of shared memory. Else
// the same threads do one after the other.
constexpr bool HELPED = HAS_MATRIX_TF32;
constexpr int FORWARD_THREADS = HELPED ? 2 * THREADS : THREADS;
constexpr int STAGES = HELPED ? 2 : 1;
// Of the registers that three blocks a multiprocessor leave a thread, the recurrence takes some from the helpers, who
// hold more where elements are large.
constexpr int FORWARD_REGISTERS = 80;
template <class T>
constexpr int MOVED_REGISTERS = sizeof(T) == 2 ? 16 : 8;

// What belongs to a chunk; y over [part][channel][time].
struct ForwardStage {
  float dt[CHANNELS * ROW], dtu[CHANNELS * ROW];
  float y[Lane::PARTS * CHANNELS * ROW];
  float joins[CHUNK];
};
// A slab of a chunk's B and C, over [time][state].
struct ProjectionStage {
  float b[CHUNK * STATE_ROW], c[CHUNK * STATE_ROW];
};

struct ForwardShared {
  ForwardStage stages[STAGES];
  ProjectionStage projections[STAGES];
  float bias[CHANNELS], d[CHANNELS];
  Rows<4> rows;
  // By the chunk's parity: a chunk is not finite. Two more, so that what follows starts on 16 bytes.
  int broken[4];

  DEVICE ForwardStage& stage(int chunk) { return stages[chunk & (STAGES - 1)]; }
};

// Of the states between slabs, by the chunk's parity: the plain way repeats a chunk, and itself none.
constexpr int FORWARD_COPIES = HELPED ? 2 : 1;
static_assert((STAGES & (STAGES - 1)) == 0 && (FORWARD_COPIES & (FORWARD_COPIES - 1)) == 0, "chunks are counted with a mask");

enum ForwardTensor { FORWARD_U, FORWARD_DELTA, FORWARD_Z, FORWARD_OUT };

// What every thread of a block knows.
struct ForwardBlock {
  const ScanForward& p;
  ForwardShared& s;
  const Share& share;
  const Place& place;
  const Vectorised vectorised;
  // Chunks before this are the block's.
  const int end, slabs;

  DEVICE ForwardBlock(const ScanForward& p, ForwardShared& s, const Share& share, int slabs, bool full)
      : p(p), s(s), share(share), place(share.place), vectorised(p.sizes, p.b, p.c, full), end(share.end), slabs(slabs) {}
  DEVICE bool whole(int chunk) const { return vectorised.strips(chunk); }
};

// The recurrence over a chunk: h in and out, y to shared memory. Decays and inputs are computed two steps ahead, so
// that nothing waits for exponentials or matrix instructions.
template <class T, bool PLAIN, bool SEGMENTED>
DEVICE void forward_steps(float (&h)[4], const float (&a)[4], ForwardStage& s, const ProjectionStage& projections,
                          const Lane& lane, const StepMasks& masks, bool accumulate) {
  OuterProduct<T, PLAIN> input(s.dtu, projections.b, lane, masks);
  StateSum<T, PLAIN, SUMS_ARE_EXACT<T>> output(s.y, projections.c, lane);
  const float* dt_row = s.dt + lane.channel(0) * ROW;
  float dt[Lane::CHANNELS_EACH][4], decay[2][4], x[2][4];
  int present = 0;
  auto fetch_sizes = [&](int step) {
#pragma unroll
    for (int c = 0; c < Lane::CHANNELS_EACH; ++c) {
      load_two(&dt[c][step % 4], dt_row + present + c * Lane::ROWS * ROW + step);
    }
  };
  auto prepare = [&](int i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) decay[i % 2][e] = decay_of(dt[e / Lane::STATES_EACH][i], a[e]);
    input.set(x[i % 2], i);
  };
  auto run = [&](int first, auto more) {
    constexpr bool MORE = decltype(more)::value;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool restart = SEGMENTED && s.joins[first + i] == 0.0f;
      const int from = i % 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) h[e] = restart ? x[from][e] : decay[from][e] * h[e] + x[from][e];
      output.add(h, i);
      if (MORE || i < 2) prepare((i + 2) % 4);
      if (i == 1 && MORE) {
        fetch_sizes(6);
        input.take();
        input.fetch();
      }
    }
    output.store(accumulate);
    // After the last but one four this reads the room between rows.
    if (MORE) {
      fetch_sizes(8);
      output.fetch();
    }
    present = advanced(present + 4);
  };
  input.fetch();
  input.take();
  fetch_sizes(0);
  output.fetch();
  prepare(0);
  prepare(1);
  fetch_sizes(2);
  fetch_sizes(4);
  input.fetch();
  // Unrolled, it saves what counts addresses on, a tenth of the instructions. Without tensor cores that is little; what goes
  // the plain way is rare, and its code lies in the way of the helpers'.
  constexpr int COPIES = HELPED && !PLAIN ? CHUNK / 4 - 1 : 1;
#pragma unroll COPIES
  for (int first = 0; first < CHUNK - 4; first += 4) run(first, Constant<true>());
  run(CHUNK - 4, Constant<false>());
}

// The elementwise work of a strip of every chunk.
template <class T, bool PLAIN, bool ALONG_TIME>
struct ForwardStrip {
  const ForwardBlock& block;
  const Strip<ALONG_TIME> strip;
  // Of the chunk that is prepared next, and of the one that is finished next.
  Packed<T> u, delta, u_again, z;

  DEVICE ForwardStrip(const ForwardBlock& block, int index) : block(block), strip(index) {}

  DEVICE int inside(int chunk) const {
    return strip.inside(block.place.channels, block.p.sizes.length - int64_t{chunk} * CHUNK);
  }
  template <bool WHOLE>
  DEVICE void load(Packed<T>& x, ForwardTensor tensor, const Sequence& from, int chunk) const {
    const T* start = block.s.rows.template strip<T, WHOLE>(tensor, from, chunk, strip);
    load_strip<T, WHOLE>(x, start, from, inside(chunk), strip);
  }
  DEVICE void fetch(int chunk) {
    const ScanForward& p = block.p;
    if (chunk >= block.end) return;
    if (block.whole(chunk)) {
      load<true>(u, FORWARD_U, p.u, chunk);
      load<true>(delta, FORWARD_DELTA, p.delta, chunk);
    } else {
      load<false>(u, FORWARD_U, p.u, chunk);
      load<false>(delta, FORWARD_DELTA, p.delta, chunk);
    }
  }
  // Step sizes, and their products with u.
  DEVICE void prepare(int chunk) const {
    if (chunk >= block.end) return;
    ForwardStage& stage = block.s.stage(chunk);
    const bool soft = block.p.sizes.softplus != 0;
    float dt[8], dtu[8], bias[8];
    strip_parameter(bias, block.s.bias, strip);
    if (block.whole(chunk)) {
      step_sizes<T, true>(dt, dtu, delta, u, bias, soft, 8);
    } else {
      step_sizes<T, false>(dt, dtu, delta, u, bias, soft, inside(chunk));
    }
    put_strip(stage.dt, dt, strip);
    put_strip(stage.dtu, dtu, strip);
  }

  DEVICE void fetch_again(int chunk) {
    const ScanForward& p = block.p;
    if (block.whole(chunk)) {
      load<true>(u_again, FORWARD_U, p.u, chunk);
      if (p.z.data) load<true>(z, FORWARD_Z, p.z, chunk);
    } else {
      load<false>(u_again, FORWARD_U, p.u, chunk);
      if (p.z.data) load<false>(z, FORWARD_Z, p.z, chunk);
    }
  }
  // The output from the sums over states.
  DEVICE void finish(int chunk) const {
    const ScanForward& p = block.p;
    const float scale = StateSum<T, PLAIN, SUMS_ARE_EXACT<T>>::SCALE;
    float y[8], v[8], d[8];
    strip_parameter(d, block.s.d, strip);
    get_sums(y, block.s.stage(chunk).y, strip);
    u_again.to_floats(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = y[i] * scale + d[i] * v[i];
    if (p.z.data) {
      z.to_floats(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= v[i] * sigmoid(v[i]);
    }
    const Rows<4>& rows = block.s.rows;
    if (block.whole(chunk)) {
      // What stands in for a channel that lacks is not stored.
      if (ALONG_TIME && strip.channel() >= block.place.channels) return;
      store_strip<T, true>(rows.template strip<T, true>(FORWARD_OUT, p.out, chunk, strip), p.out, 8, y, strip);
    } else {
      T* start = rows.template strip<T, false>(FORWARD_OUT, p.out, chunk, strip);
      store_strip<T, false>(start, p.out, inside(chunk), y, strip);
    }
  }
};

// A thread's share of B and C, one slab of a chunk after the other.
template <class T>
struct ProjectionStream {
  const ForwardBlock& block;
  int chunk, slab = 0;
  int turn = 0;
  ProjectionStrip<T> share;
  const T* start;

  DEVICE ProjectionStream(const ForwardBlock& block, int chunk, int index)
      : block(block), chunk(chunk), share(index), start(share.start(block.p.b, block.p.c, block.place)) {}

  // Reads what put then writes to the stage whose turn it is.
  DEVICE void fetch() {
    const ScanForward& p = block.p;
    if (chunk >= block.end) return;
    if (block.vectorised.projections(chunk)) {
      share.template load<true>(start, p.b, p.c, p.sizes, slab, chunk);
    } else {
      share.template load<false>(start, p.b, p.c, p.sizes, slab, chunk);
    }
    if (++slab == block.slabs) {
      slab = 0;
      ++chunk;
    }
  }
  DEVICE void put() {
    ProjectionStage& stage = block.s.projections[turn];
    share.put(stage.b, stage.c);
    turn = (turn + 1) % STAGES;
  }
};

// The recurrence of a thread: states in `h` or, with several slabs, in slots by the chunk's parity.
template <class T, bool MANY, bool PLAIN, bool SEGMENTED>
struct ForwardStates {
  const ForwardBlock& block;
  const Lane lane;
  const StepMasks masks;
  const StateAddress address;
  float* slots;
  float a[4], h[4] = {};
  int turn = 0;

  DEVICE ForwardStates(const ForwardBlock& block, float* slots)
      : block(block), masks(lane), address(block.p.sizes, block.place, lane, 0, chunks()), slots(slots) {
    load_decay(a, block.p.a, block.p.sizes, block.place, lane, 0);
  }
  // Of the whole sequence.
  DEVICE int64_t chunks() const { return (block.p.sizes.length + CHUNK - 1) / CHUNK; }
  DEVICE float* slot(int slab, int chunk) const {
    return slots + ((slab * FORWARD_COPIES + (chunk & (FORWARD_COPIES - 1))) * THREADS + thread_index()) * 4;
  }
  DEVICE void run(int chunk, int slab) {
    const ScanForward& p = block.p;
    if constexpr (MANY) {
      load_decay(a, p.a, p.sizes, block.place, lane, slab);
      load_four(h, slot(slab, chunk));
    }
    if (p.checkpoints) {
      const StateAddress of_slab(p.sizes, block.place, lane, slab, chunks());
      (MANY ? of_slab : address).store(p.checkpoints, chunk * p.sizes.states, h);
    }
    forward_steps<T, PLAIN, SEGMENTED>(h, a, block.s.stage(chunk), block.s.projections[turn], lane, masks, slab > 0);
    turn = (turn + 1) % STAGES;
    if (!PLAIN && !is_finite(h[0] + h[1] + h[2] + h[3])) block.s.broken[chunk & 1] = 1;
    if constexpr (MANY) store_four(slot(slab, chunk + 1), h[0], h[1], h[2], h[3]);
  }
};

// The helpers' way through the chunks, a barrier a slab: with the recurrence of one chunk they prepare the chunk
// after and finish the chunk before. Returns as run_forward does.
template <class T, bool ALONG_TIME, bool PLAIN, bool SEGMENTED>
DEVICE int help_forward(const ForwardBlock& block, int chunk) {
  const int index = thread_index() - THREADS;
  const int first = chunk;
  ProjectionStream<T> projections(block, chunk, index);
  ForwardStrip<T, PLAIN, ALONG_TIME> strip(block, index);
  auto prepare = [&](int chunk) {
    strip.prepare(chunk);
    if (SEGMENTED) put_joins(block.s.stage(chunk).joins, block.p.segment, block.place, block.p.sizes.length, chunk, index);
  };
  strip.fetch(chunk);
  projections.fetch();
  // The first time parameters are not yet there.
  if (!PLAIN) barrier();
  prepare(chunk);
  projections.put();
  strip.fetch(chunk + 1);
  projections.fetch();
  barrier();
  for (; chunk < block.end; ++chunk) {
    // All that was read is used before more is read: a wait for one load can be a wait for those after it.
    projections.put();
    prepare(chunk + 1);
    if (chunk > first) strip.finish(chunk - 1);
    projections.fetch();
    strip.fetch(chunk + 2);
    strip.fetch_again(chunk);
    barrier();
    for (int slab = 1; slab < block.slabs; ++slab) {
      projections.put();
      projections.fetch();
      barrier();
    }
    if (!PLAIN && block.s.broken[chunk & 1]) return chunk;
  }
  strip.finish(chunk - 1);
  return chunk;
}

// The way of the other threads. Returns the first chunk that is not finite, with the states before it: a matrix
// instruction multiplies masked steps too, and 0 * inf is NaN, so that from there on the plain way is gone.
template <class T, bool MANY, bool PLAIN, bool SEGMENTED>
DEVICE int run_forward(const ForwardBlock& block, int chunk, ForwardStates<T, MANY, PLAIN, SEGMENTED>& states) {
  for (; chunk < block.end; ++chunk) {
    const float start[4] = {states.h[0], states.h[1], states.h[2], states.h[3]};
    for (int slab = 0; slab < block.slabs; ++slab) {
      states.run(chunk, slab);
      barrier();
    }
    if (!PLAIN && block.s.broken[chunk & 1]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) states.h[e] = start[e];
      return chunk;
    }
  }
  return chunk;
}

// Both by the same threads.
template <class T, bool MANY, bool ALONG_TIME, bool SEGMENTED>
DEVICE void run_forward_alone(const ForwardBlock& block, ForwardStates<T, MANY, true, SEGMENTED>& states) {
  ForwardStrip<T, true, ALONG_TIME> strip(block, thread_index());
  ProjectionStream<T> projections(block, block.share.begin, thread_index());
  strip.fetch(block.share.begin);
  projections.fetch();
  for (int chunk = block.share.begin; chunk < block.end; ++chunk) {
    strip.prepare(chunk);
    if (SEGMENTED) put_joins(block.s.stage(chunk).joins, block.p.segment, block.place, block.p.sizes.length, chunk);
    strip.fetch(chunk + 1);
    strip.fetch_again(chunk);
    for (int slab = 0; slab < block.slabs; ++slab) {
      if (slab > 0) barrier();
      projections.put();
      barrier();
      projections.fetch();
      states.run(chunk, slab);
    }
    barrier();
    strip.finish(chunk);
  }
}

// The states that enter the share, to an array over [slab][copy][thread][4] as each thread of the recurrence then has them.
template <bool SEGMENTED>
DEVICE void put_arriving(float* to, const ForwardBlock& block) {
  const QuadLane lane(thread_index());
  wait_for_kernel_before();
  for (int slab = 0; slab < block.slabs; ++slab, to += FORWARD_COPIES * THREADS * 4) {
    float h[4];
    arriving<true, SEGMENTED>(h, block.p, block.p.initial, block.share, lane, slab);
#pragma unroll
    for (int e = 0; e < 4; e += Lane::STATES_EACH)
      store_states(to + Lane::place_of(lane.channel(), lane.state + e), h + e);
  }
}

template <class T, bool MANY, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_forward(const ScanForward& p) {
  ForwardShared& s = *reinterpret_cast<ForwardShared*>(dynamic_shared());
  float* slots = dynamic_shared() + sizeof(ForwardShared) / sizeof(float);
  const ScanSizes& sizes = p.sizes;
  const Share share(sizes, p.splits, Share::outermost(sizes));
  const Place& place = share.place;
  const ForwardBlock block(p, s, share, MANY ? static_cast<int>((sizes.states + SLAB - 1) / SLAB) : 1,
                           ALONG_TIME || place.channels == CHANNELS);
  const Strip<ALONG_TIME> strip;
  s.rows.template put<T>(FORWARD_U, p.u, place, strip);
  s.rows.template put<T>(FORWARD_DELTA, p.delta, place, strip);
  s.rows.template put<T>(FORWARD_Z, p.z, place, strip);
  s.rows.template put<T>(FORWARD_OUT, p.out, place, strip);
  const Parameter bias(p.delta_bias, place), d(p.d, place);
  if (thread_index() < 4) s.broken[thread_index()] = 0;
  barrier();
  if (HELPED && thread_index() >= THREADS) {
    give_up_registers<FORWARD_REGISTERS - MOVED_REGISTERS<T>>();
    const int chunk = help_forward<T, ALONG_TIME, false, SEGMENTED>(block, share.begin);
    if (chunk < block.end) help_forward<T, ALONG_TIME, true, SEGMENTED>(block, chunk);
    return;
  }
  if (thread_index() < place.channels) prefetch(p.a + (place.first + thread_index()) * sizes.states);
  bias.put(s.bias);
  d.put(s.d);
  barrier();
  claim_registers<FORWARD_REGISTERS + MOVED_REGISTERS<T>>();
  // Of one slab through room for sums that no chunk writes to before the second.
  float* arrived = MANY ? slots + (share.begin & (FORWARD_COPIES - 1)) * THREADS * 4 : s.stage(share.begin + 1).y;
  put_arriving<SEGMENTED>(arrived, block);
  if (HELPED) barrier();
  ForwardStates<T, MANY, true, SEGMENTED> states(block, slots);
  if constexpr (HELPED) {
    ForwardStates<T, MANY, false, SEGMENTED> finite(block, slots);
    load_four(finite.h, arrived + thread_index() * 4);
    const int chunk = run_forward(block, share.begin, finite);
#pragma unroll
    for (int e = 0; e < 4; ++e) states.h[e] = finite.h[e];
    if (chunk < block.end) {
      barrier();
      run_forward(block, chunk, states);
    }
  } else {
    load_four(states.h, arrived + thread_index() * 4);
    run_forward_alone<T, MANY, ALONG_TIME, SEGMENTED>(block, states);
  }
  if (p.last && share.split + 1 == p.splits) {
    for (int slab = 0; slab < block.slabs; ++slab) {
      if constexpr (MANY) load_four(states.h, states.slot(slab, block.end));
      StateAddress(sizes, place, states.lane, slab, 1).store(p.last, 0, states.h);
    }
  }
}
