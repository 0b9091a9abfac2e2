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

// Splits that are read at once where several are gone through: each alone would wait for memory.
constexpr int SPLITS_AT_ONCE = 4;

// Sum of a split's steps dt, and whether a sequence starts in it, of one channel of the block.
struct Span {
  float length = 0.0f, restarts = 0.0f;

  // `split`: how many splits behind the place's.
  DEVICE static Span read(const float* spans, const ScanSizes& sizes, const Place& place, int64_t split, int channel) {
    float x[2] = {};
    if (channel < place.channels) load_two(x, spans + index(sizes, place, split, channel));
    return {x[0], x[1]};
  }
  DEVICE void write(float* spans, const ScanSizes& sizes, const Place& place, int channel) const {
    store_two(spans + index(sizes, place, 0, channel), length, restarts);
  }
  // What leaves the split when `enters` does, and `leaves` when nothing does; a is A log2(e).
  DEVICE float passed(float enters, float leaves, float a) const {
    // At least the smallest number, so that what is infinite stays it.
    const float decay = exp2_fast(a * length);
    return restarts != 0.0f ? leaves : (decay < 0x1p-126f ? 0x1p-126f : decay) * enters + leaves;
  }

 private:
  DEVICE static int64_t index(const ScanSizes& sizes, const Place& place, int64_t split, int channel) {
    return ((split * sizes.batch + place.batch) * sizes.channels + place.first + channel) * 2;
  }
};
