// Scalar types of tensors: 16-bit storage, fp32 arithmetic. Conversion rounds to nearest even; NaN stays NaN.
// Equation: bf16 and fp16 are fp32 rounded to 8 and 11 digits.
// Tiling: vectors of up to 16 bytes a lane.
#pragma once

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
using fp32 = float;

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }
DEVICE float to_float(fp16 x);

// Two adjacent elements, the first in the low half.
template <typename T>
DEVICE uint32_t pack(float first, float second);
template <typename T>
DEVICE void unpack(uint32_t pair, float& first, float& second);

template <>
DEVICE void unpack<bf16>(uint32_t pair, float& first, float& second) {
  first = bits_float(pair << 16);
  second = bits_float(pair & 0xffff0000u);
}

#if defined(__CUDACC__)

DEVICE float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
template <>
DEVICE void unpack<fp16>(uint32_t pair, float& first, float& second) {
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(first), "=f"(second)
      : "r"(pair));
}
template <>
DEVICE uint32_t pack<bf16>(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
template <>
DEVICE uint32_t pack<fp16>(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
DEVICE uint16_t bf16_bits(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
DEVICE uint16_t fp16_bits(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

#else

// gfx90a, gfx942 and CPUs have no instruction for it.
DEVICE uint16_t bf16_bits(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return (x != x ? bits | 0x400000u : rounded) >> 16;
}

#if defined(__HIP__)

DEVICE float to_float(fp16 x) { return __builtin_bit_cast(_Float16, x.bits); }
DEVICE uint16_t fp16_bits(float x) { return __builtin_bit_cast(uint16_t, _Float16(x)); }

#else

// Scaling by a power of two converts the exponent's bias and keeps subnormal numbers exact.
DEVICE float to_float(fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return bits_float(sign | magnitude | 0x7f800000u);
  return bits_float(sign | float_bits(bits_float(magnitude) * 0x1p112f));
}
DEVICE uint16_t fp16_bits(float x) {
  const uint32_t sign = float_bits(x) >> 16 & 0x8000u;
  const uint32_t magnitude = float_bits(x) & 0x7fffffffu;
  if (x != x) return sign | 0x7e00u | (magnitude >> 13 & 0x3ffu);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) return sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u);
  return sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

#endif

template <>
DEVICE void unpack<fp16>(uint32_t pair, float& first, float& second) {
  first = to_float(fp16{uint16_t(pair)});
  second = to_float(fp16{uint16_t(pair >> 16)});
}
template <>
DEVICE uint32_t pack<bf16>(float first, float second) {
  return bf16_bits(first) | uint32_t(bf16_bits(second)) << 16;
}
template <>
DEVICE uint32_t pack<fp16>(float first, float second) {
  return fp16_bits(first) | uint32_t(fp16_bits(second)) << 16;
}

#endif

template <typename T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE bf16 from_float<bf16>(float x) {
  return {bf16_bits(x)};
}
template <>
DEVICE fp16 from_float<fp16>(float x) {
  return {fp16_bits(x)};
}

// The register type of one memory instruction.
template <int bytes>
struct MemoryAccess {
#if !defined(__CUDACC__)
  typedef uint32_t Word __attribute__((vector_size(bytes), may_alias));
#endif
};
#if defined(__CUDACC__)
template <>
struct MemoryAccess<4> { using Word = uint32_t; };
template <>
struct MemoryAccess<8> { using Word = uint2; };
template <>
struct MemoryAccess<16> { using Word = uint4; };
#endif

// COUNT adjacent elements: a vectorized load or store. Accesses are 16 bytes, or the whole vector where it is smaller,
// and the address is aligned to the access.
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Vector {
  static constexpr int ALIGNMENT = sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16;
  using Word = typename MemoryAccess<ALIGNMENT>::Word;
  static constexpr int ACCESSES = sizeof(T) * COUNT / sizeof(Word);
  T value[COUNT];

  DEVICE void to_floats(float (&x)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      if constexpr (sizeof(T) == 4) {
        x[i] = value[i];
        x[i + 1] = value[i + 1];
      } else {
        uint32_t pair;
        __builtin_memcpy(&pair, &value[i], 4);
        unpack<T>(pair, x[i], x[i + 1]);
      }
    }
  }
  DEVICE static Vector from_floats(const float (&x)[COUNT]) {
    Vector y;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      if constexpr (sizeof(T) == 4) {
        y.value[i] = x[i];
        y.value[i + 1] = x[i + 1];
      } else {
        const uint32_t pair = pack<T>(x[i], x[i + 1]);
        __builtin_memcpy(&y.value[i], &pair, 4);
      }
    }
    return y;
  }
};
template <typename T>
using Vector8 = Vector<T, 8>;

template <int COUNT, typename T>
DEVICE Vector<T, COUNT> load(const T* from) {
  using Word = typename Vector<T, COUNT>::Word;
  Vector<T, COUNT> x;
#pragma unroll
  for (int i = 0; i < Vector<T, COUNT>::ACCESSES; ++i)
    reinterpret_cast<Word*>(&x)[i] = reinterpret_cast<const Word*>(from)[i];
  return x;
}
template <int COUNT, typename T>
DEVICE void store(T* to, const Vector<T, COUNT>& x) {
  using Word = typename Vector<T, COUNT>::Word;
#pragma unroll
  for (int i = 0; i < Vector<T, COUNT>::ACCESSES; ++i)
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(&x)[i];
}

// Stores to global memory, never to shared memory. Inline assembly, because nvcc splits a 16-byte store into four to
// move their computation, which takes four times the requests.
template <int COUNT, typename T>
DEVICE void store_global(T* to, const Vector<T, COUNT>& x) {
#if defined(__CUDACC__)
  using Word = typename Vector<T, COUNT>::Word;
#pragma unroll
  for (int i = 0; i < Vector<T, COUNT>::ACCESSES; ++i) {
    if constexpr (sizeof(Word) == 16) {
      uint4 word;
      __builtin_memcpy(&word, reinterpret_cast<const char*>(&x) + i * sizeof(Word), sizeof(Word));
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<Word*>(to) + i), "r"(word.x),
                   "r"(word.y), "r"(word.z), "r"(word.w)
                   : "memory");
    } else {
      reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(&x)[i];
    }
  }
