#include "emulation/hopper.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "core/dtype.hpp"
#include "emulation/scheduler.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::emulation {
namespace {

struct MBarrier {
  int expected = 0, arrived = 0;
  int64_t bytes = 0;   ///< expected and not yet arrived
  uint32_t phase = 0;  ///< the phase whose arrivals are counted now
};

struct Load {
  int cta;  ///< of the cluster
  uint32_t to, barrier;
  TensorMap map;
  std::array<int, TensorMap::kMostRank> at;
  const void* bulk = nullptr;  ///< not a box: so many bytes from here
  uint32_t bytes = 0;
};
struct Store {
  uint32_t from;
  TensorMap map;
  std::array<int, TensorMap::kMostRank> at;
  bool adds = false;      ///< a box whose elements, of 16 bits, are added
  float* sums = nullptr;  ///< not a box: so many bytes of float32 are added, or stored, here
  uint32_t bytes = 0;
  bool replaces = false;
};
/// Work of one issuer, in groups. Entries behind the last of `ends` are not committed.
template <class Work>
struct Groups {
  std::vector<Work> work;
  std::vector<size_t> ends;

  template <class Perform>
  void wait(int pending, Perform&& perform) {
    if (static_cast<int>(ends.size()) <= pending) return;
    const size_t groups = ends.size() - static_cast<size_t>(pending);
    const size_t done = ends[groups - 1];
    for (size_t i = 0; i < done; ++i) perform(work[i]);
    work.erase(work.begin(), work.begin() + static_cast<std::ptrdiff_t>(done));
    ends.erase(ends.begin(), ends.begin() + static_cast<std::ptrdiff_t>(groups));
    for (size_t& end : ends) end -= done;
  }
  /// Performs all of it now; the groups remain, empty.
  template <class Perform>
  void hurry(Perform&& perform) {
    for (const Work& one : work) perform(one);
    work.clear();
    for (size_t& end : ends) end = 0;
  }
};
using WarpProduct = std::array<WgmmaProduct, kLanes>;

struct Hopper {
  std::map<std::pair<int, uint32_t>, MBarrier> barriers;  // by CTA and address
  std::vector<Load> loads;
  std::map<std::pair<int, unsigned>, Groups<Store>> stores;          // by CTA and thread
  std::map<std::pair<int, unsigned>, Groups<WarpProduct>> products;  // by CTA and warp
};
Hopper& hopper() {
  thread_local Hopper state;
  return state;
}

MBarrier& barrier_at(uint32_t address, const char* what) {
  shared_bytes(address, 8, 8, what);
  const auto found = hopper().barriers.find({cta_rank(), without_rank(address)});
  if (found == hopper().barriers.end()) fail("%s: no barrier was made at shared address %#x", what, address);
  return found->second;
}
void complete(MBarrier& b) {
  if (b.arrived < b.expected || b.bytes != 0) return;
  b.arrived = 0;
  b.phase ^= 1;
}

/// Calls `visit(shared offset of a 16-byte chunk, address or null outside the tensor, bytes inside)`.
template <class Visit>
void for_each_chunk(const TensorMap& map, const std::array<int, TensorMap::kMostRank>& at, Visit&& visit) {
  const uint32_t chunk = tile::kChunkBytes / map.element_bytes;
  uint32_t index[TensorMap::kMostRank] = {};
  uint32_t offset = 0;
  for (;;) {
    uint64_t address = map.address;
    bool inside = true;
    for (int r = 0; r < map.rank; ++r) {
      const int64_t x = int64_t{at[static_cast<size_t>(r)]} + index[r];
      inside = inside && x >= 0 && x < map.sizes[r];
      address += static_cast<uint64_t>(x) * map.strides[r];
    }
    uint32_t elements = 0;
    if (inside) elements = std::min<uint32_t>(chunk, map.sizes[0] - static_cast<uint32_t>(at[0]) - index[0]);
    visit(offset, inside ? reinterpret_cast<unsigned char*>(address) : nullptr, elements * map.element_bytes);
    offset += tile::kChunkBytes;
    index[0] += chunk;
    int r = 0;
    while (index[r] >= map.box[r]) {
      index[r] = 0;
      if (++r == map.rank) return;
      ++index[r];
    }
  }
}
uint32_t swizzled(const TensorMap& map, uint32_t address) {
  return tile::swizzled_address(static_cast<tile::SwizzleMode>(map.swizzle), address);
}
int64_t bytes_of_box(const TensorMap& map) {
  int64_t bytes = map.element_bytes;
  for (int r = 0; r < map.rank; ++r) bytes *= map.box[r];
  return bytes;
}

void perform(const Load& load) {
  if (load.bulk != nullptr) {
    std::memcpy(shared_bytes(load.to, load.bytes, 16, "cp.async.bulk"), load.bulk, load.bytes);
    MBarrier& barrier = barrier_at(load.barrier, "cp.async.bulk");
    barrier.bytes -= load.bytes;
    complete(barrier);
    return;
  }
  for_each_chunk(load.map, load.at, [&](uint32_t offset, const unsigned char* from, uint32_t bytes) {
    unsigned char* to =
        shared_bytes(swizzled(load.map, load.to + offset), tile::kChunkBytes, tile::kChunkBytes, "TMA");
    std::memset(to, 0, tile::kChunkBytes);
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
  MBarrier& b = barrier_at(load.barrier, "TMA");
  b.bytes -= bytes_of_box(load.map);
  complete(b);
}
template <class T>
void add_element(unsigned char* to, const unsigned char* from) {
  T sum, x;
  std::memcpy(&sum, to, sizeof sum);
  std::memcpy(&x, from, sizeof x);
  sum = from_float<T>(to_float(sum) + to_float(x));
  std::memcpy(to, &sum, sizeof sum);
}

void perform(const Store& store) {
  if (store.sums != nullptr) {
    const unsigned char* from = shared_bytes(store.from, store.bytes, 16, "cp.reduce.async.bulk");
    for (uint32_t i = 0; i < store.bytes / 4; ++i) {
      float x;
      std::memcpy(&x, from + 4 * i, 4);
      store.sums[i] = store.replaces ? x : store.sums[i] + x;
    }
    return;
  }
  for_each_chunk(store.map, store.at, [&](uint32_t offset, unsigned char* to, uint32_t bytes) {
    const unsigned char* from = shared_bytes(swizzled(store.map, store.from + offset), tile::kChunkBytes,
                                             tile::kChunkBytes, store.adds ? "TMA reduction" : "TMA store");
    if (!store.adds) {
      if (bytes > 0) std::memcpy(to, from, bytes);
      return;
    }
    for (uint32_t i = 0; i < bytes; i += 2) {
      if (store.map.is_bf16) {
        add_element<Bf16>(to + i, from + i);
      } else {
        add_element<F16>(to + i, from + i);
      }
    }
  });
}

TensorMap decode(const CUtensorMap& map, int rank, uint32_t shared, const char* what) {
  TensorMap decoded;
  std::memcpy(&decoded, &map, sizeof decoded);
  if (decoded.rank != rank) fail("%s of %d dimensions by a map of %d", what, rank, decoded.rank);
  const auto atom =
      static_cast<uint32_t>(tile::swizzle_atom_bytes(static_cast<tile::SwizzleMode>(decoded.swizzle)));
  if (shared % atom != 0)
    fail("%s: shared address %#x is no multiple of %u, the swizzle's atom", what, shared, atom);
  return decoded;
}

template <class T>
float element_as(const unsigned char* bytes) {
  T x;
  std::memcpy(&x, bytes, sizeof x);
  return to_float(x);
}
float element(const unsigned char* bytes, WgmmaElement type) {
  switch (type) {
    case WgmmaElement::kF16:
      return element_as<F16>(bytes);
    case WgmmaElement::kE4M3:
      return element_as<E4M3>(bytes);
    case WgmmaElement::kBF16:
      break;
  }
  return element_as<Bf16>(bytes);
}

tile::WgmmaDescriptor descriptor(uint64_t bits) {
  const auto field = [bits](int at) { return static_cast<uint32_t>(bits >> at & 0x3fffu) << 4; };
  return {field(0), field(16), field(32), static_cast<tile::SwizzleMode>(bits >> 62),
          static_cast<int>(bits >> 49 & 7u)};
}

/// The 16 rows of a warp.
void perform(const WarpProduct& product, unsigned warp) {
  const WgmmaProduct& op = product[0];
  const int first_row = static_cast<int>(warp % 4) * 16;
  const int bytes = op.element == WgmmaElement::kE4M3 ? 1 : 2;
  const int size_k = 32 / bytes, in_chunk = tile::kChunkBytes / bytes;  // two chunks are a step
  constexpr int kMostK = 32, kMostN = 256;
  float a[16][kMostK], b[kMostK][kMostN];
  const auto read = [&](uint32_t address, const char* what, auto&& to) {
    const unsigned char* from = shared_bytes(address, tile::kChunkBytes, tile::kChunkBytes, what);
    for (int e = 0; e < in_chunk; ++e) to(e) = element(from + bytes * e, op.element);
  };
  for (int r = 0; r < 16 && op.a == nullptr; ++r) {
    for (int chunk = 0; chunk < 2; ++chunk) {
      read(tile::wgmma_k_major_address(descriptor(op.a_descriptor), first_row + r, chunk), "wgmma: A",
           [&](int e) -> float& { return a[r][chunk * in_chunk + e]; });
    }
  }
  for (int l = 0; l < kLanes && op.a != nullptr; ++l) {
    for (int reg = 0; reg < 4; ++reg) {
      for (int i = 0; i < 4 / bytes; ++i) {
        const tile::Coord at =
            bytes == 1 ? tile::WgmmaOperandA8::at(l, reg, i) : tile::WgmmaOperandA::at(l, reg, i);
        const uint32_t bits = product[static_cast<size_t>(l)].a[reg] >> (8 * bytes * i);
        a[at.row][at.col] = element(reinterpret_cast<const unsigned char*>(&bits), op.element);
      }
    }
  }
  const tile::WgmmaDescriptor db = descriptor(op.b_descriptor);
  if (op.b_mn_major) {
    for (int k = 0; k < size_k; ++k) {
      for (int chunk = 0; chunk < op.n / in_chunk; ++chunk)
        read(tile::wgmma_mn_major_address(db, k, chunk), "wgmma: B",
             [&](int e) -> float& { return b[k][chunk * in_chunk + e]; });
    }
  } else {
    for (int n = 0; n < op.n; ++n) {
      for (int chunk = 0; chunk < 2; ++chunk)
        read(tile::wgmma_k_major_address(db, n, chunk), "wgmma: B",
             [&](int e) -> float& { return b[chunk * in_chunk + e][n]; });
    }
  }
  float d[16][kMostN] = {};
  for (int r = 0; r < 16; ++r) {
    for (int k = 0; k < size_k; ++k) {
      for (int n = 0; n < op.n; ++n) d[r][n] += a[r][k] * b[k][n];
    }
  }
  for (int l = 0; l < kLanes; ++l) {
    float* to = product[static_cast<size_t>(l)].d;
    for (int reg = 0; reg < op.n / 2; ++reg) {
      const tile::Coord at = tile::WgmmaAccumulator::at(l, reg);
      to[reg] = (op.accumulate ? to[reg] : 0.0f) + d[at.row][at.col];
    }
  }
}

}  // namespace

void begin_cta_of_hopper() {
  hopper() = {};
}
void end_cta_of_hopper() {
  if (!hopper().loads.empty()) fail("ends with %zu copies by TMA under way", hopper().loads.size());
}
void end_thread_of_hopper() {
  const auto found = hopper().stores.find({cta_rank(), position.thread.x});
  if (found != hopper().stores.end() && !found->second.work.empty())
    fail("a thread ends before TMA has read what it stores");
}

bool step_of_tma() {
  std::vector<Load>& loads = hopper().loads;
  if (loads.empty()) return false;
  const size_t chosen = random_below(static_cast<uint32_t>(loads.size()));
  const Load load = loads[chosen];
  loads.erase(loads.begin() + static_cast<std::ptrdiff_t>(chosen));
  in_cta(load.cta, [&] { perform(load); });
  return true;
}

void mbarrier_init(uint32_t barrier, int arrivals) {
  shared_bytes(barrier, 8, 8, "mbarrier.init");
  if (arrivals <= 0) fail("mbarrier.init for %d arrivals", arrivals);
  hopper().barriers[{cta_rank(), without_rank(barrier)}] = {arrivals, 0, 0, 0};
}
void mbarrier_arrive(uint32_t barrier, uint32_t expected_bytes) {
  MBarrier& b = barrier_at(barrier, "mbarrier.arrive");
  if (b.arrived == b.expected)
    fail("mbarrier.arrive at shared address %#x: more than %d arrivals of a phase", barrier, b.expected);
  b.bytes += expected_bytes;
  ++b.arrived;
  complete(b);
  interruption();
}
uint32_t remote_address(uint32_t address, int rank) {
  return without_rank(address) | static_cast<uint32_t>(rank) << kRankBit;
}
void mbarrier_arrive_remote(uint32_t remote_barrier) {
  in_cta(static_cast<int>(remote_barrier >> kRankBit), [&] {
    MBarrier& b = barrier_at(without_rank(remote_barrier), "mbarrier.arrive.shared::cluster");
    if (b.arrived == b.expected)
      fail("mbarrier.arrive at shared address %#x: more than %d arrivals of a phase", remote_barrier,
           b.expected);
    ++b.arrived;
    complete(b);
  });
  interruption();
}
void mbarrier_complete_remote(uint32_t remote_barrier, uint32_t bytes) {
  in_cta(static_cast<int>(remote_barrier >> kRankBit), [&] {
    MBarrier& b = barrier_at(without_rank(remote_barrier), "st.async");
    b.bytes -= bytes;
    complete(b);
  });
}
void store_remote(uint32_t remote_to, uint32_t x) {
  interruption();
  in_cta(static_cast<int>(remote_to >> kRankBit), [&] {
    std::memcpy(shared_bytes(without_rank(remote_to), sizeof x, sizeof x, "st.shared::cluster"), &x,
                sizeof x);
  });
}
void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  if (parity > 1) fail("mbarrier.try_wait for parity %u", parity);
  struct Wait {
    const MBarrier* barrier;
    uint32_t parity;
  } wait{&barrier_at(barrier, "mbarrier.try_wait"), parity};
  wait_until(
      [](const void* of) {
        const auto& w = *static_cast<const Wait*>(of);
        return w.barrier->phase != w.parity;
      },
      &wait, "mbarrier.try_wait");
}

CUresult tensor_map_encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                 const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                 const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap tensor{};
  const bool of_8_bits = type == CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const bool of_16_bits = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const uint32_t element_bytes = of_8_bits ? 1 : 2;
  if ((!of_8_bits && !of_16_bits) || rank < 1 || rank > TensorMap::kMostRank ||
      swizzle == CU_TENSOR_MAP_SWIZZLE_NONE)
    return CUDA_ERROR_INVALID_VALUE;
  tensor.address = reinterpret_cast<uint64_t>(address);
  if (address == nullptr || tensor.address % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  const tile::SwizzleMode mode = swizzle == CU_TENSOR_MAP_SWIZZLE_32B   ? tile::SwizzleMode::k32
                                 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? tile::SwizzleMode::k64
                                                                        : tile::SwizzleMode::k128;
  const uint32_t row_bytes = box[0] * element_bytes;
  if (row_bytes % 16 != 0 || row_bytes > static_cast<uint32_t>(tile::swizzle_row_bytes(mode)))
    return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t r = 0; r < rank; ++r) {
    const cuuint64_t stride = r == 0 ? element_bytes : strides[r - 1];
    if (sizes[r] == 0 || sizes[r] > uint64_t{1} << 32 || box[r] == 0 || box[r] > 256 || steps[r] != 1 ||
        (r > 0 && (stride % 16 != 0 || stride >= uint64_t{1} << 40))) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    tensor.strides[r] = stride;
    tensor.sizes[r] = static_cast<uint32_t>(sizes[r]);
    tensor.box[r] = box[r];
  }
  tensor.rank = static_cast<uint8_t>(rank);
  tensor.element_bytes = static_cast<uint8_t>(element_bytes);
  tensor.is_bf16 = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  tensor.swizzle = static_cast<uint8_t>(mode);
  std::memcpy(map, &tensor, sizeof tensor);
  return CUDA_SUCCESS;
}

