// PTX of sm_90a as functions, and nothing else: a test has another file in the place of this one, for a CPU.
// Nothing is included: NVRTC compiles this without a toolkit.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

DEVICE u8* shared_memory() { extern __shared__ __align__(1024) u8 memory[]; return memory; }
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_of(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE int of_warp(int x) { return __shfl_sync(~0u, x, 0); }  // the compiler then knows it to be one of the warp
// What follows from the result is made anew each time: where registers are few, it shall not be kept.
DEVICE int anew(int x) { asm volatile("" : "+r"(x)); return x; }
DEVICE u32 lanes_of(bool mine) { return __ballot_sync(~0u, mine); }
DEVICE bool all_of_warp(bool mine) { return __all_sync(~0u, mine); }
template <int COUNT> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// -------------------------------------------------------------------------------------------------- waiting for others

DEVICE void barrier_init(u64& barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}
DEVICE void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(u64& barrier) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(shared_address(&barrier)) : "memory");
}
DEVICE void arrive_once(u64& barrier, int lane) {  // when all lanes are here
  __syncwarp();
  if (lane == 0) arrive(barrier);
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
DEVICE void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void cluster_leave() {  // nothing that was written is shown
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// ------------------------------------------------------------------------------------------------------------- memory

DEVICE u32 of_block(u32 address, int block) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}
DEVICE float2 remote_float2(u32 address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
DEVICE float4 remote_float4(u32 address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address) : "memory");
  return v;
}
DEVICE void copy16(u32 to, const u8* from, bool some) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(some ? 16 : 0) : "memory");
}
DEVICE void copy8(u32 to, const u8* from, bool some) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(some ? 8 : 0) : "memory");
}
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory"); }
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copies_wait() {  // and all lanes see what each has brought
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
  __syncwarp();
}
DEVICE uint2 load8(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
  return v;
}
DEVICE uint4 load16(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
DEVICE void store4(u32 a, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
DEVICE void store8(u32 a, u32 x, u32 y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}
DEVICE void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

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
// Four E4M3 codes as two pairs. bf16: by f16 and fp32, which is exact, and as fast as with integers.
template <bool F16> DEVICE void of_codes(u32 codes, u32& low, u32& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high) : "r"(codes));
  if (F16) return;
  float a, b, c, d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(low));
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(c), "=f"(d) : "r"(high));
  low = pair<false>(a, b), high = pair<false>(c, d);
}
template <bool F16> DEVICE u32 times(u32 x, u32 y) {
  u32 z;
  if (F16) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// ----------------------------------------------------------------------------------------------------------- products

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
DEVICE void shared_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE u64 descriptor(u32 address, int leading, int stride) {  // 128-byte swizzle
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(stride >> 4) << 32) | (1ull << 62);
}
#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define P32                                                                                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31"
#define P64                                                                                                    \
  P32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
      "%58,%59,%60,%61,%62,%63"
// 64 heads x 64 keys: A in registers, B shared and K-major.
#define SCORE(TYPE)                                                                                               \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE  \
               " {" P32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"                                              \
               : R16(s, 0), R16(s, 16) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)add))
template <bool F16> DEVICE void score(float (&s)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add) {
  if (F16) SCORE("f16"); else SCORE("bf16");
}
// The same, added, with A shared and K-major.
#define SCORE_SHARED(TYPE)                                                                                              \
  asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" P32 \
               "}, %32, %33, p, 1, 1, 0, 0;}" : R16(s, 0), R16(s, 16) : "l"(a), "l"(b))
template <bool F16> DEVICE void score_shared(float (&s)[32], u64 a, u64 b) {
  if (F16) SCORE_SHARED("f16"); else SCORE_SHARED("bf16");
}
// 64 heads x 128 channels: A shared, B shared and MN-major.
#define SUM(TYPE)                                                                                                  \
  asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE    \
               " {" P64 "}, %64, %65, p, 1, 1, 0, 1;}"                                                             \
               : R16(o, FIRST), R16(o, FIRST + 16), R16(o, FIRST + 32), R16(o, FIRST + 48) : "l"(a), "l"(b))
template <bool F16, int FIRST> DEVICE void sum_128(float (&o)[128], u64 a, u64 b) {
  if (F16) SUM("f16"); else SUM("bf16");
}
