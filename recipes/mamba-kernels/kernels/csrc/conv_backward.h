// Causal convolution, backward. The result before silu is recomputed; its gradient g = out_gradient silu'(result) gives
// x_gradient[t] = sum over j of weight[width - 1 - j] g[t + j] and the gradients of weight and bias, which blocks sum
// over their range of all times and sequences of a channel.
// Tiling: a block of 64 threads has a channel and a split of all times of its sequences, 8 times a lane.
#pragma once

#include "conv_common.h"

namespace conv {

// Channel-first: the times that a warp computes at once.
constexpr int BACKWARD_TIMES = WARP_SIZE * 8;
constexpr int BACKWARD_THREADS = 64;
constexpr int WARPS = BACKWARD_THREADS / WARP_SIZE;
// The prefetch distance in such groups of times: another would cost more in occupancy than it gains.
template <class T, int TAPS, bool SEGMENTED>
constexpr int BACKWARD_PREFETCH = SEGMENTED || TAPS > 4 ? 1 : 4 / sizeof(T);

// Shared memory of the sums, in floats.
template <int TAPS>
constexpr int TIME_SUMS = WARPS * (TAPS + 1);

template <int mask = 1>
DEVICE float warp_sum(float x) {
  if constexpr (mask < WARP_SIZE) return warp_sum<2 * mask>(x + shuffle_xor<mask>(x));
  return x;
}

// g at one time, from global memory.
template <class T>
DEVICE float gradient_at(const ConvBackward& p, const Segments& segments, int64_t batch, int64_t channel, int time) {
  const int width = static_cast<int>(p.sizes.width);
  const Row<T> x(p.x, batch, channel, p.sizes.length), initial(p.initial, batch, channel, width - 1);
  const Row<T> out_gradient(p.out_gradient, batch, channel, p.sizes.length);
  const float g = to_float(out_gradient[time]);
  if (!p.sizes.silu) return g;
  float y = p.bias ? p.bias[channel] : 0.0f;
#pragma unroll 1
  for (int k = 0; k < width; ++k) {
    const int from = time - (width - 1) + k;
    if (segments.same(from, time)) y += p.weight[channel * width + k] * to_float(input_at(x, initial, from));
  }
  return g * silu_derivative<T>(y * SILU_SCALE<T>);
}

// The gradient of the initial state: x_gradient at negative times.
template <class T>
DEVICE void store_initial_gradient(const ConvBackward& p, const Segments& segments, int64_t batch, int64_t channel) {
  const int width = static_cast<int>(p.sizes.width), length = static_cast<int>(p.sizes.length);
  const int history = width - 1;
  const Row<T> gradient(p.initial_gradient, batch, channel, history);
  const Row<T> last(p.last_gradient, batch, channel, history);
#pragma unroll 1
  for (int j = 0; j < history; ++j) {
    float sum = 0.0f;
#pragma unroll 1
    for (int time = 0; time <= j && time < length; ++time) {
      if (!segments.same(time, 0)) break;
      sum += p.weight[channel * width + j - time] * gradient_at<T>(p, segments, batch, channel, time);
    }
    if (last.given && j >= length && segments.same(0, length - 1)) sum += to_float(last[j - length]);
    gradient[j] = from_float<T>(sum);
  }
}

// One channel of one sequence, of all tensors.
template <class T>
struct BackwardRow {
  const ConvBackward& p;
  const int64_t batch, channel;
  const Row<T> x, out_gradient, x_gradient;
  // Vectors start this much before a multiple of eight times.
  const int shift;
  const bool vectors;

  DEVICE BackwardRow(const ConvBackward& p, int64_t batch, int64_t channel)
      : p(p),
        batch(batch),
        channel(channel),
        x(p.x, batch, channel, p.sizes.length),
        out_gradient(p.out_gradient, batch, channel, p.sizes.length),
        x_gradient(p.x_gradient, batch, channel, p.sizes.length),
        shift(x.misalignment()),
        vectors(x.stride == 1 && out_gradient.aligned(shift) && x_gradient.aligned(shift)) {}

  DEVICE Row<T> initial() const { return Row<T>(p.initial, batch, channel, p.sizes.width - 1); }
  DEVICE Row<T> last_gradient() const { return Row<T>(p.last_gradient, batch, channel, p.sizes.width - 1); }
  DEVICE Segments segments() const { return Segments(p.segment, p.sizes.length, batch); }

