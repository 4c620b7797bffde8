// Linear maps with weights of 8-bit codes, whose rows are also quantized to 8-bit codes.
//
// The sums are integers, so they are exact for any order of K and any instruction set. Codes q from
// 0 to 255 stand for q - 128: a sum is sum(x * q) - 128 * sum(x). It is converted to float and
// multiplied by (row scale * column scale). The scales, [N] or [2 N], follow the panels.
#include "dot.h"
#include "gemm_multiplier.h"
#include "gemm_tiles.h"
#include "gemm_vectors.h"
#include "kv_codes.h"

// Words of four codes of a panel times four codes of a row.
struct Bytes {
  typedef uint32_t Value;
  typedef int8_t Source;
#if defined(__AVX512VNNI__) || HAS_AVX_VNNI || defined(__ARM_NEON)
  static constexpr int PER_WORD = 1;
  static constexpr int MIDDLE = ARE_UNSIGNED ? 128 : 0;  // unpacked code that stands for 0
  static rf unpack(rw words, int) { return (rf)(ARE_UNSIGNED ? words : words ^ 0x80808080); }
  static rf add_product(rf sum, Value x, rf w) { return (rf)add_dot((ri)sum, (rw)w, x); }
  static void pack(const int8_t* x, int64_t n, Value* to) { memcpy(to, x, n); }
#else
  // Two values of two shorts each: the first and third code of a word, then the others.
  static constexpr int PER_WORD = 2, MIDDLE = 128;
  static rf unpack(rw words, int i) { return (rf)((i == 0 ? words : words >> 8) & 0x00ff00ff); }
  static rf add_product(rf sum, Value x, rf w) {
#if defined(__AVX512BW__)
    return (rf)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x)));
#elif defined(__AVX2__)
    return (rf)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x)));
#else
    typedef int32_t ri __attribute__((vector_size(REGISTER)));
    ri pair = (ri)w;
    return (rf)((ri)sum + (pair & 0xffff) * (int16_t)x + (pair >> 16) * ((int32_t)x >> 16));
#endif
  }
  static void pack(const int8_t* x, int64_t n, Value* to) {
    for (int64_t i = 0; i < n; i += 4, to += 2) {
      int8_t q[4] = {};
      memcpy(q, x + i, std::min<int64_t>(n - i, 4));
      for (int j = 0; j < 2; j++) to[j] = uint16_t(q[j]) | uint32_t(q[j + 2]) << 16;
    }
  }
#endif
};

#if HAS_SQUARES
// The same sums, of two rows and two words at once. Only panels that are streamed are multiplied.
struct Squares : Vectors<Bytes> {
  static void multiply(const Part& part, int rows, int, int64_t) {
    blocks(std::make_index_sequence<MAX_ROWS>())[rows - 1](part);
  }

 private:
  typedef void (*Function)(const Part&);

  template <size_t... R>
  static constexpr std::array<Function, MAX_ROWS> blocks(std::index_sequence<R...>) {
    return {block<R + 1>...};
  }
  template <int ROWS> static void block(const Part& part) {
    constexpr int V = across(ROWS);
    for (int column = 0; column < COLUMNS; column += V * WORDS) columns<ROWS, V>(part, column);
  }
  // An odd row is paired with itself.
  template <int ROWS, int V> static INLINE void columns(const Part& part, int column) {
    constexpr int EVEN = ROWS + ROWS % 2, LAST = ROWS - 1;
    const uint32_t* x = (const uint32_t*)part.rows;
    float* sums = part.sums + column;
    ri squares[EVEN][V];
#pragma GCC unroll 8
    for (int r = 0; r < EVEN; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++)
        squares[r][v] = part.is_first ? ri{} : (ri)load_words(at(sums, std::min(r, LAST), v));
    exchange_squares(squares);
    for (bool is_last : {false, true}) {
      Stretch s = stretch(part, column, AHEAD, is_last);
      for (int64_t w = s.begin; w < s.end; w += 2) {
        rw words[V][2];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
          if (v % (LINE / WORDS) == 0)
            for (int i = 0; i < 2; i++) s.loader.prefetch(w + i, v * WORDS);
          join_quads(signed_words(s.loader.words(w, v * WORDS)),
                     signed_words(s.loader.words(w + 1, v * WORDS)), words[v]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < EVEN; r += 2) {
          rw rows = join_eights(x + r * STRIDE + w, x + std::min(r + 1, LAST) * STRIDE + w);
#pragma GCC unroll 8
          for (int v = 0; v < V; v++)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++)
              squares[r + i][v] = add_square(squares[r + i][v], rows, words[v][i]);
        }
      }
    }
    exchange_squares(squares);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++)
        store_words(at(sums, r, v), (rw)squares[r][v]);
  }
  static float* at(float* sums, int row, int v) { return sums + row * COLUMNS + v * WORDS; }
  static rw signed_words(const uint32_t* words) { return (rw)Bytes::unpack(load_words(words), 0); }
};
#else
typedef Vectors<Bytes> Squares;
#endif

