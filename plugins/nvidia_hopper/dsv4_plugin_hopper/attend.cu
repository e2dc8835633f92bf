// Sparse attention of DeepSeek-V4 for sm_90a. What it computes: dsv4core.ops.sparse_mla.
//
// A block has up to 64 heads of one query and a slice of its keys, in tiles of 64 keys; the slices of a query form a
// cluster and merge through distributed shared memory. 512 threads, four warp groups:
//
//   gather   brings rows to shared memory, two tiles ahead
//   scores   turns codes into A fragments of wgmma, S^T = K Q^T with Q in shared memory, writes what it has turned as the V
//            tile, 64 keys x 512 channels, swizzled, and makes weights
//   sums (2) O += P V, 256 channels each
//
// The softmax has a reference that is raised only when a score is 2^8 above it: O is almost never rescaled. Rows of bf16
// are brought to where V is, and never turned.

#include <ptx.cuh>

enum Format { PACKED, CODES, WIDE };  // 448 codes with scales, and 64 bf16; 512 codes; 512 bf16

constexpr int KEYS = 64, HEADS = 64, WIDTH = 512;
constexpr int ROW = 576;           // bytes of raw rows: no two of eight lanes find theirs in one bank
constexpr float NOTHING = -1e30f;  // a reference before any key
constexpr float SPARE = 8.f;       // bits by which a score may be above the reference
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct Pool {
  const u8* rows;
  i64 page_stride;
  u32 page_size;
  const float* scale;  // of CODES; none is 1
  const int* slots;
  i64 slot_stride;
  const int* owners;  // each query's row of `slots`; none is its own
  int length;
};

struct __align__(1024) Shared {
  u8 query[HEADS * WIDTH * 2];
  u8 values[KEYS * WIDTH * 2];
  u8 raw[2][KEYS * ROW];  // WIDE: the second tile of values
  u8 weights[KEYS * HEADS * 2];
  u8 scales[2][KEYS * 8];
  float reference[HEADS], total[HEADS], partial[4][HEADS], factor[HEADS], lower[HEADS], share[8][HEADS];
  int rescale;
  u64 query_full, query_arranged, rows_full[2], rows_empty[2], values_empty[4], weights_full, finished;
};
static_assert(sizeof(Shared) <= 227 << 10, "sm_90 has 227 KB for a block");
static_assert(sizeof(Shared::values) == 65536 && sizeof(Shared::raw) >= 65536, "values of WIDE are two tiles side by side");

// ------------------------------------------------------------------------------------------------- queries and slots

// Where queries come first: nothing else does before they are arranged.
template <int FORMAT> DEVICE u32 query_raw(Shared& shared) {
  return FORMAT == WIDE ? shared_address(shared.raw) : shared_address(shared.values);
}

// Queries as the B operand. Within 64 channels they are in the order in which a thread has those of its keys.
template <int FORMAT, bool F16> DEVICE void arrange_queries(Shared& shared, int warp, int lane, int heads) {
  const int half = lane >> 4, quarter = lane & 15;
  const u32 raw = query_raw<FORMAT>(shared);
  wait(shared.query_full, 0);
#pragma unroll 1
  for (int two = warp; two < HEADS / 2; two += 12) {
    const int head = two * 2 + half;
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      uint2 v = make_uint2(0, 0);
      if (head < heads) v = load8(raw + head * 1024 + group * 128 + quarter * 8);
      const bool rotary = FORMAT == PACKED && group == 7;
      const int part = rotary ? (quarter >> 1) & 3 : quarter >> 2;
      const int step = rotary ? (quarter & 1) + 2 * (quarter >> 3) : quarter & 3;
      const u32 row = shared_address(shared.query) + group * 8192 + head * 128;
      const int first = FORMAT == WIDE ? quarter >> 1 : 2 * step, second = FORMAT == WIDE ? first : first + 1;
      const int place = FORMAT == WIDE ? (quarter & 1) * 8 : part * 4;
      store4(row + ((first ^ (head & 7)) << 4) + place, of_bf16<F16>(v.x));
      store4(row + ((second ^ (head & 7)) << 4) + place + (FORMAT == WIDE ? 4 : 0), of_bf16<F16>(v.y));
    }
  }
  shared_for_products();
  arrive(shared.query_arranged);
}

