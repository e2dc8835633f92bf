// Sparse attention of DeepSeek-V4 over packed rows, for sm_90a. What it computes: dsv4core.ops.sparse_mla.
//
// A block has up to 64 heads of one query and a slice of its keys, in tiles of 64 keys; the slices of a query form a
// cluster and merge through distributed shared memory. 512 threads, four warp groups, each with a part of its own:
//
//   gather   brings rows of 576 bytes and their scales to shared memory, two tiles ahead, and turns each tile into the
//            V tile: 64 keys x 512 channels of 16 bits, swizzled
//   scores   turns the same raw tile into A fragments of wgmma, S^T = K Q^T with Q in shared memory, and makes weights
//   sums (2) O += P V, 256 channels each
//
// The softmax has a reference that is raised only when a score is 2^8 above it, so that O is almost never rescaled.
// Nothing is included: NVRTC compiles this without a toolkit.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

constexpr int KEYS = 64, HEADS = 64, WIDTH = 512;
constexpr int ROW = 576;  // bytes of a packed row: 448 codes, then 64 bf16
constexpr float NOTHING = -1e30f;      // a reference before any key
constexpr float SPARE = 8.f;           // bits by which a score may be above the reference
#define INFINITY_ __int_as_float(0x7f800000)
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct Pool {
  const u8* rows;
  i64 page_stride;
  u32 page_size;
  const int* slots;
  i64 slot_stride;
  int length;
};

struct __align__(1024) Shared {
  u8 query[HEADS * WIDTH * 2];
  u8 values[KEYS * WIDTH * 2];
  u8 raw[2][KEYS * ROW];
  u8 weights[2][KEYS * HEADS * 2];
  u8 scales[2][KEYS * 8];
  float reference[HEADS], total[HEADS], partial[4][HEADS], factor[2][HEADS], share[8][HEADS];
  int rescale[2];
  u64 query_full, raw_full[2], raw_empty[2], values_full[2], values_empty[2], weights_full[2], weights_empty[2];
};

// ---------------------------------------------------------------------------------------------------------- PTX

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
DEVICE void barrier_init(u64& barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}
DEVICE void arrive(u64& barrier) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(shared_address(&barrier)) : "memory");
}
DEVICE void arrive_after_copies(u64& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
DEVICE void wait(u64& barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\n"
      "bra AGAIN;\nREADY:\n}" ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}
DEVICE void meet(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
DEVICE bool any_of(int number, int threads, bool mine) {
  int found;
  asm volatile("{.reg .pred p, q; setp.ne.b32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q;}"
               : "=r"(found) : "r"(number), "r"(threads), "r"((int)mine) : "memory");
  return found;
}
DEVICE void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE u32 of_block(u32 address, int block) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}
DEVICE float remote_float(u32 address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
DEVICE float4 remote_float4(u32 address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address) : "memory");
  return v;
}
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
DEVICE void shared_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_of(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE u64 descriptor(u32 address, int leading, int stride) {  // 128-byte swizzle
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(stride >> 4) << 32) | (1ull << 62);
}
DEVICE void copy16(u32 to, const u8* from, bool some) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(some ? 16 : 0) : "memory");
}
DEVICE void copy8(u32 to, const u8* from, bool some) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(some ? 8 : 0) : "memory");
}
DEVICE uint4 load16(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
DEVICE uint2 load8(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
  return v;
}
DEVICE float2 load8f(u32 a) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory");
  return v;
}
DEVICE void store16(u32 a, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEVICE void store4(u32 a, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
#define MATRICES(MODE)                                                                                                     \
  asm volatile("stmatrix.sync.aligned.m8n8.x4" MODE ".shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),      \
               "r"(c), "r"(d) : "memory")
DEVICE void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) { MATRICES(""); }
DEVICE void store_matrices_turned(u32 to, u32 a, u32 b, u32 c, u32 d) { MATRICES(".trans"); }

// ---------------------------------------------------------------------------------------------- operands: bf16 or f16

template <bool F16> DEVICE u32 pair(float low, float high) {
  u32 packed;
  if (F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <bool F16> DEVICE u32 of_bf16(u32 two) {
  return F16 ? pair<true>(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)) : two;
}
// Four E4M3 codes times a power of two as two pairs. bf16: by f16 and fp32, which is exact, and faster than with integers.
template <bool F16> DEVICE void of_codes(u32 codes, u32 scale, u32& low, u32& high) {
  u32 x, y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(x), "=r"(y) : "r"(codes));
  if (F16) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(x), "r"(scale));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(y), "r"(scale));
    return;
  }
  float a, b, c, d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(c), "=f"(d) : "r"(y));
  x = pair<false>(a, b), y = pair<false>(c, d);
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(low) : "r"(x), "r"(scale));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(high) : "r"(y), "r"(scale));
}
// A scale's byte, 127 more than its exponent, as a pair of factors. 0 and 255 have no bf16 of that form.
template <bool F16> DEVICE u32 factors(u32 byte) {
  if (F16) { float f = __uint_as_float(byte << 23); return pair<true>(f, f); }
  u32 bits = byte == 0 ? 0x0040u : byte == 255 ? 0x7fc0u : byte << 7;  // 2^-127 is subnormal
  return bits | (bits << 16);
}

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define P32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define P64 P32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
// 64 keys x 64 heads: A in registers, B shared and K-major.
#define SCORE(TYPE)                                                                                                       \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE          \
               " {" P32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"                                                      \
               : R16(s, 0), R16(s, 16) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)add))
