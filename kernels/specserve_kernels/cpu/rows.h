// The structs of types.py as the kernels see them; the ctypes structs of ops.py have this order.
#pragma once

#include <cstdint>

struct Rows {
  int64_t num_requests, num_rows;
  const int32_t *qo_indptr, *indptr, *indices, *positions, *prefix;
  const int64_t* slots;
  const uint64_t* mask;
};

// One layer's keys and values: [num_blocks, block_size, num_heads, head_dim], blocks strided.
struct KV {
  void *k, *v;
  int64_t block_stride;  // elements
  int64_t block_size, num_heads, head_dim;
  int64_t is_bf16;

  template <class T> T* at(void* base, int64_t slot) const {
    return (T*)base + slot / block_size * block_stride + slot % block_size * num_heads * head_dim;
  }
};
