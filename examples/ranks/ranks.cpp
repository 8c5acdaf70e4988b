// Causal attention over 1,000 tokens on four ranks, which are threads here; on machines of their own they would do the same.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fovea/distributed.hpp>
#include <random>
#include <vector>

int main() {
  constexpr int kRanks = 4;
  constexpr int64_t kTokens = 1000, kHeads = 4, kSize = 32, kRow = kHeads * kSize;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(kTokens * kRow), o(x.size()), together(x.size());
  for (float& value : x) value = normal(random);

  // Each rank has a chunk of tokens from the front and one from the back, so that all have as much to compute.
  const std::vector<fovea::Piece> pieces = fovea::zigzag_pieces(kTokens, kRanks);
  const auto attend_on_rank = [&](const fovea::Transport& transport) {
    std::vector<float> own;
    for (const fovea::Piece& piece : pieces) {
      if (piece.rank == transport.rank())
        own.insert(own.end(), x.begin() + piece.begin * kRow, x.begin() + piece.end * kRow);
    }
    std::vector<float> own_o(own.size());
    const auto shape = {int64_t{1}, fovea::rows_of_rank(pieces, transport.rank()), kHeads, kSize};
    const fovea::Tensor X(own.data(), shape), O(own_o.data(), shape);
    const fovea::DistributedPlan plan(
        transport, {.local = {.q = X, .k = X, .v = X, .o = O, .causal = true}, .queries = pieces},
        {.attention = {.num_threads = 1}});
    fovea::Workspace workspace(plan.workspace_size(), plan.device());
    plan.run({.q = own.data(), .k = own.data(), .v = own.data(), .o = own_o.data()}, workspace);
    auto from = own_o.begin();
    for (const fovea::Piece& piece : pieces) {
      if (piece.rank != transport.rank()) continue;
      const int64_t count = (piece.end - piece.begin) * kRow;
      std::copy_n(from, count, together.begin() + piece.begin * kRow);
      from += count;
    }
  };

  const auto shape = {int64_t{1}, kTokens, kHeads, kSize};
  const fovea::Tensor X(x.data(), shape), O(o.data(), shape);
  float largest = 0;
  try {
    fovea::ThreadRanks(kRanks).run(attend_on_rank);
    fovea::attend(X, X, X, O, {.causal = true});
  } catch (const fovea::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  for (size_t i = 0; i < o.size(); ++i) largest = std::fmax(largest, std::fabs(o[i] - together[i]));
  std::printf("the largest difference from one rank is %g\n", static_cast<double>(largest));
  return largest < 1e-5f ? 0 : 1;
}
