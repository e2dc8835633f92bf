// Sparse attention of DeepSeek-V4 for sm_90a. What it computes: dsv4core.ops.sparse_mla.
//
// A block has up to 64 heads of a query, an item, and goes on to further ones; where items are few, a cluster of blocks shares
// one: a slice of its keys each, merged through distributed shared memory, and an item has fewer heads, by which that takes
// its time. Keys come in tiles of 64. 512 threads, four groups:
//
//   rows     brings rows to shared memory, each warp its own, and turns them into a tile of operands: 64 keys x 512 channels,
//            which are K and V
//   scores   S = Q K^T, half of Q in registers, and weights
//   sums (2) O += P V, 256 channels each
//
// Tiles of operands are two, so that rows of one are turned while another is multiplied. The softmax has a reference that is
// raised only when a score is 2^8 above it: O is almost never rescaled.
//
// Of 32 channels, 8 a + 2 b + c (b < 4, c < 2) is at 8 b + 2 a + c of operands. A thread of wgmma, whose fragments are a row's
// pairs at 8 b + 2 a for its a and all b, so has eight channels side by side: 16 bytes of a query, or of a result. Rows of bf16
// are brought to where operands are, in the order that they have.

#include <ptx.cuh>

enum Format { PACKED, CODES, WIDE };  // 448 codes with scales, and 64 bf16; 512 codes; 512 bf16

constexpr int KEYS = 64, HEADS = 64, WIDTH = 512;
constexpr int ROW = 576;           // bytes of raw rows: no two of eight lanes find theirs in one bank
constexpr int RING = 3;            // eights of a warp's raw rows: two are on their way while one is turned
constexpr int SLICES = 16;         // of an item, at most
constexpr float NOTHING = -1e30f;  // a reference before any key: scores below it are none
constexpr float SPARE = 8.f;       // bits by which a score may be above the reference
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct Pool {
  const u8* rows;
  i64 page_stride;
  u32 page_size, page_factor, page_shift;  // a slot is of page (slot x factor) >> shift
  const float* scale;  // of CODES; none is 1
  const int* slots;    // -1 for none
  i64 slot_stride;
  const int* owners;   // each query's row of `slots`; none is its own
  const int* lengths;  // each query's; none is all columns
  int columns;
};

struct Work {
  const u16* q;  // [queries, heads, 512] bf16
  i64 q_stride;
  Pool window, entries;
  const float* sinks;  // [heads], or none
  u16* out;            // [queries, heads, 512] bf16
  float* lse;          // [queries, heads], or none
  int heads, item_heads, head_blocks, items;  // item_heads: up to 64; head_blocks: a query's items
  float scale;                    // with log2(e) in it
  int slice, slices, start, step;
  DEVICE int query(int item) const { return item / head_blocks; }
  DEVICE int first_head(int item) const { return (item - query(item) * head_blocks) * item_heads; }
  DEVICE int heads_of(int item) const { return min(item_heads, heads - first_head(item)); }
};

// Of a warp's walk over slots, what is not needed for each tile: registers are few.
struct Walk {
  const int* entries;  // slots of the item's second pool, of this slice
  int left, tiles;     // their columns and tiles; no tiles: there are none, or they are being walked
  int item;
};

struct __align__(1024) Shared {
  u8 operands[2][KEYS * WIDTH * 2];
  u8 query[HEADS * WIDTH];  // the second 256 channels
  u8 weights[KEYS * HEADS * 2];
  u8 raw[4][RING][8 * ROW];
  u8 scales[4][2][16 * 8];
  float2 totals[HEADS];  // of an item: references, and sums of weights
  float factor[HEADS];
  int rescale[4];
  Walk walk[4];
  u64 sources[4][16];  // where a warp's rows of a tile are; 0 for none
  __align__(8) u16 there[4][4];  // a bit for each key of a tile
  int kind[4];                   // of a tile: LAST of its item, or of the WINDOW
  u64 rows_full[2], summed[2], weights_full, totals_full, totals_empty;
};
static_assert(sizeof(Shared) <= 227 << 10, "sm_90 has 227 KB for a block");
enum Kind { LAST = 1, WINDOW = 2 };

// --------------------------------------------------------------------------------------------------------------- rows

