// Wrappers for AMX's tile instructions. EMULATE_AMX replaces them by an emulation, so that any CPU
// can test the code that uses them.
#pragma once

#include <cstdint>

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};

  // The CPU requires that a tile without rows has no bytes.
  void set(int tile, int rows, int bytes) {
    num_rows[tile] = rows;
    row_bytes[tile] = rows ? bytes : 0;
  }
};

#if defined(EMULATE_AMX)
#define HAS_TILES 1
#include "gemm_emulation.h"
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Linux grants the tiles to a process on request.
static inline bool request_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
// Macros, because compilers need tile numbers as literals.
#define configure_tiles(config) _tile_loadconfig(config)
#define release_tiles() _tile_release()
#define zero_tile(tile) _tile_zero(tile)
#define load_tile(tile, from, stride) _tile_loadd(tile, from, stride)
#define store_tile(tile, to, stride) _tile_stored(tile, to, stride)
#define multiply_tiles(sums, rows, columns) _tile_dpbf16ps(sums, rows, columns)
#define multiply_code_tiles(sums, rows, columns) _tile_dpbsud(sums, rows, columns)
#else
#define HAS_TILES 0
#endif
