// What a block of the scan's forward pass has in shared memory, and the recurrence over one chunk.
// Equation: h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = C_t h_t.
#pragma once

#include "scan_mma.h"
#include "scan_common.h"

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
