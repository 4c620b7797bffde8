// Moving the KV of tokens from slot to slot.
#include <cstring>

#include "op.h"
#include "vec.h"

// In all layers of a model, in the order given.
struct Moves {
  const KV* layers;
  int64_t num_layers;
  const int64_t *source, *target;
  int64_t num_moves;
};

template <class T> static void move_layer(const KV& kv, const Moves& a) {
  int64_t bytes = kv.num_heads * kv.head_dim * sizeof(T);
  for (int64_t m = 0; m < a.num_moves; m++) {
    memcpy(kv.at<T>(kv.k, a.target[m]), kv.at<T>(kv.k, a.source[m]), bytes);
    memcpy(kv.at<T>(kv.v, a.target[m]), kv.at<T>(kv.v, a.source[m]), bytes);
  }
}

extern "C" void specserve_move_kv(const void* args, const Step&, Team& team) {
  const Moves& a = *(const Moves*)args;
  Range part = team.part(a.num_layers);
  for (int64_t l = part.begin; l < part.end; l++)
    a.layers[l].is_bf16 ? move_layer<bf16>(a.layers[l], a) : move_layer<float>(a.layers[l], a);
}