  DEVICE int start(int group) const { return group * BACKWARD_TIMES - shift; }
  // Groups from first_interior() to last_interior() are whole vectors and touch neither state.
  DEVICE int first_interior() const { return shift != 0 || p.initial.data; }
  template <int TAPS>
  DEVICE int last_interior() const {
    return vectors ? (x.length + shift - (p.last_gradient.data ? TAPS : 0)) / BACKWARD_TIMES : 0;
  }
};

// A lane's contribution to the gradients of weight and bias. The terms of eight times are summed first, because each
// addition rounds to the digits of the whole sum; and tap by tap, which takes one register.
template <int TAPS>
struct Gradients {
  float weight[TAPS] = {}, bias = 0.0f;
};

// A lane's times of one channel, and its contribution to the gradients of weight and bias.
template <class T, int TAPS, bool SEGMENTED>
struct BackwardLane {
  static constexpr int PAST = TAPS - 1, PREFETCH = BACKWARD_PREFETCH<T, TAPS, SEGMENTED>;
  using Rows = BackwardRow<T>;

  struct Loads {
    RawVector<T, TAPS> before;
    RawVector<T, 8> now, out_gradient;

    DEVICE void load_interior(const Rows& rows, int time) {
      before = rows.x.template load_vector<TAPS>(maximum(time - TAPS, 0));
      now = rows.x.template load_vector<8>(time);
      out_gradient = rows.out_gradient.template load_vector<8>(time);
    }
    DEVICE void load_edge(const Rows& rows, int time) {
      before = rows.x.template read<TAPS>(time - TAPS, rows.vectors);
      now = rows.x.template read<8>(time, rows.vectors);
      out_gradient = rows.out_gradient.template read<8>(time, rows.vectors);
    }
  };

  // The filter before silu is scaled by SILU_SCALE and g divided by it: their product is unscaled.
  const bool silu_after;
  const float scale;
  const Filter<TAPS> filter;
  // Of the unscaled g.
  Gradients<TAPS> gradients;
  // On lane 0: g at the first times after the warp's vectors.
  float halo[PAST];

  DEVICE BackwardLane(const ConvBackward& p, int64_t channel)
      : silu_after(p.sizes.silu != 0),
        scale(silu_after ? SILU_SCALE<T> : 1.0f),
        filter(Filter<TAPS>(p.weight, p.bias, p.sizes.width, channel).scaled(scale)) {}

  // g of eight times, from the inputs since `time` - PAST.
  template <bool EXACT>
  DEVICE void apply_silu_derivative(float (&g)[8], const float (&x)[PAST + 8], const Rows& rows, int time) const {
    float z[8];
    convolve<TAPS, SEGMENTED, EXACT>(z, x, filter, rows.segments(), time);
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] *= silu_derivative<T>(z[i], 1.0f / SILU_SCALE<T>);
  }

