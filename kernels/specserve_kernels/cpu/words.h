// Matrices of 32-bit words, each a float or a pair of bf16, and their float product.
//
// Both products of attention, Q K^T and weights V, have the form c[n][width] += a[n][units]
// b[units][width]. A unit is a dimension or a position, or a pair of them. Every element of c is
// summed over the units in the same order, for any n and width.
#pragma once

#include <algorithm>

#include "kv_codes.h"

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

// Whether values of type T are multiplied as pairs of bf16, else as floats.
template <class T> constexpr bool PAIRED = HAS_PAIRS && std::is_same_v<Active<T>, bf16>;
template <class T> constexpr int PER_WORD = PAIRED<T> ? 2 : 1;

// Registers for the sums of a block; other registers hold the operands.
constexpr int SUMS = REGISTER == 32 ? 8 : 16;
constexpr int MAX_GROUP = SUMS / 2;  // maximum rows of `a` per block

template <bool IS_PAIRED> static inline rf multiply_words(rw a, rw b, rf c) {
#if HAS_PAIRS
  if constexpr (IS_PAIRED) return (rf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#endif
  return multiply_add((rf)a, (rf)b, c);
}

struct Matrix {
  const word* at;
  int64_t stride;  // words

  Matrix from(int64_t row, int64_t column) const { return {at + row * stride + column, stride}; }
};

struct Sums {
  float* at;
  int64_t stride;  // floats

  Sums from(int64_t row, int64_t column) const { return {at + row * stride + column, stride}; }
};

// Load sums from memory, or zeros. Unrolled, because registers cannot be indexed; otherwise sums
// would pass through the stack.
template <int N, int S> static INLINE void load_sums(Sums from, bool adds, rf (&to)[N][S]) {
#pragma GCC unroll 8
  for (int i = 0; i < N; i++)
#pragma GCC unroll 8
    for (int s = 0; s < S; s++) to[i][s] = adds ? (rf)load_words(from.from(i, s * WORDS).at) : rf{};
}
template <int N, int S> static INLINE void store_sums(const rf (&from)[N][S], Sums to) {
#pragma GCC unroll 8
  for (int i = 0; i < N; i++)
#pragma GCC unroll 8
    for (int s = 0; s < S; s++) store_words(to.from(i, s * WORDS).at, (rw)from[i][s]);
}

// Tokens that are read later. Their lines are prefetched between the blocks of a product, a few at a
// time, because a CPU has buffers for few misses.
struct Ahead {
  const void* const* tokens = nullptr;
  int num_tokens = 0;
  int64_t bytes = 0;     // of a token
  int64_t products = 1;  // register products until all lines are needed
  int64_t done = 0;
  int next = 0;  // token

  void after(int64_t more) {
    done += more;
    int end = std::min<int64_t>(done * num_tokens / products, num_tokens);
    for (; next < end; next++)
      for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char*)tokens[next] + i, 0, 2);
  }
};

// Multiply rows [0, N) by S registers of columns.
template <bool IS_PAIRED, int N, int S>
static void multiply_block(Matrix a, Matrix b, Sums c, int64_t units, bool adds) {
  rf sum[N][S];
  load_sums(c, adds, sum);
  for (int64_t u = 0; u < units; u++) {
    rw column[S];
#pragma GCC unroll 8
    for (int s = 0; s < S; s++) column[s] = load_words(b.from(u, s * WORDS).at);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      rw value = *a.from(i, u).at - rw{};
#pragma GCC unroll 8
      for (int s = 0; s < S; s++) sum[i][s] = multiply_words<IS_PAIRED>(value, column[s], sum[i][s]);
    }
  }
  store_sums(sum, c);
}

// Multiply rows in steps of N, for columns from `first` on in steps of S registers. Return the end
// of these columns.
template <bool IS_PAIRED, int N, int S>
static int64_t multiply_columns(Matrix a, Matrix b, Sums c, int n, int64_t units, int64_t first,
                                int64_t width, bool adds, Ahead& ahead) {
  for (; first + S * WORDS <= width; first += S * WORDS)
    for (int i = 0; i + N <= n; i += N) {
      multiply_block<IS_PAIRED, N, S>(a.from(i, 0), b.from(0, first), c.from(i, first), units, adds);
      ahead.after(N * S * units);
    }
  return first;
}

// Multiply rows in steps of N, then the rest in steps of N / 2.
template <bool IS_PAIRED, int N>
static void multiply_rows(Matrix a, Matrix b, Sums c, int n, int64_t units, int64_t width,
                          bool adds, Ahead& ahead) {
  constexpr int S = std::min(SUMS / N, 8);
  if (n >= N) {
    int64_t end = multiply_columns<IS_PAIRED, N, S>(a, b, c, n, units, 0, width, adds, ahead);
    if constexpr (S > 4)
      end = multiply_columns<IS_PAIRED, N, 4>(a, b, c, n, units, end, width, adds, ahead);
    multiply_columns<IS_PAIRED, N, 1>(a, b, c, n, units, end, width, adds, ahead);
  }
  int rest = n % N, done = n - rest;
  if constexpr (N > 1)
    if (rest)
      multiply_rows<IS_PAIRED, N / 2>(a.from(done, 0), b, c.from(done, 0), rest, units, width, adds,
                                      ahead);
}

// Compute c = a b, or c += a b, for n rows and `width` columns, a multiple of LANES.
template <bool IS_PAIRED>
static void multiply_vectors(Matrix a, Matrix b, Sums c, int n, int64_t units, int64_t width,
                             bool adds, Ahead& ahead) {
  multiply_rows<IS_PAIRED, MAX_GROUP>(a, b, c, n, units, width, adds, ahead);
}