template <bool F16> DEVICE void score(float (&s)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add) {
  if (F16) SCORE("f16"); else SCORE("bf16");
}
// 64 heads x 128 channels: A shared, B shared and MN-major.
#define SUM(TYPE, FIRST)                                                                                                  \
  asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE           \
               " {" P64 "}, %64, %65, p, 1, 1, 0, 1;}"                                                                    \
               : R16(o, FIRST), R16(o, FIRST + 16), R16(o, FIRST + 32), R16(o, FIRST + 48) : "l"(a), "l"(b))
template <bool F16> DEVICE void sum_256(float (&o)[128], u64 a, u64 b) {
  if (F16) SUM("f16", 0); else SUM("bf16", 0);
  b += 1024;
  if (F16) SUM("f16", 64); else SUM("bf16", 64);
}

// ------------------------------------------------------------------------------------------------------------ parts

// Eight channels of two keys, of one of eight groups of 64, as A fragments: the last group is bf16 already.
template <bool F16> DEVICE void fragments(uint4 first, uint4 second, u32 scale, u32 other, u32 (&a)[8], u32 (&b)[8]) {
  of_codes<F16>(first.x, scale, a[0], a[1]), of_codes<F16>(first.y, scale, a[2], a[3]);
  of_codes<F16>(first.z, scale, a[4], a[5]), of_codes<F16>(first.w, scale, a[6], a[7]);
  of_codes<F16>(second.x, other, b[0], b[1]), of_codes<F16>(second.y, other, b[2], b[3]);
  of_codes<F16>(second.z, other, b[4], b[5]), of_codes<F16>(second.w, other, b[6], b[7]);
}
template <bool F16> DEVICE void rotary(uint4 first, uint4 second, uint4 further, uint4 last, u32 (&a)[8], u32 (&b)[8]) {
  a[0] = of_bf16<F16>(first.x), a[1] = of_bf16<F16>(first.y), a[2] = of_bf16<F16>(first.z), a[3] = of_bf16<F16>(first.w);
  a[4] = of_bf16<F16>(further.x), a[5] = of_bf16<F16>(further.y);
  a[6] = of_bf16<F16>(further.z), a[7] = of_bf16<F16>(further.w);
  b[0] = of_bf16<F16>(second.x), b[1] = of_bf16<F16>(second.y);
  b[2] = of_bf16<F16>(second.z), b[3] = of_bf16<F16>(second.w);
  b[4] = of_bf16<F16>(last.x), b[5] = of_bf16<F16>(last.y), b[6] = of_bf16<F16>(last.z), b[7] = of_bf16<F16>(last.w);
}
DEVICE u32 byte_of(uint2 scales, int group) { return ((group < 4 ? scales.x : scales.y) >> (8 * (group & 3))) & 255u; }

