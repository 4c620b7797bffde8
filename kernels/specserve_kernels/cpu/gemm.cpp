// Linear maps: packing weights, and multiplying rows by them.
#include "gemm_multiplier.h"
#include "gemm_tiles.h"
#include "gemm_vectors.h"

struct Pack {
  int64_t value_bytes, is_gated;
  const void* weight;  // [N, K], or [2 N, K] if gated
  uint32_t* packed;
  int64_t N, K;
};

// Pack 16 rows of a weight as 16 columns of a panel; `num_rows` of them exist.
static void pack_columns(const char* weight, int64_t num_rows, int64_t row_bytes, int64_t words,
                         uint32_t* panel) {
  for (int64_t w = 0; w < words; w += TILE_WORDS) {
    vi x[16];
    int64_t bytes = std::min<int64_t>(row_bytes - w * 4, 64);
    if (num_rows == 16 && bytes == 64) {
      for (int r = 0; r < 16; r++) x[r] = load_lanes(weight + r * row_bytes + w * 4);
    } else {
      for (vi& row : x) row = vi{};
      for (int64_t r = 0; r < num_rows; r++)
        memcpy(&x[r], weight + r * row_bytes + w * 4, bytes);
    }
    transpose(x);
    for (int i = 0; i < TILE_WORDS; i++) memcpy(panel + (w + i) * COLUMNS, &x[i], 64);
  }
}

static void pack(const Pack& a, Team& team) {
  Shape shape{a.N, a.K, a.value_bytes, a.is_gated != 0};
  int64_t row_bytes = a.K * a.value_bytes;
  int64_t second = shape.is_gated ? a.N : COLUMNS / 2;  // rows from a panel's first to its 17th
  for (int64_t p = team.take(); p < shape.num_panels(); p = team.take())
    for (int half = 0; half < 2; half++) {
      int64_t first = p * panel_columns(shape.is_gated) + half * second;
      int64_t left = a.N * (1 + (shape.is_gated && half)) - first;
      int64_t num_rows = std::clamp<int64_t>(left, 0, COLUMNS / 2);
      pack_columns((const char*)a.weight + first * row_bytes, num_rows, row_bytes, shape.words(),
                   a.packed + p * shape.panel_words() + half * COLUMNS / 2);
    }
}

template <class Path> static void multiply_on(const Maps& maps, Team& team) {
  const Linear& a = maps.each;
  Multiplier<Path>{maps, {a.N, a.K, a.is_bf16 ? 2 : 4, a.is_gated()}}.run(team);
}

void multiply(const Maps& maps, Team& team) {
  const Linear& a = maps.each;
  if (a.rounds_whole_rows()) return multiply_rounded(maps, team);
  if (a.rounds_rows) return multiply_integers(maps, team);
  if (a.bits) return multiply_codes(maps, team);
  if (!a.is_bf16) return multiply_on<Vectors<Floats>>(maps, team);
#if HAS_TILES
  if (Tiles::are_usable()) return multiply_on<Tiles>(maps, team);
#endif
  multiply_on<Vectors<Pairs>>(maps, team);
}

extern "C" {
// Return the number of words of a packed weight.
int64_t specserve_packed_words(int64_t N, int64_t K, int64_t value_bytes, int64_t is_gated) {
  Shape shape{N, K, value_bytes, is_gated != 0};
  return shape.num_panels() * shape.panel_words();
}

void specserve_pack(const void* args, const Step&, Team& team) { pack(*(const Pack*)args, team); }

void specserve_linear(const void* args, const Step& step, Team& team) {
  Linear a = *(const Linear*)args;
  if (step.num_rows[ADAPTED] == 0) a.added = nullptr;
  multiply({a, step.num_rows[a.domain]}, team);
}
}