// A warp's rows of a block's items: of each tile sixteen, first eight of them, then eight more.
template <int FORMAT> struct Bringing {
  const Work& work;
  Shared& shared;
  const int* from;            // this lane's slot of the tile after the coming one; lanes sixteen apart have the same
  int left, tiles;            // columns from there on, and tiles times two, of a pool; plus one: of the window
  int slot, kind;             // of the coming tile; kind -1: none comes
  int expected;               // of the item after, a lane each: columns of both pools, rows of their slots
  int tile, place;            // that is being brought, and where in the ring
  const int warp, lane;
  bool more = true;           // whether there was such a tile

  DEVICE Bringing(Shared& shared, const Work& work, int warp, int lane)
      : work(work), shared(shared), tile(-1), place(RING - 1), warp(warp), lane(lane) {
    look_up(work.start);
    enter(work.start), look_further();
  }
  DEVICE void look_up(int item) {
    if (item >= work.items || lane >= 4) return;
    const int query = work.query(item);
    const Pool &window = work.window, &entries = work.entries;
    const int* at = lane == 0 ? window.lengths : lane == 1 ? entries.lengths : lane == 2 ? window.owners : entries.owners;
    expected = at ? __ldg(at + query) : lane == 0 ? window.columns : lane == 1 ? entries.columns : query;
  }
  DEVICE void enter(int item) {
    const int seen = min(max(__shfl_sync(~0u, expected, 0), 0), work.window.columns);
    const int found = min(max(__shfl_sync(~0u, expected, 1), 0), work.entries.columns);
    const i64 seen_row = __shfl_sync(~0u, expected, 2), found_row = __shfl_sync(~0u, expected, 3);
    const int of_window = (seen + KEYS - 1) / KEYS, all = of_window + (found + KEYS - 1) / KEYS;
    const int first = work.slice * all / work.slices, end = (work.slice + 1) * all / work.slices;
    const int mine = max(min(of_window, end) - first, 0), others = end - first - mine;
    const int skipped = mine > 0 ? 0 : first - of_window;  // tiles of entries
    const int* window = work.window.slots + seen_row * work.window.slot_stride + first * KEYS;
    const int* entries = work.entries.slots + found_row * work.entries.slot_stride + skipped * KEYS;
    if (mine > 0) walk(window, seen - first * KEYS, mine, 1);
    else if (others > 0) walk(entries, found - skipped * KEYS, others, 0);
    else walk(window, 0, 1, 0);  // a tile of nothing
    shared.walk[warp] = {entries, found, mine > 0 ? others : 0, item};
    __syncwarp();
    look_up(item + work.step);
  }
  DEVICE void walk(const int* slots, int columns, int count, int of_window) {
    const int row = warp * 16 + (lane & 15);
    from = slots + row, left = columns - row, tiles = 2 * count + of_window;
  }
  DEVICE void look_further() {
    slot = kind = -1;
    if (tiles < 2) return;
    if (left > 0) slot = __ldg(from);
    kind = tiles & 1 ? WINDOW : 0, from += KEYS, left -= KEYS, tiles -= 2;
    if (tiles < 2) leave();
  }
  DEVICE void leave() {  // a pool
    Walk& own = shared.walk[warp];
    const int count = own.tiles, item = own.item + work.step;
    if (count > 0) walk(own.entries, own.left, count, 0);
    else kind |= LAST;
    __syncwarp();
    own.tiles = 0;
    __syncwarp();
    if (count == 0 && item < work.items) enter(item);
  }
  DEVICE void next() {  // a tile: what it is, where its rows are, and their scales
    ++tile, more = kind >= 0;
    if (!more) return;
    __syncwarp();  // the last tile's sources have been read
    const u32 lanes = lanes_of(slot >= 0);
    if (lane == 0) shared.there[tile & 3][warp] = lanes;
    if (lane == 0 && warp == 0) shared.kind[tile & 3] = kind;
    u64 row, scales;
    find(row, scales);
    if (lane < 16) shared.sources[warp][lane] = row;
    if (FORMAT == PACKED && lane < 16)
      copy8(shared_address(shared.scales[warp][tile & 1]) + lane * 8, (const u8*)scales, slot >= 0);
    look_further();
    __syncwarp();
  }
  DEVICE void find(u64& row, u64& scales) const {
    constexpr int BYTES = FORMAT == PACKED ? 576 : FORMAT == CODES ? 512 : 1024;
    const Pool &window = work.window, &entries = work.entries;  // each member is chosen: chosen pools would be in memory
    const bool mine = kind & WINDOW;
    row = 0, scales = (u64)(mine ? window.rows : entries.rows);
    if (slot < 0) return;
    const u32 page_size = mine ? window.page_size : entries.page_size;
    const u32 page = (u64)(u32)slot * (mine ? window.page_factor : entries.page_factor) >>
                     (mine ? window.page_shift : entries.page_shift);
    const u32 offset = slot - page * page_size;
    const u64 base = scales + page * (mine ? window.page_stride : entries.page_stride);
    row = base + (u64)offset * BYTES, scales = base + (u64)page_size * BYTES + (u64)offset * 8;
  }
  DEVICE const u8* source(int row, bool& there) const {  // of a row, this lane's quarter
    u64 at = shared.sources[warp][row];
    there = at != 0;
    return (const u8*)(there ? at : (u64)work.window.rows) + (lane & 3) * 16;
  }
  DEVICE void bring(int half) {  // four lanes a row
    place = place == RING - 1 ? 0 : place + 1;
    if (more) {
      bool there;
      const u8* own = source(half * 8 + (lane >> 2), there);
      const u32 to = shared_address(shared.raw[warp][place]) + (lane >> 2) * ROW + (lane & 3) * 16;
#pragma unroll
      for (int i = 0; i < (FORMAT == PACKED ? 9 : 8); ++i) copy16(to + i * 64, own + i * 64, there);
    }
    copies_commit();
  }
};