struct Tiles {
  Pool window, entries;
  int first, count, of_window;  // this slice's, and all of the first pool
  DEVICE bool in_window(int tile) const { return first + tile < of_window; }
  DEVICE int slot(int tile, int key) const {  // -1 for none
    if (tile >= count) return -1;
    const bool mine = in_window(tile);
    const int column = (first + tile - (mine ? 0 : of_window)) * KEYS + key;
    const int* slots = mine ? window.slots : entries.slots;
    return column < (mine ? window.length : entries.length) ? __ldg(slots + column) : -1;
  }
  DEVICE float scale(int tile) const {
    const float* of_pool = in_window(tile) ? window.scale : entries.scale;
    return of_pool ? __ldg(of_pool) : 1.f;
  }
};

// --------------------------------------------------------------------------------------------------------------- rows

// A warp's 16 rows, whose slots lanes have, twice.
template <int FORMAT>
DEVICE void bring_rows(Shared& shared, const Tiles& tiles, int tile, int slot, int warp, int lane) {
  const int stage = tile & 1;
  const bool mine = tiles.in_window(tile);
  const u8* rows = mine ? tiles.window.rows : tiles.entries.rows;
  const u32 page_size = mine ? tiles.window.page_size : tiles.entries.page_size;
  constexpr int BYTES = FORMAT == PACKED ? 576 : FORMAT == CODES ? 512 : 1024;
  u64 row = 0, scales = (u64)rows;
  if (slot >= 0) {
    const u32 page = (u32)slot / page_size, offset = (u32)slot - page * page_size;
    const u8* base = rows + page * (mine ? tiles.window.page_stride : tiles.entries.page_stride);
    row = (u64)(base + offset * BYTES), scales = (u64)(base + (i64)page_size * BYTES + offset * 8);
  }
  const u32 raw = shared_address(shared.raw[stage]) + warp * 16 * ROW;
  const u32 values = shared_address(shared.values) + stage * 65536 + warp * 16 * 128;
  constexpr int PIECES = BYTES / 16;  // of a row
#pragma unroll 4
  for (int i = 0; i < PIECES / 2; ++i) {
    const int piece = i * 32 + lane, key = piece / PIECES, own = piece - key * PIECES;
    const u64 from = __shfl_sync(~0u, row, key);
    const u32 swizzled = values + (own >> 3) * 8192 + key * 128 + (((own ^ key) & 7) << 4);
    copy16(FORMAT == WIDE ? swizzled : raw + key * ROW + own * 16, (from ? (const u8*)from : rows) + own * 16, from != 0);
  }
  if (FORMAT == PACKED && lane < 16)
    copy8(shared_address(shared.scales[stage]) + (warp * 16 + lane) * 8, (const u8*)scales, slot >= 0);
  arrive_after_copies(shared.rows_full[stage]);
}

template <int FORMAT> DEVICE void gather(Shared& shared, const Tiles& tiles, int warp, int lane) {
  const int row = warp * 16 + (lane & 15);
  int slot = tiles.slot(0, row);
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile) {
    const int coming = slot;
    slot = tiles.slot(tile + 1, row);
    if (FORMAT == WIDE && tile == 1) wait(shared.query_arranged, 0);
    if (tile >= 2) wait(shared.rows_empty[tile & 1], ((tile >> 1) - 1) & 1);
    bring_rows<FORMAT>(shared, tiles, tile, coming, warp, lane);
  }
}

// A scale's byte, 127 more than its exponent, as a pair of factors. 0 and 255 have no bf16 of that form.
template <bool F16> DEVICE u32 factors(u32 byte) {
  if (F16) { float f = __uint_as_float(byte << 23); return pair<true>(f, f); }
  u32 bits = byte == 0 ? 0x0040u : byte == 255 ? 0x7fc0u : byte << 7;  // 2^-127 is subnormal
  return bits | (bits << 16);
}

// 16 channels of one key, for four products of 16 channels, as A fragments: codes, or bf16.
template <int FORMAT, bool F16> DEVICE void fragments(uint4 codes, u32 byte, u32 (&a)[8]) {
  of_codes<F16>(codes.x, a[0], a[1]), of_codes<F16>(codes.y, a[2], a[3]);
  of_codes<F16>(codes.z, a[4], a[5]), of_codes<F16>(codes.w, a[6], a[7]);
  if (FORMAT != PACKED) return;
  const u32 scale = factors<F16>(byte);
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] = times<F16>(a[i], scale);
}
template <bool F16> DEVICE void rotary(uint4 first, uint4 second, u32 (&a)[8]) {
  a[0] = of_bf16<F16>(first.x), a[1] = of_bf16<F16>(first.y), a[2] = of_bf16<F16>(first.z), a[3] = of_bf16<F16>(first.w);
  a[4] = of_bf16<F16>(second.x), a[5] = of_bf16<F16>(second.y);
  a[6] = of_bf16<F16>(second.z), a[7] = of_bf16<F16>(second.w);
}
DEVICE u32 byte_of(uint2 scales, int group) { return ((group < 4 ? scales.x : scales.y) >> (8 * (group & 3))) & 255u; }

