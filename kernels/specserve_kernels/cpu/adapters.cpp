// LoRA adapters: the two maps of each row's adapter, in addition to a linear map.
#include "linear.h"

struct AdapterMaps {
  Linear map;                 // shared shape of all slots; rows are in the order of slots
  const void* const* packed;  // [S]  null: the slot's adapter does not change the map
  const int32_t* begins;      // [S + 1]
  int64_t num_slots;
};

// Zero the sums of rows whose adapter does not change the map, because no multiplication writes
// them.
static void clear_unwritten(const AdapterMaps& a, Team& team) {
  for (int64_t slot = 0; slot < a.num_slots; slot++) {
    if (a.packed[slot]) continue;
    Range part = team.part((a.begins[slot + 1] - a.begins[slot]) * a.map.N);
    float* sums = (float*)a.map.out + a.begins[slot] * a.map.N;
    std::fill(sums + part.begin, sums + part.end, 0.0f);
  }
}

extern "C" void specserve_adapter_maps(const void* args, const Step&, Team& team) {
  const AdapterMaps& a = *(const AdapterMaps*)args;
  if (a.map.epilogue == FLOATS) clear_unwritten(a, team);
  multiply({a.map, 0, a.packed, a.begins, a.num_slots}, team);
}
