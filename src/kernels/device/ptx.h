// SPDX-License-Identifier: Apache-2.0
// PTX instructions as functions (PTX ISA 7.0: sm_80 and later).
#pragma once

#include <cstdint>

#define FLASHPLAN_DEVICE __device__ __forceinline__

namespace flashplan::device {

/// threadIdx.x, read through a shuffle. Then the compiler does not read the special register again
/// at each use, which is slow. It also does not compute values from the index long before their
/// use, which would hold registers.
FLASHPLAN_DEVICE int thread_index() {
  const uint32_t index = threadIdx.x;
  uint32_t shuffled;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;\n"
               : "=r"(shuffled)
               : "r"(index), "r"(index & 31));
  return static_cast<int>(shuffled & 1023);  // tells nvcc that it is >= 0: divisions become shifts
}

/// Returns x as a value that the compiler knows nothing about. Values that follow from it are
/// computed where they are used, and hold no registers elsewhere.
FLASHPLAN_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
FLASHPLAN_DEVICE const unsigned char* opaque(const unsigned char* x) {
  asm volatile("" : "+l"(x));
  return x;
}

/// Lets the next kernel of the stream begin before this kernel ends, if the next kernel is launched
/// with programmatic dependent launch. The next kernel's CTAs start as CTAs of this kernel end.
FLASHPLAN_DEVICE void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}
/// If this kernel was launched before the earlier kernels of the stream had ended (programmatic
/// dependent launch), waits until they have ended and their results are in memory. Until then only
/// the plan may be read, and nothing written.
FLASHPLAN_DEVICE void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

FLASHPLAN_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// The cp_async functions start a copy to shared memory. Copies of 16 bytes bypass the L1 cache.
FLASHPLAN_DEVICE void cp_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from)
               : "memory");
}
/// Copies the first `num_bytes` of 16 bytes, and writes zeros for the others. Unlike cp_async_16()
/// it does not ask for the whole 128-byte line in the L2 cache.
FLASHPLAN_DEVICE void cp_async_16_padded(uint32_t to, const void* from, int num_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(num_bytes)
               : "memory");
}
FLASHPLAN_DEVICE void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from) : "memory");
}
/// Copies 4 bytes if `copies` is true, else writes zeros.
FLASHPLAN_DEVICE void cp_async_4_if(bool copies, uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from),
               "r"(copies ? 4 : 0)
               : "memory");
}
FLASHPLAN_DEVICE void cp_async_8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\n" ::"r"(to), "l"(from) : "memory");
}

FLASHPLAN_DEVICE void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address));
}

/// Ends a group of this thread's copies.
FLASHPLAN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// Waits until all groups but the latest `kPending` groups have arrived.
template <int kPending>
FLASHPLAN_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// Waits until all copies of this thread are complete, whether they are in a group or not.
FLASHPLAN_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

/// Loads four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix
/// i / 8.
FLASHPLAN_DEVICE void ldmatrix(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}
FLASHPLAN_DEVICE void ldmatrix_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}

/// Transposes an 8 x 8 matrix of 16-bit elements. Each lane holds two neighbouring elements of a
/// row.
FLASHPLAN_DEVICE uint32_t transpose(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(pair));
  return transposed;
}

FLASHPLAN_DEVICE uint32_t load_shared_2(uint32_t address) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(value) : "r"(address) : "memory");
  return value;
}
FLASHPLAN_DEVICE uint32_t load_shared_4(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(address) : "memory");
  return value;
}
/// Loads a word anew at each call, because other warps may change it meanwhile.
FLASHPLAN_DEVICE uint32_t load_shared_relaxed_4(uint32_t address) {
  uint32_t value;
  asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(address) : "memory");
  return value;
}
FLASHPLAN_DEVICE uint2 load_shared_8(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address)
               : "memory");
  return value;
}
FLASHPLAN_DEVICE uint4 load_shared_16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
FLASHPLAN_DEVICE const unsigned char* load_shared_pointer(uint32_t address) {
  const unsigned char* value;
  asm volatile("ld.shared.u64 %0, [%1];\n" : "=l"(value) : "r"(address));
  return value;
}
FLASHPLAN_DEVICE void load_shared_pointers(uint32_t address, const unsigned char*& first,
                                           const unsigned char*& second) {
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];\n" : "=l"(first), "=l"(second) : "r"(address));
}
FLASHPLAN_DEVICE void store_shared_pointer(uint32_t address, const unsigned char* value) {
  asm volatile("st.shared.u64 [%0], %1;\n" ::"r"(address), "l"(value) : "memory");
}
FLASHPLAN_DEVICE void store_shared_pointers(uint32_t address, const unsigned char* first,
                                            const unsigned char* second) {
  asm volatile("st.shared.v2.u64 [%0], {%1, %2};\n" ::"r"(address), "l"(first), "l"(second)
               : "memory");
}
/// Stores the low 16 bits.
FLASHPLAN_DEVICE void store_shared_2(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(address), "h"(static_cast<uint16_t>(value))
               : "memory");
}
/// Atomically adds to a word of shared memory, and returns the value before the addition.
FLASHPLAN_DEVICE uint32_t add_shared(uint32_t address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;\n"
               : "=r"(before)
               : "r"(address), "r"(value)
               : "memory");
  return before;
}
FLASHPLAN_DEVICE void store_shared_4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}
FLASHPLAN_DEVICE void store_shared_8(uint32_t address, uint2 value) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(address), "r"(value.x), "r"(value.y)
               : "memory");
}
FLASHPLAN_DEVICE void store_shared_16(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

FLASHPLAN_DEVICE uint32_t load_global_4(const void* from) {
  uint32_t value;
  asm volatile("ld.global.u32 %0, [%1];\n" : "=r"(value) : "l"(from));
  return value;
}

FLASHPLAN_DEVICE uint2 load_global_8(const void* from) {
  uint2 value;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];\n" : "=r"(value.x), "=r"(value.y) : "l"(from));
  return value;
}

