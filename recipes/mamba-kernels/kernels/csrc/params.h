// What the host hands to the kernels: plain structs of pointers, strides and sizes, eight bytes a field.
// Strides count elements. A pointer that is null means that the tensor was not given.
#pragma once

#include <cstdint>

// A tensor over batch, channel and time in the input's type.
struct Sequence {
  void* data;
  int64_t batch, channel, time;
};

// B or C, over batch, group, state and time in the input's type.
struct Projection {
  void* data;
  int64_t batch, group, state, time;
};

struct ScanSizes {
  int64_t batch, channels, length, states, groups;
  // 1: delta goes through softplus.
  int64_t softplus;
  // 1: consecutive times of every Sequence are adjacent in memory; 0: consecutive channels are.
  int64_t time_adjacent;
  // 1: eight adjacent elements of every Sequence, from a multiple of eight on, start on 16 bytes.
  int64_t aligned;
};

struct ScanForward {
  ScanSizes sizes;
  Sequence u, delta, z, out;
  Projection b, c;
  const float* a;            // (channels, states), contiguous
  const float* d;            // (channels)
  const float* delta_bias;   // (channels)
  const float* initial;      // (batch, channels, states), contiguous
  const int32_t* segment;    // (batch, length), contiguous; a change of value starts a new sequence
  float* last;               // (batch, channels, states), contiguous
  float* checkpoints;        // (batch, channels, chunks, states): state before each chunk of 32 steps
  // Of the ceil(length / 32) chunks a split has ceil(chunks / splits), the last one what is left: at least one. With
  // several splits scan_states_* comes first, blocks * (splits - 1) * ceil(states / 16) blocks of it, and leaves:
  int64_t splits;
  float* carries;  // (splits, batch, channels, states): what leaves each split but the last when nothing enters
  float* spans;    // (splits, batch, channels, 2): its steps' sum, and 1 where a sequence starts in it
};

struct ScanBackward {
  ScanSizes sizes;
  Sequence u, delta, z, out_gradient;
  Sequence u_gradient, delta_gradient, z_gradient;
  Projection b, c;
  const float* a;
  const float* d;
  const float* delta_bias;
  const int32_t* segment;
  const float* checkpoints;
  const float* last_gradient;  // (batch, channels, states), contiguous
  // (splits, batch, channels, states), of which the first split's counts; with more than 16 states always given:
  // scratch.
  float* initial_gradient;
  float* a_gradient;     // (splits, batch, channels, states): still to be summed over splits and batch
  float* d_gradient;     // (splits, batch, channels): likewise
  float* bias_gradient;  // (splits, batch, channels): likewise
  float* b_partial;      // (batch, groups, blocks, length, states): still to be summed over blocks
  float* c_partial;      // likewise
  // Of the ceil(length / 32) chunks a split has ceil(chunks / splits), the last one what is left: at least one. With
  // several splits scan_carries_* comes first, blocks * (splits - 1) * ceil(states / 16) blocks of it, and leaves:
  int64_t splits;
  float* carries;  // (splits, batch, channels, states): what leaves each split but the first when nothing enters
  float* spans;    // (splits, batch, channels, 2): its steps' sum, and 1 where a sequence starts in it
};

// Sums what ScanBackward leaves to be summed, in order. Blocks of 128 threads: 2 * batch * groups * ceil(length / 32), and
// for the three of `parts`, unless there is only one, ceil(channels * (states + 2) / 128) more.
struct ScanReduce {
  const float* a_partial;
  const float* d_partial;
  const float* bias_partial;
  const float* b_partial;
  const float* c_partial;
  float* a_gradient;     // (channels, states)
  float* d_gradient;     // (channels)
  float* bias_gradient;  // (channels)
  Projection b_gradient, c_gradient;
  int64_t batch, channels, length, states, groups;
  int64_t blocks, parts;  // of a group's channels; of batch and time
};

// Causal convolution over time, each channel by itself: width 2 to 8, length up to 2^31 - 2^13.
struct ConvSizes {
  int64_t batch, channels, length, width;
  // 1: the result goes through silu.
  int64_t silu;
  // 1: consecutive times of x are adjacent in memory; 0: consecutive channels are.
  int64_t time_adjacent;
};

// Blocks of 128 threads, with pieces = ceil(length / steps): conv_forward_*, for times adjacent, batch *
// ceil(channels / 4) * pieces, with steps a multiple of 256; conv_forward_tokens_*, for channels adjacent, ceil(batch *
// pieces * ceil(channels / 4) / 128), with any steps.
// Of each there is one for widths up to 4 (_bf16) and one for more (_wide_bf16). conv_forward_plain4_*,
// conv_backward_plain4_* and, with channels adjacent, conv_forward_tokens_plain4_* and conv_backward_tokens_plain4_* are
// launched likewise, for width 4 and what conv_plain.h says, and plain2 and plain3 for theirs; but conv_forward_plain4_fp32
// as batch * channels * pieces blocks, and conv_backward_plain4_* in blocks of 128 threads. conv_forward_small4_* takes the
// place of conv_forward_plain4_* with 256 steps.
struct ConvForward {
  ConvSizes sizes;
  Sequence x, out;
  // (batch, channels, width - 1) in the input's type: the inputs before time 0, and the last inputs. Of the
  // inputs before time 0 the first sequence of `segment` alone knows; `last` is zero where a time belongs to
  // another sequence than the last time.
  Sequence initial, last;
  const float* weight;     // (channels, width), contiguous
  const float* bias;       // (channels)
  const int32_t* segment;  // (batch, length), contiguous; a change of value starts a new sequence
  int64_t steps, pieces;   // of a row for a team, or of a lane
  // Of `pieces`, and of ceil(channels / 4), or channels where rows are blocks; see Reciprocal in conv_forward.h.
  uint64_t piece_reciprocal, group_reciprocal;
};

// Blocks: of 64 threads, conv_backward_*, for times adjacent, channels * splits, with any number of splits; of
// 128 threads, conv_backward_tokens_*, for channels adjacent, ceil(channels / 128) * splits, with splits =
// batch * ceil(length / (4 * steps)).
struct ConvBackward {
  ConvSizes sizes;
  Sequence x, out_gradient, x_gradient;
  Sequence initial, last_gradient, initial_gradient;
  const float* weight;
  const float* bias;
  const int32_t* segment;
  int64_t steps;  // of a lane, a multiple of 4; for times adjacent not looked at
  int64_t splits;
  float* weight_partial;  // (splits, channels, width): still to be summed over splits; with one, the gradient
  float* bias_partial;    // (splits, channels): likewise
};

// Sums both partial gradients over splits, in order. Blocks of 128 threads: ceil(channels * (width + 1) / 16).
struct ConvReduce {
  const float* weight_partial;
  const float* bias_partial;
  float* weight_gradient;  // (channels, width)
  float* bias_gradient;    // (channels)
  int64_t splits, channels, width;
};

// Some more steps of sequences whose last inputs are kept in `state`, which is brought up to date in place.
// Blocks of 128 threads: ceil(batch * channels / 128).
struct ConvUpdate {
  ConvSizes sizes;  // time_adjacent is not looked at
  Sequence x, out;
  Sequence state;  // (states, channels, state_length) in the input's type
  int64_t state_length;
  const float* weight;
  const float* bias;
  const int32_t* past;         // (batch): steps so far, and time t is kept at t % state_length; null: shifted
  const int32_t* state_index;  // (batch): the state of each sequence; negative: none, and the output is zero
};