  // From g of eight times and of those that follow, which the next lane holds: their terms of the sums, and the
  // gradient of x.
  template <bool EXACT>
  DEVICE void back(float (&x_gradient)[8], const float (&x)[PAST + 8], const float (&own)[8], const Rows& rows,
                   int time) {
    const int lane = thread_index() % WARP_SIZE, right = (lane + 1) % WARP_SIZE;
    float g[8 + PAST];
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = own[i];
    gradients.bias += pairwise_sum8(own);
#pragma unroll
    for (int i = 0; i < PAST; ++i) {
      g[8 + i] = shuffle(lane == 0 ? halo[i] : own[i], right);
      halo[i] = own[i];
    }
    const SameSegment<PAST + 8 + PAST, SEGMENTED> same_segment(rows.segments(), time - PAST);
#pragma unroll
    for (int i = 0; i < 8; ++i) x_gradient[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
      if (!filter.template used<EXACT>(k)) continue;
      float terms = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (same_segment.same(i + k, i + PAST)) terms += g[i] * x[i + k];
        if (same_segment.same(PAST + i, 2 * PAST + i - k)) x_gradient[i] += filter.weight[k] * g[i + PAST - k];
      }
      gradients.weight[k] += terms;
    }
  }

  // Groups [begin, end) from last to first, all interior. `has_next`: an interior vector follows them, and `halo` is
  // not known yet.
  template <bool EXACT, bool SILU>
  DEVICE void walk_interior(const Rows& rows, int begin, int end, bool has_next) {
    const int first = rows.start(begin) + thread_index() % WARP_SIZE * 8;
    Loads loads[PREFETCH], next;
    const int after = rows.start(end);
#pragma unroll
    for (int i = 0; i < PREFETCH; ++i)
      loads[i].load_interior(rows, maximum(first + (end - begin - 1 - i) * BACKWARD_TIMES, first));
    if (has_next) next.load_interior(rows, after);
    if (has_next) {
      float x[PAST + 8], g[8];
      concatenate(x, next.before, next.now);
      next.out_gradient.to_floats(g);
      if constexpr (SILU) apply_silu_derivative<EXACT>(g, x, rows, after);
#pragma unroll
      for (int i = 0; i < PAST; ++i) halo[i] = g[i];
    }
#pragma unroll 1
    for (int time = first + (end - begin - 1) * BACKWARD_TIMES;; time -= PREFETCH * BACKWARD_TIMES) {
#pragma unroll
      for (int i = 0; i < PREFETCH; ++i) {
        const int t = time - i * BACKWARD_TIMES;
        if (t < first) return;
        float x[PAST + 8], g[8], x_gradient[8];
        concatenate(x, loads[i].before.zero_unless(t > 0), loads[i].now);
        loads[i].out_gradient.to_floats(g);
        // Reuses the registers. Beyond the end the first group is loaded again.
        loads[i].load_interior(rows, maximum(t - PREFETCH * BACKWARD_TIMES, first));
        if constexpr (SILU) apply_silu_derivative<EXACT>(g, x, rows, t);
        back<EXACT>(x_gradient, x, g, rows, t);
        rows.x_gradient.store_vector(t, x_gradient);
      }
    }
  }

  DEVICE void load_edge_inputs(float (&x)[PAST + 8], float (&g)[8], const Rows& rows, int time) const {
    Loads loads;
    loads.load_edge(rows, time);
    concatenate(x, loads.before, loads.now);
    add_initial(x, rows.initial(), time - PAST);
    loads.out_gradient.to_floats(g);
    if (silu_after) apply_silu_derivative<false>(g, x, rows, time);
    // Outside the row out_gradient is 0; its product with an infinite derivative would not be.
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (!rows.x.contains(time + i)) g[i] = 0.0f;
  }
  DEVICE void step_edge(const Rows& rows, int time) {
    float x[PAST + 8], g[8], x_gradient[8];
    load_edge_inputs(x, g, rows, time);
    back<false>(x_gradient, x, g, rows, time);
    if (rows.p.last_gradient.data) add_last(x_gradient, rows, time);
    rows.x_gradient.write(time, rows.vectors, x_gradient);
  }

  // The last inputs are also the last state.
  DEVICE void add_last(float (&x_gradient)[8], const Rows& rows, int time) const {
    const Row<T> last = rows.last_gradient();
    const int length = rows.x.length, kept = length - last.length;
    if (time + 8 <= kept) return;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (last.contains(time + i - kept) && rows.segments().same(time + i, length - 1))
        x_gradient[i] += to_float(last[time + i - kept]);
  }

  // Groups [begin, end) of BACKWARD_TIMES of one row, from last to first.
  DEVICE void walk(const Rows& rows, int begin, int end, bool last) {
    // The row's last piece includes what a shift pushes beyond it.
    if (last && rows.start(end) < rows.x.length) ++end;
#pragma unroll
    for (int i = 0; i < PAST; ++i) halo[i] = 0.0f;
    const int lower = maximum(rows.first_interior(), begin), upper = rows.template last_interior<TAPS>();
    bool has_next = rows.start(end) < rows.x.length;
    if (has_next && (end > upper || end <= lower || rows.start(end) + 8 > rows.x.length)) {
      float x[PAST + 8], g[8];
      load_edge_inputs(x, g, rows, rows.start(end));
#pragma unroll
      for (int i = 0; i < PAST; ++i) halo[i] = g[i];
      has_next = false;
    }
#pragma unroll 1
    for (int group = end - 1; group >= begin; --group) {
      if (group < upper && group >= lower) {
        bool_switch(filter.unused_taps == 0, [&](auto exact) {
          bool_switch(silu_after, [&](auto silu) { walk_interior<exact, silu>(rows, lower, group + 1, has_next); });
        });
        group = lower;
        has_next = false;
      } else {
        step_edge(rows, rows.start(group) + thread_index() % WARP_SIZE * 8);
      }
    }
  }
};

// A warp's range of the rows of a channel, of `groups` groups of times each.
struct WarpRange {
  const int groups;
  int64_t begin, end;

