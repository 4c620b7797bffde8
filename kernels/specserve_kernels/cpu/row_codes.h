// Quantization of rows to int8 codes, with one scale per group of columns.
//
// reference/kv.py defines the codes and the scale of a group. Sixteen groups are quantized at once,
// so that their reductions and divisions share instructions.
#pragma once

#include "kv_codes.h"

// The numbers of a row's group that do not depend on the column.
struct RowGroup {
  float scale;
  int32_t start;    // minus sum of codes * zero, if all columns have the same zero; else 0
  float minus_sum;  // of codes
  float product;    // scale * sum of codes
};

// Where a row's codes are written.
struct RowCodes {
  int8_t* codes;                // of the first group
  int64_t codes_bytes, padded;  // bytes between groups; codes of a group, with zeros after the last
  RowGroup* groups;             // of the first group
  int64_t groups_between;       // elements between groups
  int zero;                     // of all columns
};

// Reduce 16 vectors: lane i of the result combines the lanes of vector i.
template <class F> static INLINE vi reduce_each(vi* x, F combine) {
#if defined(__AVX512F__)
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    exchange<8>(x[i], x[i + 8]);
    x[i] = combine(x[i], x[i + 8]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    exchange<4>(x[i], x[i + 4]);
    x[i] = combine(x[i], x[i + 4]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    exchange<2>(x[i], x[i + 2]);
    x[i] = combine(x[i], x[i + 2]);
  }
  exchange<1>(x[0], x[1]);
  return combine(x[0], x[1]);
#else
  typedef int32_t quarter __attribute__((vector_size(16)));  // GCC shuffles wider vectors slowly
  int32_t results[LANES];
  for (int i = 0; i < LANES; i++) {
    quarter q[4];
    memcpy(q, &x[i], sizeof q);
    quarter all = combine(combine(q[0], q[1]), combine(q[2], q[3]));
    all = combine(all, (quarter)__builtin_shuffle(all, quarter{2, 3, 0, 1}));
    all = combine(all, (quarter)__builtin_shuffle(all, quarter{1, 0, 3, 2}));
    results[i] = all[0];
  }
  return load_lanes(results);
#endif
}

// Quantize n <= 16 groups of a row.
template <class Source>
static INLINE void quantize_groups(const Source* x, int n, int64_t group, RowCodes to) {
  vi each[LANES];
  for (int g = 0; g < LANES; g++) {
    vi most{};  // as bits, which order like magnitudes; NaN is largest
    for (int64_t k = 0; g < n && k < group; k += LANES) {
      const Source* from = x + g * group + k;
      vi size = (vi)load_up_to(from, std::min<int64_t>(LANES, group - k)) & 0x7fffffff;
      most = size > most ? size : most;
    }
    each[g] = most;
  }
  vf largest = (vf)reduce_each(each, [](auto a, auto b) { return a > b ? a : b; });
  vi is_broken = ~(vi)(largest < INF), is_zero = (vi)(largest < SMALLEST_HEAD);
  vf inverse = is_broken | is_zero ? vf{} : 127.0f / largest;
  vf scale = is_zero ? vf{} : largest / 127.0f;
  scale = is_broken ? splat(std::numeric_limits<float>::quiet_NaN()) : scale;

  for (int g = 0; g < LANES; g++) {
    vi sum{};
    int8_t* codes = to.codes + g * to.codes_bytes;
    for (int64_t k = 0; g < n && k < group; k += LANES) {
      int count = std::min<int64_t>(LANES, group - k);
      vf v = load_up_to(x + g * group + k, count);
      vi code = int8_codes(is_broken[g] ? vf{} : v * inverse[g]);
      vb bytes = lowest_bytes(code);
      memcpy(codes + k, &bytes, count);
      sum += code;
    }
    for (int64_t k = group; g < n && k < to.padded; k++) codes[k] = 0;
    each[g] = sum;
  }
  vi sum = reduce_each(each, [](auto a, auto b) { return a + b; });
  vf product = scale * __builtin_convertvector(sum, vf);
  for (int g = 0; g < n; g++)
    to.groups[g * to.groups_between] = {scale[g], -to.zero * sum[g], float(-sum[g]), product[g]};
}

template <class Source>
static void quantize_row(const Source* x, int64_t num_groups, int64_t group, RowCodes to) {
  for (int64_t g = 0; g < num_groups; g += LANES) {
    int n = std::min<int64_t>(LANES, num_groups - g);
    if (group == 32) quantize_groups(x, n, 32, to);
    else quantize_groups(x, n, group, to);
    x += LANES * group;
    to.codes += LANES * to.codes_bytes;
    to.groups += LANES * to.groups_between;
  }
}
