// Fills AttentionParams from a problem, and the pointers of a run into it.
#include "cuda/launch/params.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "tile/philox.hpp"

namespace fovea::cuda {
namespace {

/// Bytes of one cp.async, ld.global.v4 or st.global.v4.
constexpr int64_t kVectorBytes = 16;

constexpr std::array<std::pair<Role, uint32_t>, 8> kAlignedBits = {{{Role::kQ, tile::kAlignedQ},
                                                                    {Role::kK, tile::kAlignedK},
                                                                    {Role::kV, tile::kAlignedV},
                                                                    {Role::kDO, tile::kAlignedDO},
                                                                    {Role::kO, tile::kAlignedO},
                                                                    {Role::kDQ, tile::kAlignedDQ},
                                                                    {Role::kDK, tile::kAlignedDK},
                                                                    {Role::kDV, tile::kAlignedDV}}};

tile::RowsView rows(const TensorDesc& t) {
  return {nullptr, t.stride[0], t.stride[1], t.stride[2]};
}
tile::StatsView stats(const TensorDesc& t) {
  return {nullptr, t.stride[0], t.stride[1], t.stride[2]};
}
tile::PairsView pairs(const TensorDesc& t) {
  return {nullptr, t.stride[0], t.stride[1], t.stride[2], t.stride[3]};
}

/// Whether every row starts at a multiple of 16 bytes from the first and is a multiple of 16 bytes long; and
/// rows are not so far apart that the products of 32 bits by which kernels find them would overflow
/// (warp/shared_tile.cuh).
bool rows_are_vectors(const TensorDesc& t) {
  constexpr int64_t kFarthestRow = int64_t{1} << 30;
  if (t.shape[1] > 1 && t.stride[1] >= kFarthestRow) return false;
  if (t.shape[3] * size_of(t.dtype) % kVectorBytes != 0) return false;
  for (size_t i = 0; i < 3; ++i) {
    if (t.shape[i] > 1 && t.stride[i] * size_of(t.dtype) % kVectorBytes != 0) return false;
  }
  return true;
}

}  // namespace

tile::AttentionParams params_of(const AttentionProblem& p) {
  tile::AttentionParams a;
  a.q = rows(p[Role::kQ]);
  a.k = rows(p[Role::kK]);
  a.v = rows(p[Role::kV]);
  a.o = rows(p[Role::kO]);
  a.lse = stats(p[Role::kLse]);
  a.d_o = rows(p[Role::kDO]);
  a.dq = rows(p[Role::kDQ]);
  a.dk = rows(p[Role::kDK]);
  a.dv = rows(p[Role::kDV]);
  a.dlse = stats(p[Role::kDLse]);

  a.bias = pairs(p[Role::kBias]);
  a.dbias = pairs(p[Role::kDBias]);
  a.mask = pairs(p[Role::kMask]);
  a.block_mask = pairs(p[Role::kBlockMask]);
  a.bias_is_f32 = p[Role::kBias].dtype == DType::kF32;
  a.dbias_is_f32 = p[Role::kDBias].dtype == DType::kF32;
  a.o_is_f32 = p[Role::kO].dtype == DType::kF32;
  if (p.has(Role::kBlockMask)) {
    a.block_q = static_cast<int>(p.block_q);
    a.block_k = static_cast<int>(p.block_k);
  }
  a.alibi_batch = p[Role::kAlibi].stride[0];
  a.alibi_head = p[Role::kAlibi].stride[1];

  a.seqlen_q = static_cast<int>(p.seqlen_q);
  a.seqlen_k = static_cast<int>(p.seqlen_k);
  a.total_q = p.total_q;
  a.total_k = p.total_k;
  a.batch = static_cast<int>(p.batch);
  a.heads_q = static_cast<int>(p.heads_q);
  a.heads_kv = static_cast<int>(p.heads_kv);
  a.group = static_cast<int>(p.group());
  a.head_dim = static_cast<int>(p.head_dim);
  a.head_dim_v = static_cast<int>(p.head_dim_v);
  a.scale = static_cast<float>(p.scale);
  a.softcap = static_cast<float>(p.softcap);
  a.window_left = static_cast<int>(p.window_left);
  a.window_right = static_cast<int>(p.window_right);

  const tile::Dropout dropout(p.dropout, 0, 0);
  a.dropout_threshold = dropout.threshold;
  a.dropout_keep_scale = dropout.keep_scale;
  a.rng_state_is_input = p.pass == Pass::kBackward && p.has(Role::kRngState);

  for (const auto& [role, bit] : kAlignedBits) {
    if (p.has(role) && rows_are_vectors(p[role])) a.aligned16 |= bit;
  }
  return a;
}

void bind(tile::AttentionParams& a, const Buffers& buffers) {
  a.q.data = buffers.get<char>(Role::kQ);
  a.k.data = buffers.get<char>(Role::kK);
  a.v.data = buffers.get<char>(Role::kV);
  a.o.data = buffers.get<char>(Role::kO);
  a.lse.data = buffers.get<float>(Role::kLse);
  a.d_o.data = buffers.get<char>(Role::kDO);
  a.dq.data = buffers.get<char>(Role::kDQ);
  a.dk.data = buffers.get<char>(Role::kDK);
  a.dv.data = buffers.get<char>(Role::kDV);
  a.dlse.data = buffers.get<float>(Role::kDLse);
  a.bias.data = buffers.get<char>(Role::kBias);
  a.dbias.data = buffers.get<char>(Role::kDBias);
  a.mask.data = buffers.get<char>(Role::kMask);
  a.block_mask.data = buffers.get<char>(Role::kBlockMask);
  a.alibi = buffers.get<float>(Role::kAlibi);
  a.sink = buffers.get<float>(Role::kSink);
  a.dsink = buffers.get<float>(Role::kDSink);
  a.cu_seqlens_q = buffers.get<int32_t>(Role::kCuSeqlensQ);
  a.cu_seqlens_k = buffers.get<int32_t>(Role::kCuSeqlensK);
  a.seqused_q = buffers.get<int32_t>(Role::kSeqUsedQ);
  a.seqused_k = buffers.get<int32_t>(Role::kSeqUsedK);
  a.rng_state = buffers.get<int64_t>(Role::kRngState);
  a.seed = buffers.seed;
  a.offset = buffers.offset;
  for (const auto& [role, bit] : kAlignedBits) {
    if (reinterpret_cast<uintptr_t>(buffers.data[index_of(role)]) % kVectorBytes != 0) a.aligned16 &= ~bit;
  }
}

}  // namespace fovea::cuda
