// How the keys of few queries are shared among the CTAs of clusters.
#include "cuda/launch/decode_clusters.hpp"

#include <algorithm>
#include <bit>

#include "cuda/launch/schedule.hpp"
#include "cuda/launch/sizes.hpp"

namespace fovea::cuda {
namespace {

constexpr size_t kSharedOfSystem = 1024;  // of each CTA
constexpr int64_t kShort = 4096;  // keys: up to these few tiles have the CTAs that the longest needs, at once
constexpr int kRowsOfProduct = 16;                       // of queries: what a product of mma.sync has
constexpr int kFewestShared = 4, kMostShared = 8;        // CTAs of a cluster that several heads share
constexpr int64_t kMostOfClusterCta = int64_t{1} << 20;  // elements of keys and values
constexpr int kCtasOfMany = 8;                           // of a tile, where tiles take turns

/// CTAs of clusters of `ctas` that find an SM each, where each has one for itself. A cluster lies in one part of the GPU (GPC): what is
/// left of each part is lost, up to a tenth of an H200.
int64_t room_for_alone(int ctas, const DeviceProperties& device) {
  return ctas <= 2 ? device.sm_count : int64_t{device.sm_count} * 9 / 10;
}
/// As shared memory has room for.
int ctas_an_sm(const Kernel& kernel, const DeviceProperties& device) {
  return static_cast<int>(device.shared_per_sm / (kernel.shared_bytes + kSharedOfSystem));
}
bool two_an_sm(const Kernel& kernel, const DeviceProperties& device) {
  return ctas_an_sm(kernel, device) >= 2;
}
/// Kernels of CTAs of half the size, each of which has a tile for itself.
bool has_small_ctas(const Kernel& kernel, const DeviceProperties& device) {
  return ctas_an_sm(kernel, device) > 2;
}
/// The same where two CTAs may lie on one SM, if they fit: clusters of up to 8 find room for one CTA for each SM of the GPU.
int64_t room_for_clusters(int ctas, const Kernel& kernel, const DeviceProperties& device) {
  return ctas <= 8 && two_an_sm(kernel, device) ? device.sm_count : room_for_alone(ctas, device);
}
/// Whether so many CTAs leave two thirds of the GPU idle.
bool few_ctas(int64_t ctas, const DeviceProperties& device) {
  return 3 * ctas < device.sm_count;
}

int64_t elements_of_tile(const AttentionProblem& p, const Kernel& kernel) {
  return saturating_product(keys_of_tile(p, kernel), p.head_dim + p.head_dim_v);
}

int64_t rows_of_tile(const AttentionProblem& p, const Kernel& kernel) {
  return p.seqlen_q * (packs_group(p, kernel) ? p.group() : 1);
}

/// Whether CTAs of so many tiles take turns on SMs, which evens out what they have.
bool are_many(int64_t tiles, const DeviceProperties& device) {
  return saturating_product(tiles, 2) >= 3 * int64_t{device.sm_count};
}

bool fits_grid(const AttentionProblem& p) {
  return std::max(p.heads_q, p.batch) <= kMostOfGrid;
}
/// Of several sequences.
bool gpu_knows_lengths(const AttentionProblem& p) {
  return p.batch > 1 && (p.packed_k || p.has(Role::kSeqUsedK));
}

/// Whether more tiles than clusters have room for beside each other, all of one length or up to 4,096 keys of 8 bits, have a CTA each, or eight
/// that take turns.
bool many_are_alike(const AttentionProblem& p, const Kernel& kernel, const DeviceProperties& device) {
  const bool alike = !gpu_knows_lengths(p) && (p.batch == 1 || !p.has(Role::kLeftPadK));
  const bool at_once = kernel.e4m3_keys ? kernel.tma : two_an_sm(kernel, device) || !fits_boxes(p);
  return at_once && (alike || (kernel.e4m3_keys && p.seqlen_k <= kShort)) && fits_grid(p) &&
         2 * tiles_of_few_rows(p, kernel) > device.sm_count;
}

/// Whether sequences have more than 4,096 keys of 8 bits, and the GPU alone knows how many. Tiles have a cluster of 2 CTAs or more each up to two for each SM;
/// more have equal shares of all keys, which end sooner where sequences are short (64 of 1,000 keys, 45 us for 67; H200).
bool bytes_of_many_lengths(const AttentionProblem& p, const Kernel& kernel) {
  return kernel.e4m3_keys && kernel.tma && gpu_knows_lengths(p) && p.seqlen_k > kShort && fits_grid(p);
}

/// Whether many tiles, which are alike, have eight CTAs each that take turns. All tiles that an SM holds two of at once end together; more end
/// at different times, and so do those of which some SMs have two and others one, which costs more the longer they are. (8 key heads of
/// 128, H200: 9 sequences of 4,096 keys 38.2 us by one CTA, 42.2 by eight; 20 of 16,384 307 and 298; 40 of 8,192 322 and 300. With 8 rows of
/// queries, whose merge takes longer, 64 of 8,192 467 and 478.)
bool have_eight(const AttentionProblem& p, const Kernel& kernel, const DeviceProperties& device) {
  constexpr int64_t kRowsAtOnce = 4;
  // Elements of such a CTA.
  constexpr int64_t kFewest = int64_t{1} << 17, kFewestBeside = int64_t{1} << 18,
                    kFewestOfRows = int64_t{1} << 19;
  const int64_t fewest = rows_of_tile(p, kernel) > kRowsAtOnce                          ? kFewestOfRows
                         : tiles_of_few_rows(p, kernel) <= 2 * int64_t{device.sm_count} ? kFewestBeside
                                                                                        : kFewest;
  return elements_of_tile(p, kernel) / kCtasOfMany >= fewest;
}

/// CTAs of each of many tiles, which are alike: where a quarter of a turn of one CTA each is left, halves of shorter tiles fill it. (34 sequences of
/// 4,096 keys of 64 70 us for 75, before small CTAs, which take 68.)
int ctas_of_many(const AttentionProblem& p, const Kernel& kernel, const DeviceProperties& device) {
  constexpr int64_t kFewestOfHalf = int64_t{1} << 18;
  const int64_t tiles = tiles_of_few_rows(p, kernel), sms = device.sm_count;
  if (tiles <= sms || ctas_an_sm(kernel, device) != 2 || kernel.e4m3_keys) return 1;
  if (have_eight(p, kernel, device)) return kCtasOfMany;
  const bool few_left = tiles > 2 * sms && 2 * tiles <= 5 * sms;
  return few_left && elements_of_tile(p, kernel) / 2 >= kFewestOfHalf ? 2 : 1;
}

/// Kernels of small CTAs have all tiles under way at once, where others take turns, or have two on some SMs and one on others. Of the time by
/// others (H200, 20, 24, 28, 32, 40, 48, 64 sequences of 8 key heads): of 64, 2,048 keys 0.95, 0.92, -, 1.00, 0.89, 0.99, 0.99; 4,096 0.95, 0.92, -,
/// 0.98, 0.98, 0.99, 1.02; of 128, 1,024 keys 1.00, 0.97, 0.98, 1.04, 0.97, 0.99, 1.09; 2,048 0.98, 0.96, 0.98, 1.01, 1.00, 1.00, 1.06; 4,096 0.98,
/// 0.94, -, 1.00, 1.04, -, 1.06. In pages of 64 0.88 to 1.01, but 64 sequences, of 128, 1.03.
std::string small_ctas_clause(const AttentionProblem& p, const Kernel& kernel,
                              const DeviceProperties& device) {
  // Elements of keys and values of a tile.
  constexpr int64_t kFewElements = int64_t{1} << 18, kFewBeside = int64_t{1} << 19;
  const int64_t tiles = tiles_of_few_rows(p, kernel), sms = device.sm_count,
                elements = elements_of_tile(p, kernel), slots = sms * ctas_an_sm(kernel, device),
                turns = ceil_div(tiles, slots);
  const bool gpu_knows = gpu_knows_lengths(p);
  if (gpu_knows && p.seqlen_k > kShort)
    return "is for up to " + std::to_string(kShort) + " keys of sequences whose lengths the GPU alone knows";
  // Others have two CTAs on a fifth to three quarters of the SMs, and are as fast on fewer or more; but where the GPU alone knows lengths on more.
  const bool uneven = 5 * tiles >= 6 * sms && 4 * tiles <= (gpu_knows ? 8 : 7) * sms &&
                      (gpu_knows || !have_eight(p, kernel, device));
  // Else tiles of few keys take turns, which are to be three quarters full together: a turn of few tiles takes as long as any.
  const bool full = turns == 1 || 3 * turns * slots <= 4 * tiles;
  const bool few = tiles > 2 * sms && full && elements <= (tiles <= 3 * sms ? kFewBeside : kFewElements);
  if ((uneven || few) && fits_grid(p)) return "";
  return "is for tiles of few keys, and where others hold two on some SMs and one on the rest, this problem "
         "has " +
         std::to_string(tiles) + " of " + std::to_string(keys_of_tile(p, kernel)) + " keys";
}

}  // namespace

bool fits_boxes(const AttentionProblem& p) {
  return std::has_single_bit(static_cast<uint64_t>(p.group()));
}

bool cluster_lengths_differ(const AttentionProblem& p, const Kernel& kernel) {
  // Up to 4,096 keys clusters are for few tiles and wait for the longest. Kernels for keys of 8 bits have one CTA an SM: none takes turns.
  return !kernel.e4m3_keys && fits_grid(p) && p.seqlen_k > kShort && gpu_knows_lengths(p);
}

int ctas_of_shared_cluster(const AttentionProblem& p, const Kernel& kernel, const DeviceProperties& device) {
  if (kernel.e4m3_keys || has_small_ctas(kernel, device) || !two_an_sm(kernel, device) || !fits_grid(p) ||
      !gpu_knows_lengths(p))
    return 0;
  const int64_t tiles = tiles_of_few_rows(p, kernel), sms = device.sm_count;
  // Tiles of the usual length have as many CTAs as find an SM each. Four and more have clusters for themselves, and many tiles take turns.
  if (4 * tiles <= sms || are_many(tiles, device)) return 0;
  const bool two = 2 * tiles <= sms;
  if (two && p.seqlen_k <= kShort) return 0;
  const int64_t ctas_of_heads = tiles / p.batch * (two ? 2 : 1);
  return ctas_of_heads >= kMostShared ? kMostShared : ctas_of_heads >= kFewestShared ? kFewestShared : 0;
}

ClusterSharing cluster_sharing(const AttentionProblem& p, const Kernel& kernel,
                               const DeviceProperties& device, int ctas) {
  ClusterSharing sharing;
  sharing.by_length = ctas > 2 && p.batch > 1 && (gpu_knows_lengths(p) || p.has(Role::kLeftPadK));
  sharing.heads = sharing.by_length && ctas_of_shared_cluster(p, kernel, device) == ctas;
  sharing.log2_most = std::countr_zero(static_cast<unsigned>(ctas));
  // Where usual tiles have a CTA each, those of more keys would end too far apart.
  if (sharing.heads && 2 * tiles_of_few_rows(p, kernel) > device.sm_count) sharing.log2_elements = 19;
  return sharing;
}

int ctas_of_cluster(const AttentionProblem& p, const Kernel& kernel, const DeviceProperties& device) {
  constexpr int64_t kFewestKeys = 32;  // of a CTA: fewer take no less time
  if (const int shared = ctas_of_shared_cluster(p, kernel, device); shared > 0) return shared;
  const int64_t tiles = tiles_of_few_rows(p, kernel), keys = keys_of_tile(p, kernel);
  if (cluster_lengths_differ(p, kernel)) {
    // Of few tiles a long one has eight, of which others use as many as find room at once. The CTAs of many take turns on SMs, which evens
    // out what they have. Between, where heads do not fill clusters that they would share, equal shares of all keys end sooner than
    // clusters of two (16 sequences of up to 32,768 keys, 8 key heads, 221 us for 237; H200).
    constexpr int kOfLong = 8;
    constexpr int64_t kTurns = 4;
    if (saturating_product(tiles, kOfLong) <= kTurns * device.sm_count) return kOfLong;
    return are_many(tiles, device) ? 2 : 1;
  }
  for (int ctas = kMostDecodeCtas; ctas > 1; ctas /= 2) {
    if (saturating_product(tiles, ctas) <= room_for_clusters(ctas, kernel, device) &&
        ctas * kFewestKeys <= std::max(keys, 2 * kFewestKeys))
      return ctas;
  }
  if (many_are_alike(p, kernel, device)) return ctas_of_many(p, kernel, device);
  return bytes_of_many_lengths(p, kernel) && tiles <= 2 * int64_t{device.sm_count} ? 2 : 1;
}

ClusterSplits cluster_splits(const AttentionProblem& p, const Kernel& kernel,
                             const DeviceProperties& device) {
  const int ctas = ctas_of_cluster(p, kernel, device);
  if (cluster_lengths_differ(p, kernel) || ctas_of_shared_cluster(p, kernel, device) > 0 ||
      many_are_alike(p, kernel, device))
    return {ctas, 1};
  const int64_t elements = elements_of_tile(p, kernel) / ctas;
  // A CTA reads so many in the time of the launch that merges. (One key head of 256, 8,192 keys: 11.8 us for 14.0, 2,048 9.0 for 9.0; H200.)
  constexpr int64_t kWorthSplitting = int64_t{1} << 17;
  const int64_t tiles = std::max<int64_t>(1, tiles_of_few_rows(p, kernel));
  // Half of the SMs read nearly as fast as all, and faster where keys are to be converted: 131,072 keys of 8 heads of 64 take 76 us, for 49.
  const bool few = few_ctas(tiles * ctas, device);
  if (elements <= (few ? kWorthSplitting : kMostOfClusterCta) || (!few && kernel.e4m3_keys)) return {ctas, 1};
  // A launch merges so many parts as fast as fewer, and CTAs that are in no cluster lie on every SM: 131,072 keys of 8 heads of 64 take 66.7 us in
  // 16 parts, and 68.1 in two of 8 CTAs each. More parts cost more: one head of 256 42.0 us in 7 of 16 CTAs, 40.1 in 14 of 8, 43.0 in 128.
  constexpr int64_t kParts = 14;
  for (int each = kMostDecodeCtas;; each /= 2) {
    const int64_t splits = room_for_alone(each, device) / (tiles * each);
    if (splits >= kParts || each == 1)
      return {each, static_cast<int>(std::clamp<int64_t>(splits, 1, kMostSplits))};
  }
}

std::string cluster_size_clause(const AttentionProblem& p, const Kernel& kernel,
                                const DeviceProperties& device) {
  const int64_t tiles = tiles_of_few_rows(p, kernel);
  const int ctas = ctas_of_cluster(p, kernel, device);
  // Over fewer keys other kernels end sooner, whose tiles have 64 rows anyway (16 heads of 128, 32 queries of 512 keys: 7.5 us for 8.9; H200).
  const int64_t fewest = fits_boxes(p) ? 1024 : 256;
  if (rows_of_tile(p, kernel) > kRowsOfProduct && keys_of_tile(p, kernel) < fewest)
    return "is for " + std::to_string(fewest) + " keys and more where a tile has more than " +
           std::to_string(kRowsOfProduct) + " rows of queries";
  if (has_small_ctas(kernel, device)) return small_ctas_clause(p, kernel, device);
  if (ctas_of_shared_cluster(p, kernel, device) > 0 || (ctas > 1 && cluster_lengths_differ(p, kernel)))
    return "";
  // More tiles of one length than that others share as well. Those of 8 bits do not, where lengths differ.
  const bool shared_by_others = kernel.e4m3_keys ? !gpu_knows_lengths(p) : fits_boxes(p);
  if (many_are_alike(p, kernel, device) &&
      (ctas > 1 || tiles <= 2 * int64_t{device.sm_count} || !shared_by_others))
    return "";
  if (ctas < 2)
    return "is for tiles that leave half of " + std::to_string(device.sm_count) +
           " SMs idle, this problem has " + std::to_string(tiles);
  const ClusterSplits shared = cluster_splits(p, kernel, device);
  const int64_t ctas_of_tile = int64_t{shared.ctas} * shared.splits, ctas_of_all = tiles * ctas_of_tile;
  if (gpu_knows_lengths(p) && p.seqlen_k > kShort) {
    // A third of the SMs does not read fast enough for a long sequence. (H200, up to 32,768 keys in pages, against equal shares: 2 sequences of 8
    // heads, 64 CTAs, 33 us for 42; 8 of them 62 for 68.)
    if (bytes_of_many_lengths(p, kernel) && shared.splits == 1 && !few_ctas(ctas_of_all, device)) return "";
    return "leaves more than " + std::to_string(kShort) +
           " keys of 8 bits of sequences whose lengths the GPU alone knows to equal shares of all keys";
  }
  // Measured on an H200, 16 bits: a CTA of 64 reads 57 GB/s, one of 16 74, and all of 132 together 4.2 TB/s, where a launch that merges
  // or counts costs 3 us more. At 2 MB each half of the SMs are still ahead, fewer are not; where CTAs fill the SMs there is no limit (8 heads
  // of 128, 131,072 keys in 16 parts 124 us, 129 by other kernels). Keys of 8 bits that are multiplied as they are
  // have twice as many elements in 2 MB, but it takes all SMs: one tile of 8,192 keys for every two, head size 256, 65 us for 87 in equal
  // shares; eight of 131,072, head size 64, by 64 CTAs 48 us for 43.
  // Other kernels take longer for pages.
  constexpr int64_t kMostOfFew = kMostOfClusterCta / 2;
  const bool fill_sms = 10 * ctas_of_all >= 9 * int64_t{device.sm_count};
  const bool pages = p.has(Role::kPageTable) && !kernel.e4m3_keys;
  if (fill_sms && !kernel.e4m3_keys) return "";
  const int64_t most = few_ctas(ctas_of_all, device)       ? kMostOfFew
                       : (kernel.tma && fill_sms) || pages ? 2 * kMostOfClusterCta
                                                           : kMostOfClusterCta;
  const int64_t elements = elements_of_tile(p, kernel) / ctas_of_tile;
  if (elements <= most) return "";
  return "is for up to " + std::to_string(most) + " elements of keys and values a CTA, this problem has " +
         std::to_string(elements);
}

size_t shared_of_whole_sm(const Kernel& kernel, const DeviceProperties& device) {
  return std::max(kernel.shared_bytes, std::min(device.shared_per_cta, device.shared_per_sm / 2));
}

Placement placement_of(const AttentionProblem& p, const Kernel& kernel, const ForwardArgs& args,
                       const DeviceProperties& device, int ctas_per_sm) {
  if (!kernel.splits_in_cluster) return {kernel.shared_bytes, true};
  // Clusters that begin beside the last ones of the launch before find room by twos on an SM: 8 sequences of 8,192 keys 101 us for 66 (H200).
  if (args.sharing.heads) return {kernel.shared_bytes, false};
  const int64_t of_tile = int64_t{args.cluster_ctas} * args.num_splits,
                ctas = saturating_product(tiles_of_few_rows(p, kernel), of_tile),
                alone = room_for_alone(args.cluster_ctas, device);
  const bool fill_sms = args.cluster_ctas <= 2 && 10 * ctas >= 9 * int64_t{device.sm_count},
             fill_slots = 10 * ctas >= 9 * int64_t{ctas_per_sm} * device.sm_count;
  if (ctas <= alone && fill_sms) return {shared_of_whole_sm(kernel, device), true};
  // CTAs that begin while others end lie evenly where those of two launches find room at once. Else the last ones go where the first of
  // the launch before end, by twos beside idle SMs or all in some parts of the GPU: one an SM, 8,192 keys of 8 heads of 128 take 16.3 us for
  // 64 CTAs in clusters of 8, two an SM 12.7, and 14.0 where they begin behind the launch before (H200).
  const bool for_two = 2 * ctas <= (two_an_sm(kernel, device) ? 2 : 1) * alone;
  // Short ones wait for latencies more than for memory.
  constexpr int64_t kShortCta = int64_t{1} << 17;  // elements of keys and values, 4 us of such a CTA
  const bool are_short = elements_of_tile(p, kernel) / of_tile <= kShortCta;
  return {kernel.shared_bytes, for_two || (ctas <= alone && are_short) || fill_slots};
}

}  // namespace fovea::cuda