// Rows of T quantized to 8-bit codes, and the conversion of their sums to floats.
template <class T> struct RoundedRows {
  static inline thread_local Scratch<int8_t> code_memory;
  static inline thread_local Scratch<float> scale_memory;
  static inline thread_local Scratch<int32_t> sum_memory;

  const Linear& a;
  Shape shape{a.N, a.K, 1, a.is_gated()};
  int64_t first = 0;  // first row of the slab
  int8_t* codes = nullptr;
  float* scales = nullptr;
  int32_t* middles = nullptr;  // what each row's sums have too much

  void take(Range slab) {
    int64_t n = slab.end - slab.begin;
    first = slab.begin;
    codes = code_memory.at_least(n * a.K);
    scales = scale_memory.at_least(n);
    middles = sum_memory.at_least(n);
    for (int64_t r = 0; r < n; r++) {
      int8_t* row = codes + r * a.K;
      scales[r] = quantize(a.row<T>(first + r), a.K, (Int8<float>*)row);
      int32_t sum = 0;
      for (int64_t k = 0; k < a.K; k++) sum += row[k];
      middles[r] = Bytes::MIDDLE * sum;
    }
  }
  const int8_t* row(int64_t r) const { return codes + (r - first) * a.K; }
  const float* column_scales() const {
    return (const float*)((const uint32_t*)a.packed + shape.num_panels() * shape.panel_words());
  }

  // `sums` are integers on entry.
  void finish(float* sums, int64_t panel, Range rows) const {
    int64_t column = panel * panel_columns(shape.is_gated), left = a.N - column;
    const float* scales_of = column_scales() + column;
    scale_columns(sums, scales_of, left, rows);
    if (shape.is_gated) scale_columns(sums + LANES, scales_of + a.N, left, rows);
    else if (left > LANES) scale_columns(sums + LANES, scales_of + LANES, left - LANES, rows);
    ::finish<T>(a, sums, panel, rows);
  }
  // Scale 16 columns, or the n that exist.
  void scale_columns(float* sums, const float* scales_of, int64_t n, Range rows) const {
    vf scale = load_up_to(scales_of, std::min<int64_t>(n, LANES));
    for (int64_t r = rows.begin - first; r < rows.end - first; r++, sums += COLUMNS) {
      vf sum = __builtin_convertvector(load_lanes(sums) - middles[r], vf);
      store(sums, sum * (scale * scales[r]));
    }
  }
};

template <class Path> static void multiply_on(const Maps& maps, Team& team) {
  const Linear& a = maps.each;
  Shape shape{a.N, a.K, 1, a.is_gated()};
  if (a.is_bf16) Multiplier<Path, RoundedRows<bf16>>{maps, shape}.run(team);
  else Multiplier<Path, RoundedRows<float>>{maps, shape}.run(team);
}

void multiply_rounded(const Maps& maps, Team& team) {
#if HAS_TILES
  if (Tiles::are_usable()) return multiply_on<TilesOf<int8_t>>(maps, team);
#endif
  multiply_on<Squares>(maps, team);
}