/// Loads memory that other CTAs wrote, so it bypasses the L1 cache. Returns `otherwise` if not
/// `valid`. It has no branch, so that many loads can be in flight.
FLASHPLAN_DEVICE float load_if(bool valid, const float* from, float otherwise) {
  float x = otherwise;
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.b32 valid, %2, 0;\n@valid ld.global.cg.f32 %0, [%1];\n}\n"
      : "+f"(x)
      : "l"(from), "r"(static_cast<int>(valid)));
  return x;
}
FLASHPLAN_DEVICE float4 load_4_if(bool valid, const float* from, float otherwise) {
  float4 x = {otherwise, otherwise, otherwise, otherwise};
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.b32 valid, %5, 0;\n"
      "@valid ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "l"(from), "r"(static_cast<int>(valid)));
  return x;
}

/// Loads 16 bytes that are used once, and do not stay in the L1 cache.
FLASHPLAN_DEVICE uint4 load_once_16(const void* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

constexpr float kLn2 = 0.69314718055994531F;
constexpr float kLog2e = 1.4426950408889634F;

FLASHPLAN_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
FLASHPLAN_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
/// cos_fast() and sin_fast() have an absolute error of about 5e-7 in [-pi, pi].
FLASHPLAN_DEVICE float cos_fast(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
FLASHPLAN_DEVICE float sin_fast(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
FLASHPLAN_DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
/// tanh(x) with an absolute error of about 2e-7. The instruction tanh.approx has an error of 5e-4,
/// too much for a capped logit.
FLASHPLAN_DEVICE float tanh_fast(float x) {
  return 1.0F - 2.0F * reciprocal_fast(1.0F + exp2_fast(x * (2.0F * kLog2e)));
}

/// Returns the pointer that lane `lane` passes.
FLASHPLAN_DEVICE const unsigned char* shuffled_pointer(const unsigned char* pointer, int lane) {
  return reinterpret_cast<const unsigned char*>(
      __shfl_sync(0xffffffffU, reinterpret_cast<unsigned long long>(pointer), lane));
}

/// Transposes 4 x 4 matrices of 32-bit words. Four neighbouring lanes, the first a multiple of 4,
/// have the rows of a matrix. All lanes of the warp call it.
FLASHPLAN_DEVICE uint4 transposed_in_four_lanes(uint4 words) {
  const auto exchange = [](uint32_t& first, uint32_t& second, int step) {
    const bool is_upper = (threadIdx.x & static_cast<unsigned>(step)) != 0;
    const uint32_t other = __shfl_xor_sync(0xffffffffU, is_upper ? first : second, step);
    first = is_upper ? other : first;
    second = is_upper ? second : other;
  };
  exchange(words.x, words.y, 1);
  exchange(words.z, words.w, 1);
  exchange(words.x, words.z, 2);
  exchange(words.y, words.w, 2);
  return words;
}

/// Waits for `threads` threads at barrier `id` of the CTA.
FLASHPLAN_DEVICE void barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
/// Waits as barrier_wait() does, and returns whether `x` is true for any of these threads.
FLASHPLAN_DEVICE bool barrier_any(int id, int threads, bool x) {
  int result;
  asm volatile(
      "{\n.reg .pred x, any;\nsetp.ne.b32 x, %1, 0;\nbar.red.or.pred any, %2, %3, x;\n"
      "selp.b32 %0, 1, 0, any;\n}\n"
      : "=r"(result)
      : "r"(static_cast<int>(x)), "r"(id), "r"(threads)
      : "memory");
  return result != 0;
}

FLASHPLAN_DEVICE float infinity() { return __int_as_float(0x7f800000); }

/// Adds to a counter with acquire and release semantics, and returns the value before. With a
/// barrier before and after it, this also orders the accesses of the CTA's other threads.
FLASHPLAN_DEVICE int32_t arrive(int32_t* counter, int32_t amount = 1) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(counter), "r"(amount)
               : "memory");
  return before;
}

/// Loads a value that other CTAs change. It orders no other accesses.
FLASHPLAN_DEVICE int32_t load_relaxed(const int32_t* from) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return value;
}

/// Loads a value that other CTAs change. All later accesses to memory come after it.
FLASHPLAN_DEVICE int32_t load_acquire(const int32_t* from) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return value;
}

/// Atomically replaces *value by `next` if it equals `last`, and returns whether it did. It orders
/// no other accesses to memory.
FLASHPLAN_DEVICE bool compare_and_swap(int32_t* value, int32_t last, int32_t next) {
  int32_t before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;\n"
               : "=r"(before)
               : "l"(value), "r"(last), "r"(next)
               : "memory");
  return before == last;
}

/// Adds to a counter with release semantics. With a barrier before it, all earlier accesses of the
/// CTA come before the addition.
FLASHPLAN_DEVICE void add_release(int32_t* counter, int32_t amount) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(counter), "r"(amount) : "memory");
}

/// Stores a value with release semantics. With a barrier before it, all earlier accesses of the CTA
/// come before the store.
FLASHPLAN_DEVICE void store_release(int32_t* to, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(to), "r"(value) : "memory");
}

}  // namespace flashplan::device