  DEVICE WarpRange(const ConvBackward& p, int groups, uint32_t split) : groups(groups) {
    const int64_t all = p.sizes.batch * groups;
    const int64_t each = p.splits == 1 ? (all + WARPS - 1) / WARPS : ceil_div(all, p.splits * WARPS);
    begin = (static_cast<int64_t>(split) * WARPS + thread_index() / WARP_SIZE) * each;
    end = minimum(begin + each, all);
  }
  // Calls body with each row and its groups [begin, end), from last to first.
  template <class Body>
  DEVICE void each(const Body& body) const {
    int64_t stop = end;
#pragma unroll 1
    for (int64_t batch = stop <= begin ? 0 : divide(stop - 1, groups); stop > begin; --batch) {
      const int64_t row = batch * groups, start = row > begin ? row : begin;
      body(batch, static_cast<int>(start - row), static_cast<int>(stop - row));
      stop = start;
    }
  }
};

// Sums over the block's lanes: the gradient of each tap from `unused_taps` of TAPS on and, last, of the bias.
template <int TAPS, class Own>
DEVICE void store_sums(const ConvBackward& p, float* sums, int64_t channel, int64_t split, int unused_taps,
                       const Own& own) {
  const int warp = thread_index() / WARP_SIZE;
#pragma unroll
  for (int k = 0; k <= TAPS; ++k) {
    const float sum = warp_sum(own(k));
    if (thread_index() % WARP_SIZE == 0) sums[warp * (TAPS + 1) + k] = sum;
  }
  barrier();
  const int k = thread_index();
  if (k > TAPS || k < unused_taps) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += sums[i * (TAPS + 1) + k];
  const int64_t position = split * p.sizes.channels + channel;
  if (k == TAPS) {
    p.bias_partial[position] = sum;
  } else {
    p.weight_partial[position * p.sizes.width + k - unused_taps] = sum;
  }
}

template <class T, int TAPS, bool SEGMENTED>
DEVICE void backward_along_time(const ConvBackward& p, float* sums) {
  const uint32_t block = static_cast<uint32_t>(block_index()), splits = static_cast<uint32_t>(p.splits);
  const uint32_t channel = splits == 1 ? block : block / splits, split = block - channel * splits;
  const int groups = (static_cast<int>(p.sizes.length) + BACKWARD_TIMES - 1) / BACKWARD_TIMES;
  const WarpRange range(p, groups, split);
  BackwardLane<T, TAPS, SEGMENTED> lane(p, channel);
  range.each([&](int64_t batch, int begin, int end) {
    const BackwardRow<T> rows(p, batch, channel);
    lane.walk(rows, begin, end, end == groups);
    if (p.initial_gradient.data && begin == 0 && thread_index() % WARP_SIZE == 0)
      store_initial_gradient<T>(p, rows.segments(), batch, channel);
  });
  store_sums<TAPS>(p, sums, channel, split, lane.filter.unused_taps, [&](int k) {
    return (k < TAPS ? lane.gradients.weight[k] : lane.gradients.bias) * lane.scale;
  });
}

// A block has REDUCE_COLUMNS results side by side, and REDUCE_ROWS ranges of splits of each.
constexpr int REDUCE_COLUMNS = 16, REDUCE_ROWS = THREADS / REDUCE_COLUMNS;

DEVICE void reduce(const ConvReduce& p, float (&sums)[REDUCE_ROWS][REDUCE_COLUMNS]) {
  wait_on_dependent_grids();
  const int of_block = thread_index() % REDUCE_COLUMNS, part = thread_index() / REDUCE_COLUMNS;
  const int64_t weights = p.channels * p.width, index = block_index() * REDUCE_COLUMNS + of_block;
  const bool any = index < weights + p.channels, bias = index >= weights;
  const int64_t position = bias ? index - weights : index, stride = bias ? p.channels : weights;
  const float* partial = (bias ? p.bias_partial : p.weight_partial) + position;
  const int64_t each = (p.splits + REDUCE_ROWS - 1) / REDUCE_ROWS, begin = minimum(part * each, p.splits);
  const int64_t count = minimum(each, p.splits - begin);
  sums[part][of_block] = any ? strided_sum(partial + begin * stride, count, stride) : 0.0f;
  barrier();
  if (!any || part > 0) return;
  (bias ? p.bias_gradient : p.weight_gradient)[position] = strided_sum(&sums[0][of_block], REDUCE_ROWS, REDUCE_COLUMNS);
}

}  // namespace conv
