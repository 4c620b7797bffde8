// What the CPU can do at best: reading memory, and multiply-adds of bfloat16 or of 8-bit codes on
// registers.
//
// Compiled on the machine that is measured, with -march=native and contraction allowed.

#include <cstdint>
#include <cstring>
#include <utility>

#include <omp.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__aarch64__)
#define KEEP(vector) "+w"(vector)
#elif defined(__AVX512F__)
#define KEEP(vector) "+v"(vector)
#else
#define KEEP(vector) "+x"(vector)
#endif

namespace {

typedef uint64_t Words __attribute__((vector_size(64)));

constexpr int LOADS = 8;  // vectors of 64 bytes a turn; memory is slower than their sum

// Bytes in multiples of 64 * LOADS; the rest is not read.
uint64_t read_part(const char* begin, int64_t bytes) {
  Words all = {};
  for (int64_t at = 0; at + 64 * LOADS <= bytes; at += 64 * LOADS)
    for (int i = 0; i < LOADS; i++) {
      Words words;
      std::memcpy(&words, begin + at + 64 * i, 64);
      all ^= words;
    }
  uint64_t one = 0;
  for (int i = 0; i < 8; i++) one ^= all[i];
  return one;
}

#if defined(__AMX_BF16__)
constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;  // asm/prctl.h

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

bool has_tiles() { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0; }

// Four sums of two tiles of rows with two of columns: a GEMM's inner loop without its loads.
template <bool ARE_CODES> void multiply_four_tiles() {
  if constexpr (ARE_CODES) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  } else {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
template <bool ARE_CODES> int64_t multiply_tiles(int64_t turns) {
  TileConfig config;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t turn = 0; turn < turns; turn++) multiply_four_tiles<ARE_CODES>();
  alignas(64) float out[256];
  _tile_stored(0, out, 64);
  volatile float sink = out[0];
  (void)sink;
  _tile_release();
  return turns * 4 * 16 * 16 * (ARE_CODES ? 64 : 32) * 2;
}
#else
bool has_tiles() { return false; }
template <bool> int64_t multiply_tiles(int64_t) { return 0; }
#endif

struct Floats {
#if defined(__AVX512BF16__)
  static constexpr const char* NAME = "vdpbf16ps";
  typedef __m512 Sum;
  typedef __m512bh Factor;
  static constexpr int FLOPS = 16 * 4, NUM_SUMS = 16;
  static Factor factor() { return (Factor)_mm512_set1_epi16(0x3f40); }  // 0.75
  static Sum multiply_add(Sum sum, Factor a, Factor b) { return _mm512_dpbf16_ps(sum, a, b); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static constexpr const char* NAME = "bfmmla";
  typedef float32x4_t Sum;
  typedef bfloat16x8_t Factor;
  static constexpr int FLOPS = 4 * 4 * 2, NUM_SUMS = 16;
  static Factor factor() { return vreinterpretq_bf16_u16(vdupq_n_u16(0x3f40)); }  // 0.75
  static Sum multiply_add(Sum sum, Factor a, Factor b) { return vbfmmlaq_f32(sum, a, b); }
#else
  static constexpr const char* NAME = "fp32 multiply-add";
#if defined(__AVX512F__)
  static constexpr int WIDTH = 64, NUM_SUMS = 16;
#elif defined(__AVX__)
  static constexpr int WIDTH = 32, NUM_SUMS = 12;  // of 16 registers
#else
  static constexpr int WIDTH = 16, NUM_SUMS = 16;
#endif
  typedef float Sum __attribute__((vector_size(WIDTH)));
  typedef Sum Factor;
  static constexpr int FLOPS = WIDTH / 4 * 2;
  static Factor factor() { return Factor{} + 0.75f; }
  static Sum multiply_add(Sum sum, Factor a, Factor b) { return a * b + sum; }
#endif
};

// Products of 8-bit codes, added up as 32-bit integers.
struct Codes {
#if defined(__AVX512VNNI__)
  static constexpr const char* NAME = "vpdpbusd";
  typedef __m512i Sum;
  static constexpr int FLOPS = 64 * 2, NUM_SUMS = 16;
  static Sum factor() { return _mm512_set1_epi8(3); }
  static Sum multiply_add(Sum sum, Sum a, Sum b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVXVNNI__)
  static constexpr const char* NAME = "vpdpbusd";
  typedef __m256i Sum;
  static constexpr int FLOPS = 32 * 2, NUM_SUMS = 12;
  static Sum factor() { return _mm256_set1_epi8(3); }
  static Sum multiply_add(Sum sum, Sum a, Sum b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#elif defined(__AVX2__)
  static constexpr const char* NAME = "vpmaddubsw and vpmaddwd";
  typedef __m256i Sum;
  static constexpr int FLOPS = 32 * 2, NUM_SUMS = 8;
  static Sum factor() { return _mm256_set1_epi8(3); }
  static Sum multiply_add(Sum sum, Sum a, Sum b) {
    const Sum pairs = _mm256_maddubs_epi16(a, b);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  static constexpr const char* NAME = "sdot";
  typedef int32x4_t Sum;
  static constexpr int FLOPS = 16 * 2, NUM_SUMS = 16;
  static Sum factor() { return vdupq_n_s32(0x03030303); }
  static Sum multiply_add(Sum sum, Sum a, Sum b) {
    return vdotq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
  }
#else
  static constexpr const char* NAME = "int32 multiply-add";
  typedef int32_t Sum __attribute__((vector_size(16)));
  static constexpr int FLOPS = 4 * 2, NUM_SUMS = 12;
  static Sum factor() { return Sum{} + 3; }
  static Sum multiply_add(Sum sum, Sum a, Sum b) { return a * b + sum; }
#endif
  typedef Sum Factor;
};

// The compiler may assume nothing of the values: equal sums would be one.
template <class Unit>
void step(typename Unit::Sum& sum, typename Unit::Factor& a, typename Unit::Factor& b) {
  sum = Unit::multiply_add(sum, a, b);
  asm volatile("" : KEEP(sum), KEEP(a), KEEP(b));
}

// Sums that do not wait for each other. Constant indices: a loop over them would be unrolled too
// late for the compiler to keep them in registers.
template <class Unit, size_t... I>
int64_t multiply_vectors(int64_t turns, std::index_sequence<I...>) {
  typename Unit::Sum sums[Unit::NUM_SUMS] = {};
  typename Unit::Factor a = Unit::factor(), b = Unit::factor();
  for (int64_t turn = 0; turn < turns; turn++) (step<Unit>(sums[I], a, b), ...);
  typename Unit::Sum all = {};
  ((all += sums[I]), ...);
  volatile float sink = all[0];
  (void)sink;
  return turns * Unit::NUM_SUMS * Unit::FLOPS;
}

// `turns` of each thread's loop; the operations done.
template <class Unit, bool ARE_CODES> int64_t multiply(int64_t turns, int threads) {
  const bool tiles = has_tiles();
  int64_t all = 0;
#pragma omp parallel num_threads(threads) reduction(+ : all)
  all += tiles ? multiply_tiles<ARE_CODES>(turns)
               : multiply_vectors<Unit>(turns, std::make_index_sequence<Unit::NUM_SUMS>());
  return all;
}

}  // namespace

extern "C" {

// Reads all bytes once; their exclusive or, so that no read can be left out.
uint64_t bound_read(const char* memory, int64_t bytes, int threads) {
  uint64_t all = 0;
#pragma omp parallel num_threads(threads) reduction(^ : all)
  {
    const int64_t part = bytes / omp_get_num_threads() / 64 * 64;
    all ^= read_part(memory + omp_get_thread_num() * part, part);
  }
  return all;
}

// `turns` of each thread's loop; the operations done: of bfloat16, or of 8-bit codes.
int64_t bound_multiply(int64_t turns, int threads) {
  return multiply<Floats, false>(turns, threads);
}
int64_t bound_multiply_codes(int64_t turns, int threads) {
  return multiply<Codes, true>(turns, threads);
}

const char* bound_unit() { return has_tiles() ? "AMX tiles" : Floats::NAME; }
const char* bound_code_unit() { return has_tiles() ? "AMX tiles" : Codes::NAME; }
}