// A scale's byte, 127 more than its exponent, as a pair of factors: 0 for 2^-127, infinity for what is none (255).
template <bool F16> DEVICE u32 factors(u32 byte) {
  if (!F16) return byte * 0x00800080u;
  const float f = __uint_as_float(byte << 23);
  return pair<true>(f, f);
}
DEVICE u32 byte_of(uint2 scales, int group) { return ((group < 4 ? scales.x : scales.y) >> (8 * (group & 3))) & 255u; }

// Where a lane has 16 of 64 channels, in the order of the head of this file.
struct Places {
  u32 of[4];
  DEVICE explicit Places(u32 first) : of{first, first ^ 16, first ^ 32, first ^ 48} {}
  DEVICE void store(int group, const u32 (&first)[4], const u32 (&second)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) store8(of[i] + group * 8192, first[i], second[i]);
  }
};

// Half of a warp's raw rows become operands. A lane turns 16 of each 64 channels of a row.
template <int FORMAT, bool F16> DEVICE void turn_rows(Shared& shared, int tile, int half, int place, int warp, int lane) {
  const int row = lane >> 2, quarter = lane & 3, key = warp * 16 + half * 8 + row;
  const u32 from = shared_address(shared.raw[warp][place]) + row * ROW + quarter * 16;
  const Places to(shared_address(shared.operands[tile & 1]) + key * 128 + (((4 * (quarter >> 1)) ^ row) << 4) +
                  8 * (quarter & 1));
  uint2 scales = make_uint2(0, 0);
  if (FORMAT == PACKED) scales = load8(shared_address(shared.scales[warp][tile & 1]) + (half * 8 + row) * 8);
  constexpr int CODED = FORMAT == PACKED ? 7 : 8;
  uint4 next = load16(from);
  uint4 x, y;  // of PACKED, the last 64 channels
#pragma unroll
  for (int i = 0; i < CODED; ++i) {
    const uint4 codes = next;
    if (i + 1 < CODED) next = load16(from + (i + 1) * 64);
    else if (FORMAT == PACKED) x = load16(from + 448 + quarter * 16), y = load16(from + 464 + quarter * 16);
    u32 a[4], b[4];
    of_codes<F16>(codes.x, a[0], a[1]), of_codes<F16>(codes.y, a[2], a[3]);
    of_codes<F16>(codes.z, b[0], b[1]), of_codes<F16>(codes.w, b[2], b[3]);
    if (FORMAT == PACKED) {
      const u32 scale = factors<F16>(byte_of(scales, i));
#pragma unroll
      for (int k = 0; k < 4; ++k) a[k] = times<F16>(a[k], scale), b[k] = times<F16>(b[k], scale);
    }
    to.store(i, a, b);
  }
  if (FORMAT == PACKED) {
    const u32 a[4] = {of_bf16<F16>(x.x), of_bf16<F16>(x.y), of_bf16<F16>(x.z), of_bf16<F16>(x.w)};
    const u32 b[4] = {of_bf16<F16>(y.x), of_bf16<F16>(y.y), of_bf16<F16>(y.z), of_bf16<F16>(y.w)};
    to.store(7, a, b);
  }
}

// Operands of the tile before the last have been read.
DEVICE void wait_for_operands(Shared& shared, int tile) {
  if (tile >= 2) wait(shared.summed[tile & 1], ((tile >> 1) - 1) & 1);
}

