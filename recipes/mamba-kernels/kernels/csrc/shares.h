// Time split over blocks, for batches too small to fill a GPU. Both passes are linear in what enters a split, h forward
// and a_{t+1} g_{t+1} backward: a first kernel (scan_splits.h) finds what leaves a split when nothing enters, and how
// long the split is in steps dt. Every block then adds up, in order, what reaches its split.
#pragma once

#include "elements.h"

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

// Sum of steps dt, and whether a sequence starts in them, of one channel of the block: of a split, or of several.
struct Span {
  float length = 0.0f, restarts = 0.0f;

  // Where that of a channel is, `split` splits behind the place's.
  DEVICE static int64_t index(const ScanSizes& sizes, const Place& place, int64_t split, int channel) {
    return ((split * sizes.batch + place.batch) * sizes.channels + place.first + channel) * 2;
  }
  DEVICE static Span read(const float* from) {
    float x[2];
    load_two(x, from);
    return {x[0], x[1]};
  }
  DEVICE void write(float* to) const { store_two(to, length, restarts); }
  DEVICE void add(const Span& next) {
    length += next.length;
    if (next.restarts != 0.0f) restarts = 1.0f;
  }
  // Adds to x what is left of y after these steps; a is A log2(e). SEGMENTED: sequences may start in them.
  template <bool SEGMENTED>
  DEVICE void add_what_is_left(float (&x)[4], const float (&y)[4], const float (&a)[4]) const {
    if (SEGMENTED && restarts != 0.0f) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // At least the smallest number, so that what is infinite stays it.
      const float decay = exp2_fast(a[e] * length);
      x[e] += (decay < 0x1p-126f ? 0x1p-126f : decay) * y[e];
    }
  }
};
