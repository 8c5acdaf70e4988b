// The definitions of agreement.hpp.
#include "distributed/agreement.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "distributed/terms.hpp"

namespace fovea::distributed {
namespace {

/// The shortest text that is this number again.
std::string text(double number) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  return {digits.data(), end};
}

std::string text(const fovea_dtype& type) {
  constexpr std::array kKinds = {"int", "uint", "float", "", "bfloat", "", "bool"};
  const char* kind = type.code < kKinds.size() ? kKinds[type.code] : "type ";
  return kind + std::to_string(type.bits);
}

std::string text(const Placement& placement) {
  std::string pieces;
  for (size_t rank = 0; rank < placement.of_rank.size(); ++rank) {
    for (const Held& held : placement.of_rank[rank])
      pieces += ", [" + std::to_string(held.rows.begin) + ", " + std::to_string(held.rows.end) +
                ") on rank " + std::to_string(rank);
  }
  return std::to_string(placement.total) + " rows" + pieces;
}

std::string text_of_queries(const Shape& shape) {
  return shape.queries_everywhere ? std::to_string(shape.queries.total) + " rows on every rank"
                                  : text(shape.queries);
}

std::string text_of_starts(const std::vector<Sequence>& sequences, Range Sequence::*axis) {
  std::string starts = "0";
  for (const Sequence& sequence : sequences) starts += ", " + std::to_string((sequence.*axis).end);
  return starts;
}

std::string text(const Window& window) {
  std::string both = "(";
  both.append(std::to_string(window.left)).append(", ").append(std::to_string(window.right)).append(")");
  if (window.right == 0) both += ", which is causal";
  return both;
}

std::string heads_text(int64_t heads, int64_t size) {
  return std::to_string(heads) + " heads of " + std::to_string(size);
}

/// Which tensors there are, with their types.
std::string text_of_tensors(const LocalProblem& problem) {
  std::string tensors;
  for (int i = 0; i < kPlaces; ++i) {
    const auto place = static_cast<Place>(i);
    if (!problem.has(place)) continue;
    tensors += (tensors.empty() ? "" : ", ") + problem.name(place) + " " + text(problem[place].type);
  }
  return tensors;
}

std::string text_of_rates(const fovea_distributed_options& o) {
  return text(o.flops_per_second) + ", " + text(o.link_bytes_per_second) + ", " +
         text(o.host_link_bytes_per_second);
}

// ---- the error ----

/// The part around the first place where a text differs from another.
std::string excerpt(const std::string& whole, size_t differs) {
  constexpr size_t kBefore = 40, kLength = 160;
  const size_t begin = differs > kBefore && whole.size() > kLength ? differs - kBefore : 0;
  std::string shown = begin > 0 ? "..." : "";
  shown += whole.substr(begin, kLength);
  if (begin + kLength < whole.size()) shown += "...";
  return shown;
}

/// "rank 3", "ranks 0, 1, 2", or the first ones of many.
std::string names_of(const std::vector<size_t>& ranks) {
  constexpr size_t kShown = 4;
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    names += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > kShown ? names + " and " + std::to_string(ranks.size() - kShown) + " others" : names;
}

}  // namespace

SharedArguments shared_arguments(const LocalProblem& p, const fovea_distributed_options& o,
                                 const Method& chosen) {
  const Shape& s = p.shape;
  return {{{"local.pass", p.backward() ? "backward" : "forward"},
           {"transport.device", p.device.type == FOVEA_CPU ? "a CPU" : "a GPU"},
           {"transport.peer_copies", p.by_copies ? "1" : "0"},
           {"local.q", "a batch of " + std::to_string(s.batch) + ", " + heads_text(s.heads_q, s.head_dim)},
           {"local.k", heads_text(s.heads_kv, s.head_dim)},
           {"local.v", heads_text(s.heads_kv, s.head_dim_v)},
           {"queries", text_of_queries(s)},
           {"keys", text(s.keys)},
           {"cu_seqlens_q", text_of_starts(s.sequences, &Sequence::queries)},
           {"cu_seqlens_k", text_of_starts(s.sequences, &Sequence::keys)},
           {"local.scale", text(p.scale)},
           {"local.window", text(s.window)},
           {"local.softcap", text(p.softcap)},
           {"local.dropout", text(p.dropout)},
           {"terms", p.terms ? p.terms->text : "none"},
           {"tensors and their types", text_of_tensors(p)},
           {"heads_ranks, stages, ranks_per_host", std::to_string(o.heads_ranks) + ", " +
                                                       std::to_string(o.stages) + ", " +
                                                       std::to_string(o.ranks_per_host)},
           {"memory_limit", std::to_string(o.memory_limit)},
           {"flops_per_second and bytes of links", text_of_rates(o)},
           {"the method that is chosen", std::to_string(chosen.heads_ranks) + " heads_ranks and " +
                                             std::to_string(chosen.stages) + " stages"}}};
}

uint64_t fingerprint(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

void throw_disagreement(const std::string& argument, const std::vector<std::string>& values,
                        const std::string& remedy) {
  std::vector<std::pair<std::string, std::vector<size_t>>> groups;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    const auto known =
        std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == values[rank]; });
    if (known == groups.end()) {
      groups.push_back({values[rank], {rank}});
    } else {
      known->second.push_back(rank);
    }
  }
  size_t differs = std::string::npos;
  for (const auto& [value, ranks] : groups) {
    const std::string& first = groups[0].first;
    const auto [here, there] = std::mismatch(first.begin(), first.end(), value.begin(), value.end());
    if (&value != &first) differs = std::min(differs, static_cast<size_t>(here - first.begin()));
  }
  constexpr size_t kShown = 4;
  std::string got;
  for (size_t i = 0; i < std::min(groups.size(), kShown); ++i)
    got += (i > 0 ? " and " : "") + excerpt(groups[i].first, differs) + " on " + names_of(groups[i].second);
  if (groups.size() > kShown) got += " and " + std::to_string(groups.size() - kShown) + " other values";
  throw Disagreement(Status::kInvalidArgument, argument,
                     argument + ": got " + got + ", expected the same on all ranks; " + remedy);
}

}  // namespace fovea::distributed
