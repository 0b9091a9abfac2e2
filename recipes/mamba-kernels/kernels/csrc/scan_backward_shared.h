// What a block of the scan's backward pass has in shared memory, and the addresses that lie there.
// Tiling: rows of a channel over the chunk's 32 steps; B and C over [time][state]; saved states and inputs by thread.
#pragma once

#include "scan_backward_sums.h"
#include "scan_split_state.h"

// Steps whose intermediate values a lane keeps in registers.
constexpr int REGISTER_STEPS = 8;
// States saved before each eight steps of a chunk but the last. With tensor cores in shared memory, because the
// recurrence needs the registers; without, in registers, because it needs the shared memory.
constexpr int SAVED_STATES = CHUNK / REGISTER_STEPS - 1;
// u, delta, the gradient of out, and z: read twice a chunk, from shared memory where it has room.
constexpr int INPUTS = 4;
template <class T>
constexpr bool STAGES_INPUTS = HAS_MMA_TF32 && sizeof(T) == 2;

struct BackwardShared {
  float dt[CHANNELS * ROW], dy[CHANNELS * ROW];
  // Sums over states. With one state tile d(dt u) takes the place of dt u.
  float sums[STATE_SUMS * CHANNELS * ROW];
  float b[CHUNK * STATE_VECTOR_ROW], c[CHUNK * STATE_VECTOR_ROW];
  float state_stage[VectorThreadMap::WARPS * StateReduction::STAGE];
  float channel_stage[VectorThreadMap::WARPS * ChannelReduction<false, false>::STAGE];
  float projections[VectorThreadMap::WARPS * 2 * CHUNK * STATE_TILE];
  // Each thread's items of the inputs, as loaded.
  uint32_t inputs[STAGES_INPUTS<bf16> ? INPUTS * 4 * THREADS : 4];
  float saved_states[HAS_MMA_TF32 ? SAVED_STATES * THREADS * 4 : 4];
  // Masks of mma operands: one where the row of lanes is the column.
  float ones[8 * 8];
  float continues[CHUNK], bias[CHANNELS], d[CHANNELS];
  // Gradients of D and of delta's bias.
  CompensatedSum d_total[CHANNELS], bias_total[CHANNELS];
  RowPointers<7> rows;
  // Pointers to this block's partial dB and dC, to each state of the first state tile of B and C, and to each channel's
  // checkpoints: computing one takes 64-bit products, and registers that the recurrence needs.
  uintptr_t partial[2], projection_rows[2][STATE_TILE], checkpoint_rows[CHANNELS];
  int non_finite;
  int unused[3];
};
static_assert(sizeof(BackwardShared) % 16 == 0);

// Behind it lie dt u of several state tiles, then the carry slots.
constexpr int TILED_INPUT = CHANNELS * ROW;
template <bool MULTI_TILE>
DEVICE float* dtu_rows(BackwardShared& s) {
  return MULTI_TILE ? reinterpret_cast<float*>(&s + 1) : s.sums + SUM_INPUT * CHANNELS * ROW;
}

template <class T>
DEVICE void store_addresses(const ScanBackward& p, BackwardShared& s, const ChannelTile& tile) {
  const ScanSizes& sizes = p.sizes;
  const int i = thread_index();
  if (i < 2) {
    const int64_t part = (tile.batch * sizes.groups + tile.group) * tile.blocks + tile.block;
    s.partial[i] = reinterpret_cast<uintptr_t>((i ? p.c_partial : p.b_partial) + part * sizes.length * sizes.states);
  }
  if (i < 2 * STATE_TILE) {
    const bool is_c = i >= STATE_TILE;
    const int64_t at = tile.batch * (is_c ? p.c.batch : p.b.batch) + tile.group * (is_c ? p.c.group : p.b.group) +
                       i % STATE_TILE * (is_c ? p.c.state : p.b.state);
    const T* data = static_cast<const T*>(is_c ? p.c.data : p.b.data);
    s.projection_rows[is_c][i % STATE_TILE] = reinterpret_cast<uintptr_t>(data + at);
  }
  if (i < CHANNELS) {
    const int64_t chunks = (sizes.length + CHUNK - 1) / CHUNK, channel = tile.batch * sizes.channels + tile.first + i;
    s.checkpoint_rows[i] = reinterpret_cast<uintptr_t>(p.checkpoints + channel * chunks * sizes.states);
  }
}