// ------------------------------------------------------------------------------------------------------------- scores

// Which 64 channels come i-th, 0 1 4 5 2 3 6 7: first those which each group of sums reads first, as they are free first.
DEVICE constexpr int order(int i) { return (i & 1) | ((i & 2) << 1) | ((i & 4) >> 1); }

// Products of a tile from raw rows, which become values.
template <int FORMAT, bool F16>
DEVICE void multiply_codes(Shared& shared, int tile, int warp, int lane, float (&s)[32]) {
  const int stage = tile & 1, eighth = lane >> 2, quarter = lane & 3, key = warp * 16 + eighth;
  const u64 queries = descriptor(shared_address(shared.query), 16, 1024);
  const u32 to = shared_address(shared.values) + key * 128;
  const u32 codes_place = ((2 * quarter) ^ eighth) << 4, rotary_place = (quarter ^ eighth) << 4;
  const u32 from = shared_address(shared.raw[stage]) + key * ROW + 16 * quarter;
  uint2 scales = make_uint2(0, 0), others = scales;
  if (FORMAT == PACKED) {
    scales = load8(shared_address(shared.scales[stage]) + key * 8);
    others = load8(shared_address(shared.scales[stage]) + key * 8 + 64);
  }
  uint4 first = load16(from), second = load16(from + 8 * ROW), further, last;  // of a key, and of the one eight further
  u32 a[2][8], b[2][8];
#pragma unroll
  for (int i = 0; i < 9; ++i) {
    if (i < 8) {
      const int group = order(i);
      u32(&x)[8] = a[i & 1];
      u32(&y)[8] = b[i & 1];
      if (i >= 2) products_wait<1>();
      if (FORMAT == PACKED && group == 7) {
        rotary<F16>(first, further, x), rotary<F16>(second, last, y);
      } else {
        fragments<FORMAT, F16>(first, byte_of(scales, group), x), fragments<FORMAT, F16>(second, byte_of(others, group), y);
        if (i < 7) first = load16(from + order(i + 1) * 64), second = load16(from + order(i + 1) * 64 + 8 * ROW);
        if (FORMAT == PACKED && i == 6) further = load16(from + 512), last = load16(from + 512 + 8 * ROW);
      }
      if (i == 7) arrive_once(shared.rows_empty[stage], lane);
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        score<F16>(s, x[2 * k], y[2 * k], x[2 * k + 1], y[2 * k + 1], queries + group * 512 + k * 2, (i | k) != 0);
      products_commit();
    }
    if (i == 0) continue;
    // Values are stored behind the next products, while those of the last tile are still read.
    const int before = order(i - 1);
    if ((i & 1) && tile > 0) wait(shared.values_empty[before >> 1], (tile - 1) & 1);
    const bool turned = FORMAT == PACKED && before == 7;
    const u32 place = to + before * 8192 + (turned ? rotary_place : codes_place);
    const u32 next = to + before * 8192 + (turned ? rotary_place ^ 64 : codes_place ^ 16);
    const u32(&x)[8] = a[(i - 1) & 1];
    const u32(&y)[8] = b[(i - 1) & 1];
    store16(place, x[0], x[1], x[2], x[3]), store16(next, x[4], x[5], x[6], x[7]);
    store16(place + 1024, y[0], y[1], y[2], y[3]), store16(next + 1024, y[4], y[5], y[6], y[7]);
  }
}

// The same from rows of bf16, which are values.
DEVICE void multiply_wide(Shared& shared, int tile, float (&s)[32]) {
  shared_for_products();
  meet(1, 128);
  const u64 keys = descriptor(shared_address(shared.values) + (tile & 1) * 65536, 16, 1024);
  const u64 queries = descriptor(shared_address(shared.query), 16, 1024);
  products_begin();
#pragma unroll
  for (int i = 0; i < 32; ++i)
    score_shared(s, keys + (i >> 2) * 512 + (i & 3) * 2, queries + (i >> 2) * 512 + (i & 3) * 2, i != 0);
  products_commit();
}

