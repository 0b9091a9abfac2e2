// Selective scan, forward: h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = C_t h_t + D u_t, out_t = y_t silu(z_t).
// Equation: that of the first lines.
// Tiling: a block has 32 channels of one sequence, chunk after chunk; four warps run the recurrence, four the
//   elementwise work (without tensor cores the same warps do both).
// Alone: pytest recipes/mamba-kernels/tests/test_scan.py -k emulated
#pragma once

#include "scan_prefix.h"
#include "scan_mma.h"

// A log2(e) of the lane's elements; zero beyond the last state or channel, where h stays zero.
DEVICE void load_decay_rates(float (&a)[4], const float* source, const ScanSizes& s, const ChannelTile& tile,
                             const MmaThreadMap& lane, int64_t state_tile) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int channel = lane.channel(e / MmaThreadMap::STATES_EACH);
    const int64_t n = state_tile * STATE_TILE + lane.state() + e % MmaThreadMap::STATES_EACH;
    const bool valid = channel < tile.channels && n < s.states;
    a[e] = valid ? source[(tile.first + channel) * s.states + n] * LOG2_E : 0.0f;
  }
}

// A lane's adjacent states.
DEVICE void load_states(float* h, const float* from) {
  if constexpr (MmaThreadMap::STATES_EACH == 2) {
    load_float2(h, from);
  } else {
    load_float4(h, from);
  }
}
DEVICE void store_states(float* to, const float* h) {
  if constexpr (MmaThreadMap::STATES_EACH == 2) {
    store_float2(to, h[0], h[1]);
  } else {
    store_float4(to, h[0], h[1], h[2], h[3]);
  }
}

// The lane's elements of a tensor (batch, channels, chunks, states).
struct StateAccess {
  int64_t start[MmaThreadMap::CHANNELS_EACH];
  int states;
  bool is_full;

  DEVICE StateAccess(const ScanSizes& s, const ChannelTile& tile, const MmaThreadMap& lane, int64_t state_tile,
                     int64_t chunks) {
    const int64_t n = state_tile * STATE_TILE + lane.state();
    states = n < s.states ? static_cast<int>(s.states - n < 4 ? s.states - n : 4) : 0;
#pragma unroll
    for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c) {
      const int channel = lane.channel(c);
      start[c] = ((tile.batch * s.channels + tile.first + channel) * chunks) * s.states + n;
      if (channel >= tile.channels) start[c] = -1;
    }
    is_full = tile.channels == CHANNELS && s.states % STATE_TILE == 0;
  }
  DEVICE void load(float (&h)[4], const float* from, int64_t offset) const {
    if (is_full) {
#pragma unroll
      for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c)
        load_states(h + c * MmaThreadMap::STATES_EACH, from + start[c] + offset);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = e / MmaThreadMap::STATES_EACH, j = e % MmaThreadMap::STATES_EACH;
      h[e] = start[c] >= 0 && j < states ? from[start[c] + offset + j] : 0.0f;
    }
  }
  DEVICE void store(float* to, int64_t offset, const float (&h)[4]) const {
    if (is_full) {
#pragma unroll
      for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c)
        store_states(to + start[c] + offset, h + c * MmaThreadMap::STATES_EACH);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = e / MmaThreadMap::STATES_EACH, j = e % MmaThreadMap::STATES_EACH;
      if (start[c] >= 0 && j < states) to[start[c] + offset + j] = h[e];
    }
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

// The recurrence uses mma while all is finite: an mma multiplies masked steps too, and 0 * inf is NaN. From the first
// chunk that is not finite on it goes without (NO_MMA), and a NaN reaches no step before its own.

// Warp specialization. With tensor cores half of a block's warps do the recurrence and the other half the elementwise
// work of the chunks before and after, so that the exponential unit stays busy; shared memory is double-buffered.
// Without, the same warps do both in turn.
constexpr bool WARP_SPECIALIZED = HAS_MMA_TF32;
constexpr int FORWARD_THREADS = WARP_SPECIALIZED ? 2 * THREADS : THREADS;
constexpr int STAGES = WARP_SPECIALIZED ? 2 : 1;
// Of the registers a thread has at three blocks a multiprocessor, elementwise warps give some to the recurrence; with
// fp32 they need more themselves.
constexpr int FORWARD_REGISTERS = 80;
template <class T>
constexpr int REALLOCATED_REGISTERS = sizeof(T) == 2 ? 16 : 8;