#else
  store(to, x);
#endif
}

// Loads from global memory what is read once and not written meanwhile, without allocating it in L1.
template <int COUNT, typename T>
DEVICE Vector<T, COUNT> load_global_no_allocate(const T* from) {
#if defined(__CUDACC__)
  using Word = typename Vector<T, COUNT>::Word;
  static_assert(sizeof(Word) == 16);
  Vector<T, COUNT> x;
#pragma unroll
  for (int i = 0; i < Vector<T, COUNT>::ACCESSES; ++i) {
    uint4 word;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(reinterpret_cast<const Word*>(from) + i));
    __builtin_memcpy(reinterpret_cast<char*>(&x) + i * sizeof(Word), &word, sizeof(Word));
  }
  return x;
#else
  return load<COUNT>(from);
#endif
}

template <typename T>
DEVICE Vector8<T> load_vector8(const T* from) {
  return load<8>(from);
}
DEVICE void load_float4(float* x, const float* from) {
  const Vector<float, 4> four = load<4>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = four.value[i];
}
DEVICE void store_float4(float* to, float x0, float x1, float x2, float x3) {
  store(to, Vector<float, 4>{{x0, x1, x2, x3}});
}

struct alignas(8) Float2 {
  float value[2];
};
DEVICE void load_float2(float* x, const float* from) {
  const Float2 two = *reinterpret_cast<const Float2*>(from);
  x[0] = two.value[0];
  x[1] = two.value[1];
}
DEVICE void store_float2(float* to, float x, float y) { *reinterpret_cast<Float2*>(to) = {x, y}; }

// A compile-time condition passed as an argument.
template <bool VALUE>
struct BoolConstant {
  static constexpr bool value = VALUE;
};