// Queries as the B operand, their channels in the order in which a thread has those of its keys' fragments.
template <bool F16> DEVICE void arrange_queries(Shared& shared, int warp, int warps, int lane, int heads) {
  const int half = lane >> 4, quarter = lane & 15;
  wait(shared.query_full, 0);
#pragma unroll 1
  for (int two = warp; two < HEADS / 2; two += warps) {
    const int head = two * 2 + half;
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      uint2 v = make_uint2(0, 0);
      if (head < heads) v = load8(shared_address(shared.values) + head * 1024 + group * 128 + quarter * 8);
      const int part = group < 7 ? quarter >> 2 : (quarter >> 1) & 3;
      const int step = group < 7 ? quarter & 3 : (quarter & 1) + 2 * (quarter >> 3);
      const u32 to = shared_address(shared.query) + group * 8192 + head * 128 + part * 4;
      store4(to + (((2 * step) ^ (head & 7)) << 4), of_bf16<F16>(v.x));
      store4(to + (((2 * step + 1) ^ (head & 7)) << 4), of_bf16<F16>(v.y));
    }
  }
  shared_for_products();
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
};

// One warp's 16 rows of a tile; lanes 0 to 15 have their slots.
DEVICE void gather_rows(Shared& shared, const Tiles& tiles, int tile, int slot, int warp, int lane) {
  const int stage = tile & 1;
  const u32 to = shared_address(shared.raw[stage]) + warp * 16 * ROW;
  const bool mine = tiles.in_window(tile);
  const u8* rows = mine ? tiles.window.rows : tiles.entries.rows;
  const u32 page_size = mine ? tiles.window.page_size : tiles.entries.page_size;
  u64 row = 0, scales = (u64)rows;
  if (slot >= 0) {
    const u32 page = (u32)slot / page_size, offset = (u32)slot - page * page_size;
    const u8* base = rows + page * (mine ? tiles.window.page_stride : tiles.entries.page_stride);
    row = (u64)(base + offset * ROW), scales = (u64)(base + (i64)page_size * ROW + offset * 8);
  }
#pragma unroll 4
  for (int key = 0; key < 16; ++key) {
    const u64 from = __shfl_sync(~0u, row, key);
    copy16(to + key * ROW + lane * 16, (from ? (const u8*)from : rows) + lane * 16, from != 0);
  }
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    const int key = eight * 8 + (lane >> 2);
    const u64 from = __shfl_sync(~0u, row, key);
    const int rest = 512 + (lane & 3) * 16;
    copy16(to + key * ROW + rest, (from ? (const u8*)from : rows) + rest, from != 0);
  }
  if (lane < 16) copy8(shared_address(shared.scales[stage]) + (warp * 16 + lane) * 8, (const u8*)scales, slot >= 0);
  arrive_after_copies(shared.raw_full[stage]);
}