// A raised reference: the same for all keys of the tile.
DEVICE void raise(Shared& shared, bool fresh, int warp, int lane, float (&s)[32], float (&sums)[16]) {
  const int first = 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float x = fmaxf(s[4 * i], s[4 * i + 2]), y = fmaxf(s[4 * i + 1], s[4 * i + 3]);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes)), y = fmaxf(y, __shfl_xor_sync(~0u, y, lanes));
    if (lane < 4) *(float2*)&shared.partial[warp][first + 8 * i] = make_float2(x, y);
  }
  meet(1, 128);
  if (warp < 2) {
    const int head = warp * 32 + lane;
    float most = shared.partial[0][head];
#pragma unroll
    for (int x = 1; x < 4; ++x) most = fmaxf(most, shared.partial[x][head]);
    const float old = shared.reference[head];
    const float raised = fresh ? fmaxf(most, NOTHING) : old + fmaxf(most, 0.f);
    shared.reference[head] = raised;
    shared.factor[head] = exp2_of(old - raised);
    shared.lower[head] = (fresh ? 0.f : old) - raised;
  }
  if (warp == 0 && lane == 0) shared.rescale = !fresh;
  meet(1, 128);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 lower = load8f(shared_address(&shared.lower[first + 8 * i]));
    const float2 faded = load8f(shared_address(&shared.factor[first + 8 * i]));
    s[4 * i] += lower.x, s[4 * i + 2] += lower.x, s[4 * i + 1] += lower.y, s[4 * i + 3] += lower.y;
    sums[2 * i] *= faded.x, sums[2 * i + 1] *= faded.y;
  }
}

// Weights of a tile: 2^(score - reference), and their sums. `here`, `there`: whether a thread's two keys are there; `fresh`:
// whether no key was before.
template <int FORMAT, bool F16>
DEVICE void weights(Shared& shared, const Tiles& tiles, int tile, bool here, bool there, int warp, int lane, float scale,
                    float (&s)[32], float (&sums)[16], bool& fresh) {
  const u32 references = shared_address(&shared.reference[2 * (lane & 3)]);
  const float of_pool = FORMAT == CODES ? tiles.scale(tile) : 1.f;  // no bf16: it multiplies scores and weights
  const float factor = scale * of_pool;
  float highest = -infinity();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 reference = load8f(references + 32 * i);
    if (fresh) reference = make_float2(0.f, 0.f);
    s[4 * i] = fmaf(s[4 * i], factor, -reference.x), s[4 * i + 2] = fmaf(s[4 * i + 2], factor, -reference.x);
    s[4 * i + 1] = fmaf(s[4 * i + 1], factor, -reference.y), s[4 * i + 3] = fmaf(s[4 * i + 3], factor, -reference.y);
    if (!here) s[4 * i] = s[4 * i + 1] = -infinity();
    if (!there) s[4 * i + 2] = s[4 * i + 3] = -infinity();
    highest = fmaxf(highest, fmaxf(fmaxf(s[4 * i], s[4 * i + 2]), fmaxf(s[4 * i + 1], s[4 * i + 3])));
  }
  const bool above = fresh || any_of(1, 128, highest > SPARE);
  if (FORMAT == WIDE && tile > 0) {  // others have waited where they stored values
    wait(shared.values_empty[1], (tile - 1) & 1);
    wait(shared.values_empty[3], (tile - 1) & 1);
  }
  if (above) raise(shared, fresh, warp, lane, s, sums);
  else if (warp == 0 && lane == 0) shared.rescale = 0;
  if (fresh) fresh = !any_of(1, 128, here || there);
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = exp2_of(s[i]);
  const float of_value = FORMAT == CODES ? of_pool : 1.f;
  const int matrix = lane >> 3, row = lane & 7;
  const u32 to = shared_address(shared.weights) + ((matrix >> 1) * 8 + row) * 128 + (((2 * warp + (matrix & 1)) ^ row) << 4);
