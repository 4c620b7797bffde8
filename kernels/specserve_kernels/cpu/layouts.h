// Queries, keys and values as matrices of words, from where they stand in memory.
#pragma once

#include "words.h"

// Where the keys or values of consecutive positions stand, of the first KV head of several. Tokens
// that no row may see are zeros, as their slots may hold anything.
template <class T> using Tokens = const T* const*;
constexpr int64_t MAX_TOKEN = 1 << 15;  // dimensions of all heads
template <class T> alignas(64) constexpr T ZEROS[MAX_TOKEN] = {};

// Tokens that will be read soon are prefetched while others are multiplied, all heads of a token
// together: memory is read faster in long stretches than head by head.
struct Prefetch {
  const void* const* tokens = nullptr;
  int64_t bytes = 0, at = 0;  // of a token

  void lines(int n) {
    while (tokens && n > 0) {
      int run = std::min<int64_t>(n, (bytes - at + 63) / 64);
      const char* from = (const char*)*tokens + at;
      for (int i = 0; i < run; i++) __builtin_prefetch(from + 64 * i, 0, 2);
      n -= run;
      at += 64 * run;
      if (at < bytes) continue;
      tokens++;
      at = 0;
    }
  }
};

// A register of the words that one row has from dimension d on.
template <class T> static inline rw words_at(const T* row, int64_t d) {
  if constexpr (std::is_same_v<T, bf16> && !PAIRED<T>) {
    typedef uint16_t part __attribute__((vector_size(REGISTER / 2)));
    part x;
    memcpy(&x, row + d, REGISTER / 2);
    return __builtin_convertvector(x, rw) << 16;
  }
  return load_words(row + d);
}
// The same where the row has only n more dimensions; the words that it lacks are zeros.
template <class T> static inline rw words_at(const T* row, int64_t d, int n) {
  T t[WORDS * PER_WORD<T>] = {};
  memcpy(t, row + d, n * sizeof(T));
  return words_at(t, 0);
}

// The words of a head, in whole registers.
template <class T> static int64_t words_of(int64_t D) {
  constexpr int STEP = WORDS * PER_WORD<T>;
  return (D + STEP - 1) / STEP * WORDS;
}

template <class T> static void load_query(const T* q, int64_t D, word* to) {
  constexpr int STEP = WORDS * PER_WORD<T>;
  for (int64_t d = 0; d < D; d += STEP)
    store_words(to + d / PER_WORD<T>, D - d < STEP ? words_at(q, d, D - d) : words_at(q, d));
}

// One butterfly of a transpose: swaps the off-diagonal S x S squares of a and b.
template <int S> static inline void swap_squares(rw& a, rw& b) {
  rw low, high;
  for (int l = 0; l < WORDS; l++) {
    low[l] = l & S ? WORDS + (l ^ S) : l;
    high[l] = l & S ? WORDS + l : l ^ S;
  }
  rw x = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = x;
}
template <int S> static inline void transpose_words(rw* x) {  // WORDS x WORDS, in place
#pragma GCC unroll 16
  for (int i = 0; i < WORDS; i++)
    if (!(i & S)) swap_squares<S>(x[i], x[i + S]);
  if constexpr (S > 1) transpose_words<S / 2>(x);
}

// x[word][key] of WORDS keys, from dimension d on; `rest` dimensions are left of the head.
template <class T>
static inline void columns_of(Tokens<T> keys, int64_t d, int64_t rest, Prefetch& next, rw* x) {
  constexpr int STEP = WORDS * PER_WORD<T>;
#pragma GCC unroll 16
  for (int i = 0; i < WORDS; i++)
    x[i] = rest < STEP ? words_at(keys[i], d, rest) : words_at(keys[i], d);
  next.lines(std::max<int>(WORDS * STEP * sizeof(T) / 64, 1));
  transpose_words<WORDS / 2>(x);
}

// to[word][key], `stride` words apart; count is a multiple of LANES. The head's dimensions are
// [first, first + D) of a token.
template <class T>
static void load_keys(Tokens<T> keys, int count, int64_t first, int64_t D, Prefetch next, word* to,
                      int64_t stride) {
  for (int j = 0; j < count; j += WORDS) {
    word* column = to + j;
    for (int64_t d = 0; d < D; d += WORDS * PER_WORD<T>) {
      rw x[WORDS];
      columns_of<T>(keys + j, first + d, D - d, next, x);
#pragma GCC unroll 16
      for (int i = 0; i < WORDS; i++, column += stride) store_words(column, x[i]);
    }
  }
}

// The words of 2 WORDS dimensions of one or two positions.
template <class T> static inline void unit_at(const T* a, const T* b, rw& low, rw& high) {
  if constexpr (PAIRED<T>) {
    typedef uint16_t halves __attribute__((vector_size(REGISTER)));
    halves x, y, at;
    memcpy(&x, a, REGISTER);
    memcpy(&y, b, REGISTER);
    for (int i = 0; i < 2 * WORDS; i++) at[i] = i / 2 + i % 2 * 2 * WORDS;
    low = (rw)__builtin_shuffle(x, y, at);
    high = (rw)__builtin_shuffle(x, y, at + WORDS);
  } else {
    low = words_at(a, 0);
    high = words_at(a, WORDS);
  }
}
// The same where the rows have only n more dimensions.
template <class T> static inline void unit_at(const T* a, const T* b, int n, rw& low, rw& high) {
  T x[2 * WORDS] = {}, y[2 * WORDS] = {};
  memcpy(x, a, n * sizeof(T));
  memcpy(y, b, n * sizeof(T));
  unit_at(x, y, low, high);
}

// The cache lines of `registers` registers of words of one unit.
template <class T> constexpr int lines_of(int registers) {
  return std::max<int>(PER_WORD<T> * registers * WORDS * sizeof(T) / 64, 1);
}

// to[unit][dimension], `stride` words apart; count is even. Dimensions as in load_keys.
template <class T>
static void load_values(Tokens<T> values, int count, int64_t first, int64_t D, Prefetch next,
                        word* to, int64_t stride) {
  constexpr int STEP = 2 * WORDS;
  for (int j = 0; j < count; j += PER_WORD<T>, to += stride) {
    const T *a = values[j] + first, *b = values[j + PER_WORD<T> - 1] + first;
    rw low, high;
    for (int64_t d = 0; d < D; d += STEP) {
      if (D - d < STEP) unit_at(a + d, b + d, D - d, low, high);
      else unit_at(a + d, b + d, low, high);
      next.lines(lines_of<T>(2));
      store_words(to + d, low);
      store_words(to + d + WORDS, high);
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