template <bool F16> DEVICE void gather(Shared& shared, const Tiles& tiles, int warp, int lane) {
  const int key = warp * 16 + (lane >> 2), quarter = lane & 3, eighth = lane >> 2;
  int slot = tiles.slot(0, warp * 16 + (lane & 15));
  if (tiles.count > 0) gather_rows(shared, tiles, 0, slot, warp, lane);
  slot = tiles.slot(1, warp * 16 + (lane & 15));
  if (tiles.count > 1) gather_rows(shared, tiles, 1, slot, warp, lane);
  slot = tiles.slot(2, warp * 16 + (lane & 15));
  meet(7, 512);
  const u32 to = shared_address(shared.values) + key * 128;
  const u32 codes_place = ((2 * quarter) ^ eighth) << 4, rotary_place = (quarter ^ eighth) << 4;
  const int half = warp >> 1;
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile) {
    const int stage = tile & 1;
    wait(shared.raw_full[stage], (tile >> 1) & 1);
    const u32 from = shared_address(shared.raw[stage]) + key * ROW + 16 * quarter;
    const uint2 scales = load8(shared_address(shared.scales[stage]) + key * 8);
    const uint2 others = load8(shared_address(shared.scales[stage]) + key * 8 + 64);
    if (tile >= 1) wait(shared.values_empty[half], (tile - 1) & 1);
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      u32 a[8], b[8];
      const u32 at = from + group * 64;
      if (group < 7)
        fragments<F16>(load16(at), load16(at + 8 * ROW), factors<F16>(byte_of(scales, group)),
                       factors<F16>(byte_of(others, group)), a, b);
      else
        rotary<F16>(load16(at), load16(at + 8 * ROW), load16(at + 64), load16(at + 64 + 8 * ROW), a, b);
      const u32 place = to + group * 8192 + (group < 7 ? codes_place : rotary_place);
      const u32 next = to + group * 8192 + (group < 7 ? codes_place ^ 16 : rotary_place ^ 64);
      store16(place, a[0], a[1], a[2], a[3]), store16(next, a[4], a[5], a[6], a[7]);
      store16(place + 1024, b[0], b[1], b[2], b[3]), store16(next + 1024, b[4], b[5], b[6], b[7]);
    }
    shared_for_products();
    arrive(shared.values_full[half]);
    __syncwarp();
    if (lane == 0) arrive(shared.raw_empty[stage]);
    if (tile + 2 < tiles.count) {
      const int coming = slot;
      slot = tiles.slot(tile + 3, warp * 16 + (lane & 15));
      wait(shared.raw_empty[stage], (tile >> 1) & 1);
      gather_rows(shared, tiles, tile + 2, coming, warp, lane);
    }
  }
}

template <bool F16>
DEVICE void scores(Shared& shared, const Tiles& tiles, int warp, int lane, int heads, float scale) {
  arrange_queries<F16>(shared, warp, 12, lane, heads);
  meet(7, 512);
  const int eighth = lane >> 2, quarter = lane & 3, key = warp * 16 + eighth;
  const u64 queries = descriptor(shared_address(shared.query), 16, 1024);
  float sums[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i] = 0.f;
  bool here = tiles.slot(0, key) >= 0, there = tiles.slot(0, key + 8) >= 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile) {
    const int stage = tile & 1;
    const bool next_here = tiles.slot(tile + 1, key) >= 0, next_there = tiles.slot(tile + 1, key + 8) >= 0;
    float s[32];
    wait(shared.raw_full[stage], (tile >> 1) & 1);
    const u32 from = shared_address(shared.raw[stage]) + key * ROW + 16 * quarter;
    const uint2 scales = load8(shared_address(shared.scales[stage]) + key * 8);
    const uint2 others = load8(shared_address(shared.scales[stage]) + key * 8 + 64);
    uint4 first = load16(from), second = load16(from + 8 * ROW), further, last;
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      u32 a[8], b[8];
      if (group >= 2) products_wait<1>();
      if (group < 7) {
        fragments<F16>(first, second, factors<F16>(byte_of(scales, group)), factors<F16>(byte_of(others, group)), a, b);
        first = load16(from + (group + 1) * 64), second = load16(from + (group + 1) * 64 + 8 * ROW);
        if (group == 6) further = load16(from + 512), last = load16(from + 512 + 8 * ROW);
      } else {
        rotary<F16>(first, second, further, last, a, b);
      }
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        score<F16>(s, a[2 * k], b[2 * k], a[2 * k + 1], b[2 * k + 1], queries + group * 512 + k * 2, (group | k) != 0);
      products_commit();
    }
    __syncwarp();
    if (lane == 0) arrive(shared.raw_empty[stage]);
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!here) s[4 * i] = s[4 * i + 1] = -INFINITY_;
      if (!there) s[4 * i + 2] = s[4 * i + 3] = -INFINITY_;
    }
    here = next_here, there = next_there;
    const u32 references = shared_address(&shared.reference[2 * quarter]);
    const bool fresh = !(*(volatile float*)&shared.reference[0] > 0.1f * NOTHING);  // no key yet, the same for all heads
    float highest = -INFINITY_;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float2 reference = load8f(references + 32 * i);
      if (fresh) reference = make_float2(0.f, 0.f);
      s[4 * i] = fmaf(s[4 * i], scale, -reference.x), s[4 * i + 2] = fmaf(s[4 * i + 2], scale, -reference.x);
      s[4 * i + 1] = fmaf(s[4 * i + 1], scale, -reference.y), s[4 * i + 3] = fmaf(s[4 * i + 3], scale, -reference.y);
      highest = fmaxf(highest, fmaxf(fmaxf(s[4 * i], s[4 * i + 2]), fmaxf(s[4 * i + 1], s[4 * i + 3])));
    }
    const bool raise = fresh || any_of(1, 128, highest > SPARE);
    if (tile >= 2) wait(shared.weights_empty[stage], ((tile >> 1) - 1) & 1);
    if (raise) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float a = fmaxf(s[4 * i], s[4 * i + 2]), b = fmaxf(s[4 * i + 1], s[4 * i + 3]);