#pragma unroll
  for (int i = 0; i < 8; i += 2)
    store_matrices_turned(to + i * 1024, pair<F16>(s[4 * i] * of_value, s[4 * i + 1] * of_value),
                          pair<F16>(s[4 * i + 2] * of_value, s[4 * i + 3] * of_value),
                          pair<F16>(s[4 * i + 4] * of_value, s[4 * i + 5] * of_value),
                          pair<F16>(s[4 * i + 6] * of_value, s[4 * i + 7] * of_value));
  shared_for_products();
  arrive(shared.weights_full);
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[2 * i] += s[4 * i] + s[4 * i + 2], sums[2 * i + 1] += s[4 * i + 1] + s[4 * i + 3];
}

template <int FORMAT, bool F16>
DEVICE void scores(Shared& shared, const Tiles& tiles, int warp, int lane, int heads, float scale) {
  arrange_queries<FORMAT, F16>(shared, warp, lane, heads);
  wait(shared.query_arranged, 0);
  const int key = warp * 16 + (lane >> 2);
  float sums[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i] = 0.f;
  bool here = tiles.slot(0, key) >= 0, there = tiles.slot(0, key + 8) >= 0, fresh = true;
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile) {
    const bool next_here = tiles.slot(tile + 1, key) >= 0, next_there = tiles.slot(tile + 1, key + 8) >= 0;
    float s[32];
    wait(shared.rows_full[tile & 1], (tile >> 1) & 1);
    if (FORMAT == WIDE) multiply_wide(shared, tile, s);
    else multiply_codes<FORMAT, F16>(shared, tile, warp, lane, s);
    products_wait<0>();
    weights<FORMAT, F16>(shared, tiles, tile, here, there, warp, lane, scale, s, sums, fresh);
    here = next_here, there = next_there;
  }
  meet(1, 128);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float x = sums[2 * i], y = sums[2 * i + 1];
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes), y += __shfl_xor_sync(~0u, y, lanes);
    if (lane < 4) *(float2*)&shared.partial[warp][8 * i + 2 * lane] = make_float2(x, y);
  }
}

// --------------------------------------------------------------------------------------------------------------- sums

template <int FORMAT, bool F16>
DEVICE void weigh(Shared& shared, int count, int part, int warp, int lane, float (&o)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] = 0.f;
  const u64 weights = descriptor(shared_address(shared.weights), 16, 1024);
  const u64 all = descriptor(shared_address(shared.values) + part * 32768, 8192, 1024);
#pragma unroll 1
  for (int tile = 0; tile < count; ++tile) {
    const u64 values = FORMAT == WIDE ? all + (tile & 1) * 4096 : all;
    wait(shared.weights_full, tile & 1);
    if (*(volatile int*)&shared.rescale) {
      const float upper = shared.factor[warp * 16 + (lane >> 2)], lower = shared.factor[warp * 16 + (lane >> 2) + 8];
#pragma unroll
      for (int i = 0; i < 32; ++i) o[4 * i] *= upper, o[4 * i + 1] *= upper, o[4 * i + 2] *= lower, o[4 * i + 3] *= lower;
    }
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) sum_128<F16, 0>(o, weights + k * 2, values + k * 128);
    products_commit();
#pragma unroll
    for (int k = 0; k < 4; ++k) sum_128<F16, 64>(o, weights + k * 2, values + 1024 + k * 128);
    products_commit();
    products_wait<1>();
    arrive_once(shared.values_empty[2 * part], lane);
    products_wait<0>();
    arrive_once(shared.values_empty[2 * part + 1], lane);
    if (FORMAT == WIDE) arrive_once(shared.rows_empty[tile & 1], lane);
  }
}

DEVICE float log_sum(float reference, float total) {
  return total == 0.f ? -infinity() : (reference + log2_of(total)) * LN_2;  // NaN stays NaN
}

// All keys were here: divide, and write rows of 256 channels through shared memory.
DEVICE void write_whole(Shared& shared, float (&o)[128], int part, int warp, int lane, int heads, const float* sinks,
                        u16* out, float* lse) {
  float inverse[2];
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int head = warp * 16 + (lane >> 2) + 8 * x;
    float total = 0;
    for (int i = 0; i < 4; ++i) total += shared.partial[i][head];
    const float reference = shared.reference[head];
    if (lse && part == 0 && (lane & 3) == 0 && head < heads) lse[head] = log_sum(reference, total);
    if (sinks && head < heads) total += exp2_of(sinks[head] * LOG2_E - reference);
    inverse[x] = total == 0.f ? 0.f : 1.f / total;
  }
  const int matrix = lane >> 3, turn = lane & 7, row = warp * 16 + (matrix & 1) * 8 + turn;
  const u32 to = shared_address(shared.values) + part * 32768 + row * 512;