// Shared memory of a chunk; y over [part][channel][time].
struct ForwardStage {
  float dt[CHANNELS * ROW], dtu[CHANNELS * ROW];
  float y[MmaThreadMap::PARTS * CHANNELS * ROW];
  float continues[CHUNK];
};
// A state tile of a chunk's B and C, over [time][state].
struct ProjectionStage {
  float b[CHUNK * STATE_ROW], c[CHUNK * STATE_ROW];
};

struct ForwardShared {
  ForwardStage stages[STAGES];
  ProjectionStage projections[STAGES];
  float bias[CHANNELS], d[CHANNELS];
  RowPointers<4> rows;
  // Whether a chunk is not finite, by the chunk's parity; padded to 16 bytes.
  int non_finite[4];

  DEVICE ForwardStage& stage(int chunk) { return stages[chunk & (STAGES - 1)]; }
};

// Copies of the states between state tiles, by the chunk's parity: a chunk may be repeated without mma.
constexpr int FORWARD_COPIES = WARP_SPECIALIZED ? 2 : 1;
static_assert((STAGES & (STAGES - 1)) == 0 && (FORWARD_COPIES & (FORWARD_COPIES - 1)) == 0,
              "chunks are counted with a mask");

enum ForwardTensor { FORWARD_U, FORWARD_DELTA, FORWARD_Z, FORWARD_OUT };

// Known to every thread of a block.
struct ForwardBlock {
  const ScanForward& p;
  ForwardShared& s;
  const SplitTile& split_tile;
  const ChannelTile& tile;
  const VectorizedChunks vectorized;
  // The end of the block's chunks.
  const int end, state_tiles;

  DEVICE ForwardBlock(const ScanForward& p, ForwardShared& s, const SplitTile& split_tile, int state_tiles, bool full)
      : p(p),
        s(s),
        split_tile(split_tile),
        tile(split_tile.tile),
        vectorized(p.sizes, p.b, p.c, full),
        end(split_tile.end),
        state_tiles(state_tiles) {}
  DEVICE bool is_full(int chunk) const { return vectorized.items(chunk); }
};

// The recurrence over a chunk: h in and out, y to shared memory. Decays and inputs are computed two steps ahead, so
// that nothing waits for exponentials or mma instructions.
template <class T, bool NO_MMA, bool SEGMENTED>
DEVICE void forward_steps(float (&h)[4], const float (&a)[4], ForwardStage& s, const ProjectionStage& projections,
                          const MmaThreadMap& lane, const StepMasks& masks, bool accumulate) {
  OuterProduct<T, NO_MMA> input(s.dtu, projections.b, lane, masks);
  StateContraction<T, NO_MMA, SUM_BOTH_PARTS<T>> output(s.y, projections.c, lane);
  const float* dt_row = s.dt + lane.channel(0) * ROW;
  float dt[MmaThreadMap::CHANNELS_EACH][4], decay[2][4], x[2][4];
  int present = 0;
  auto fetch_sizes = [&](int step) {
#pragma unroll
    for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c) {
      load_float2(&dt[c][step % 4], dt_row + present + c * MmaThreadMap::ROWS * ROW + step);
    }
  };
  auto prepare = [&](int i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) decay[i % 2][e] = decay_factor(dt[e / MmaThreadMap::STATES_EACH][i], a[e]);
    input.set(x[i % 2], i);
  };
  auto run = [&](int first, auto more) {
    constexpr bool MORE = decltype(more)::value;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool reset = SEGMENTED && s.continues[first + i] == 0.0f;
      const int from = i % 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) h[e] = reset ? x[from][e] : decay[from][e] * h[e] + x[from][e];
      output.add(h, i);
      if (MORE || i < 2) prepare((i + 2) % 4);
      if (i == 1 && MORE) {
        fetch_sizes(6);
        input.consume();
        input.fetch();
      }
    }
    output.store(accumulate);
    // After the last four steps but one this reads the padding of rows.
    if (MORE) {
      fetch_sizes(8);
      output.fetch();
    }
    present = opaque_index(present + 4);
  };
  input.fetch();
  input.consume();
  fetch_sizes(0);
  output.fetch();
  prepare(0);
  prepare(1);
  fetch_sizes(2);
  fetch_sizes(4);
  input.fetch();
  // Unrolling saves the address arithmetic, a tenth of the instructions. Without tensor cores that is little; without
  // mma the loop is rare, and its code would crowd out the elementwise warps'.
  constexpr int COPIES = WARP_SPECIALIZED && !NO_MMA ? CHUNK / 4 - 1 : 1;
