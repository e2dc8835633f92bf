// What `ptx.cuh` declares, on a CPU: every thread of a cluster is a fiber, in an order of chance; copies arrive and products
// read at once or late, as chance has it, and products read nothing that no fence has shown them; who waits for what never
// comes is named; a block's memory is overwritten when its last thread has ended. What it does not see: threads that go on
// until they wait for something, and so do nothing between; the four warps of products wait for each other; A fragments
// are read when products begin; a fence shows what any thread of the block has told others; plain stores need no fence;
// prefetches; f16.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE inline
#define __global__
#define __launch_bounds__(threads, blocks)
#define __align__(bytes) alignas(bytes)

using std::max;
using std::min;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x, y, z; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace machine {

constexpr int THREADS = 512, SHARED = 227 << 10;
using Task = std::function<void()>;

struct Meeting {  // of so many threads, again and again; what they bring is there until the one after next
  int arrived = 0;
  u64 turn = 0;
  u32 brought[2][THREADS][4];
};
struct Barrier { int due = 0, pending = 0, phase = 0; };
enum Writer : int { SHOWN = -3, RELEASED = -2, COPY = -1 };  // or the number of a thread that has told nobody yet
struct Block {
  int gone = 0;
  Index index;
  u8* shared;
  std::vector<int> writers = std::vector<int>(SHARED / 16, SHOWN);  // of 16 bytes each, since the last fence
  std::vector<u32> copied, released;
  std::map<u32, Barrier> barriers;
  Meeting warps[THREADS / 32], groups[THREADS / 128], numbered[16];
};
struct Flight { Block* block; Task land; };
struct Thread {
  int number;
  Block* block;
  ucontext_t context;
  std::vector<char> stack;
  std::function<bool()> ready;  // none: it can go on
  std::string waits;
  bool done = false;
  std::vector<u32> written;
  std::vector<Task> copies;
  std::vector<std::vector<Task>> committed;
  std::vector<std::vector<Task>> products{1};  // that have been committed together; the last are not yet
};

inline std::vector<std::unique_ptr<Block>> blocks;
inline std::vector<std::unique_ptr<Thread>> threads;
inline std::vector<Flight> flights;
inline Meeting cluster;
inline Thread* self;
inline ucontext_t scheduler;
inline Index grid;
inline std::mt19937 chance;
inline std::string failed;
inline Task body;
inline u64 rounds, dawdling;

inline void wait_for(std::function<bool()> ready, const char* what) {
  while (!ready()) {
    self->ready = ready, self->waits = what;
    swapcontext(&self->context, &scheduler);
  }
}
inline int meet(Meeting& meeting, int due, const char* what) {  // which of the two turns' things were brought
  const u64 turn = meeting.turn;
  if (++meeting.arrived == due) meeting.arrived = 0, ++meeting.turn;
  else wait_for([&meeting, turn] { return meeting.turn != turn; }, what);
  return turn & 1;
}
inline int lane() { return self->number & 31; }
inline Meeting& warp() { return self->block->warps[self->number >> 5]; }
inline Meeting& group() { return self->block->groups[self->number >> 7]; }
inline u8* at(u32 address) {  // the block of a cluster is above the 18 bits of its memory, plus one
  Block& block = address >> 24 ? *blocks[(address >> 24) - 1] : *self->block;
  return block.shared + (address & 0xffffff);
}
template <class T> T read(u32 address) {
  T value;
  if (address % sizeof(T)) failed = "a read is not aligned";
  memcpy(&value, at(address), sizeof(T));
  return value;
}
template <class T> void write(u32 address, T value) {
  if (address % sizeof(T)) failed = "a write is not aligned";
  memcpy(at(address), &value, sizeof(T));
  self->block->writers[address / 16] = self->number, self->written.push_back(address / 16);
}
// A thread tells others what it has written: by any barrier.
inline void release() {
  Block& block = *self->block;
  for (u32 piece : self->written)
    if (block.writers[piece] == self->number) block.writers[piece] = RELEASED, block.released.push_back(piece);
  self->written.clear();
}
// A fence: a thread's own writes, those that it was told of, and copies that are there.
inline void show() {
  release();
  Block& block = *self->block;
  for (auto* pieces : {&block.released, &block.copied}) {
    for (u32 piece : *pieces)
      if (block.writers[piece] == RELEASED || block.writers[piece] == COPY) block.writers[piece] = SHOWN;
    pieces->clear();
  }
}
template <class T> T of_lane(T value, int source) {
  Meeting& own = warp();
  memcpy(own.brought[own.turn & 1][lane()], &value, sizeof(T));
  const int turn = meet(own, 32, "a shuffle");
  memcpy(&value, own.brought[turn][source], sizeof(T));
  return value;
}
inline void copy(u32 to, const u8* from, u32 bytes, bool some) {
  if (to % bytes || (some && (u64)from % bytes)) failed = "a copy is not aligned";
  u8* target = at(to);
  Block* block = self->block;
  auto land = [=] {
    if (some) memcpy(target, from, bytes); else memset(target, 0, bytes);
    block->writers[to / 16] = COPY, block->copied.push_back(to / 16);
  };
  if (chance() % 2) land();
  else self->copies.push_back(land);
}
inline void dawdle() {  // for some rounds, or none
  const u64 until = rounds + (chance() % 4 ? 0 : chance() % 512);
  ++dawdling;
  wait_for([until] { return rounds >= until; }, "its turn");
  --dawdling;
}
inline void dawdle_alone() { if (lane() == 0 && chance() % 8 == 0) dawdle(); }
inline void multiply(Task product) { self->products.back().push_back(product); }
inline void multiply_all_but(size_t groups) {
  auto& products = self->products;
  for (; products.size() > groups + 1; products.erase(products.begin()))
    for (Task& product : products.front()) product();
}
inline float of_bf16(u32 bits) {
  bits <<= 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline u16 to_bf16(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return value != value ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline float of_code(u32 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float value = exponent ? ldexpf(1 + mantissa / 8.f, exponent - 7) : ldexpf(mantissa / 8.f, -6);
  return code & 128 ? -value : value;
}
// An element of an operand: the 128-byte swizzle exchanges 16-byte pieces by the row of eight.
inline float element(u32 address) {
  address ^= (address >> 7 & 7) << 4;
  const Block& block = *self->block;
  if (block.writers[address / 16] != SHOWN) failed = "products read what no fence has shown them";
  u16 bits;
  memcpy(&bits, block.shared + address, 2);
  return of_bf16(bits);
}
inline u32 start(u64 descriptor) { return (descriptor & 0x3fff) << 4; }
inline u32 leading(u64 descriptor) { return (descriptor >> 16 & 0x3fff) << 4; }
inline u32 stride(u64 descriptor) { return (descriptor >> 32 & 0x3fff) << 4; }
inline float k_major(u64 own, int row, int k) {
  return element(start(own) + row / 8 * stride(own) + row % 8 * 128 + 2 * k);
}
inline float mn_major(u64 own, int k, int column) {
  return element(start(own) + column / 64 * leading(own) + k / 8 * stride(own) + k % 8 * 128 + column % 64 * 2);
}
// Where a thread's i-th of four results of eight columns is.
inline int row_of(int i) { return (self->number >> 5 & 3) * 16 + lane() / 4 + 8 * (i >> 1); }
inline int column_of(int i) { return 2 * (lane() & 3) + (i & 1); }

inline void matrices(u32 to, const u32 (&own)[4]) {
  Meeting& meeting = warp();
  memcpy(meeting.brought[meeting.turn & 1][lane()], own, 16);
  meeting.brought[meeting.turn & 1][32 + lane()][0] = to;
  const int turn = meet(meeting, 32, "stmatrix");
  u16 row[8];
  for (int column = 0; column < 8; ++column)
    row[column] = meeting.brought[turn][lane() % 8 * 4 + column / 2][lane() / 8] >> (16 * (column & 1));
  uint4 whole;
  memcpy(&whole, row, 16), write(to, whole);
}

inline void enter() {
  body();
  self->done = true;
  swapcontext(&self->context, &scheduler);
}
inline void go_on(Thread& thread) {
  thread.ready = nullptr, self = &thread;
  swapcontext(&scheduler, &thread.context);
}
inline bool land_some() {
  std::vector<Flight> now;
  now.swap(flights);
  for (Flight& flight : now) {
    if (chance() % 3) { flights.push_back(flight); continue; }
    Thread nobody;
    nobody.block = flight.block, self = &nobody;
    flight.land();
  }
  return !now.empty();
}
// A cluster's threads, to their ends; what they wait for where that does not come.
inline void run_cluster(int size, Index first) {
  cluster = Meeting(), blocks.clear(), threads.clear(), flights.clear(), rounds = dawdling = 0;
  for (int i = 0; i < size; ++i) {
    blocks.push_back(std::make_unique<Block>());
    Block& block = *blocks.back();
    block.index = {first.x + i, first.y, first.z};
    block.shared = (u8*)memset(aligned_alloc(1024, SHARED), 0xff, SHARED);
    for (int number = 0; number < THREADS; ++number) {
      threads.push_back(std::make_unique<Thread>());
      Thread& thread = *threads.back();
      thread.number = number, thread.block = &block, thread.stack.resize(48 << 10);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = thread.stack.size();
      thread.context.uc_link = &scheduler;
      makecontext(&thread.context, enter, 0);
    }
  }
  std::shuffle(threads.begin(), threads.end(), chance);
  for (bool left = true; left && failed.empty();) {
    bool moved = land_some() || dawdling > 0;
    left = false, ++rounds;
    for (auto& thread : threads) {
      if (thread->done) continue;
      left = true;
      if (thread->ready && !thread->ready()) continue;
      go_on(*thread), moved = true;
      if (thread->done && ++thread->block->gone == THREADS) memset(thread->block->shared, 0xff, SHARED);
    }
    if (moved || !left) continue;
    std::map<std::string, int> waiting;
    for (auto& thread : threads)
      if (!thread->done) ++waiting[thread->waits + " in group " + std::to_string(thread->number / 128)];
    for (auto& [what, count] : waiting) failed += std::to_string(count) + " threads wait for " + what + "; ";
  }
  for (auto& block : blocks) free(block->shared);
}

}  // namespace machine

#define threadIdx (Index{machine::self->number, 0, 0})
#define blockIdx (machine::self->block->index)
#define gridDim (machine::grid)

DEVICE u8* shared_memory() { return machine::self->block->shared; }
DEVICE u32 shared_address(const void* pointer) { return (u32)((const u8*)pointer - machine::self->block->shared); }
DEVICE float infinity() { return INFINITY; }
DEVICE float exp2_of(float x) { return exp2f(x); }
DEVICE float log2_of(float x) { return log2f(x); }
DEVICE float __uint_as_float(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
template <class T> DEVICE T __ldg(const T* from) { return *from; }
template <class T> DEVICE T __shfl_sync(u32, T value, int source) { return machine::of_lane(value, source & 31); }
template <class T> DEVICE T __shfl_xor_sync(u32, T value, int mask) { return machine::of_lane(value, machine::lane() ^ mask); }
DEVICE int of_warp(int x) { return __shfl_sync(~0u, x, 0); }
DEVICE int anew(int x) { return x; }
DEVICE u32 lanes_of(bool mine) {
  u32 lanes = 0;
  for (int i = 0; i < 32; ++i) lanes |= (u32)__shfl_sync(~0u, (int)mine, i) << i;
  return lanes;
}
DEVICE bool all_of_warp(bool mine) { return lanes_of(mine) == ~0u; }
DEVICE void __syncwarp() { machine::release(), machine::meet(machine::warp(), 32, "its warp"); }
template <int COUNT> DEVICE void give_registers() {}
template <int COUNT> DEVICE void take_registers() {}

DEVICE machine::Barrier& barrier_at(const u64& barrier) { return machine::self->block->barriers[shared_address(&barrier)]; }
DEVICE void barrier_init(u64& barrier, int count) { barrier_at(barrier) = {count, count, 0}; }
DEVICE void barriers_are_made() {}
DEVICE void arrive(u64& barrier) {
  machine::release();
  machine::Barrier& own = barrier_at(barrier);
  if (own.due == 0) machine::failed = "a barrier was not made";
  if (--own.pending == 0) own.pending = own.due, own.phase ^= 1;
}
DEVICE void arrive_once(u64& barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(barrier);
}
DEVICE void arrive_after_copies(u64& barrier) {
  auto land = [copies = machine::self->copies, &barrier] {
    for (auto& copy : copies) copy();
    arrive(barrier);
  };
  machine::self->copies.clear();
  machine::flights.push_back({machine::self->block, land});
}
DEVICE void wait(u64& barrier, int parity) {
  machine::Barrier* own = &barrier_at(barrier);
  machine::wait_for([=] { return own->phase != parity; }, "a barrier");
  machine::dawdle_alone();
}
DEVICE void meet(int number, int threads) {
  machine::release(), machine::meet(machine::self->block->numbered[number], threads, "bar.sync");
}
DEVICE void __syncthreads() { meet(0, machine::THREADS); }
DEVICE void cluster_meet() {
  machine::release();
  machine::meet(machine::cluster, machine::THREADS * machine::blocks.size(), "the cluster");
}
DEVICE void cluster_leave() { cluster_meet(); }

DEVICE u32 of_block(u32 address, int block) { return address | (u32)(block + 1) << 24; }
DEVICE float2 remote_float2(u32 address) { return machine::read<float2>(address); }
DEVICE float4 remote_float4(u32 address) { return machine::read<float4>(address); }
DEVICE void copy16(u32 to, const u8* from, bool some) { machine::copy(to, from, 16, some); }
DEVICE void copy8(u32 to, const u8* from, bool some) { machine::copy(to, from, 8, some); }
DEVICE void prefetch(const void*) {}
DEVICE void copies_commit() {
  machine::self->committed.push_back(machine::self->copies);
  machine::self->copies.clear();
}
template <int PENDING> DEVICE void copies_wait() {
  auto& groups = machine::self->committed;
  for (; groups.size() > PENDING; groups.erase(groups.begin()))
    for (auto& copy : groups.front()) copy();
  __syncwarp();
}
DEVICE uint2 load8(u32 a) { return machine::read<uint2>(a); }
DEVICE uint4 load16(u32 a) { return machine::read<uint4>(a); }
DEVICE void store4(u32 a, u32 x) { machine::write(a, x); }
DEVICE void store8(u32 a, u32 x, u32 y) { machine::write(a, uint2{x, y}); }
DEVICE void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) { machine::matrices(to, {a, b, c, d}); }

template <bool F16> DEVICE u32 pair(float low, float high) {
  return machine::to_bf16(low) | (u32)machine::to_bf16(high) << 16;
}
template <bool F16> DEVICE u32 of_bf16(u32 two) { return two; }
template <bool F16> DEVICE void of_codes(u32 codes, u32& low, u32& high) {
  low = pair<F16>(machine::of_code(codes & 255), machine::of_code(codes >> 8 & 255));
  high = pair<F16>(machine::of_code(codes >> 16 & 255), machine::of_code(codes >> 24));
}
template <bool F16> DEVICE u32 times(u32 x, u32 y) {
  return pair<F16>(machine::of_bf16(x) * machine::of_bf16(y), machine::of_bf16(x >> 16) * machine::of_bf16(y >> 16));
}

DEVICE void products_begin() {}
DEVICE void products_commit() {
  machine::self->products.emplace_back();
  if (machine::chance() % 2) machine::multiply_all_but(0);
}
template <int PENDING> DEVICE void products_wait() {
  machine::dawdle();
  machine::multiply_all_but(PENDING);
  machine::meet(machine::group(), 128, "products");
}
DEVICE void shared_for_products() { machine::show(); }
DEVICE u64 descriptor(u32 address, int leading, int stride) {
  return (u64)(address >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32;
}
template <bool F16> DEVICE void score(float (&s)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add) {
  machine::Meeting& own = machine::group();
  const u32 fragment[4] = {a0, a1, a2, a3};
  memcpy(own.brought[own.turn & 1][machine::self->number & 127], fragment, 16);
  const int turn = machine::meet(own, 128, "products"), first = machine::self->number & 96;
  std::array<u32, 128> fragments;  // of the warp
  memcpy(fragments.data(), own.brought[turn][first], 512);
  machine::multiply([=, &s] {
    for (int i = 0; i < 32; ++i) {
      const int row = machine::row_of(i & 3) % 16, column = i / 4 * 8 + machine::column_of(i & 3);
      float sum = add ? s[i] : 0;
      for (int k = 0; k < 16; ++k) {
        const u32 two = fragments[(row % 8 * 4 + k % 8 / 2) * 4 + row / 8 + k / 8 * 2];
        sum += machine::of_bf16(two >> (16 * (k & 1)) & 0xffff) * machine::k_major(b, column, k);
      }
      s[i] = sum;
    }
  });
}
template <bool F16> DEVICE void score_shared(float (&s)[32], u64 a, u64 b) {
  machine::multiply([=, &s] {
    for (int i = 0; i < 32; ++i) {
      const int column = i / 4 * 8 + machine::column_of(i & 3);
      float sum = s[i];
      for (int k = 0; k < 16; ++k) sum += machine::k_major(a, machine::row_of(i & 3), k) * machine::k_major(b, column, k);
      s[i] = sum;
    }
  });
}
template <bool F16, int FIRST> DEVICE void sum_128(float (&o)[128], u64 a, u64 b) {
  machine::multiply([=, &o] {
    for (int i = 0; i < 64; ++i) {
      const int column = i / 4 * 8 + machine::column_of(i & 3);
      for (int k = 0; k < 16; ++k)
        o[FIRST + i] += machine::k_major(a, machine::row_of(i & 3), k) * machine::mn_major(b, k, column);
    }
  });
}
