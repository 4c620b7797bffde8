// Loading queries, keys and values from memory as matrices of words.
#pragma once

#include "words.h"

// Addresses of the keys or values of consecutive positions, at an item's first KV head. Hidden
// tokens point to ZEROS, because their slots may contain anything.
template <class T> using Tokens = const T* const*;
constexpr int64_t MAX_TOKEN = 1 << 15;  // maximum dimensions of a token, over all heads
template <class T> alignas(64) constexpr T ZEROS[MAX_TOKEN] = {};

// One head of the tokens that are read next, in the order of the current reads. Lines are prefetched
// into L2 only, which is faster than into L1 on Zen 4: the reads may need L1's few miss buffers.
struct Prefetch {
  const void* const* tokens = nullptr;
  int64_t head = 0;  // first byte of the head

  // Prefetch `bytes` of token j from byte `at` of the head on.
  void lines(int j, int64_t at, int bytes) const {
    if (!tokens || (bytes < 64 && at % 64)) return;
    const char* from = (const char*)tokens[j] + head + at;
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  }
};

// Codes are transposed first and decoded later: `expand` decodes one word to EXPANDED words.
template <class T> constexpr int EXPANDED = IS_CODE<T> ? 4 / PER_WORD<T> : 1;
// Dimensions in one register of a row during transposition.
template <class T> constexpr int DIMS = WORDS * PER_WORD<T> * EXPANDED<T>;

// Load a register of a row's words from dimension d on.
template <class T> static inline rw words_at(const T* row, int64_t d) {
  if constexpr (std::is_same_v<T, bf16> && !PAIRED<T>) {
    typedef uint16_t part __attribute__((vector_size(REGISTER / 2)));
    part x;
    memcpy(&x, row + d, REGISTER / 2);
    return __builtin_convertvector(x, rw) << 16;
  }
  return load_words(row + d);
}
// Same if the row has only n more dimensions; missing words are zeros.
template <class T> static inline rw words_at(const T* row, int64_t d, int n) {
  T t[DIMS<T>] = {};
  memcpy(t, row + d, n * sizeof(T));
  return words_at(t, 0);
}

// Return the words of a head, in whole steps.
template <class T> static int64_t words_of(int64_t D) {
  return (D + DIMS<T> - 1) / DIMS<T> * WORDS * EXPANDED<T>;
}

// Load a query, padded to the words of a key of type T.
template <class T> static void load_query(const Active<T>* q, int64_t D, word* to) {
  typedef Active<T> A;
  for (int64_t w = 0, d = 0; w < words_of<T>(D); w += WORDS, d += DIMS<A>) {
    int rest = std::max<int64_t>(D - d, 0);
    store_words(to + w, rest < DIMS<A> ? words_at(q, d, rest) : words_at(q, d));
  }
}

// In each run of 16 bytes, interleave the first (HALF = 0) or last halves of a and b. Elements are
// words or pairs of words; V is a register of them.
template <class V, int HALF> static INLINE rw interleave(rw a, rw b) {
  constexpr int SIZE = sizeof(V{}[0]), N = REGISTER / SIZE, RUN = 16 / SIZE;
  V at;
  for (int l = 0; l < N; l++)
    at[l] = l / RUN * RUN + HALF * RUN / 2 + l % RUN / 2 + (l % 2 ? N : 0);
  return (rw)__builtin_shuffle((V)a, (V)b, at);
}
// Select the runs of 16 bytes at even (ODD = 0) or odd places, first from a, then from b.
template <int ODD> static INLINE rw every_second_run(rw a, rw b) {
  rw at;
  for (int l = 0; l < WORDS; l++) at[l] = (l / 4 * 2 + ODD) * 4 + l % 4;
  return __builtin_shuffle(a, b, at);
}
// Transpose N rows of N runs; the rows are every fourth of x.
template <int N> static INLINE void transpose_runs(rw* x) {
  if constexpr (N == 2) {
    rw first = x[0];
    x[0] = every_second_run<0>(first, x[4]);
    x[4] = every_second_run<1>(first, x[4]);
  } else if constexpr (N == 4) {
    rw a = every_second_run<0>(x[0], x[4]), b = every_second_run<0>(x[8], x[12]);
    rw c = every_second_run<1>(x[0], x[4]), d = every_second_run<1>(x[8], x[12]);
    x[0] = every_second_run<0>(a, b);
    x[8] = every_second_run<1>(a, b);
    x[4] = every_second_run<0>(c, d);
    x[12] = every_second_run<1>(c, d);
  }
}
// Transpose WORDS x WORDS words in place. The shuffles overwrite no operands, which saves copies.
static INLINE void transpose_words(rw* x) {
  typedef uint64_t pairs __attribute__((vector_size(REGISTER)));
#pragma GCC unroll 4
  for (int i = 0; i < WORDS; i += 4) {
    rw a = interleave<rw, 0>(x[i], x[i + 1]), b = interleave<rw, 1>(x[i], x[i + 1]);
    rw c = interleave<rw, 0>(x[i + 2], x[i + 3]), d = interleave<rw, 1>(x[i + 2], x[i + 3]);
    x[i] = interleave<pairs, 0>(a, c);
    x[i + 1] = interleave<pairs, 1>(a, c);
    x[i + 2] = interleave<pairs, 0>(b, d);
    x[i + 3] = interleave<pairs, 1>(b, d);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) transpose_runs<WORDS / 4>(x + c);
}