#pragma unroll
        for (int x = 4; x < 32; x *= 2)
          a = fmaxf(a, __shfl_xor_sync(~0u, a, x)), b = fmaxf(b, __shfl_xor_sync(~0u, b, x));
        if (eighth == 0) *(float2*)&shared.partial[warp][8 * i + 2 * quarter] = make_float2(a, b);
      }
      meet(1, 128);
      const int head = warp * 32 + lane;
      if (head < HEADS) {
        float most = shared.partial[0][head];
#pragma unroll
        for (int x = 1; x < 4; ++x) most = fmaxf(most, shared.partial[x][head]);
        const float old = shared.reference[head];
        const float raised = fresh ? fmaxf(most, NOTHING) : old + fmaxf(most, 0.f);
        shared.reference[head] = raised;
        shared.factor[stage][head] = exp2_of(old - raised);
        shared.share[0][head] = (fresh ? 0.f : old) - raised;
      }
      if (warp == 0 && lane == 0) shared.rescale[stage] = !fresh;
      meet(1, 128);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 lower = load8f(shared_address(&shared.share[0][8 * i + 2 * quarter]));
        const float2 faded = load8f(shared_address(&shared.factor[stage][8 * i + 2 * quarter]));
        s[4 * i] += lower.x, s[4 * i + 2] += lower.x, s[4 * i + 1] += lower.y, s[4 * i + 3] += lower.y;
        sums[2 * i] *= faded.x, sums[2 * i + 1] *= faded.y;
      }
    } else if (warp == 0 && lane == 0) {
      shared.rescale[stage] = 0;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = exp2_of(s[i]);
    const int matrix = lane >> 3, row = lane & 7;
    const u32 to = shared_address(shared.weights[stage]) + ((matrix >> 1) * 8 + row) * 128 +
                   (((2 * warp + (matrix & 1)) ^ row) << 4);
#pragma unroll
    for (int i = 0; i < 8; i += 2)
      store_matrices_turned(to + i * 1024, pair<F16>(s[4 * i], s[4 * i + 1]), pair<F16>(s[4 * i + 2], s[4 * i + 3]),
                            pair<F16>(s[4 * i + 4], s[4 * i + 5]), pair<F16>(s[4 * i + 6], s[4 * i + 7]));
    shared_for_products();
    arrive(shared.weights_full[stage]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[2 * i] += s[4 * i] + s[4 * i + 2], sums[2 * i + 1] += s[4 * i + 1] + s[4 * i + 3];
  }
  meet(1, 128);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float a = sums[2 * i], b = sums[2 * i + 1];
#pragma unroll
    for (int x = 4; x < 32; x *= 2) a += __shfl_xor_sync(~0u, a, x), b += __shfl_xor_sync(~0u, b, x);
    if (eighth == 0) *(float2*)&shared.partial[warp][8 * i + 2 * quarter] = make_float2(a, b);
  }
}