template <int FORMAT, bool F16> DEVICE void rows(Shared& shared, const Work& work, int warp, int lane) {
  Bringing<FORMAT> ahead(shared, work, warp, lane);
  ahead.next(), ahead.bring(0), ahead.bring(1);
#pragma unroll 1
  for (int tile = 0; ahead.more; ++tile) {
    ahead.next(), ahead.bring(0);
    copies_wait<RING - 1>();
    wait_for_operands(shared, tile);
    turn_rows<FORMAT, F16>(shared, tile, 0, ahead.place == RING - 1 ? 0 : ahead.place + 1, warp, lane);
    __syncwarp();
    ahead.bring(1);
    copies_wait<RING - 1>();
    turn_rows<FORMAT, F16>(shared, tile, 1, ahead.place == RING - 1 ? 0 : ahead.place + 1, warp, lane);
    arrive_once(shared.rows_full[tile & 1], lane);
  }
}

// The same for rows of bf16, which are not turned.
DEVICE void wide_rows(Shared& shared, const Work& work, int warp, int lane) {
  const int eighth = lane >> 2, quarter = lane & 3;
  Bringing<WIDE> ahead(shared, work, warp, lane);
#pragma unroll 1
  for (int tile = 0;; ++tile) {
    wait_for_operands(shared, tile);
    ahead.next();
    if (!ahead.more) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool there;
      const u8* source = ahead.source(half * 8 + eighth, there);
      const u32 to = shared_address(shared.operands[tile & 1]) + (warp * 16 + half * 8 + eighth) * 128;
#pragma unroll 4
      for (int i = 0; i < 16; ++i)
        copy16(to + (i >> 1) * 8192 + (((4 * (i & 1) + quarter) ^ eighth) << 4), source + i * 64, there);
    }
    arrive_after_copies(shared.rows_full[tile & 1]);
    arrive_once(shared.rows_full[tile & 1], lane);
  }
}

// ------------------------------------------------------------------------------------------------------------- scores

// A thread's eight of 32 channels, as four pairs.
template <int FORMAT> DEVICE void load_eight(const u16* from, int quarter, bool there, u32 (&to)[4]) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (there && FORMAT != WIDE) v = *(const uint4*)(from + 8 * quarter);
  if (there && FORMAT == WIDE) {
    const u32* pairs = (const u32*)from + quarter;
    v = make_uint4(pairs[0], pairs[4], pairs[8], pairs[12]);
  }
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Half of an item's queries, from a channel on, as A fragments: a thread has two heads.
struct Queries { u32 upper[8][4], lower[8][4]; };
template <int FORMAT> DEVICE void load_queries(const Work& work, int item, int from, int warp, int lane, Queries& to) {
  lane = anew(lane);  // no registers for addresses before
  const int head = warp * 16 + (lane >> 2), heads = work.heads_of(item);
  const u16* rows = work.q + work.query(item) * work.q_stride + (work.first_head(item) + head) * WIDTH + from;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    load_eight<FORMAT>(rows + 32 * i, lane & 3, head < heads, to.upper[i]);
    load_eight<FORMAT>(rows + 32 * i + 8 * WIDTH, lane & 3, head + 8 < heads, to.lower[i]);
  }
}

// An item's queries: the first 256 channels into registers, the others to shared memory.
template <int FORMAT, bool F16>
DEVICE void bring_queries(Shared& shared, const Work& work, int item, int warp, int lane, Queries& own) {
  Queries others;
  load_queries<FORMAT>(work, item, 256, warp, lane, others);
  load_queries<FORMAT>(work, item, 0, warp, lane, own);
  lane = anew(lane);
  const u32 to = shared_address(shared.query) + (warp * 16 + (lane >> 2)) * 128 + ((lane >> 2) << 4) + 4 * (lane & 3);
  meet(1, 128);  // the last item's have been read
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const u32 place = (to + (i >> 1) * 8192) ^ ((4 * (i & 1) + x) << 4);
      store4(place, of_bf16<F16>(others.upper[i][x])), store4(place + 1024, of_bf16<F16>(others.lower[i][x]));
      own.upper[i][x] = of_bf16<F16>(own.upper[i][x]), own.lower[i][x] = of_bf16<F16>(own.lower[i][x]);
    }
  meet(1, 128);
}

// Products of a tile.
template <bool F16>
DEVICE void multiply(Shared& shared, int tile, const Queries& own, float (&s)[32]) {
  const u64 keys = descriptor(shared_address(shared.operands[tile & 1]), 16, 1024);
  const u64 queries = descriptor(shared_address(shared.query), 16, 1024);
  products_begin();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int x = i >> 1, y = 2 * (i & 1);
    score<F16>(s, own.upper[x][y], own.lower[x][y], own.upper[x][y + 1], own.lower[x][y + 1],
               keys + (i >> 2) * 512 + (i & 3) * 2, i != 0);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int place = (i >> 2) * 512 + (i & 3) * 2;
    score_shared<F16>(s, queries + place, keys + 2048 + place);
  }
  products_commit();
}

