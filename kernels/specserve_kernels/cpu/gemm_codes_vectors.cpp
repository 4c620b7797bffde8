// The products of gemm_codes_vectors.h, in a file of their own: with and without tiles, they are the
// same.
#include "gemm_codes_vectors.h"

template <class Kind> void CodeVectors<Kind>::multiply(const CodePart& part, int rows) {
  TABLE<0, false>[rows - 1](part);
}

template <class Kind>
CodeMultiplying CodeVectors<Kind>::by_codes(int64_t bits, [[maybe_unused]] Meaning meaning) {
#if DECODES_PAIRS
  if constexpr (IS_PAIRED) {
    if (meaning == BY_TABLE) return PairCodes<4, BY_TABLE>::multiply;
    if (meaning == WITH_ZEROS)
      return bits == 4 ? PairCodes<4, WITH_ZEROS>::multiply : PairCodes<8, WITH_ZEROS>::multiply;
    return bits == 4 ? PairCodes<4, CENTERED>::multiply : PairCodes<8, CENTERED>::multiply;
  }
#endif
  return bits == 4 ? multiply_floats<4> : multiply_floats<8>;
}

template struct CodeVectors<Floats>;
template struct CodeVectors<Pairs>;
