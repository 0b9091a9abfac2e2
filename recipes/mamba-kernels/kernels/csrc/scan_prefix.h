// The exclusive prefix of a split: the carry that enters it; see scan_splits.h.
// Equation: carry = sum over splits before of their aggregates, each decayed over the splits between.
// Tiling: a lane has four states of a channel and reads up to eight splits at once.
#pragma once

#include "scan_state_vector.h"
#include "scan_splits.h"

// Splits whose aggregates are read together, because a single load would be waited for. Few where elements are read one
// by one: code costs instruction fetches even where it does not run.
constexpr int SPLIT_BATCH = 8, SMALL_SPLIT_BATCH = 2;

// Adds the decayed aggregates of `count` splits, from the nearest on, so that no decay or product waits for another.
// Returns their total decay.
template <int BATCH, bool SEGMENTED, class Load>
DEVICE SplitDecay accumulate_splits(float (&carry)[4], const float (&a)[4], const float* states_at,
                                    const float* decays_at, int64_t state_stride, int64_t decay_stride, int count,
                                    const Load& load) {
  SplitDecay between;
#pragma unroll 1
  for (; count > 0; count -= BATCH) {
    float states[BATCH][4];
    SplitDecay split_decays[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      if (k < count) {
        load(states[k], states_at);
        split_decays[k] = SplitDecay::read(decays_at);
      }
      states_at += state_stride;
      decays_at += decay_stride;
    }
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      // A loop that is left early is not unrolled by clang 22, and arrays then lie in memory.
      if (k < count) {
        between.add_decayed<SEGMENTED>(carry, states[k], a);
        between.add(split_decays[k]);
      }
    }
  }
  return between;
}

// The carry that enters a split: of the initial carry of the sequence, if it has one, and of the splits between.
template <bool FORWARD, bool SEGMENTED, class Params>
DEVICE void exclusive_prefix(float (&carry)[4], const Params& p, const float* initial, const SplitTile& split_tile,
                             const VectorThreadMap& lane, int64_t state_tile) {
  constexpr int64_t DIRECTION = FORWARD ? -1 : 1;
  const ScanSizes& sizes = p.sizes;
  const StateVectorAccess address(sizes, split_tile.tile, lane, state_tile);
  const int64_t channels = sizes.batch * sizes.channels, nearest = split_tile.split + DIRECTION;
#pragma unroll
  for (int e = 0; e < 4; ++e) carry[e] = 0.0f;
  if (address.vector.valid == 0) return;
  float first[4] = {}, a[4] = {};
  if (initial) address.load(first, initial);
  const int count = static_cast<int>(FORWARD ? split_tile.split : p.splits - 1 - split_tile.split);
  SplitDecay between;
  if (count > 0) {
    load_decay_rates(a, p.a, sizes, split_tile.tile, lane, state_tile);
    const float* states = p.split_states + (nearest * channels * sizes.states + address.start);
    const float* split_decays = p.split_decays + SplitDecay::index(sizes, split_tile.tile, nearest, lane.channel());
    const int64_t state_stride = DIRECTION * channels * sizes.states, decay_stride = DIRECTION * channels * 2;
    if (address.vector.vectorized) {
      between =
          accumulate_splits<SPLIT_BATCH, SEGMENTED>(carry, a, states, split_decays, state_stride, decay_stride, count,
                                                    [](float(&x)[4], const float* at) { load_float4(x, at); });
    } else {
      between = accumulate_splits<SMALL_SPLIT_BATCH, SEGMENTED>(
          carry, a, states, split_decays, state_stride, decay_stride, count,
          [&](float(&x)[4], const float* at) { address.vector.load(x, at); });
    }
  }
  if (initial) between.add_decayed<SEGMENTED>(carry, first, a);
}
