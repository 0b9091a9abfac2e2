// Causal convolution backward. The result before silu is computed again; its gradient g = out_gradient
// silu'(result) yields x_gradient[t] = sum over j of weight[width - 1 - j] g[t + j] and the gradients of weight
// and bias, which blocks sum over their share of all times and sequences of a channel.
#pragma once

#include "conv.h"

namespace conv {

// Times adjacent: what a wave computes at once.
constexpr int BACKWARD_TIMES = WAVE * 8;
constexpr int BACKWARD_THREADS = 64;
constexpr int WAVES = BACKWARD_THREADS / WAVE;
// How many of that a wave loads ahead: what one more costs in registers, hence in waves, it does not bring.
template <class T, int TAPS, bool SEGMENTED>
constexpr int DEPTH = SEGMENTED || TAPS > 4 ? 1 : 4 / sizeof(T);

// Shared memory for sums, in floats.
template <int TAPS, int COUNT = WAVES>
constexpr int TIME_SUMS = COUNT * (TAPS + 1);

template <int mask = 1>
DEVICE float wave_sum(float x) {
  if constexpr (mask < WAVE) return wave_sum<2 * mask>(x + shuffle_xor<mask>(x));
  return x;
}

// g at one time, from memory.
template <class T>
DEVICE float gradient_at(const ConvBackward& p, const Segments& segments, int64_t batch, int64_t channel,
                         int time) {
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
  return g * silu_slope<T>(y * SILU_SCALE<T>);
}

// The gradient of the initial state: what x_gradient is at negative times.
template <class T>
DEVICE void store_initial_gradient(const ConvBackward& p, const Segments& segments, int64_t batch,
                                   int64_t channel) {
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

// One channel of one sequence of all tensors.
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
  // Groups from the first on up to the last are whole vectors throughout and meet neither state.
  DEVICE int first_inside() const { return shift != 0 || p.initial.data; }
  template <int TAPS>
  DEVICE int last_inside() const {
    return vectors ? (x.length + shift - (p.last_gradient.data ? TAPS : 0)) / BACKWARD_TIMES : 0;
  }
};

// What a lane adds to the gradients of weight and bias. What eight times add is summed by itself, since each addition rounds
// to the digits of the whole sum; and tap by tap, which takes one register.
template <int TAPS>
struct Gradients {
  float weight[TAPS] = {}, bias = 0.0f;
};

// A lane's times of one channel, and what it adds to the gradients of weight and bias.
template <class T, int TAPS, bool SEGMENTED>
struct Strand {
  static constexpr int PAST = TAPS - 1, AHEAD = DEPTH<T, TAPS, SEGMENTED>;
  using Rows = BackwardRow<T>;

  struct Loads {
    Words<T, TAPS> before;
    Words<T, 8> now, out_gradient;

    DEVICE void inside(const Rows& rows, int time) {
      before = rows.x.template load_vector<TAPS>(larger(time - TAPS, 0));
      now = rows.x.template load_vector<8>(time);
      out_gradient = rows.out_gradient.template load_vector<8>(time);
    }
    DEVICE void edge(const Rows& rows, int time) {
      before = rows.x.template read<TAPS>(time - TAPS, rows.vectors);
      now = rows.x.template read<8>(time, rows.vectors);
      out_gradient = rows.out_gradient.template read<8>(time, rows.vectors);
    }
  };

  // Before silu the filter is scaled, as silu wants it, and g divided by the same: their product is not.
  const bool silu_after;
  const float scale;
  const Filter<TAPS> filter;
  // Of g as it is.
  Gradients<TAPS> gradients;
  // g at the first times of the vector that follows the wave's last one; on lane 0.
  float following[PAST];

  DEVICE Strand(const ConvBackward& p, int64_t channel)
      : silu_after(p.sizes.silu != 0),
        scale(silu_after ? SILU_SCALE<T> : 1.0f),
        filter(Filter<TAPS>(p.weight, p.bias, p.sizes.width, channel).scaled(scale)) {}

  // g of eight times, from the inputs since `time` - PAST.
  template <bool EXACT>
  DEVICE void through_silu(float (&g)[8], const float (&x)[PAST + 8], const Rows& rows, int time) const {
    float z[8];
    convolve<TAPS, SEGMENTED, EXACT>(z, x, filter, rows.segments(), time);
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] *= silu_slope<T>(z[i], 1.0f / SILU_SCALE<T>);
  }

