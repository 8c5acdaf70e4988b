// Clusters of fwd_decode_cluster and fwd_decode_e4m3_cluster: which problems are theirs, how many CTAs share the keys of a tile, and where these
// come to lie. A tile is all queries of a key head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/problem.hpp"
#include "cuda/launch/device_properties.hpp"
#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

/// Whether boxes of TMA hold whole groups of query heads: they are of 1, 2, 4, 8 ... Else kernels that copy Q by TMA read the keys once for each
/// head.
bool fits_boxes(const AttentionProblem& problem);
/// Whether sequences may be of different lengths, which only the GPU knows: clusters are for the longest then, and in others fewer CTAs take
/// part.
bool cluster_lengths_differ(const AttentionProblem& problem, const Kernel& kernel);
/// CTAs of clusters that several heads share, where lengths may differ: those that a tile leaves have tiles of other heads of the sequence. 0:
/// heads have clusters for themselves, as tiles are few or many, or a sequence's heads do not fill clusters.
int ctas_of_shared_cluster(const AttentionProblem& problem, const Kernel& kernel,
                           const DeviceProperties& device);
/// What a kernel needs to know to find the CTAs of a tile in clusters of `ctas`.
ClusterSharing cluster_sharing(const AttentionProblem& problem, const Kernel& kernel,
                               const DeviceProperties& device, int ctas);
/// CTAs of a cluster that share the keys of a tile: a power of two. 1 where a CTA for each tile fills more than half of the GPU, 8 where
/// tiles take many turns. Where lengths may differ: 8 for few tiles, 2 for many; between what heads share, or 1.
int ctas_of_cluster(const AttentionProblem& problem, const Kernel& kernel, const DeviceProperties& device);

/// Clusters that have parts of the keys of a tile each, and their CTAs: more than one where few CTAs would read many keys.
struct ClusterSplits {
  int ctas = 1, splits = 1;
};
ClusterSplits cluster_splits(const AttentionProblem& problem, const Kernel& kernel,
                             const DeviceProperties& device);

/// Why a problem whose queries fit the kernel's tile is not for its clusters; empty where it is.
std::string cluster_size_clause(const AttentionProblem& problem, const Kernel& kernel,
                                const DeviceProperties& device);

/// Where the CTAs of a forward's launch come to lie.
struct Placement {
  size_t shared_bytes = 0;  ///< of a CTA: more than it needs where each is to have an SM of its own
  bool even = true;         ///< as good where they begin while CTAs of the launch before still run
};
Placement placement_of(const AttentionProblem& problem, const Kernel& kernel, const ForwardArgs& args,
                       const DeviceProperties& device, int ctas_per_sm);
/// Shared memory of a CTA beside which an SM has no room for another.
size_t shared_of_whole_sm(const Kernel& kernel, const DeviceProperties& device);

}  // namespace fovea::cuda