// Of a thread's two heads.
struct Softmax {
  float reference[2] = {NOTHING, NOTHING}, sums[2] = {0.f, 0.f};
  bool fresh = true;  // no key was before
};

// Raised references.
DEVICE void raise(Shared& shared, Softmax& own, int warp, int lane, const float (&highest)[2], float (&s)[32]) {
  float lower[2];
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    float most = highest[x];
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float old = own.reference[x], raised = own.fresh ? fmaxf(most, NOTHING) : old + fmaxf(most, 0.f);
    const float faded = exp2_of(old - raised);
    own.reference[x] = raised, own.sums[x] *= faded, lower[x] = (own.fresh ? 0.f : old) - raised;
    if ((lane & 3) == 0) shared.factor[warp * 16 + (lane >> 2) + 8 * x] = faded;
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] += lower[i >> 1 & 1];
}

// Weights of a tile: 2^(score - reference), and their sums. `keys`: a bit for each key that is there. A pool's scale, which
// is no bf16, is in scores, and in the weights that values are summed up with, but not in the sums of weights.
template <int FORMAT, bool F16>
DEVICE void weigh(Shared& shared, Softmax& own, int tile, u64 keys, int warp, int lane, float scale, float of_pool,
                  float (&s)[32]) {
  const u64 there = keys >> (2 * (lane & 3));
  const float factor = scale * of_pool;
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = fmaf(s[i], factor, own.fresh ? 0.f : -own.reference[i >> 1 & 1]);
  if (~keys) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!(there >> (8 * i) & 1)) s[4 * i] = s[4 * i + 2] = -infinity();
      if (!(there >> (8 * i + 1) & 1)) s[4 * i + 1] = s[4 * i + 3] = -infinity();
    }
  }
  float highest[2] = {-infinity(), -infinity()};
#pragma unroll
  for (int i = 0; i < 32; ++i) highest[i >> 1 & 1] = fmaxf(highest[i >> 1 & 1], s[i]);
  const bool above = !all_of_warp(!own.fresh && fmaxf(highest[0], highest[1]) <= SPARE);
  if (tile >= 1) wait(shared.summed[(tile - 1) & 1], ((tile - 1) >> 1) & 1);  // the last weights have been read
  if (above) raise(shared, own, warp, lane, highest, s);
  if (lane == 0) shared.rescale[warp] = above && !own.fresh;
  own.fresh = own.fresh && keys == 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = exp2_of(s[i]), own.sums[i >> 1 & 1] += s[i];
  if (FORMAT == CODES)
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] *= of_pool;
  const int matrix = lane >> 3, turn = lane & 7;
  const u32 to = shared_address(shared.weights) + (warp * 16 + (matrix & 1) * 8 + turn) * 128;
#pragma unroll
  for (int i = 0; i < 8; i += 2)
    store_matrices(to + (((i + (matrix >> 1)) ^ turn) << 4), pair<F16>(s[4 * i], s[4 * i + 1]),
                   pair<F16>(s[4 * i + 2], s[4 * i + 3]), pair<F16>(s[4 * i + 4], s[4 * i + 5]),
                   pair<F16>(s[4 * i + 6], s[4 * i + 7]));
  shared_for_products();  // and what others have turned, for those who sum it up
  arrive_once(shared.weights_full, lane);
}

// What sums are divided by: an item's references, and totals of its weights.
DEVICE void hand_over(Shared& shared, const Softmax& own, int number, int warp, int lane) {
  if (number >= 1) wait(shared.totals_empty, (number - 1) & 1);
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    float total = own.sums[x];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int head = warp * 16 + (lane >> 2) + 8 * x;
    if ((lane & 3) == 0) shared.totals[head] = make_float2(own.reference[x], total);
  }
  arrive_once(shared.totals_full, lane);
}

