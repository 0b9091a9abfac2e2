// The tf32 mma instructions: d += a b with a 16 x k, b k x 8 and d 16 x 8, distributed over a warp of 32 lanes. With
// row = lane / 4 and column = lane % 4, a lane holds
//   a: (row, column), (row + 8, column), then the same at column + 4 where k = 8
//   b: (column, row), then (column + 4, row) where k = 8
//   d: (row, 2 column), (row, 2 column + 1), (row + 8, 2 column), (row + 8, 2 column + 1)
// The hardware reads the first 10 mantissa bits of a and b. Undefined where HAS_MMA_TF32 is false, so that use is an
// error.
// Equation: d += a b.
// Tiling: 16 x k by k x 8 over a warp, as above.
#pragma once

#if defined(__CUDACC__)

DEVICE void mma_tf32_16x8x4(float d[4], const float a[2], float b) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(float_bits(a[0])), "r"(float_bits(a[1])), "r"(float_bits(b)));
}
DEVICE void mma_tf32_16x8x8(float d[4], const float a[4], const float b[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(float_bits(a[0])), "r"(float_bits(a[1])), "r"(float_bits(a[2])), "r"(float_bits(a[3])),
        "r"(float_bits(b[0])), "r"(float_bits(b[1])));
}
// d = a b: without an accumulator there are no registers to clear.
DEVICE void product_tf32_16x8x8(float d[4], const float a[4], const float b[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(float_bits(a[0])), "r"(float_bits(a[1])), "r"(float_bits(a[2])), "r"(float_bits(a[3])),
        "r"(float_bits(b[0])), "r"(float_bits(b[1])), "f"(0.0f));
}

#elif defined(__HIP__) || EMULATED_WARP_SIZE != 32

DEVICE void product_tf32_16x8x8(float d[4], const float a[4], const float b[2]);
DEVICE void mma_tf32_16x8x4(float d[4], const float a[2], float b);
DEVICE void mma_tf32_16x8x8(float d[4], const float a[4], const float b[2]);

#else

template <int depth>
inline void multiply_tf32(float d[4], const float* a, const float* b) {
  constexpr int parts = depth / 4;
  float operands[3 * parts];
  for (int i = 0; i < 2 * parts; ++i) operands[i] = bits_float(float_bits(a[i]) & 0xffffe000u);
  for (int i = 0; i < parts; ++i) operands[2 * parts + i] = bits_float(float_bits(b[i]) & 0xffffe000u);
  const emulator::Lane* lanes = emulator::exchange({"mma_tf32_16x8", depth}, operands, 3 * parts);
  const int lane = thread_index() % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < depth; ++k)
      d[i] += lanes[row * 4 + k % 4].value[k / 4 * 2 + i / 2] *
              lanes[column * 4 + k % 4].value[2 * parts + k / 4];
  }
}
DEVICE void mma_tf32_16x8x4(float d[4], const float a[2], float b) { multiply_tf32<4>(d, a, &b); }
DEVICE void mma_tf32_16x8x8(float d[4], const float a[4], const float b[2]) { multiply_tf32<8>(d, a, b); }
DEVICE void product_tf32_16x8x8(float d[4], const float a[4], const float b[2]) {
  for (int i = 0; i < 4; ++i) d[i] = 0.0f;
  multiply_tf32<8>(d, a, b);
}

#endif