#pragma unroll COPIES
  for (int first = 0; first < CHUNK - 4; first += 4) run(first, BoolConstant<true>());
  run(CHUNK - 4, BoolConstant<false>());
}

// The elementwise work on a thread's items of every chunk.
template <class T, bool NO_MMA, bool ALONG_TIME>
struct ForwardElementwise {
  const ForwardBlock& block;
  const ThreadItems<ALONG_TIME> items;
  // Items of the chunk that is prepared next, and of the chunk that is finished next.
  RawItems<T> u, delta, u_again, z;

  DEVICE ForwardElementwise(const ForwardBlock& block, int index) : block(block), items(index) {}

  DEVICE int valid(int chunk) const {
    return items.valid(block.tile.channels, block.p.sizes.length - int64_t{chunk} * CHUNK);
  }
  template <bool FULL>
  DEVICE void load(RawItems<T>& x, ForwardTensor tensor, const Sequence& from, int chunk) const {
    const T* start = block.s.rows.template items<T, FULL>(tensor, from, chunk, items);
    load_items<T, FULL>(x, start, from, valid(chunk), items);
  }
  DEVICE void fetch(int chunk) {
    const ScanForward& p = block.p;
    if (chunk >= block.end) return;
    if (block.is_full(chunk)) {
      load<true>(u, FORWARD_U, p.u, chunk);
      load<true>(delta, FORWARD_DELTA, p.delta, chunk);
    } else {
      load<false>(u, FORWARD_U, p.u, chunk);
      load<false>(delta, FORWARD_DELTA, p.delta, chunk);
    }
  }
  // dt and dt u.
  DEVICE void prepare(int chunk) const {
    if (chunk >= block.end) return;
    ForwardStage& stage = block.s.stage(chunk);
    const bool use_softplus = block.p.sizes.softplus != 0;
    float dt[8], dtu[8], bias[8];
    load_parameter(bias, block.s.bias, items);
    if (block.is_full(chunk)) {
      discretize<T, true>(dt, dtu, delta, u, bias, use_softplus, 8);
    } else {
      discretize<T, false>(dt, dtu, delta, u, bias, use_softplus, valid(chunk));
    }
    store_shared_items(stage.dt, dt, items);
    store_shared_items(stage.dtu, dtu, items);
  }

