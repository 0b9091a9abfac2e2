// Kernels that try out the portability header, right ones and wrong ones.
#include "portable.h"

#include "scan_common.h"

struct Check {
  float* out;
  const float* in;
  int64_t count;
};

template <int mask>
DEVICE void shuffle_all(const Check& p) {
  if constexpr (mask < WARP_SIZE) {
    p.out[mask * THREADS + thread_index()] = shuffle_xor<mask>(p.in[thread_index()]);
    shuffle_all<mask + 1>(p);
  }
}
KERNEL(check_shuffle_xor, THREADS, 8, Check) { shuffle_all<1>(p); }

KERNEL(check_shared, THREADS, 1, Check) {
  SHARED float tile[THREADS];
  tile[thread_index()] = p.in[block_index() * THREADS + thread_index()];
  barrier();
  dynamic_shared()[THREADS - 1 - thread_index()] = tile[THREADS - 1 - thread_index()] * 2.0f;
  barrier();
  p.out[block_index() * THREADS + thread_index()] = dynamic_shared()[(thread_index() + 1) % THREADS];
}

KERNEL(check_math, THREADS, 1, Check) {
  if (thread_index() >= p.count) return;
  const float x = p.in[thread_index()];
  p.out[thread_index()] = softplus(x);
}

// Bits in and out: eight numbers a thread, as T and back.
template <class T>
DEVICE void convert(const Check& p) {
  T* elements = reinterpret_cast<T*>(p.out);
  const int64_t first = (block_index() * THREADS + thread_index()) * 8;
  if (first + 8 > p.count) return;
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = p.in[first + i];
  store(elements + first, Vector8<T>::from_floats(x));
  // One by one must be the same as eight at a time.
  for (int i = 0; i < 8; ++i) elements[p.count + first + i] = from_float<T>(x[i]);
}
template <class T>
DEVICE void widen(const Check& p) {
  const T* elements = reinterpret_cast<const T*>(p.in);
  const int64_t first = (block_index() * THREADS + thread_index()) * 8;
  if (first + 8 > p.count) return;
  float x[8];
  load_vector8(elements + first).to_floats(x);
  for (int i = 0; i < 8; ++i) {
    p.out[first + i] = x[i];
    p.out[p.count + first + i] = to_float(elements[first + i]);
  }
}
KERNEL(check_to_bf16, THREADS, 1, Check) { convert<bf16>(p); }
KERNEL(check_to_fp16, THREADS, 1, Check) { convert<fp16>(p); }
KERNEL(check_from_bf16, THREADS, 1, Check) { widen<bf16>(p); }
KERNEL(check_from_fp16, THREADS, 1, Check) { widen<fp16>(p); }

// What must be found wrong.
KERNEL(wrong_return, THREADS, 1, Check) {
  if (thread_index() == 5) return;
  p.out[thread_index()] = shuffle_xor<4>(1.0f);
}
KERNEL(wrong_half_barrier, THREADS, 1, Check) {
  if (thread_index() < 64) barrier();
  p.out[thread_index()] = 1.0f;
}
KERNEL(wrong_branches, THREADS, 1, Check) {
  p.out[thread_index()] = thread_index() % 2 ? shuffle_xor<1>(1.0f) : shuffle_xor<2>(1.0f);
}
KERNEL(wrong_unwritten, THREADS, 1, Check) {
  SHARED float tile[THREADS];
  p.out[block_index() * THREADS + thread_index()] = tile[thread_index()] + dynamic_shared()[thread_index()];
  tile[thread_index()] = dynamic_shared()[thread_index()] = 1.0f;
}
KERNEL(wrong_missing_barrier, THREADS, 1, Check) {
  SHARED float tile[THREADS];
  tile[thread_index()] = 1.0f;
  p.out[block_index() * THREADS + thread_index()] = tile[(thread_index() + 64) % THREADS];
}
KERNEL(wrong_too_much_shared, THREADS, 1, Check) { dynamic_shared()[thread_index() + p.count] = 1.0f; }