template <int FORMAT, bool F16> DEVICE void scores(Shared& shared, const Work& work, int warp, int lane) {
  Queries queries;
  bring_queries<FORMAT, F16>(shared, work, work.start, warp, lane, queries);
  Softmax own;
  int item = work.start, number = 0;
#pragma unroll 1
  for (int tile = 0; item < work.items; ++tile) {
    float s[32];
    wait(shared.rows_full[tile & 1], (tile >> 1) & 1);
    shared_for_products();
    multiply<F16>(shared, tile, queries, s);
    const uint2 there = load8(shared_address(shared.there[tile & 3]));
    const int kind = of_warp(shared.kind[tile & 3]), next = item + work.step;
    const float* scale = kind & WINDOW ? work.window.scale : work.entries.scale;
    const float of_pool = FORMAT == CODES && scale ? __ldg(scale) : 1.f;
    products_wait<0>();
    weigh<FORMAT, F16>(shared, own, tile, (u64)there.y << 32 | there.x, warp, lane, work.scale, of_pool, s);
    if (!(kind & LAST)) continue;
    hand_over(shared, own, number++, warp, lane);
    own = Softmax(), item = next;
    if (item < work.items) bring_queries<FORMAT, F16>(shared, work, item, warp, lane, queries);
  }
}

// --------------------------------------------------------------------------------------------------------------- sums

// Sums of an item's values. Returns the first tile of the next.
template <bool F16> DEVICE int add_up(Shared& shared, int tile, int part, int warp, int lane, float (&o)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] = 0.f;
  const u64 weights = descriptor(shared_address(shared.weights), 16, 1024);
  const u64 all = descriptor(shared_address(shared.operands) + part * 32768, 8192, 1024);
  for (bool last = false; !last; ++tile) {
    wait(shared.weights_full, tile & 1);
    const u64 values = all + (tile & 1) * 4096;
    last = *(volatile int*)&shared.kind[tile & 3] & LAST;
    if (*(volatile int*)&shared.rescale[warp]) {
      const float upper = shared.factor[warp * 16 + (lane >> 2)], lower = shared.factor[warp * 16 + (lane >> 2) + 8];
#pragma unroll
      for (int i = 0; i < 32; ++i) o[4 * i] *= upper, o[4 * i + 1] *= upper, o[4 * i + 2] *= lower, o[4 * i + 3] *= lower;
    }
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) sum_128<F16, 0>(o, weights + k * 2, values + k * 128);
#pragma unroll
    for (int k = 0; k < 4; ++k) sum_128<F16, 64>(o, weights + k * 2, values + 1024 + k * 128);
    products_commit();
    products_wait<0>();
    arrive_once(shared.summed[tile & 1], lane);
  }
  return tile;
}

DEVICE float log_sum(float reference, float total) {
  return total == 0.f ? -infinity() : (reference + log2_of(total)) * LN_2;  // NaN stays NaN
}
// What a sum is multiplied by.
DEVICE float inverse_of(float sink, float reference, float total) {
  total += exp2_of(sink * LOG2_E - reference);
  return total == 0.f ? 0.f : 1.f / total;
}
DEVICE float sink_of(const Work& work, int item, int head) {
  return work.sinks && head < work.heads_of(item) ? __ldg(work.sinks + work.first_head(item) + head) : -infinity();
}
// The j-th pair of a thread's channels of the i-th 32.
template <int FORMAT> DEVICE int channel(int i, int j, int quarter) {
  return 32 * i + (FORMAT == WIDE ? 8 * j + 2 * quarter : 8 * quarter + 2 * j);
}

// All keys of an item were here.
template <int FORMAT>
DEVICE void write_whole(Shared& shared, const Work& work, int item, int part, int warp, int lane, const float (&o)[128]) {
  const int heads = work.heads_of(item);
  const i64 row = (i64)work.query(item) * work.heads + work.first_head(item);
  float inverse[2];
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int head = warp * 16 + (lane >> 2) + 8 * x;
    const float2 of = shared.totals[head];
    if (work.lse && part == 0 && (lane & 3) == 0 && head < heads) work.lse[row + head] = log_sum(of.x, of.y);
    inverse[x] = inverse_of(sink_of(work, item, head), of.x, of.y);
  }
  arrive_once(shared.totals_empty, lane);
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int head = warp * 16 + (lane >> 2) + 8 * x;
    u16* to = work.out + (row + head) * WIDTH + part * 256;
    if (head >= heads) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      u32 v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 16 * i + 4 * j + 2 * x;
        v[j] = pair<false>(o[at] * inverse[x], o[at + 1] * inverse[x]);
        if (FORMAT == WIDE) *(u32*)(to + channel<FORMAT>(i, j, lane & 3)) = v[j];
      }
      if (FORMAT != WIDE) *(uint4*)(to + channel<FORMAT>(i, 0, lane & 3)) = make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
}