template <bool F16>
DEVICE void weigh(Shared& shared, const Tiles& tiles, int part, int warp, int lane, int heads, float (&o)[128]) {
  arrange_queries<F16>(shared, 4 + part * 4 + warp, 12, lane, heads);
  meet(7, 512);
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] = 0.f;
  const u64 weights = descriptor(shared_address(shared.weights), 16, 1024);
  const u64 values = descriptor(shared_address(shared.values) + part * 32768, 8192, 1024);
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile) {
    const int stage = tile & 1;
    wait(shared.weights_full[stage], (tile >> 1) & 1);
    if (*(volatile int*)&shared.rescale[stage]) {
      const float upper = shared.factor[stage][warp * 16 + (lane >> 2)];
      const float lower = shared.factor[stage][warp * 16 + (lane >> 2) + 8];
#pragma unroll
      for (int i = 0; i < 32; ++i) o[4 * i] *= upper, o[4 * i + 1] *= upper, o[4 * i + 2] *= lower, o[4 * i + 3] *= lower;
    }
    wait(shared.values_full[0], tile & 1);
    products_begin();
    sum_256<F16>(o, weights + stage * 512, values), sum_256<F16>(o, weights + stage * 512 + 2, values + 128);
    products_commit();
    wait(shared.values_full[1], tile & 1);
    products_begin();
    sum_256<F16>(o, weights + stage * 512 + 4, values + 256), sum_256<F16>(o, weights + stage * 512 + 6, values + 384);
    products_commit();
    products_wait<1>();
    if (lane == 0) arrive(shared.values_empty[0]);
    products_wait<0>();
    if (lane == 0) arrive(shared.values_empty[1]), arrive(shared.weights_empty[stage]);
  }
}

DEVICE float log_sum(float reference, float total) {
  return total == 0.f ? -INFINITY_ : (reference + log2_of(total)) * LN_2;  // NaN stays NaN
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
    inverse[x] = total > 0.f ? 1.f / total : 0.f;
  }
  const int matrix = lane >> 3, turn = lane & 7, row = warp * 16 + (matrix & 1) * 8 + turn;
  const u32 to = shared_address(shared.values) + part * 32768 + row * 512;
#pragma unroll
  for (int i = 0; i < 32; i += 2)
    store_matrices(to + (((i + (matrix >> 1)) ^ turn) << 4), pair<false>(o[4 * i] * inverse[0], o[4 * i + 1] * inverse[0]),
                   pair<false>(o[4 * i + 2] * inverse[1], o[4 * i + 3] * inverse[1]),
                   pair<false>(o[4 * i + 4] * inverse[0], o[4 * i + 5] * inverse[0]),
                   pair<false>(o[4 * i + 6] * inverse[1], o[4 * i + 7] * inverse[1]));
  meet(5 + part, 128);
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
    float highest = -INFINITY_, total = 0;
    for (int x = 0; x < slices; ++x) highest = fmaxf(highest, remote_float(of_block(reference_at, x)));
    for (int x = 0; x < slices; ++x) {
      const float share = exp2_of(remote_float(of_block(reference_at, x)) - highest);
      shared.share[x][thread] = share, total += remote_float(of_block(total_at, x)) * share;
    }
    if (lse && slice == 0 && thread < heads) lse[thread] = log_sum(highest, total);
    if (sinks && thread < heads) total += exp2_of(sinks[thread] * LOG2_E - highest);
    const float inverse = total > 0.f ? 1.f / total : 0.f;
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

