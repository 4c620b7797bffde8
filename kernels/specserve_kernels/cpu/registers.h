// Vector registers of the target instruction set. GCC keeps wider vectors in memory.
#pragma once

#include "vec.h"
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef uint32_t word;

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int WORDS = REGISTER / 4;
typedef float rf __attribute__((vector_size(REGISTER)));
typedef word rw __attribute__((vector_size(REGISTER)));
typedef int32_t ri __attribute__((vector_size(REGISTER)));

static inline rw load_words(const void* p) { rw v; memcpy(&v, p, REGISTER); return v; }
template <class T> static inline void store_words(T* p, rw v) { memcpy(p, &v, REGISTER); }
static inline rf broadcast(float x) { return x - rf{}; }

static inline rf multiply_add(rf a, rf b, rf c) {
#if defined(__AVX512F__)
  return (rf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (rf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (rf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Load WORDS 16-bit integers. GCC's conversion takes at least twice the instructions.
static INLINE ri load_shorts(const char* p) {
#if defined(__AVX512F__)
  return (ri)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (ri)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__ARM_NEON)
  return (ri)vmovl_s16(vld1_s16((const int16_t*)p));
#else
  int16_t shorts __attribute__((vector_size(REGISTER / 2)));
  memcpy(&shorts, p, sizeof shorts);
  return __builtin_convertvector(shorts, ri);
#endif
}
