// The products of gemm_integers.h, in a file of their own: with and without tiles, they are the same.
#include "gemm_integers.h"

void IntegerVectors::multiply(const IntegerPart& part, Words words, int rows) {
  switch (words) {
    case BYTES: return run<BYTES>(part, rows);
    case DECODED: return run<HAS_SHORT_SUMS ? DECODED : BYTES>(part, rows);
    case NIBBLES: return run<NIBBLES>(part, rows);
    case FIVES: return run<FIVES>(part, rows);
    case SIXES: return run<SIXES>(part, rows);
    case INDICES: return run<INDICES>(part, rows);
  }
}

void IntegerVectors::decode(const IntegerPart& part, Words words, char* to) {
  switch (words) {
    case FIVES: return decode_as<FIVES>(part, to);
    case SIXES: return decode_as<SIXES>(part, to);
    case INDICES: return decode_as<INDICES>(part, to);
    default: return decode_as<NIBBLES>(part, to);
  }
}
