// The instruction set that the kernels are compiled for. Results depend on it.
extern "C" const char* specserve_level() {
#if defined(EMULATE_AMX)
  return "emulated-amx";
#elif defined(EMULATE_AVX_VNNI)
  return "emulated-avx-vnni";
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)
  return "x86-64-v4-amx";
#elif defined(__AVX512BF16__) && defined(__AVX512VL__)
  return "x86-64-v4-bf16";
#elif defined(__AVX512F__)
  return "x86-64-v4";
#elif defined(__AVX2__) && defined(__FMA__) && defined(__AVXVNNI__)
  return "x86-64-v3-vnni";
#elif defined(__AVX2__) && defined(__FMA__)
  return "x86-64-v3";
#elif defined(__x86_64__)
  return "x86-64";
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return "aarch64-i8mm";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "aarch64-dotprod";
#elif defined(__aarch64__)
  return "aarch64";
#else
  return "unknown";
#endif
}