// A slice's sums, in its own memory: no two of eight lanes write to one bank.
DEVICE float* sum_at(float* sums, int head, int channel) {
  return &sums[head * WIDTH + (channel ^ (head & 7) << 3 ^ (head & 1) << 2)];
}
template <int FORMAT>
DEVICE void keep_sums(float* sums, int heads, int part, int warp, int lane, const float (&o)[128]) {
  if (warp * 16 >= heads) return;
#pragma unroll
  for (int x = 0; x < 2; ++x)
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 16 * i + 4 * j + 2 * x, head = warp * 16 + (lane >> 2) + 8 * x;
        *(float2*)sum_at(sums, head, part * 256 + channel<FORMAT>(i, j, lane & 3)) = make_float2(o[at], o[at + 1]);
      }
}

// What each slice's sums are multiplied by, [heads, SLICES]. Sixteen lanes have the slices of a head.
DEVICE void share(Shared& shared, const Work& work, const float (&sinks)[HEADS / 16], float* of_slices, int thread) {
  const int heads = work.heads_of(work.start), slice = thread & 15;
  float2 own[HEADS / 16];
#pragma unroll
  for (int i = 0; i < HEADS / 16; ++i) {
    const u32 at = shared_address(&shared.totals[16 * i + (thread >> 4)]);
    own[i] = slice < work.slices && 16 * i < heads ? remote_float2(of_block(at, slice)) : make_float2(-infinity(), 0.f);
  }
#pragma unroll
  for (int i = 0; i < HEADS / 16; ++i) {
    if (16 * i >= heads) break;
    const int head = 16 * i + (thread >> 4);
    float highest = own[i].x;
    for (int other = 1; other < 16; other *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, other));
    const float share = exp2_of(own[i].x - highest);
    float total = own[i].y * share;
    for (int other = 1; other < 16; other *= 2) total += __shfl_xor_sync(~0u, total, other);
    of_slices[head * SLICES + slice] = share * inverse_of(sinks[i], highest, total);
    if (work.lse && work.slice == 0 && slice == 0 && head < heads)
      work.lse[(i64)work.query(work.start) * work.heads + work.first_head(work.start) + head] = log_sum(highest, total);
  }
  meet(5, 256);
}

// Four channels of all slices' sums: eight slices' loads are on their way at once, this block's own first, so that not all
// ask one block.
DEVICE float4 sum_of_slices(u32 at, const float* of_slices, int slice, int slices) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int x = 0; x < SLICES; x += 8) {
    if (x >= slices) break;
    float4 v[8];
    float shares[8];
#pragma unroll
    for (int y = 0; y < 8; ++y) {
      const int other = slice + x + y < slices ? slice + x + y : slice + x + y - slices;
      const bool there = x + y < slices;
      v[y] = there ? remote_float4(of_block(at, other)) : make_float4(0, 0, 0, 0);
      shares[y] = there ? of_slices[other] : 0.f;
    }
#pragma unroll
    for (int y = 0; y < 8; ++y) {
      sum.x += shares[y] * v[y].x, sum.y += shares[y] * v[y].y;
      sum.z += shares[y] * v[y].z, sum.w += shares[y] * v[y].w;
    }
  }
  return sum;
}

// Slices of an item: each of them adds up a share of the rows of all.
template <int FORMAT>
DEVICE void write_merged(Shared& shared, const Work& work, int part, int warp, int lane, const float (&o)[128]) {
  lane = anew(lane);  // no registers for addresses before
  float* sums = (float*)shared.operands;         // 128 KB
  float* of_slices = (float*)shared.weights;     // 4 KB
  const int thread = part * 128 + warp * 32 + lane, slice = work.slice, slices = work.slices;
  const int heads = work.heads_of(work.start);
  meet(5, 256);  // operands have been read
  keep_sums<FORMAT>(sums, heads, part, warp, lane, o);
  float sinks[HEADS / 16];
#pragma unroll
  for (int i = 0; i < HEADS / 16; ++i) sinks[i] = sink_of(work, work.start, 16 * i + (thread >> 4));
  cluster_meet();
  share(shared, work, sinks, of_slices, thread);
  const i64 row = (i64)work.query(work.start) * work.heads + work.first_head(work.start);
  const int fours = heads * WIDTH / 4, end = (slice + 1) * fours / slices;
  for (int four = slice * fours / slices + thread; four < end; four += 256) {
    const int head = four >> 7, first = (four & 127) * 4;
    const float4 sum = sum_of_slices(shared_address(sum_at(sums, head, first)), of_slices + head * SLICES, slice, slices);
    *(uint2*)(work.out + (row + head) * WIDTH + first) = make_uint2(pair<false>(sum.x, sum.y), pair<false>(sum.z, sum.w));
  }
  cluster_leave();  // a block's memory lasts until all have read it
}

