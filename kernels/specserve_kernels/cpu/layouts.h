// Queries, keys and values as matrices of words, from where they stand in memory.
#pragma once

#include "words.h"

// The keys or values of some positions. Those that no row may see are read as zeros, as their slots
// may hold anything.
template <class T> struct Tokens {
  const T* base;
  const int64_t* offsets;  // of positions, from the first
  int begin, end;          // the positions that may be seen, from the first

  const T* at(int j) const {
    alignas(64) static const T zeros[MAX_HEAD_DIM] = {};
    return begin <= j && j < end ? base + offsets[j] : zeros;
  }
  Tokens from(int j) const { return {base, offsets + j, begin - j, end - j}; }
  // Memory that is asked for now need not be waited for later.
  void prefetch(int j, int64_t d) const { __builtin_prefetch(at(j) + d, 0, 2); }
};

// Up to 16 words of one row, from dimension d on; those that the row lacks are zeros.
template <class T> static inline vi words_at(const T* row, int64_t d, int64_t D) {
  constexpr int STEP = LANES * PER_WORD<T>;
  if constexpr (std::is_same_v<T, bf16> && !PAIRED<T>)
    return (vi)load_up_to(row + d, std::min<int64_t>(LANES, D - d));
  if (D - d >= STEP) return load_lanes(row + d);
  vi v{};
  memcpy(&v, row + d, (D - d) * sizeof(T));
  return v;
}

template <class T> static int64_t words_of(int64_t D) {
  return (D + LANES * PER_WORD<T> - 1) / (LANES * PER_WORD<T>)*LANES;
}

template <class T> static void load_query(const T* q, int64_t D, word* to) {
  constexpr int STEP = LANES * PER_WORD<T>;
  for (int64_t d = 0; d < D; d += STEP) {
    vi v = words_at(q, d, D);
    memcpy(to + d / PER_WORD<T>, &v, 64);
  }
}

// to[word][key], `stride` words apart; count is a multiple of LANES. `next` is prefetched: the
// first `num_next` of the tokens that will be read next.
template <class T>
static void load_keys(const Tokens<T>& keys, int count, int64_t D, word* to, int64_t stride,
                      const Tokens<T>& next, int num_next) {
  constexpr int STEP = LANES * PER_WORD<T>;
  for (int j = 0; j < count; j += LANES)
    for (int64_t d = 0; d < D; d += STEP) {
      vi x[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) x[i] = words_at(keys.at(j + i), d, D);
      for (int i = 0; i < LANES && j + i < num_next; i++) next.prefetch(j + i, d);
      transpose(x);
      word* row = to + d / PER_WORD<T> * stride + j;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) memcpy(row + i * stride, &x[i], 64);
    }
}

static inline vu bits_of(const bf16* p, int n) {
  vh h{};
  if (n == LANES) memcpy(&h, p, 32);
  else memcpy(&h, p, n * 2);
  return __builtin_convertvector(h, vu);
}

// to[unit][dimension], `stride` words apart; count is a multiple of two.
template <class T>
static void load_values(const Tokens<T>& values, int count, int64_t D, word* to, int64_t stride,
                        const Tokens<T>& next, int num_next) {
  for (int j = 0; j < count; j += PER_WORD<T>, to += stride) {
    const T *a = values.at(j), *b = PAIRED<T> ? values.at(j + 1) : a;
    for (int i = j; i < j + PER_WORD<T> && i < num_next; i++)
      for (int64_t d = 0; d < D; d += 64 / sizeof(T)) next.prefetch(i, d);
    for (int64_t d = 0; d < D; d += LANES) {
      int n = std::min<int64_t>(LANES, D - d);
      if constexpr (PAIRED<T>) {
        vu pairs = bits_of(a + d, n) | bits_of(b + d, n) << 16;
        memcpy(to + d, &pairs, 64);
      } else {
        vf v = load_up_to(a + d, n);
        memcpy(to + d, &v, 64);
      }
    }
  }
}

// Whether values, as words, have neither Inf nor NaN among them.
template <class T>
static bool are_finite(const word* values, int64_t units, int64_t D, int64_t stride) {
  vi bad{};
  for (int64_t u = 0; u < units; u++)
    for (int64_t d = 0; d < D; d += LANES) {
      vi v = load_lanes(values + u * stride + d);
      bad |= (v & 0x7f800000) == 0x7f800000;
      if constexpr (PAIRED<T>) bad |= (v & 0x7f80) == 0x7f80;
    }
  for (int i = 0; i < LANES; i++)
    if (bad[i]) return false;
  return true;
}
