// Activations and sums of fp32, for the scan and the convolution.
// Equation: sigmoid(x) = 1 / (1 + exp(-x)), silu(x) = x sigmoid(x), softplus(x) = log(1 + exp(x)).
#pragma once

#include "portable.h"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

DEVICE bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp2_approx(-x * LOG2_E)); }

// softplus(x) = max(x, 0) + log(1 + t) with t = exp(-|x|). The polynomial approximates log(1 + t) / t on [0, 1] and is
// 1 at 0. Its error relative to 0.3 + t is at most 3.5e-7: exact near 0, because a scan of small steps accumulates each
// step's error.
DEVICE float softplus(float x) {
  const float t = exp2_approx(-LOG2_E * __builtin_fabsf(x));
  float p = 0.0479126237f - 0.0096224416f * t;
  p = p * t - 0.112987801f;
  p = p * t + 0.181110397f;
  p = p * t - 0.24625358f;
  p = p * t + 0.332976431f;
  p = p * t - 0.499988675f;
  p = p * t + 1.0f;
  return p * t + (x > 0.0f ? x : 0.0f);
}

// Pairwise: no term takes part in more than three additions.
DEVICE float pairwise_sum8(const float* x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// A compensated (Kahan) sum: `compensation` is the rounding error of the last addition.
struct CompensatedSum {
  float sum, compensation;

  DEVICE void add(float x) {
    const float missing = x - compensation, next = sum + missing;
    // The compensation of an infinite sum would be NaN.
    compensation = is_finite(next) ? (next - sum) - missing : 0.0f;
    sum = next;
  }
};

// The sum of `count` floats at `stride`, in batches of eight independent loads.
DEVICE float strided_sum(const float* terms, int64_t count, int64_t stride) {
  CompensatedSum total{};
#pragma unroll 1
  for (int64_t first = 0; first < count; first += 8) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = first + i < count ? terms[(first + i) * stride] : 0.0f;
    total.add(pairwise_sum8(x));
  }
  return total.sum;
}