enum BackwardTensor {
  BACKWARD_U,
  BACKWARD_DELTA,
  BACKWARD_Z,
  BACKWARD_OUT_GRADIENT,
  BACKWARD_U_GRADIENT,
  BACKWARD_DELTA_GRADIENT,
  BACKWARD_Z_GRADIENT
};

struct SavedStates {
  float kept[HAS_MMA_TF32 ? 1 : SAVED_STATES][4];

  // Copies the first saved state from global memory.
  DEVICE static void copy(BackwardShared& s, const float* from) { cp_async(s.saved_states + thread_index() * 4, from); }
  DEVICE void store_shared(BackwardShared& s, int index, const float (&h)[4]) {
    if constexpr (HAS_MMA_TF32) {
      store_float4(s.saved_states + (index * THREADS + thread_index()) * 4, h[0], h[1], h[2], h[3]);
    } else {
#pragma unroll
      for (int i = 0; i < SAVED_STATES; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) kept[i][e] = i == index ? h[e] : kept[i][e];
      }
    }
  }
  DEVICE void load_shared(float (&h)[4], const BackwardShared& s, int index) const {
    if constexpr (HAS_MMA_TF32) {
      load_float4(h, s.saved_states + (index * THREADS + thread_index()) * 4);
    } else {
#pragma unroll
      for (int i = 0; i < SAVED_STATES; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) h[e] = i == index ? kept[i][e] : h[e];
      }
    }
  }
};

enum CarryKind { CARRY, A_GRADIENT };
// Slots of a state tile: each kind by the chunk's parity.
constexpr int CARRIES = 4;

// Whether carries have no registers between chunks.
template <bool MULTI_TILE>
constexpr bool STORES_CARRY = MULTI_TILE || HAS_MMA_TF32;

// Storage of carries and of A's gradient while other state tiles have the registers. With tensor cores in shared
// memory, in two copies by the chunk's parity, because a chunk may be repeated without mma; without, in the output
// tensors.
struct CarryStorage {
  const ScanBackward& p;
  const ChannelTile& tile;
  const VectorThreadMap& lane;
  float* shared;

  DEVICE StateVectorAccess address(int64_t state_tile) const {
    return StateVectorAccess(p.sizes, tile, lane, state_tile);
  }
  DEVICE float* slot(int64_t state_tile, CarryKind which, int chunk) const {
    return shared + (((state_tile * 2 + which) * 2 + (chunk + 1) % 2) * THREADS + thread_index()) * 4;
  }
  DEVICE float* kept(CarryKind which) const { return which == CARRY ? p.initial_gradient : p.a_gradient; }
  DEVICE void load(float (&x)[4], int64_t state_tile, CarryKind which, int chunk) const {
    if constexpr (HAS_MMA_TF32) {
      load_float4(x, slot(state_tile, which, chunk));
    } else {
      address(state_tile).load(x, kept(which));
    }
  }
  DEVICE void store(const float (&x)[4], int64_t state_tile, CarryKind which, int chunk) const {
    if constexpr (HAS_MMA_TF32) {
      store_float4(slot(state_tile, which, chunk), x[0], x[1], x[2], x[3]);
    } else {
      address(state_tile).store(kept(which), x);
    }
  }
  // Adds a chunk's gradient of A to that of the chunks after it, and stores both for the chunk before.
  template <bool MULTI_TILE>
  DEVICE void add_chunk(const float (&carry)[4], float (&a_gradient)[4], const float (&of_chunk)[4], int64_t state_tile,
                        int chunk) const {
    if constexpr (STORES_CARRY<MULTI_TILE>) load(a_gradient, state_tile, A_GRADIENT, chunk);
#pragma unroll
    for (int e = 0; e < 4; ++e) a_gradient[e] += of_chunk[e];
    if constexpr (STORES_CARRY<MULTI_TILE>) {
      store(carry, state_tile, CARRY, chunk - 1);
      store(a_gradient, state_tile, A_GRADIENT, chunk - 1);
    }
  }
};