// Load x[word][key] of the keys [j, j + WORDS) for one step of dimensions, from dimension d of the
// head that begins at `first`. `expand` decodes the words.
template <class T>
static INLINE void columns_of(Tokens<T> keys, int j, int64_t first, int64_t d, int64_t D,
                              Prefetch next, rw* x) {
#pragma GCC unroll 16
  for (int i = 0; i < WORDS; i++) {
    bool is_whole = D - d >= DIMS<T>;
    x[i] = is_whole ? words_at(keys[j + i], first + d) : words_at(keys[j + i], first + d, D - d);
    next.lines(j + i, d * sizeof(T), DIMS<T> * sizeof(T));
  }
  transpose_words(x);
}
template <class T> static INLINE void expand(rw x, rw (&words)[EXPANDED<T>]) {
  if constexpr (!IS_CODE<T>) {
    words[0] = x;
  } else if constexpr (!PAIRED<T>) {
    words[0] = (rw)floats_at<T, 0>(x);
    words[1] = (rw)floats_at<T, 1>(x);
    words[2] = (rw)floats_at<T, 2>(x);
    words[3] = (rw)floats_at<T, 3>(x);
  } else {
    words[0] = paired(floats_at<T, 0>(x), floats_at<T, 1>(x));
    words[1] = paired(floats_at<T, 2>(x), floats_at<T, 3>(x));
  }
}

// Load to[word][key]; words are `stride` apart. `count` is a multiple of LANES. The head's
// dimensions are [first, first + D) of a token.
template <class T>
static void load_keys(Tokens<T> keys, int count, int64_t first, int64_t D, word* to,
                      int64_t stride) {
  for (int j = 0; j < count; j += WORDS) {
    word* column = to + j;
    for (int64_t d = 0; d < D; d += DIMS<T>) {
      rw x[WORDS];
      columns_of<T>(keys, j, first, d, D, {}, x);
#pragma GCC unroll 16
      for (int i = 0; i < WORDS; i++) {
        rw words[EXPANDED<T>];
        expand<T>(x[i], words);
#pragma GCC unroll 4
        for (rw each : words) {
          store_words(column, each);
          column += stride;
        }
      }
    }
  }
}

// Load the words of 2 * WORDS dimensions of one or two positions.
template <class T> static inline void unit_at(const T* a, const T* b, rw& low, rw& high) {
  if constexpr (IS_CODE<T> && !PAIRED<T>) {
    low = (rw)floats_of(a);
    high = (rw)floats_of(a + WORDS);
  } else if constexpr (IS_CODE<T>) {
    low = paired(floats_of(a), floats_of(b));
    high = paired(floats_of(a + WORDS), floats_of(b + WORDS));
  } else if constexpr (PAIRED<T>) {
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
// Same if the rows have only n more dimensions.
template <class T> static inline void unit_at(const T* a, const T* b, int n, rw& low, rw& high) {
  T x[2 * WORDS] = {}, y[2 * WORDS] = {};
  memcpy(x, a, n * sizeof(T));
  memcpy(y, b, n * sizeof(T));
  unit_at(x, y, low, high);
}

// Load to[unit][dimension]; units are `stride` words apart. `count` is even. Dimensions as in
// load_keys.
template <class T>
static void load_values(Tokens<T> values, int count, int64_t first, int64_t D, word* to,
                        int64_t stride) {
  for (int j = 0; j < count; j += PER_WORD<T>, to += stride) {
    const T *a = values[j] + first, *b = values[j + PER_WORD<T> - 1] + first;
    rw low, high;
    for (int64_t d = 0; d < D; d += 2 * WORDS) {
      if (D - d < 2 * WORDS) unit_at(a + d, b + d, D - d, low, high);
      else unit_at(a + d, b + d, low, high);
      store_words(to + d, low);
      store_words(to + d + WORDS, high);
    }
  }
}

// Whether words of values contain neither Inf nor NaN.
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