template <int FORMAT, bool F16> DEVICE void sums(Shared& shared, const Work& work, int part, int warp, int lane) {
  float o[128];
  int tile = 0, number = 0;
#pragma unroll 1
  for (int item = work.start; item < work.items; item += work.step, ++number) {
    tile = add_up<F16>(shared, tile, part, warp, lane, o);
    wait(shared.totals_full, number & 1);
    if (work.slices == 1) write_whole<FORMAT>(shared, work, item, part, warp, lane, o);
    else write_merged<FORMAT>(shared, work, part, warp, lane, o);
  }
}

// ---------------------------------------------------------------------------------------------------------- a launch

// What a block loads first comes to L2: lengths, and where it is known where they are, a query's first 1,024 slots, whichever
// slice is this block's: that follows from lengths.
DEVICE void expect_pool(const Pool& pool, int query, int lane) {
  if (lane == 0 && pool.lengths) prefetch(pool.lengths + query);
  if (lane == 0 && pool.owners) prefetch(pool.owners + query);
  if (!pool.owners && lane * 32 < pool.columns) prefetch(pool.slots + query * pool.slot_stride + lane * 32);
}

// Grid: slices (a cluster), and blocks that have an item each and go on to others; with more than one slice, as many as items.
template <int FORMAT, bool F16> DEVICE void attend(Work work) {
  Shared& shared = *(Shared*)shared_memory();
  // Both of the shuffled number, which the compiler knows to be one of the warp.
  const int thread = threadIdx.x, lane = thread & 31, number = of_warp(thread >> 5);
  const int group = number >> 2, warp = number & 3;
  work.slices = gridDim.x, work.slice = blockIdx.x, work.start = blockIdx.y, work.step = gridDim.y;
  if (number < 3) {
    const int query = work.query(work.start), head = work.first_head(work.start) + lane;
    if (number == 0 && work.sinks && head < work.heads) prefetch(work.sinks + head);
    if (number == 1) expect_pool(work.window, query, lane);
    if (number == 2) expect_pool(work.entries, query, lane);
  }
  if (thread == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.rows_full[i], FORMAT == WIDE ? 132 : 4);  // all threads' copies, and warps
      barrier_init(shared.summed[i], 8);
    }
    barrier_init(shared.weights_full, 4), barrier_init(shared.totals_full, 4), barrier_init(shared.totals_empty, 8);
    barriers_are_made();
  }
  __syncthreads();
  if (group >= 2) {
    take_registers<160>();
    sums<FORMAT, F16>(shared, work, group - 2, warp, lane);
    return;
  }
  if (group == 0) {
    give_registers<40>();
    if (FORMAT == WIDE) wide_rows(shared, work, warp, lane);
    else rows<FORMAT, F16>(shared, work, warp, lane);
  } else {
    take_registers<152>();
    scores<FORMAT, F16>(shared, work, warp, lane);
  }
  if (work.slices > 1) cluster_meet(), cluster_leave();
}

#define ENTRY(NAME, FORMAT, F16)                                                                                       \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                                 \
      NAME(const u16* q, i64 q_stride, const u8* rows, i64 page_stride, u32 page_size, u32 page_factor,                \
           u32 page_shift, const float* row_scale, const int* slots, i64 slot_stride, const int* owners,               \
           const int* lengths, int columns, const u8* more_rows, i64 more_page_stride, u32 more_page_size,             \
           u32 more_page_factor, u32 more_page_shift, const float* more_scale, const int* more_slots,                  \
           i64 more_slot_stride, const int* more_owners, const int* more_lengths, int more_columns,                    \
           const float* sinks, u16* out, float* lse, int heads, int item_heads, int items, float scale) {              \
    const Pool window{rows,  page_stride, page_size, page_factor, page_shift, row_scale,                               \
                      slots, slot_stride, owners,    lengths,     columns};                                            \
    const Pool entries{more_rows,  more_page_stride, more_page_size, more_page_factor, more_page_shift, more_scale,    \
                       more_slots, more_slot_stride, more_owners,    more_lengths,     more_columns};                  \
    const int head_blocks = (heads + item_heads - 1) / item_heads;                                                     \
    attend<FORMAT, F16>(                                                                                               \
        Work{q, q_stride, window, entries, sinks, out, lse, heads, item_heads, head_blocks, items, scale});            \
  }
ENTRY(packed_bf16, PACKED, false)
ENTRY(packed_f16, PACKED, true)
ENTRY(codes_bf16, CODES, false)
ENTRY(wide_bf16, WIDE, false)