#pragma unroll
  for (int i = 0; i < 32; i += 2)
    store_matrices(to + (((i + (matrix >> 1)) ^ turn) << 4), pair<false>(o[4 * i] * inverse[0], o[4 * i + 1] * inverse[0]),
                   pair<false>(o[4 * i + 2] * inverse[1], o[4 * i + 3] * inverse[1]),
                   pair<false>(o[4 * i + 4] * inverse[0], o[4 * i + 5] * inverse[0]),
                   pair<false>(o[4 * i + 6] * inverse[1], o[4 * i + 7] * inverse[1]));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int head = warp * 16 + i;
    if (head < heads)
      ((uint4*)(out + head * WIDTH + part * 256))[lane] =
          *(uint4*)(shared.values + part * 32768 + head * 512 + ((lane ^ (head & 7)) << 4));
  }
}

// Slices of a query: each of them adds up a share of the rows of all.
DEVICE void write_merged(Shared& shared, float (&o)[128], int part, int warp, int lane, int heads, int slice, int slices,
                         const float* sinks, u16* out, float* lse) {
  float* sums = (float*)shared.values;  // and the raw tiles behind it: 128 KB
  const int row = warp * 16 + (lane >> 2), thread = part * 128 + warp * 32 + lane;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int channel = (part * 256 + 8 * i + 2 * (lane & 3)) ^ ((lane >> 2) << 3);
    *(float2*)&sums[row * WIDTH + channel] = make_float2(o[4 * i], o[4 * i + 1]);
    *(float2*)&sums[(row + 8) * WIDTH + channel] = make_float2(o[4 * i + 2], o[4 * i + 3]);
  }
  if (thread < HEADS) {
    float total = 0;
    for (int i = 0; i < 4; ++i) total += shared.partial[i][thread];
    shared.total[thread] = total;
  }
  cluster_meet();
  if (thread < HEADS) {
    const u32 reference_at = shared_address(&shared.reference[thread]), total_at = shared_address(&shared.total[thread]);
    float highest = -infinity(), total = 0;
    for (int x = 0; x < slices; ++x) highest = fmaxf(highest, remote_float(of_block(reference_at, x)));
    for (int x = 0; x < slices; ++x) {
      const float share = exp2_of(remote_float(of_block(reference_at, x)) - highest);
      shared.share[x][thread] = share, total += remote_float(of_block(total_at, x)) * share;
    }
    if (lse && slice == 0 && thread < heads) lse[thread] = log_sum(highest, total);
    if (sinks && thread < heads) total += exp2_of(sinks[thread] * LOG2_E - highest);
    const float inverse = total == 0.f ? 0.f : 1.f / total;
    for (int x = 0; x < slices; ++x) shared.share[x][thread] *= inverse;
  }
  meet(5, 256);
  const int fours = heads * WIDTH / 4, end = (slice + 1) * fours / slices;
  for (int four = slice * fours / slices + thread; four < end; four += 256) {
    const int head = four >> 7, channel = (four & 127) * 4;
    const u32 at = shared_address(&sums[head * WIDTH + (channel ^ ((head & 7) << 3))]);
    float4 sum = make_float4(0, 0, 0, 0);
    for (int x = 0; x < slices; ++x) {
      const float share = shared.share[x][head];
      const float4 v = remote_float4(of_block(at, x));
      sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
    }
    *(uint2*)(out + head * WIDTH + channel) = make_uint2(pair<false>(sum.x, sum.y), pair<false>(sum.z, sum.w));
  }
  cluster_meet();  // a block's memory lasts until all have read it
}

// ---------------------------------------------------------------------------------------------------------- a launch

