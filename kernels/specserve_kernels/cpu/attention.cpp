// Attention over KV of the queries' type.
#include "attention.h"

extern "C" void specserve_attention(const void* args, const Step& step, Team& team) {
  const Attention& a = *(const Attention*)args;
  if (a.kv->has_scales()) return attention_over_codes(a, step, team);
  a.is_bf16 ? attention<bf16>(a, step, team) : attention<float>(a, step, team);
}