void tma_load(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int* coordinates, int rank) {
  tma_load_multicast(to, map, barrier, coordinates, rank, 1u << cta_rank());
}
void tma_load_multicast(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int* coordinates,
                        int rank, uint32_t ctas) {
  barrier_at(barrier, "TMA");
  for (int cta = 0; ctas >> cta != 0; ++cta) {
    if ((ctas >> cta & 1) == 0) continue;
    Load load{cta, without_rank(to), without_rank(barrier), decode(map, rank, to, "TMA"), {}};
    std::copy_n(coordinates, rank, load.at.begin());
    hopper().loads.push_back(load);
  }
  interruption();
}
namespace {
/// Now or at the wait, as it comes.
void issue(const Store& store) {
  if (random_below(2) == 0) {
    perform(store);
  } else {
    hopper().stores[{cta_rank(), position.thread.x}].work.push_back(store);
  }
}
}  // namespace

void tma_store(const CUtensorMap& map, uint32_t from, const int* coordinates, int rank) {
  Store store{from, decode(map, rank, from, "TMA store"), {}};
  std::copy_n(coordinates, rank, store.at.begin());
  issue(store);
}
void tma_add(const CUtensorMap& map, uint32_t from, const int* coordinates, int rank) {
  Store store{from, decode(map, rank, from, "TMA reduction"), {}};
  store.adds = true;
  std::copy_n(coordinates, rank, store.at.begin());
  issue(store);
}
namespace {
void issue_bulk(float* to, uint32_t from, uint32_t bytes, bool replaces) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || bytes % 16 != 0)
    fail("cp.async.bulk or cp.reduce.async.bulk: not in steps of 16 bytes");
  Store store{from, {}, {}};
  store.sums = to;
  store.bytes = bytes;
  store.replaces = replaces;
  issue(store);
}
}  // namespace
void bulk_add_f32(float* to, uint32_t from, uint32_t bytes) {
  issue_bulk(to, from, bytes, false);
}
void bulk_store_f32(float* to, uint32_t from, uint32_t bytes) {
  issue_bulk(to, from, bytes, true);
}
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0)
    fail("cp.async.bulk: not in steps of 16 bytes");
  barrier_at(barrier, "cp.async.bulk");
  Load load{cta_rank(), to, barrier, {}, {}};
  load.bulk = from;
  load.bytes = bytes;
  hopper().loads.push_back(load);
  interruption();
}
void tma_store_commit() {
  Groups<Store>& mine = hopper().stores[{cta_rank(), position.thread.x}];
  mine.ends.push_back(mine.work.size());
}
void tma_store_wait_read(int pending) {
  hopper().stores[{cta_rank(), position.thread.x}].wait(pending, [](const Store& store) { perform(store); });
  interruption();
}