  // From g of eight times, those that follow from the lane to the right: what they add to the sums, and the
  // gradient of x.
  template <bool EXACT>
  DEVICE void back(float (&x_gradient)[8], const float (&x)[PAST + 8], const float (&own)[8], const Rows& rows,
                   int time) {
    const int lane = thread_index() % WAVE, right = (lane + 1) % WAVE;
    float g[8 + PAST];
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = own[i];
    gradients.bias += sum_of_eight(own);
#pragma unroll
    for (int i = 0; i < PAST; ++i) {
      g[8 + i] = shuffle(lane == 0 ? following[i] : own[i], right);
      following[i] = own[i];
    }
    const Together<PAST + 8 + PAST, SEGMENTED> together(rows.segments(), time - PAST);
#pragma unroll
    for (int i = 0; i < 8; ++i) x_gradient[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
      if (!filter.template used<EXACT>(k)) continue;
      float terms = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (together.same(i + k, i + PAST)) terms += g[i] * x[i + k];
        if (together.same(PAST + i, 2 * PAST + i - k)) x_gradient[i] += filter.weight[k] * g[i + PAST - k];
      }
      gradients.weight[k] += terms;
    }
  }

  // Groups [begin, end) from the last to the first, all inside. `ahead`: so is a vector that follows
  // them, and `following` is not yet known.
  template <bool EXACT, bool SILU>
  DEVICE void walk_inside(const Rows& rows, int begin, int end, bool ahead) {
    const int first = rows.start(begin) + thread_index() % WAVE * 8;
    Loads loads[AHEAD], next;
    const int after = rows.start(end);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      loads[i].inside(rows, larger(first + (end - begin - 1 - i) * BACKWARD_TIMES, first));
    if (ahead) next.inside(rows, after);
    if (ahead) {
      float x[PAST + 8], g[8];
      join(x, next.before, next.now);
      next.out_gradient.to_floats(g);
      if constexpr (SILU) through_silu<EXACT>(g, x, rows, after);
#pragma unroll
      for (int i = 0; i < PAST; ++i) following[i] = g[i];
    }
#pragma unroll 1
    for (int time = first + (end - begin - 1) * BACKWARD_TIMES;; time -= AHEAD * BACKWARD_TIMES) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int t = time - i * BACKWARD_TIMES;
        if (t < first) return;
        float x[PAST + 8], g[8], x_gradient[8];
        join(x, loads[i].before.only_if(t > 0), loads[i].now);
        loads[i].out_gradient.to_floats(g);
        // The registers are free. Beyond the end the first is loaded again.
        loads[i].inside(rows, larger(t - AHEAD * BACKWARD_TIMES, first));
        if constexpr (SILU) through_silu<EXACT>(g, x, rows, t);
        back<EXACT>(x_gradient, x, g, rows, t);
        rows.x_gradient.store_vector(t, x_gradient);
      }
    }
  }

  DEVICE void load_edge(float (&x)[PAST + 8], float (&g)[8], const Rows& rows, int time) const {
    Loads loads;
    loads.edge(rows, time);
    join(x, loads.before, loads.now);
    add_initial(x, rows.initial(), time - PAST);
    loads.out_gradient.to_floats(g);
    if (silu_after) through_silu<false>(g, x, rows, time);
    // Outside the row, out_gradient is 0, but its product with an infinite slope is not.
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (!rows.x.contains(time + i)) g[i] = 0.0f;
  }
  DEVICE void step_edge(const Rows& rows, int time) {
    float x[PAST + 8], g[8], x_gradient[8];
    load_edge(x, g, rows, time);
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

  // Groups [begin, end) of BACKWARD_TIMES of one row, from the last to the first.
  DEVICE void walk(const Rows& rows, int begin, int end, bool last) {
    // The row's last piece has also what a shift pushes beyond it.
    if (last && rows.start(end) < rows.x.length) ++end;
#pragma unroll
    for (int i = 0; i < PAST; ++i) following[i] = 0.0f;
    const int lower = larger(rows.first_inside(), begin), upper = rows.template last_inside<TAPS>();
    bool ahead = rows.start(end) < rows.x.length;
    if (ahead && (end > upper || end <= lower || rows.start(end) + 8 > rows.x.length)) {
      float x[PAST + 8], g[8];
      load_edge(x, g, rows, rows.start(end));
#pragma unroll
      for (int i = 0; i < PAST; ++i) following[i] = g[i];
      ahead = false;
    }
#pragma unroll 1
    for (int group = end - 1; group >= begin; --group) {
      if (group < upper && group >= lower) {
        choose(filter.skip == 0, [&](auto exact) {
          choose(silu_after, [&](auto silu) { walk_inside<exact, silu>(rows, lower, group + 1, ahead); });
        });
        group = lower;
        ahead = false;
      } else {
        step_edge(rows, rows.start(group) + thread_index() % WAVE * 8);
      }
    }
  }
};

