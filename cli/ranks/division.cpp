// The definitions of division.hpp.
#include "cli/ranks/division.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "cli/terminal/failure.hpp"

namespace fovea::cli {
namespace {

/// A tensor that every rank has memory of its own for.
struct Field {
  const char* name;
  Tensor Problem::*tensor;
  Spread spread;
  fovea_access forward, backward;
};

constexpr std::array kFields = {
    Field{"q", &Problem::q, Spread::query_rows, FOVEA_READ, FOVEA_READ},
    Field{"k", &Problem::k, Spread::key_rows, FOVEA_READ, FOVEA_READ},
    Field{"v", &Problem::v, Spread::key_rows, FOVEA_READ, FOVEA_READ},
    Field{"o", &Problem::o, Spread::query_rows, FOVEA_WRITE, FOVEA_READ},
    Field{"lse", &Problem::lse, Spread::query_statistic, FOVEA_WRITE, FOVEA_READ},
    Field{"d_o", &Problem::d_o, Spread::query_rows, FOVEA_READ, FOVEA_READ},
    Field{"dlse", &Problem::dlse, Spread::query_statistic, FOVEA_READ, FOVEA_READ},
    Field{"dq", &Problem::dq, Spread::query_rows, FOVEA_READ, FOVEA_WRITE},
    Field{"dk", &Problem::dk, Spread::key_rows, FOVEA_READ, FOVEA_WRITE},
    Field{"dv", &Problem::dv, Spread::key_rows, FOVEA_READ, FOVEA_WRITE},
    Field{"dsink", &Problem::dsink, Spread::everywhere, FOVEA_READ, FOVEA_WRITE},
    Field{"dbias", &Problem::dbias, Spread::everywhere, FOVEA_READ, FOVEA_WRITE},
};

bool is_output(const Field& field, Pass pass) {
  return (pass == Pass::forward ? field.forward : field.backward) == FOVEA_WRITE;
}

bool is_packed(const Problem& problem) {
  return static_cast<bool>(problem.cu_seqlens_q);
}

size_t bytes_of(const Tensor& tensor) {
  int64_t count = 1;
  for (const int64_t size : tensor.shape()) count *= size;
  return static_cast<size_t>(count) * tensor.dtype().bits / 8;
}

/// The axis of rows.
size_t row_axis(const Tensor& tensor, Spread spread) {
  return tensor.shape().size() - (spread == Spread::query_statistic ? 1 : 3);
}

/// Visits the rank's rows of a tensor in the order of the rank's memory: visit(address, bytes).
template <class Visit>
void for_each_run(const Tensor& whole, Spread spread, const std::vector<Piece>& pieces, int rank,
                  Visit&& visit) {
  const auto shape = whole.shape();
  const fovea_tensor c = whole.c_tensor();
  const int64_t element = whole.dtype().bits / 8;
  std::array<int64_t, Tensor::kMaxRank> stride{};
  for (size_t i = shape.size(), compact = 1; i-- > 0; compact *= static_cast<size_t>(shape[i]))
    stride[i] = element * (c.strides ? c.strides[i] : static_cast<int64_t>(compact));
  const size_t row = row_axis(whole, spread);
  const bool statistic = spread == Spread::query_statistic, batched = shape.size() > (statistic ? 2 : 3);
  const int64_t batch = batched ? shape[0] : 1, outer = statistic ? shape[row - 1] : 1;
  const int64_t inner = statistic ? 1 : shape[row + 1];
  const auto run = static_cast<size_t>(element * (statistic ? 1 : shape[row + 2]));
  auto* const base = static_cast<std::byte*>(whole.data());
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t o = 0; o < outer; ++o) {
      std::byte* const first = base + (batched ? b * stride[0] : 0) + (statistic ? o * stride[row - 1] : 0);
      for (const Piece& piece : pieces) {
        if (piece.rank != rank) continue;
        for (int64_t r = piece.begin; r < piece.end; ++r) {
          for (int64_t i = 0; i < inner; ++i)
            visit(first + r * stride[row] + (statistic ? 0 : i * stride[row + 1]), run);
        }
      }
    }
  }
}