  DEVICE void fetch_again(int chunk) {
    const ScanForward& p = block.p;
    if (block.is_full(chunk)) {
      load<true>(u_again, FORWARD_U, p.u, chunk);
      if (p.z.data) load<true>(z, FORWARD_Z, p.z, chunk);
    } else {
      load<false>(u_again, FORWARD_U, p.u, chunk);
      if (p.z.data) load<false>(z, FORWARD_Z, p.z, chunk);
    }
  }
  // The output, from the contraction over states.
  DEVICE void finish(int chunk) const {
    const ScanForward& p = block.p;
    const float scale = StateContraction<T, NO_MMA, SUM_BOTH_PARTS<T>>::SCALE;
    float y[8], v[8], d[8];
    load_parameter(d, block.s.d, items);
    load_contraction(y, block.s.stage(chunk).y, items);
    u_again.to_floats(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = y[i] * scale + d[i] * v[i];
    if (p.z.data) {
      z.to_floats(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= v[i] * sigmoid(v[i]);
    }
    const RowPointers<4>& rows = block.s.rows;
    if (block.is_full(chunk)) {
      // The stand-in of a missing channel is not stored.
      if (ALONG_TIME && items.channel() >= block.tile.channels) return;
      store_items<T, true>(rows.template items<T, true>(FORWARD_OUT, p.out, chunk, items), p.out, 8, y, items);
    } else {
      T* start = rows.template items<T, false>(FORWARD_OUT, p.out, chunk, items);
      store_items<T, false>(start, p.out, valid(chunk), y, items);
    }
  }
};

// A thread's items of B and C, one state tile of a chunk after the other.
template <class T>
struct ProjectionStream {
  const ForwardBlock& block;
  int chunk, state_tile = 0;
  int stage_index = 0;
  ProjectionItems<T> items;
  const T* start;

  DEVICE ProjectionStream(const ForwardBlock& block, int chunk, int index)
      : block(block), chunk(chunk), items(index), start(items.start(block.p.b, block.p.c, block.tile)) {}

  // Loads what store_shared() then writes to the next stage.
  DEVICE void fetch() {
    const ScanForward& p = block.p;
    if (chunk >= block.end) return;
    if (block.vectorized.projections(chunk)) {
      items.template load<true>(start, p.b, p.c, p.sizes, state_tile, chunk);
    } else {
      items.template load<false>(start, p.b, p.c, p.sizes, state_tile, chunk);
    }
    if (++state_tile == block.state_tiles) {
      state_tile = 0;
      ++chunk;
    }
  }
  DEVICE void store_shared() {
    ProjectionStage& stage = block.s.projections[stage_index];
    items.store_shared(stage.b, stage.c);
    stage_index = (stage_index + 1) % STAGES;
  }
};

// A thread's recurrence: states in `h`, or, with several state tiles, in `slots` by the chunk's parity.
template <class T, bool MULTI_TILE, bool NO_MMA, bool SEGMENTED>
struct ForwardRecurrence {
  const ForwardBlock& block;
  const MmaThreadMap lane;
  const StepMasks masks;
  const StateAccess address;
  float* slots;
  float a[4], h[4] = {};
  int stage_index = 0;

  DEVICE ForwardRecurrence(const ForwardBlock& block, float* slots)
      : block(block), masks(lane), address(block.p.sizes, block.tile, lane, 0, chunks()), slots(slots) {
    load_decay_rates(a, block.p.a, block.p.sizes, block.tile, lane, 0);
  }
  // Chunks of the whole sequence.
  DEVICE int64_t chunks() const { return (block.p.sizes.length + CHUNK - 1) / CHUNK; }
  DEVICE float* slot(int state_tile, int chunk) const {
    return slots + ((state_tile * FORWARD_COPIES + (chunk & (FORWARD_COPIES - 1))) * THREADS + thread_index()) * 4;
  }
  DEVICE void run(int chunk, int state_tile) {
    const ScanForward& p = block.p;
    if constexpr (MULTI_TILE) {
      load_decay_rates(a, p.a, p.sizes, block.tile, lane, state_tile);
      load_float4(h, slot(state_tile, chunk));
    }
    if (p.checkpoints) {
      const StateAccess of_state_tile(p.sizes, block.tile, lane, state_tile, chunks());
      (MULTI_TILE ? of_state_tile : address).store(p.checkpoints, chunk * p.sizes.states, h);
    }
    forward_steps<T, NO_MMA, SEGMENTED>(h, a, block.s.stage(chunk), block.s.projections[stage_index], lane, masks,
                                        state_tile > 0);
    stage_index = (stage_index + 1) % STAGES;
    if (!NO_MMA && !is_finite(h[0] + h[1] + h[2] + h[3])) block.s.non_finite[chunk & 1] = 1;
    if constexpr (MULTI_TILE) store_float4(slot(state_tile, chunk + 1), h[0], h[1], h[2], h[3]);
  }
};

// The loop of the elementwise warps, one barrier a state tile: beside the recurrence of a chunk they prepare the next
// chunk and finish the previous one. Returns as run_recurrence does.
template <class T, bool ALONG_TIME, bool NO_MMA, bool SEGMENTED>
DEVICE int run_elementwise(const ForwardBlock& block, int chunk) {
  const int index = thread_index() - THREADS;
  const int first = chunk;
  ProjectionStream<T> projections(block, chunk, index);
  ForwardElementwise<T, NO_MMA, ALONG_TIME> elementwise(block, index);
  auto prepare = [&](int chunk) {
    elementwise.prepare(chunk);
    if (SEGMENTED)
      store_continues(block.s.stage(chunk).continues, block.p.segment, block.tile, block.p.sizes.length, chunk, index);
  };
  elementwise.fetch(chunk);
  projections.fetch();
  // Before the first chunk the parameters are not there yet.
  if (!NO_MMA) barrier();
  prepare(chunk);
  projections.store_shared();
  elementwise.fetch(chunk + 1);
  projections.fetch();
  barrier();
  for (; chunk < block.end; ++chunk) {
    // All loaded values are used before more are loaded: waiting for one load can mean waiting for later ones too.
    projections.store_shared();
    prepare(chunk + 1);
    if (chunk > first) elementwise.finish(chunk - 1);
    projections.fetch();
    elementwise.fetch(chunk + 2);
    elementwise.fetch_again(chunk);
    barrier();
    for (int state_tile = 1; state_tile < block.state_tiles; ++state_tile) {
      projections.store_shared();
      projections.fetch();
      barrier();
    }
    if (!NO_MMA && block.s.non_finite[chunk & 1]) return chunk;
  }
  elementwise.finish(chunk - 1);
  return chunk;
}

// The loop of the recurrence warps. Returns the first chunk that is not finite, with the states before it; the caller
// repeats it without mma.
template <class T, bool MULTI_TILE, bool NO_MMA, bool SEGMENTED>
DEVICE int run_recurrence(const ForwardBlock& block, int chunk,
                          ForwardRecurrence<T, MULTI_TILE, NO_MMA, SEGMENTED>& states) {
  for (; chunk < block.end; ++chunk) {
    const float start[4] = {states.h[0], states.h[1], states.h[2], states.h[3]};
    for (int state_tile = 0; state_tile < block.state_tiles; ++state_tile) {
      states.run(chunk, state_tile);
      barrier();
    }
    if (!NO_MMA && block.s.non_finite[chunk & 1]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) states.h[e] = start[e];
      return chunk;
    }
  }
  return chunk;
}

// Elementwise work and recurrence by the same warps.
template <class T, bool MULTI_TILE, bool ALONG_TIME, bool SEGMENTED>
DEVICE void run_fused(const ForwardBlock& block, ForwardRecurrence<T, MULTI_TILE, true, SEGMENTED>& states) {
  ForwardElementwise<T, true, ALONG_TIME> elementwise(block, thread_index());
  ProjectionStream<T> projections(block, block.split_tile.begin, thread_index());
  elementwise.fetch(block.split_tile.begin);
  projections.fetch();
  for (int chunk = block.split_tile.begin; chunk < block.end; ++chunk) {
    elementwise.prepare(chunk);
    if (SEGMENTED)
      store_continues(block.s.stage(chunk).continues, block.p.segment, block.tile, block.p.sizes.length, chunk);
    elementwise.fetch(chunk + 1);
    elementwise.fetch_again(chunk);
    for (int state_tile = 0; state_tile < block.state_tiles; ++state_tile) {
      if (state_tile > 0) barrier();
      projections.store_shared();
      barrier();
      projections.fetch();
      states.run(chunk, state_tile);
    }
    barrier();
    elementwise.finish(chunk);
  }
}

// Stores the split's exclusive prefix to [state tile][copy][thread][4], in the thread map of the recurrence.
template <bool SEGMENTED>
DEVICE void store_prefix(float* to, const ForwardBlock& block) {
  const VectorThreadMap lane(thread_index());
  wait_on_dependent_grids();
  for (int state_tile = 0; state_tile < block.state_tiles; ++state_tile, to += FORWARD_COPIES * THREADS * 4) {
    float h[4];
    exclusive_prefix<true, SEGMENTED>(h, block.p, block.p.initial, block.split_tile, lane, state_tile);
#pragma unroll
    for (int e = 0; e < 4; e += MmaThreadMap::STATES_EACH)
      store_states(to + MmaThreadMap::offset_of(lane.channel(), lane.state + e), h + e);
  }
}

template <class T, bool MULTI_TILE, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_forward(const ScanForward& p) {
  ForwardShared& s = *reinterpret_cast<ForwardShared*>(dynamic_shared());
  float* slots = dynamic_shared() + sizeof(ForwardShared) / sizeof(float);
  const ScanSizes& sizes = p.sizes;
  const SplitTile split_tile(sizes, p.splits, SplitTile::outermost_index(sizes));
  const ChannelTile& tile = split_tile.tile;
  const ForwardBlock block(p, s, split_tile,
                           MULTI_TILE ? static_cast<int>((sizes.states + STATE_TILE - 1) / STATE_TILE) : 1,
                           ALONG_TIME || tile.channels == CHANNELS);
  const ThreadItems<ALONG_TIME> items;
  s.rows.template store_shared<T>(FORWARD_U, p.u, tile, items);
  s.rows.template store_shared<T>(FORWARD_DELTA, p.delta, tile, items);
  s.rows.template store_shared<T>(FORWARD_Z, p.z, tile, items);
  s.rows.template store_shared<T>(FORWARD_OUT, p.out, tile, items);
  const ChannelParameter bias(p.delta_bias, tile), d(p.d, tile);
  if (thread_index() < 4) s.non_finite[thread_index()] = 0;
  barrier();
  if (WARP_SPECIALIZED && thread_index() >= THREADS) {
    deallocate_registers<FORWARD_REGISTERS - REALLOCATED_REGISTERS<T>>();
    const int chunk = run_elementwise<T, ALONG_TIME, false, SEGMENTED>(block, split_tile.begin);
    if (chunk < block.end) run_elementwise<T, ALONG_TIME, true, SEGMENTED>(block, chunk);
    return;
  }
  if (thread_index() < tile.channels) prefetch_l1(p.a + (tile.first + thread_index()) * sizes.states);
  bias.store_shared(s.bias);
  d.store_shared(s.d);
  barrier();
  allocate_registers<FORWARD_REGISTERS + REALLOCATED_REGISTERS<T>>();
  // With one state tile through the y of a stage that no chunk writes before the second.
  float* prefix =
      MULTI_TILE ? slots + (split_tile.begin & (FORWARD_COPIES - 1)) * THREADS * 4 : s.stage(split_tile.begin + 1).y;
  store_prefix<SEGMENTED>(prefix, block);
  if (WARP_SPECIALIZED) barrier();
  ForwardRecurrence<T, MULTI_TILE, true, SEGMENTED> states(block, slots);
  if constexpr (WARP_SPECIALIZED) {
    ForwardRecurrence<T, MULTI_TILE, false, SEGMENTED> finite(block, slots);
    load_float4(finite.h, prefix + thread_index() * 4);
    const int chunk = run_recurrence(block, split_tile.begin, finite);
#pragma unroll
    for (int e = 0; e < 4; ++e) states.h[e] = finite.h[e];
    if (chunk < block.end) {
      barrier();
      run_recurrence(block, chunk, states);
    }
  } else {
    load_float4(states.h, prefix + thread_index() * 4);
    run_fused<T, MULTI_TILE, ALONG_TIME, SEGMENTED>(block, states);
  }
  if (p.last && split_tile.split + 1 == p.splits) {
    for (int state_tile = 0; state_tile < block.state_tiles; ++state_tile) {
      if constexpr (MULTI_TILE) load_float4(states.h, states.slot(state_tile, block.end));
      StateAccess(sizes, tile, states.lane, state_tile, 1).store(p.last, 0, states.h);
    }
  }
}