// Grid: slices (a cluster), blocks of 64 heads, queries. q, out: [queries, heads, 512] bf16; lse: [queries, heads] or
// none; sinks: [heads] or none. A pool's slots: [queries or owners, columns], -1 for none; lengths: [queries], or none for all
// columns. `scale` has log2(e) in it.
template <int FORMAT, bool F16>
DEVICE void attend(const u16* q, i64 q_stride, Pool window, const int* window_lengths, Pool entries,
                   const int* entry_lengths, const float* sinks, u16* out, float* lse, int all_heads, float scale) {
  Shared& shared = *(Shared*)shared_memory();
  // Both of the shuffled number, which the compiler knows to be one of the warp.
  const int thread = threadIdx.x, lane = thread & 31, number = of_warp(thread >> 5);
  const int group = number >> 2, warp = number & 3;
  const int slices = gridDim.x, slice = blockIdx.x, first_head = blockIdx.y * HEADS;
  const i64 query = blockIdx.z;
  const int heads = min(HEADS, all_heads - first_head);
  window.slots += (window.owners ? __ldg(window.owners + query) : query) * window.slot_stride;
  entries.slots += (entries.owners ? __ldg(entries.owners + query) : query) * entries.slot_stride;
  const int seen = window_lengths ? __ldg(window_lengths + query) : window.length;  // on their way meanwhile
  const int found = entry_lengths ? __ldg(entry_lengths + query) : entries.length;
  if (thread == 0) {
    barrier_init(shared.query_full, 1), barrier_init(shared.query_arranged, 384), barrier_init(shared.finished, 512);
    barrier_init(shared.weights_full, 128);
    for (int i = 0; i < 2; ++i) barrier_init(shared.rows_full[i], 128), barrier_init(shared.rows_empty[i], FORMAT == WIDE ? 8 : 4);
    for (int i = 0; i < 4; ++i) barrier_init(shared.values_empty[i], 4);
    shared.rescale = 0;
    barriers_are_made();
    shared_for_products();
    bring(query_raw<FORMAT>(shared), q + query * q_stride + first_head * WIDTH, heads * WIDTH * 2, shared.query_full);
  }
  if (thread >= 128 && thread < 128 + HEADS) shared.reference[thread - 128] = NOTHING;
  __syncthreads();
  window.length = of_warp(min(max(seen, 0), window.length)), entries.length = of_warp(min(max(found, 0), entries.length));
  const int of_window = (window.length + KEYS - 1) / KEYS;
  const int all = of_window + (entries.length + KEYS - 1) / KEYS, first = slice * all / slices;
  const Tiles tiles{window, entries, first, (slice + 1) * all / slices - first, of_window};
  if (group < 2) {
    if (group == 0) give_registers<32>(), gather<FORMAT>(shared, tiles, warp, lane);
    else take_registers<160>(), scores<FORMAT, F16>(shared, tiles, warp, lane, heads, scale);
    arrive(shared.finished);
    if (slices > 1) cluster_meet(), cluster_meet();
    return;
  }
  take_registers<160>();
  float o[128];
  const int part = group - 2;
  arrange_queries<FORMAT, F16>(shared, 4 + part * 4 + warp, lane, heads);
  weigh<FORMAT, F16>(shared, tiles.count, part, warp, lane, o);
  arrive(shared.finished);
  wait(shared.finished, 0);
  u16* own = out + (query * all_heads + first_head) * WIDTH;
  float* own_lse = lse ? lse + query * all_heads + first_head : nullptr;
  const float* own_sinks = sinks ? sinks + first_head : nullptr;
  if (slices == 1) write_whole(shared, o, part, warp, lane, heads, own_sinks, own, own_lse);
  else write_merged(shared, o, part, warp, lane, heads, slice, slices, own_sinks, own, own_lse);
}

#define ENTRY(NAME, FORMAT, F16)                                                                                       \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                                 \
      NAME(const u16* q, i64 q_stride, const u8* rows, i64 page_stride, u32 page_size, const float* row_scale,         \
           const int* slots, i64 slot_stride, const int* owners, const int* lengths, int columns, const u8* more_rows, \
           i64 more_page_stride, u32 more_page_size, const float* more_scale, const int* more_slots,                   \
           i64 more_slot_stride, const int* more_owners, const int* more_lengths, int more_columns,                    \
           const float* sinks, u16* out, float* lse, int heads, float scale) {                                         \
    attend<FORMAT, F16>(q, q_stride,                                                                                   \
                        Pool{rows, page_stride, page_size, row_scale, slots, slot_stride, owners, columns}, lengths,   \
                        Pool{more_rows, more_page_stride, more_page_size, more_scale, more_slots, more_slot_stride,    \
                             more_owners, more_columns},                                                               \
                        more_lengths, sinks, out, lse, heads, scale);                                                  \
  }
ENTRY(packed_bf16, PACKED, false)
ENTRY(packed_f16, PACKED, true)
ENTRY(codes_bf16, CODES, false)
ENTRY(codes_f16, CODES, true)
ENTRY(wide_bf16, WIDE, false)
