// The structs of types.py in C++. The ctypes structs in native.py have the same order.
#pragma once

#include <cstdint>

struct Rows {
  int64_t num_requests, num_rows;
  const int32_t *qo_indptr, *indptr, *indices, *positions, *prefix;
  const int64_t* slots;
  const uint64_t* mask;
  // The fields of StateRows; null if no request has a recurrent state.
  int64_t num_state_blocks;
  const int32_t *state_blocks, *committed, *kept, *snapshot_at, *snapshots;
};

constexpr int MAX_HEAD_DIM = 512;

enum Stored : int64_t { AS_FP32, AS_BF16, AS_INT8, AS_FP8 };

// One layer's keys and values: [num_blocks, block_size, num_heads, head_dim], with strided blocks.
// Codes have scales: [num_blocks, num_heads, block_size].
struct KV {
  void *k, *v;
  float *k_scale, *v_scale;
  int64_t block_stride;  // elements
  int64_t scale_stride;  // floats
  int64_t block_size, num_heads, head_dim;
  Stored stored;

  bool has_scales() const { return stored == AS_INT8 || stored == AS_FP8; }
  int64_t element_bytes() const { return stored == AS_FP32 ? 4 : stored == AS_BF16 ? 2 : 1; }
  int64_t element_of(int64_t slot) const {
    return slot / block_size * block_stride + slot % block_size * num_heads * head_dim;
  }
  template <class T> T* at(void* base, int64_t slot) const { return (T*)base + element_of(slot); }
  float* scale_at(float* base, int64_t slot, int64_t head) const {
    return base + slot / block_size * scale_stride + head * block_size + slot % block_size;
  }
};