void wgmma(const WgmmaProduct& product) {
  const unsigned warp = position.thread.x / kLanes;
  collective<char>("wgmma", product, [warp](const WgmmaProduct* in, char*) {
    WarpProduct all;
    for (size_t l = 0; l < kLanes; ++l) {
      all[l] = in[l];
      if (in[l].a_descriptor != in[0].a_descriptor || in[l].b_descriptor != in[0].b_descriptor)
        fail("wgmma: descriptors differ between lanes");
    }
    Groups<WarpProduct>& mine = hopper().products[{cta_rank(), warp}];
    mine.work.push_back(all);
    if (random_below(2) == 0) mine.hurry([warp](const WarpProduct& one) { perform(one, warp); });
  });
}
void wgmma_commit() {
  const unsigned warp = position.thread.x / kLanes;
  collective<char>("wgmma.commit_group", char{}, [warp](const char*, char*) {
    Groups<WarpProduct>& mine = hopper().products[{cta_rank(), warp}];
    mine.ends.push_back(mine.work.size());
  });
}
void wgmma_wait(int pending) {
  const unsigned warp = position.thread.x / kLanes;
  collective<char>("wgmma.wait_group", char{}, [=](const char*, char*) {
    hopper().products[{cta_rank(), warp}].wait(pending,
                                               [warp](const WarpProduct& one) { perform(one, warp); });
  });
}

}  // namespace fovea::emulation
