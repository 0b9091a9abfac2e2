// Where carries and A's gradient wait while other state tiles, or other chunks, have the registers.
// Equation: none, scan_backward.h has them.
// Tiling: a slot is four states of a lane, by state tile, kind and the chunk's parity.
// Alone: pytest recipes/mamba-kernels/tests/test_scan.py -k emulated
#pragma once

#include "scan_backward_shared.h"

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