/// Visits the same rows as runs of a file: visit(sequence, begin, end, byte of the rank's memory).
template <class Visit>
void for_each_piece(const Tensor& whole, const std::vector<Piece>& pieces, int rank, Visit&& visit) {
  const auto shape = whole.shape();
  const size_t row = row_axis(whole, Spread::query_rows);
  const int64_t sequences = row > 0 ? shape[0] : 1;
  const int64_t row_bytes = shape[row + 1] * shape[row + 2] * whole.dtype().bits / 8;
  int64_t at = 0;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    for (const Piece& piece : pieces) {
      if (piece.rank != rank) continue;
      visit(sequence, piece.begin, piece.end, at);
      at += (piece.end - piece.begin) * row_bytes;
    }
  }
}

/// The rows that a rank has of a field: pieces of its spread.
std::vector<Piece> pieces_of(const Division& division, const Tensor& whole, Spread spread, int rank) {
  if (spread == Spread::key_rows) return division.keys;
  if (!division.queries.empty()) return division.queries;
  return {{rank, 0, whole.shape()[row_axis(whole, spread)]}};
}

/// Fills a rank's memory of an input.
void deal(const Tensor& given, const Field& field, const std::vector<Piece>& pieces, int rank,
          const RowReader& reader, std::byte* to) {
  if (given.data() == nullptr && reader) {
    for_each_piece(given, pieces, rank, [&](int64_t sequence, int64_t begin, int64_t end, int64_t at) {
      reader(field.name, sequence, begin, end, to + at);
    });
    return;
  }
  for_each_run(given, field.spread, pieces, rank, [&](const std::byte* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  });
}

std::vector<int32_t> starts_of(const Tensor& starts) {
  if (!starts) return {};
  if (starts.data() == nullptr)
    throw Failure(Exit::usage,
                  "--with: got packed beside --ranks, expected --lengths, or --cu-seqlens-q FILE; where "
                  "sequences start is "
                  "needed to divide them");
  const auto* const data = static_cast<const int32_t*>(starts.data());
  return {data, data + starts.shape()[0]};
}

}  // namespace

Division divide(const Problem& whole, int ranks) {
  Division division;
  const bool packed = is_packed(whole);
  const size_t axis = packed ? 0 : 1;
  const int64_t rows_q = whole.q.shape()[axis], rows_k = whole.k.shape()[axis];
  const bool uneven = whole.causal || whole.window_left >= 0 || whole.window_right >= 0;
  const auto cut = uneven ? zigzag_pieces : contiguous_pieces;
  if (rows_q >= ranks || whole.pass == Pass::backward) division.queries = cut(rows_q, ranks);
  division.keys = cut(rows_k, ranks);
  if (packed) {
    division.cu_seqlens_q = starts_of(whole.cu_seqlens_q);
    division.cu_seqlens_k = starts_of(whole.cu_seqlens_k);
  }
  return division;
}

Spread spread_of(const std::string& output) {
  const auto field = std::ranges::find(kFields, output, &Field::name);
  return field == kFields.end() ? Spread::everywhere : field->spread;
}

