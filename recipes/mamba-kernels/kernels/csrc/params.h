// The kernels' parameters: plain structs of pointers, strides and sizes, eight bytes a field. Strides count elements. A
// null pointer stands for a tensor that was not given.
#pragma once

#include <cstdint>

// A tensor (batch, channel, time) in the input's dtype.
struct Sequence {
  void* data;
  int64_t batch, channel, time;
};

// B or C, (batch, group, state, time), in the input's dtype.
struct Projection {
  void* data;
  int64_t batch, group, state, time;
};

struct ScanSizes {
  int64_t batch, channels, length, states, groups;
  // 1: delta goes through softplus.
  int64_t softplus;
  // 1: the time stride of every Sequence is 1 (channel-first); 0: the channel stride is (token-major).
  int64_t time_adjacent;
  // 1: in every Sequence, eight adjacent elements from a multiple of eight on are aligned to 16 bytes.
  int64_t aligned;
};

struct ScanForward {
  ScanSizes sizes;
  Sequence u, delta, z, out;
  Projection b, c;
  const float* a;           // (channels, states), contiguous
  const float* d;           // (channels)
  const float* delta_bias;  // (channels)
  const float* initial;     // (batch, channels, states), contiguous
  const int32_t* segment;   // (batch, length), contiguous; a change of value starts a new sequence
  float* last;              // (batch, channels, states), contiguous
  float* checkpoints;       // (batch, channels, chunks, states): state before each chunk of 32 steps
  // Time split. A split has ceil(chunks / splits) of the ceil(length / 32) chunks, the last split the remainder, at
  // least one. With several splits scan_split_forward_* runs first, in blocks * (splits - 1) * ceil(states / 16)
  // blocks, and writes:
  int64_t splits;
  float* split_states;  // (splits, batch, channels, states): what leaves each split but the last when nothing enters
  float* split_decays;  // (splits, batch, channels, 2): its steps' sum, and 1 where a sequence starts in it
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
  // (splits, batch, channels, states); the result is that of the first split. Always given with more than 16 states:
  // workspace.
  float* initial_gradient;
  float* a_gradient;     // (splits, batch, channels, states): still to be summed over splits and batch
  float* d_gradient;     // (splits, batch, channels): likewise
  float* bias_gradient;  // (splits, batch, channels): likewise
  float* b_partial;      // (batch, groups, blocks, length, states): still to be summed over blocks
  float* c_partial;      // likewise
  // Time split. A split has ceil(chunks / splits) of the ceil(length / 32) chunks, the last split the remainder, at
  // least one. With several splits scan_split_backward_* runs first, in blocks * (splits - 1) * ceil(states / 16)
  // blocks, and writes:
  int64_t splits;
  float* split_states;  // (splits, batch, channels, states): what leaves each split but the first when nothing enters
  float* split_decays;  // (splits, batch, channels, 2): its steps' sum, and 1 where a sequence starts in it
};

// Reduces ScanBackward's partial sums, in order. Blocks of 128 threads: 2 * batch * groups * ceil(length / 32), and,
// where `parts` is more than one, ceil(channels * (states + 2) / 128) more for A, D and the bias.
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

// Causal depthwise convolution over time: width 2 to 8, length up to 2^31 - 2^13.
struct ConvSizes {
  int64_t batch, channels, length, width;
  // 1: silu follows.
  int64_t silu;
  // 1: the time stride of x is 1 (channel-first); 0: the channel stride is (token-major).
  int64_t time_adjacent;
};

// Blocks of 128 threads; pieces = ceil(length / steps).
//   conv_forward_*: batch * ceil(channels / 4) * pieces, steps a multiple of 256.
//   conv_forward_token_major_*: ceil(batch * pieces * ceil(channels / 4) / 128), any steps.
// Widths above 4 have kernels of their own (_wide_bf16). The kernels _aligned take the inputs that
// conv_aligned_forward.h names in the same grids, but conv_forward_aligned_fp32 batch * channels * pieces blocks, and
// conv_backward_aligned_* blocks of 128 threads. conv_forward_small_* replaces conv_forward_aligned_* with 256 steps a
// piece, of fp32 128.
struct ConvForward {
  ConvSizes sizes;
  Sequence x, out;
  // (batch, channels, width - 1) in the input's dtype: the inputs before time 0, which belong to the first sequence of
  // `segment`, and the last inputs, zero where a time is not of the last time's sequence.
  Sequence initial, last;
  const float* weight;     // (channels, width), contiguous
  const float* bias;       // (channels)
  const int32_t* segment;  // (batch, length), contiguous; a change of value starts a new sequence
  int64_t steps, pieces;   // of a row for a logical warp, or of a lane
  // Of `pieces`, and of ceil(channels / 4), or of channels where a block has one row; see FastDivisor in
  // conv_forward.h.
  uint64_t piece_reciprocal, group_reciprocal;
};

// Blocks. conv_backward_* (channel-first): 64 threads, channels * splits, any number of splits.
// conv_backward_token_major_*: 128 threads, ceil(channels * bytes per element / 256) * splits, splits = batch *
// ceil(length / (4 * steps)).
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

// Reduces the partial gradients over splits, in order. Blocks of 128 threads: ceil(channels * (width + 1) / 16).
struct ConvReduce {
  const float* weight_partial;
  const float* bias_partial;
  float* weight_gradient;  // (channels, width)
  float* bias_gradient;    // (channels)
  int64_t splits, channels, width;
};

// Convolves further steps and updates `state`, which holds the last inputs, in place. Blocks of 128 threads: ceil(batch
// * channels / 128).
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

// What a launch of a kernel asks for beside its blocks: `<kernel>_launch` of its code object, which the build reads.
// Dynamic shared memory of a block = shared_base + shared_per_state_tile * ceil(states / 16), in bytes.
struct LaunchSizes {
  int32_t threads;
  // Set where warps hand registers to each other: with fewer they would wait for ever. A build that gives other ones is
  // refused.
  int32_t registers = 0;
  int32_t shared_base = 0, shared_per_state_tile = 0;
};

// The elements of `<kernel>_launch`; `sizes` is LaunchSizes, or a number of threads.
#define LAUNCH_ARRAY(sizes) \
  { LaunchSizes{sizes}.registers, LaunchSizes{sizes}.shared_base, LaunchSizes{sizes}.shared_per_state_tile }