// Grid: slices (a cluster), blocks of 64 heads, queries. q, out: [queries, heads, 512] bf16; lse: [queries, heads] or
// none; sinks: [heads] or none. A pool's slots: [queries, columns], -1 for none; lengths: [queries], or none for all
// columns. `scale` has log2(e) in it.
template <bool F16>
DEVICE void attend(const u16* q, i64 q_stride, Pool window, const int* window_lengths, Pool entries,
                   const int* entry_lengths, const float* sinks, u16* out, float* lse, int all_heads, float scale) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *(Shared*)memory;
  // Both of the shuffled number, which the compiler knows to be one of the warp.
  const int thread = threadIdx.x, lane = thread & 31, number = __shfl_sync(~0u, thread >> 5, 0);
  const int group = number >> 2, warp = number & 3;
  const int slices = gridDim.x, slice = blockIdx.x, first_head = blockIdx.y * HEADS;
  const i64 query = blockIdx.z;
  const int heads = min(HEADS, all_heads - first_head);
  window.slots += query * window.slot_stride, entries.slots += query * entries.slot_stride;
  if (window_lengths) window.length = min(max(window_lengths[query], 0), window.length);
  if (entry_lengths) entries.length = min(max(entry_lengths[query], 0), entries.length);
  const int of_window = (window.length + KEYS - 1) / KEYS;
  const int all = of_window + (entries.length + KEYS - 1) / KEYS, first = slice * all / slices;
  const Tiles tiles{window, entries, first, (slice + 1) * all / slices - first, of_window};
  if (thread == 0) {
    barrier_init(shared.query_full, 1);
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.raw_full[i], 128), barrier_init(shared.raw_empty[i], 8);
      barrier_init(shared.values_full[i], 64), barrier_init(shared.values_empty[i], 8);
      barrier_init(shared.weights_full[i], 128), barrier_init(shared.weights_empty[i], 8);
      shared.rescale[i] = 0;
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    shared_for_products();
    const u32 bytes = heads * WIDTH * 2, barrier = shared_address(&shared.query_full);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared.values)), "l"(q + query * q_stride + first_head * WIDTH), "r"(bytes), "r"(barrier)
                 : "memory");
  }
  if (thread >= 128 && thread < 128 + HEADS) shared.reference[thread - 128] = NOTHING;
  __syncthreads();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    gather<F16>(shared, tiles, warp, lane);
    meet(4, 512);
    if (slices > 1) cluster_meet(), cluster_meet();
  } else if (group == 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
    scores<F16>(shared, tiles, warp, lane, heads, scale);
    meet(4, 512);
    if (slices > 1) cluster_meet(), cluster_meet();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    float o[128];
    const int part = group - 2;
    weigh<F16>(shared, tiles, part, warp, lane, heads, o);
    meet(4, 512);
    u16* own = out + (query * all_heads + first_head) * WIDTH;
    float* own_lse = lse ? lse + query * all_heads + first_head : nullptr;
    const float* own_sinks = sinks ? sinks + first_head : nullptr;
    if (slices == 1) write_whole(shared, o, part, warp, lane, heads, own_sinks, own, own_lse);
    else write_merged(shared, o, part, warp, lane, heads, slice, slices, own_sinks, own, own_lse);
  }
}

#define ENTRY(NAME, F16)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                                    \
      NAME(const u16* q, i64 q_stride, const u8* rows, i64 page_stride, u32 page_size, const int* slots, i64 slot_stride, \
           const int* lengths, int columns, const u8* more_rows, i64 more_page_stride, u32 more_page_size,                \
           const int* more_slots, i64 more_slot_stride, const int* more_lengths, int more_columns, const float* sinks,    \
           u16* out, float* lse, int heads, float scale) {                                                                \
    attend<F16>(q, q_stride, Pool{rows, page_stride, page_size, slots, slot_stride, columns}, lengths,                    \
                Pool{more_rows, more_page_stride, more_page_size, more_slots, more_slot_stride, more_columns},            \
                more_lengths, sinks, out, lse, heads, scale);                                                             \
  }
ENTRY(attend_bf16, false)
ENTRY(attend_f16, true)
