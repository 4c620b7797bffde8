// Moving the KV of tokens from slot to slot.
#include <cstring>
#include <initializer_list>

#include "op.h"

// Moves in all layers of a model, in the given order.
struct Moves {
  const KV* layers;
  int64_t num_layers;
  const int64_t *source, *target;
  int64_t num_moves;
};

static void move_token(const KV& kv, int64_t source, int64_t target) {
  int64_t size = kv.element_bytes(), bytes = kv.num_heads * kv.head_dim * size;
  int64_t from = kv.element_of(source) * size, to = kv.element_of(target) * size;
  for (void* base : {kv.k, kv.v}) memcpy((char*)base + to, (char*)base + from, bytes);
  if (!kv.has_scales()) return;
  for (float* base : {kv.k_scale, kv.v_scale})
    for (int64_t h = 0; h < kv.num_heads; h++)
      *kv.scale_at(base, target, h) = *kv.scale_at(base, source, h);
}

extern "C" void specserve_move_kv(const void* args, const Step&, Team& team) {
  const Moves& a = *(const Moves*)args;
  Range part = team.part(a.num_layers);
  for (int64_t l = part.begin; l < part.end; l++)
    for (int64_t m = 0; m < a.num_moves; m++) move_token(a.layers[l], a.source[m], a.target[m]);
}
