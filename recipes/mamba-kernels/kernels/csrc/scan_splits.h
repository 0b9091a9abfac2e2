// Time split: a sequence is divided over blocks where the batch is too small to fill a GPU. Both passes are linear in
// the carry that enters a split: h forward, a_{t+1} g_{t+1} backward. A first kernel (scan_split_state.h) computes each
// split's aggregate: the carry that leaves it when none enters, and its sum of dt. Each block of the pass then computes
// its split's exclusive prefix (scan_prefix.h), in order.
// Equation: the carry that leaves a split is exp(A sum of dt) times the one that enters, plus its aggregate.
// Tiling: a split is an equal run of chunks, the last the remainder; blocks count channels, then batch, then splits.
#pragma once

#include "scan_common.h"

// A block's work: a channel tile, and the chunks [begin, end) of one split.
struct SplitTile {
  // The tile in the tensors, and in partial results, where splits count as batch.
  ChannelTile tile, partial;
  int64_t split;
  int begin, end;

  DEVICE SplitTile(const ScanSizes& sizes, int64_t splits, int64_t split) : tile(sizes), partial(tile), split(split) {
    tile.batch %= sizes.batch;
    partial.batch = split * sizes.batch + tile.batch;
    const int64_t chunks = (sizes.length + CHUNK - 1) / CHUNK, each = (chunks + splits - 1) / splits;
    begin = static_cast<int>(split * each);
    end = static_cast<int>(split * each + each < chunks ? split * each + each : chunks);
  }
  // Blocks iterate over channels, then over the batch, then over this.
  DEVICE static int64_t outermost_index(const ScanSizes& sizes) { return ChannelTile(sizes).batch / sizes.batch; }
};

// The decay of one split or of several, of one channel: its sum of dt, and whether a sequence starts in it.
struct SplitDecay {
  float total_dt = 0.0f, resets = 0.0f;

  // Index of a channel's decay, `split` splits after the tile's.
  DEVICE static int64_t index(const ScanSizes& sizes, const ChannelTile& tile, int64_t split, int channel) {
    return ((split * sizes.batch + tile.batch) * sizes.channels + tile.first + channel) * 2;
  }
  DEVICE static SplitDecay read(const float* from) {
    float x[2];
    load_float2(x, from);
    return {x[0], x[1]};
  }
  DEVICE void write(float* to) const { store_float2(to, total_dt, resets); }
  DEVICE void add(const SplitDecay& next) {
    total_dt += next.total_dt;
    if (next.resets != 0.0f) resets = 1.0f;
  }
  // Adds y, decayed over these steps, to x; a is A log2(e). SEGMENTED: sequences may start in them.
  template <bool SEGMENTED>
  DEVICE void add_decayed(float (&x)[4], const float (&y)[4], const float (&a)[4]) const {
    if (SEGMENTED && resets != 0.0f) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // At least the smallest normal number, so that an infinity stays one.
      const float decay = exp2_approx(a[e] * total_dt);
      x[e] += (decay < 0x1p-126f ? 0x1p-126f : decay) * y[e];
    }
  }
};
