// Attention over 8-bit KV.
#include "attention.h"

template <class A> static void attend(const Attention& a, const Step& step, Team& team) {
  a.kv->stored == AS_INT8 ? attention<Int8<A>>(a, step, team) : attention<Fp8<A>>(a, step, team);
}

void attention_over_codes(const Attention& a, const Step& step, Team& team) {
  a.is_bf16 ? attend<bf16>(a, step, team) : attend<float>(a, step, team);
}
