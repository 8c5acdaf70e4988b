// What sm_90 adds to the emulated device: barriers that count bytes, copies by TMA, products of warpgroups. Copies and
// products take effect at random times between the earliest and the latest that the rules allow. The model has no fences
// between ordinary and asynchronous accesses of shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fovea::emulation {

// Called by the scheduler.
void begin_cta_of_hopper();
void end_cta_of_hopper();
void end_thread_of_hopper();
/// Performs one of the copies in flight; false when there is none.
bool step_of_tma();

void mbarrier_init(uint32_t barrier, int arrivals);
void mbarrier_arrive(uint32_t barrier, uint32_t expected_bytes);
/// The address of what lies at `address` in CTA `rank` of the cluster, for the functions with `remote` in their names.
uint32_t remote_address(uint32_t address, int rank);
void mbarrier_arrive_remote(uint32_t remote_barrier);
void store_remote(uint32_t remote_to, uint32_t x);
/// Of stores that the barrier counts: so many bytes are there.
void mbarrier_complete_remote(uint32_t remote_barrier, uint32_t bytes);
void mbarrier_wait(uint32_t barrier, uint32_t parity);

/// A tensor map as this device's cuTensorMapEncodeTiled writes it.
struct TensorMap {
  static constexpr int kMostRank = 5;
  uint64_t address;
  uint64_t strides[kMostRank];  ///< bytes; of dimension 0 the size of an element
  uint32_t sizes[kMostRank], box[kMostRank];
  uint8_t rank, element_bytes, swizzle;
  bool is_bf16;  ///< of elements of 16 bits
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

/// cuTensorMapEncodeTiled of this device, by the rules of CUDA's documentation. It supports elements of 16 and 8 bits and the
/// Swizzles of 32, 64 and 128 bytes only.
CUresult tensor_map_encode_tiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address,
                                 const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                 const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
void tma_load(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int* coordinates, int rank);
/// The same for each CTA of the cluster in the mask `ctas`: at the same addresses, counted by the barrier of each.
void tma_load_multicast(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int* coordinates,
                        int rank, uint32_t ctas);
void tma_store(const CUtensorMap& map, uint32_t from, const int* coordinates, int rank);
/// The same, but elements are added.
void tma_add(const CUtensorMap& map, uint32_t from, const int* coordinates, int rank);
void tma_store_commit();
void tma_store_wait_read(int pending);
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
/// In the groups of tma_store_commit() and tma_store_wait_read().
void bulk_add_f32(float* to, uint32_t from, uint32_t bytes);
void bulk_store_f32(float* to, uint32_t from, uint32_t bytes);

enum class WgmmaElement : uint8_t { kBF16, kF16, kE4M3 };
/// D (64 x n) (+)= A (64 x k) B (k x n) of a warpgroup, k being 16, or 32 of 8 bits; this warp's 16 rows of it.
struct WgmmaProduct {
  float* d = nullptr;           ///< n / 2
  const uint32_t* a = nullptr;  ///< 4 registers, or null: by descriptor
  uint64_t a_descriptor = 0, b_descriptor = 0;
  int n = 0;
  bool accumulate = false, b_mn_major = false;
  WgmmaElement element = WgmmaElement::kBF16;
};
void wgmma(const WgmmaProduct& product);
void wgmma_commit();
void wgmma_wait(int pending);

}  // namespace fovea::emulation