// A wave's share of the rows of a channel, each of so many groups of times.
struct WaveShare {
  const int groups;
  int64_t begin, end;

  DEVICE WaveShare(const ConvBackward& p, int groups, uint32_t split) : groups(groups) {
    const int64_t all = p.sizes.batch * groups;
    const int64_t each = p.splits == 1 ? (all + WAVES - 1) / WAVES : ceil_quotient(all, p.splits * WAVES);
    begin = (static_cast<int64_t>(split) * WAVES + thread_index() / WAVE) * each;
    end = smaller(begin + each, all);
  }
  // Calls body with a row and groups [begin, end) of it, from the last to the first.
  template <class Body>
  DEVICE void each(const Body& body) const {
    int64_t stop = end;
#pragma unroll 1
    for (int64_t batch = stop <= begin ? 0 : quotient(stop - 1, groups); stop > begin; --batch) {
      const int64_t row = batch * groups, start = row > begin ? row : begin;
      body(batch, static_cast<int>(start - row), static_cast<int>(stop - row));
      stop = start;
    }
  }
};

// Adds over the block's lanes what each has for a weight, from `skip` of TAPS on, and, last, for the bias.
template <int TAPS, int COUNT, class Own>
DEVICE void store_sums(const ConvBackward& p, float* sums, int64_t channel, int64_t split, int skip, const Own& own) {
  const int wave = thread_index() / WAVE;
#pragma unroll
  for (int k = 0; k <= TAPS; ++k) {
    const float sum = wave_sum(own(k));
    if (thread_index() % WAVE == 0) sums[wave * (TAPS + 1) + k] = sum;
  }
  barrier();
  const int k = thread_index();
  if (k > TAPS || k < skip) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sum += sums[i * (TAPS + 1) + k];
  const int64_t place = split * p.sizes.channels + channel;
  if (k == TAPS) {
    p.bias_partial[place] = sum;
  } else {
    p.weight_partial[place * p.sizes.width + k - skip] = sum;
  }
}

template <class T, int TAPS, bool SEGMENTED>
DEVICE void backward_along_time(const ConvBackward& p, float* sums) {
  const uint32_t block = static_cast<uint32_t>(block_index()), splits = static_cast<uint32_t>(p.splits);
  const uint32_t channel = splits == 1 ? block : block / splits, split = block - channel * splits;
  const int groups = (static_cast<int>(p.sizes.length) + BACKWARD_TIMES - 1) / BACKWARD_TIMES;
  const WaveShare share(p, groups, split);
  Strand<T, TAPS, SEGMENTED> lane(p, channel);
  share.each([&](int64_t batch, int begin, int end) {
    const BackwardRow<T> rows(p, batch, channel);
    lane.walk(rows, begin, end, end == groups);
    if (p.initial_gradient.data && begin == 0 && thread_index() % WAVE == 0)
      store_initial_gradient<T>(p, rows.segments(), batch, channel);
  });
  store_sums<TAPS, WAVES>(p, sums, channel, split, lane.filter.skip, [&](int k) {
    return (k < TAPS ? lane.gradients.weight[k] : lane.gradients.bias) * lane.scale;
  });
}

// Of a block, threads side by side have REDUCE_PLACES results, and those behind them other splits of the same.
constexpr int REDUCE_PLACES = 16, REDUCE_PARTS = THREADS / REDUCE_PLACES;

DEVICE void reduce(const ConvReduce& p, float (&sums)[REDUCE_PARTS][REDUCE_PLACES]) {
  wait_for_kernel_before();
  const int of_block = thread_index() % REDUCE_PLACES, part = thread_index() / REDUCE_PLACES;
  const int64_t weights = p.channels * p.width, index = block_index() * REDUCE_PLACES + of_block;
  const bool any = index < weights + p.channels, bias = index >= weights;
  const int64_t place = bias ? index - weights : index, stride = bias ? p.channels : weights;
  const float* partial = (bias ? p.bias_partial : p.weight_partial) + place;
  const int64_t each = (p.splits + REDUCE_PARTS - 1) / REDUCE_PARTS, begin = smaller(part * each, p.splits);
  const int64_t count = smaller(each, p.splits - begin);
  sums[part][of_block] = any ? sum_of(partial + begin * stride, count, stride) : 0.0f;
  barrier();
  if (!any || part > 0) return;
  (bias ? p.bias_gradient : p.weight_gradient)[place] = sum_of(&sums[0][of_block], REDUCE_PARTS, REDUCE_PLACES);
}

}  // namespace conv