RankPart::RankPart(const Problem& whole, const Division& division, int rank, Data data,
                   const RowReader& reader, const RankPart* before)
    : division_(division), rank_(rank), memory_(kFields.size()) {
  problem_.local = whole;
  problem_.local.cu_seqlens_q = problem_.local.cu_seqlens_k = {};
  problem_.local.max_seqlen_q = problem_.local.max_seqlen_k = 0;
  problem_.queries = division.queries;
  problem_.keys = division.keys;
  problem_.cu_seqlens_q = division.cu_seqlens_q;
  problem_.cu_seqlens_k = division.cu_seqlens_k;
  problem_.local.named = whole.all_named();
  for (NamedTensor& named : problem_.local.named) {
    if (!named.gradient) continue;
    std::vector<std::byte>& memory = gradients_.emplace_back();
    if (data != Data::described) memory.resize(bytes_of(named.gradient));
    named.gradient = Tensor(memory.data(), named.gradient.dtype(), named.gradient.shape());
  }
  for (size_t i = 0; i < kFields.size(); ++i) {
    const Field& field = kFields[i];
    const Tensor& given = whole.*field.tensor;
    if (!given) continue;
    std::vector<int64_t> shape(given.shape().begin(), given.shape().end());
    std::vector<Piece> pieces;
    if (field.spread != Spread::everywhere) {
      pieces = pieces_of(division, given, field.spread, rank);
      shape[row_axis(given, field.spread)] = rows_of_rank(pieces, rank);
    }
    const bool written = is_output(field, whole.pass);
    Tensor part(nullptr, given.dtype(), shape);
    if (data == Data::dealt || (data == Data::empty && written)) {
      memory_[i].resize(bytes_of(part));
      part = Tensor(memory_[i].data(), given.dtype(), shape);
    }
    problem_.local.*field.tensor = part;
    if (data != Data::dealt || written || field.spread == Spread::everywhere) continue;
    if (given.data() == nullptr && before != nullptr && !before->memory_[i].empty()) {
      std::memcpy(memory_[i].data(), before->memory_[i].data(), memory_[i].size());
    } else {
      deal(given, field, pieces, rank, reader, memory_[i].data());
    }
  }
}

std::vector<std::span<std::byte>> RankPart::outputs() {
  std::vector<std::span<std::byte>> outputs;
  for (size_t i = 0; i < kFields.size(); ++i) {
    if (problem_.local.*kFields[i].tensor && is_output(kFields[i], problem_.local.pass))
      outputs.emplace_back(memory_[i]);
  }
  outputs.insert(outputs.end(), gradients_.begin(), gradients_.end());
  return outputs;
}

std::vector<std::byte> RankPart::rows_of(const std::string& output, int64_t begin, int64_t end) const {
  const auto field = std::ranges::find(kFields, output, &Field::name);
  if (field == kFields.end()) {
    auto gradient = gradients_.begin();
    for (const NamedTensor& named : problem_.local.named) {
      if (!named.gradient) continue;
      if ("d" + named.name == output) return *gradient;
      ++gradient;
    }
    return {};
  }
  if (field->spread == Spread::everywhere) return memory_[static_cast<size_t>(field - kFields.begin())];
  std::vector<std::byte> rows;
  for_each_run(problem_.local.*field->tensor, field->spread, {{0, begin, end}}, 0,
               [&](const std::byte* from, size_t bytes) { rows.insert(rows.end(), from, from + bytes); });
  return rows;
}

void RankPart::collect(const Problem& whole) const {
  auto gradient = gradients_.begin();
  for (const NamedTensor& named : whole.all_named()) {
    if (!named.gradient) continue;
    if (rank_ == 0) std::memcpy(named.gradient.data(), gradient->data(), gradient->size());
    ++gradient;
  }
  for (size_t i = 0; i < kFields.size(); ++i) {
    const Field& field = kFields[i];
    const Tensor& target = whole.*field.tensor;
    if (!target || !is_output(field, whole.pass)) continue;
    // What every rank has, the first one writes.
    const bool everywhere =
        field.spread == Spread::everywhere || (field.spread != Spread::key_rows && division_.queries.empty());
    if (everywhere && rank_ > 0) continue;
    const std::byte* from = memory_[i].data();
    if (field.spread == Spread::everywhere) {
      std::memcpy(target.data(), from, memory_[i].size());
      continue;
    }
    for_each_run(target, field.spread, pieces_of(division_, target, field.spread, rank_), rank_,
                 [&](std::byte* to, size_t bytes) {
                   std::memcpy(to, from, bytes);
                   from += bytes;
                 });
  }
}

}  // namespace fovea::cli
