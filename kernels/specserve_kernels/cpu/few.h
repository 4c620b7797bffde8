// Products for few query vectors, directly from keys and values in memory.
//
// Multiplying up to MAX_FEW query vectors takes less time than reading the tokens. A register of
// keys or values is therefore multiplied as soon as its words are in order. The CPU computes during
// memory latency. Sums are in the same order as in `multiply`.
#pragma once

#include "attention_plan.h"
#include "layouts.h"

// Tokens per block, and blocks per prefetch distance. A block's heads are read one after another:
// they are adjacent in memory, so this is faster than reading all tokens head by head.
constexpr int FEW_BLOCK = 16, FEW_AHEAD = 4;

// Compute scores[i][key] of N queries. `count` is a multiple of LANES, at most FEW_BLOCK. The
// head's dimensions are [first, first + D) of a token.
template <class T, int N>
static void score_few(Matrix q, Tokens<T> keys, int count, int64_t first, int64_t D, Prefetch next,
                      Sums scores) {
  for (int64_t d = 0, w = 0; d < D; d += DIMS<T>, w += WORDS * EXPANDED<T>)
    for (int j = 0; j < count; j += WORDS) {
      rw x[WORDS];
      columns_of<T>(keys, j, first, d, D, next, x);
      rf sum[N][1];
      load_sums(scores.from(0, j), d > 0, sum);
#pragma GCC unroll 16
      for (int u = 0; u < WORDS; u++) {
        rw words[EXPANDED<T>];
        expand<T>(x[u], words);
#pragma GCC unroll 4
        for (int e = 0; e < EXPANDED<T>; e++)
#pragma GCC unroll 8
          for (int i = 0; i < N; i++) {
            rw query = *q.from(i, w + u * EXPANDED<T> + e).at - rw{};
            sum[i][0] = multiply_words<PAIRED<T>>(query, words[e], sum[i][0]);
          }
      }
      store_sums(sum, scores.from(0, j));
    }
}

// Add to S registers of N queries' sums, from dimension d on; `rest` dimensions remain.
template <class T, int N, int S, bool IS_WHOLE>
static INLINE void add_block(Matrix weights, Tokens<T> values, int count, int64_t first, int64_t d,
                             int64_t rest, Prefetch next, Sums sums) {
  rf sum[N][S];
  load_sums(sums, true, sum);
  for (int j = 0; j < count; j += PER_WORD<T>) {
    const T *a = values[j] + first + d, *b = values[j + PER_WORD<T> - 1] + first + d;
    rw x[S];
#pragma GCC unroll 8
    for (int s = 0; s < S; s += 2) {
      if (IS_WHOLE) unit_at(a + s * WORDS, b + s * WORDS, x[s], x[s + 1]);
      else unit_at(a + s * WORDS, b + s * WORDS, rest, x[s], x[s + 1]);
    }
    for (int i = 0; i < PER_WORD<T>; i++)
      next.lines(j + i, d * sizeof(T), S * WORDS * sizeof(T));
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      rw weight = *weights.from(i, j / PER_WORD<T>).at - rw{};
#pragma GCC unroll 8
      for (int s = 0; s < S; s++) sum[i][s] = multiply_words<PAIRED<T>>(weight, x[s], sum[i][s]);
    }
  }
  store_sums(sum, sums);
}

// Compute sums[i][dimension] += weights of N queries times values. `count` is even; dimensions as
// above.
template <class T, int N>
static void add_few(Matrix weights, Tokens<T> values, int count, int64_t first, int64_t D,
                    Prefetch next, Sums sums) {
  constexpr int S = N > SUMS / 4 ? 2 : N > SUMS / 8 ? 4 : 8;
  int64_t d = 0;
  for (; d + S * WORDS <= D; d += S * WORDS)
    add_block<T, N, S, true>(weights, values, count, first, d, 0, next, sums.from(0, d));
  for (; d + 2 * WORDS <= D; d += 2 * WORDS)
    add_block<T, N, 2, true>(weights, values, count, first, d, 0, next, sums.from(0, d));
  if (d < D)
    add_block<T, N, 2, false>(weights, values, count, first, d, D - d, next, sums.from(0, d));
}
