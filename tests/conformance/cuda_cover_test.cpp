// A covering set for compute-sanitizer, which slows kernels down by orders of magnitude: few and small
// problems that together take every path of every kernel family. Each tile size, head size class, pass and
// feature once; several tiles in each direction, the last of them partial.
#include <gtest/gtest.h>

#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

struct Cover {
  const char* name;
  void (*make)(ProblemSpec&);
};
void PrintTo(const Cover& cover, std::ostream* out) {
  *out << cover.name;
}

void sizes(ProblemSpec& s, int64_t size, int64_t size_v) {
  s.head_dim = size;
  s.head_dim_v = size_v;
}

void decode(ProblemSpec& s) {
  s.batch = 2;
  s.heads_q = 8;
  s.heads_kv = 2;
  s.seqlen_q = 1;
  s.seqlen_k = 1500;
}

/// One sequence without queries, one without keys.
void pack(ProblemSpec& s) {
  s.lengths_q = {140, 0, 33, 1};
  s.lengths_k = {70, 5, 150, 0};
}

/// Keys in pages of a pool that has more: a sequence that uses all of its pages, and shorter ones.
void page(ProblemSpec& s, int64_t rows) {
  s.batch = s.lengths_q.empty() ? 2 : static_cast<int64_t>(s.lengths_q.size());
  s.page_size = rows;
  const int64_t columns = (s.seqlen_k + rows - 1) / rows;
  s.seqlen_k = columns * rows;
  s.caches = columns + 3;
  s.used_k.assign(static_cast<size_t>(s.batch), static_cast<int32_t>(s.seqlen_k));
  s.used_k.back() = static_cast<int32_t>(s.seqlen_k / 2 + 1);
}

/// A cache to which each sequence appends, with room for `rows` more in each; in pages where `page_size` is not 0.
void append(ProblemSpec& s, int32_t rows, int64_t page_size) {
  s.batch = 2;
  s.seqlen_k = 160;
  s.page_size = page_size;
  if (page_size > 0) s.caches = s.batch * (s.seqlen_k / page_size) + 2;
  s.used_k = {static_cast<int32_t>(s.seqlen_k) - rows, 0};
  s.lengths_new = {rows, rows};
  s.rotary = 32;
  s.causal = true;
}

/// `queries` of two groups of `group` heads over keys of 8 bits.
void decode_e4m3(ProblemSpec& s, int64_t size, int64_t group, int64_t queries) {
  sizes(s, size, size);
  s.heads_kv = 2;
  s.heads_q = 2 * group;
  s.seqlen_q = queries;
  s.seqlen_k = 333;
  s.causal = queries > 1;
  s.e4m3_keys = true;
}

const std::vector<Cover>& covers() {
  static const std::vector<Cover> list = {
      // Head sizes: each power of two that a kernel pads to, sizes between, D other than Dv, sizes that are no
      // multiple of 16 bytes, and sizes beyond 256.
      {"d8", [](ProblemSpec& s) { sizes(s, 8, 8); }},
      {"d32", [](ProblemSpec& s) { sizes(s, 32, 32); }},
      {"d64", [](ProblemSpec& s) { sizes(s, 64, 64); }},
      {"d64_causal",
       [](ProblemSpec& s) {
         sizes(s, 64, 64);
         s.causal = true;
       }},
      {"d96", [](ProblemSpec& s) { sizes(s, 96, 96); }},
      {"d128", [](ProblemSpec& s) { sizes(s, 128, 128); }},
      {"d128_causal",
       [](ProblemSpec& s) {
         sizes(s, 128, 128);
         s.causal = true;
       }},
      {"d160", [](ProblemSpec& s) { sizes(s, 160, 160); }},
      {"d192_128",
       [](ProblemSpec& s) {
         sizes(s, 192, 128);
         s.causal = true;
       }},
      {"d256", [](ProblemSpec& s) { sizes(s, 256, 256); }},
      {"d320", [](ProblemSpec& s) { sizes(s, 320, 320); }},
      {"d576_512",
       [](ProblemSpec& s) {
         sizes(s, 576, 512);
         s.heads_q = 8;
         s.heads_kv = 1;
         s.seqlen_q = 2;
       }},
      {"d512_causal_groups",
       [](ProblemSpec& s) {
         sizes(s, 512, 512);
         s.batch = 3;  // enough tiles that clusters take them from a counter
         s.heads_q = 3 * s.heads_kv;
         s.seqlen_q = 100;
         s.seqlen_k = 200;
         s.causal = s.sink = true;
       }},
      {"groups_of_128",  // a box of TMA has half of a group
       [](ProblemSpec& s) {
         s.heads_kv = 1;
         s.heads_q = 128;
         s.seqlen_q = 3;
         s.seqlen_k = 150;
         s.causal = true;
       }},
      {"d264_504_packed",
       [](ProblemSpec& s) {
         sizes(s, 264, 504);
         pack(s);
         s.heads_q = 2 * s.heads_kv;
         s.causal = true;
       }},
      {"d576_window",
       [](ProblemSpec& s) {
         sizes(s, 576, 512);
         s.seqlen_k = 400;
         s.window_left = 90;
         s.window_right = 20;
         s.o_is_f32 = true;
       }},
      {"d384_328_used_groups",
       [](ProblemSpec& s) {
         sizes(s, 384, 328);
         s.batch = 3;
         s.heads_q = 3 * s.heads_kv;
         s.used_q = {140, 0, 65};
         s.used_k = {129, 64, 0};
         s.causal = s.sink = s.dsink = s.dlse = true;
       }},
      {"d512_packed_spare_rows",
       [](ProblemSpec& s) {
         sizes(s, 512, 512);
         pack(s);
         s.spare_rows = 300;  // more than the tiles of the longest sequence cover
       }},
      {"d72_24", [](ProblemSpec& s) { sizes(s, 72, 24); }},
      {"d33_17", [](ProblemSpec& s) { sizes(s, 33, 17); }},

      // Few queries: packed groups, and keys split over CTAs.
      {"decode", decode},
      {"few_queries_causal",
       [](ProblemSpec& s) {
         s.heads_q = 6;
         s.heads_kv = 2;
         s.seqlen_q = 5;
         s.seqlen_k = 1100;
         s.causal = true;
         s.sink = s.dsink = true;
       }},
      {"grouped", [](ProblemSpec& s) { s.heads_q = 3 * s.heads_kv; }},

      // Lengths.
      {"packed",
       [](ProblemSpec& s) {
         pack(s);
         s.spare_rows = 3;
         s.causal = true;
       }},
      {"used",
       [](ProblemSpec& s) {
         s.batch = 3;
         s.used_q = {140, 0, 65};
         s.used_k = {129, 64, 0};
       }},

      // Terms of the score, one by one and together.
      {"window",
       [](ProblemSpec& s) {
         s.window_left = 40;
         s.window_right = 9;
       }},
      {"softcap", [](ProblemSpec& s) { s.softcap = 5; }},
      {"wide_softcap", [](ProblemSpec& s) { s.softcap = 300; }},
      {"alibi", [](ProblemSpec& s) { s.alibi = s.alibi_by_batch = true; }},
      {"alibi_d128_packed_groups",
       [](ProblemSpec& s) {
         sizes(s, 128, 128);
         s.heads_q = 3 * s.heads_kv;
         pack(s);
         s.alibi = s.causal = s.sink = s.dlse = true;
       }},
      {"alibi_d256_window",
       [](ProblemSpec& s) {
         sizes(s, 256, 256);
         s.batch = 2;
         s.alibi = s.alibi_by_batch = true;
         s.window_left = 40;
         s.window_right = 9;
       }},
      {"alibi_decode",
       [](ProblemSpec& s) {
         decode(s);
         s.alibi = true;
       }},
      {"bias", [](ProblemSpec& s) { s.bias = s.dbias = true; }},
      {"bias_broadcast",
       [](ProblemSpec& s) {
         s.batch = 2;
         s.bias = s.dbias = s.bias_is_f32 = s.dbias_is_f32 = true;
         s.bias_broadcast = 0b0101;
         s.bias_values = BiasValues::kSomeMinusInfinity;
       }},
      {"mask", [](ProblemSpec& s) { s.mask = true; }},
      {"block_mask",
       [](ProblemSpec& s) {
         s.block_mask = true;
         s.block_q = 32;
         s.block_k = 48;
       }},
      {"dropout",
       [](ProblemSpec& s) {
         s.dropout = 0.3;
         s.rng_state = true;
       }},
      {"dropout_d128_packed_groups",
       [](ProblemSpec& s) {
         sizes(s, 128, 128);
         s.heads_q = 3 * s.heads_kv;
         pack(s);
         s.causal = s.sink = s.dlse = true;
         s.dropout = 0.5;
       }},
      {"dropout_d256_window",
       [](ProblemSpec& s) {
         sizes(s, 256, 256);
         s.batch = 2;
         s.window_left = 40;
         s.window_right = 9;
         s.dropout = 0.1;
       }},
      {"dropout_d320_packed",
       [](ProblemSpec& s) {
         sizes(s, 320, 320);
         pack(s);
         s.window_left = 40;
         s.dropout = 0.3;
         s.rng_state = true;
       }},
      {"dropout_d512_used_groups",
       [](ProblemSpec& s) {
         sizes(s, 512, 448);
         s.batch = 3;
         s.heads_q = 2 * s.heads_kv;
         s.used_q = {140, 0, 65};
         s.used_k = {129, 64, 0};
         s.sink = s.dsink = s.dlse = s.gradients_are_f32 = true;
         s.dropout = 0.4;
       }},
      {"dropout_d576_512_causal_groups",
       [](ProblemSpec& s) {
         sizes(s, 576, 512);
         s.heads_q = 3 * s.heads_kv;
         s.seqlen_k = 200;
         s.causal = s.sink = true;
         s.dropout = 0.2;
       }},
      {"all_terms",
       [](ProblemSpec& s) {
         s.batch = 2;
         s.heads_q = 4;
         s.heads_kv = 2;
         s.causal = s.alibi = s.bias = s.dbias = s.mask = s.block_mask = s.sink = s.dsink = s.dlse = true;
         s.window_left = 100;
         s.softcap = 10;
         s.block_q = s.block_k = 16;
         s.dropout = 0.1;
         s.o_is_f32 = true;
         s.used_k = {120, 150};
       }},

      // Lists of keys: several tiles a query, keys split over CTAs, a list for all queries.
      {"lists",
       [](ProblemSpec& s) {
         sizes(s, 192, 136);
         s.heads_q = 11;
         s.seqlen_q = 5;
         s.list_size = 150;
         s.causal = s.sink = s.dsink = s.dlse = true;
       }},
      {"lists_packed_all_terms",
       [](ProblemSpec& s) {
         pack(s);
         s.heads_q = 3 * s.heads_kv;
         s.list_size = 70;
         s.causal = s.alibi = s.bias = s.mask = true;
         s.softcap = 10;
         s.dropout = 0.1;
       }},
      {"lists_of_all_queries",
       [](ProblemSpec& s) {
         s.list_size = 1100;
         s.list_of_all = true;
         s.seqlen_q = 3;
         s.window_left = 90;
       }},

      // Keys of a cache: pages that TMA copies, some of them in parts of a tile, and pages that it does not.
      {"pages_of_64_decode",
       [](ProblemSpec& s) {
         decode(s);
         page(s, 64);
       }},
      {"pages_of_16_d128",
       [](ProblemSpec& s) {
         sizes(s, 128, 128);
         page(s, 16);
         s.heads_q = 4 * s.heads_kv;
         s.causal = true;
       }},
      {"pages_of_48_d256",
       [](ProblemSpec& s) {
         sizes(s, 256, 256);
         page(s, 48);
         s.window_left = 40;
         s.window_right = 9;
       }},
      {"pages_of_256_d576_512",
       [](ProblemSpec& s) {
         sizes(s, 576, 512);
         s.seqlen_k = 700;
         s.heads_q = 8 * s.heads_kv;
         s.seqlen_q = 2;
         page(s, 256);
       }},
      {"pages_of_7_d128_packed_queries",
       [](ProblemSpec& s) {
         sizes(s, 128, 128);
         s.lengths_q = {140, 0, 33, 1};
         page(s, 7);
         s.causal = true;
       }},
      {"pages_of_1_decode",
       [](ProblemSpec& s) {
         decode(s);
         page(s, 1);
       }},
      {"pages_of_16_all_terms",
       [](ProblemSpec& s) {
         page(s, 16);
         s.causal = s.alibi = s.bias = s.mask = s.block_mask = s.sink = true;
         s.leftpad_k = {5, 70};
         s.softcap = 10;
         s.block_q = s.block_k = 16;
         s.dropout = 0.1;
       }},
      {"pages_misaligned",
       [](ProblemSpec& s) {
         page(s, 16);
         s.layout = Layout::kPadded;
       }},
      {"chosen_sequences",
       [](ProblemSpec& s) {
         s.batch = 3;
         s.caches = 4;
         s.cache_batch = {3, 0, 3};
         s.used_k = {150, 0, 33};
       }},
      {"padding_in_front",
       [](ProblemSpec& s) {
         decode(s);
         s.leftpad_k = {0, 700};
       }},

      // Memory.
      {"misaligned", [](ProblemSpec& s) { s.layout = Layout::kPadded; }},
      {"strided",
       [](ProblemSpec& s) {
         s.layout = Layout::kSliced;
         s.aligned = true;
         s.o_is_f32 = true;
       }},
      {"without_keys", [](ProblemSpec& s) { s.seqlen_k = 0; }},
  };
  return list;
}

/// Rows that are appended: with and without rotation, of each order of pairs, packed and not, as 8 bits.
const std::vector<Cover>& covers_of_appends() {
  static const std::vector<Cover> list = {
      {"append_decode",
       [](ProblemSpec& s) {
         append(s, 1, 16);
         s.heads_q = 4;
         s.seqlen_q = 1;
         s.rotary = 64;
       }},
      {"append_without_rotation",
       [](ProblemSpec& s) {
         append(s, 20, 0);
         s.seqlen_q = 20;
         s.rotary = 0;
       }},
      {"append_packed_interleaved",
       [](ProblemSpec& s) {
         append(s, 0, 16);
         s.lengths_q = {9, 33};
         s.packed_new = true;
         s.lengths_new = {0, 30};
         s.rotary_positions = {3, 90};
         s.rotary_interleaved = s.angles_are_f32 = true;
       }},
      {"append_misaligned_to_chosen_behind_padding",
       [](ProblemSpec& s) {
         append(s, 7, 0);
         sizes(s, 33, 17);
         s.seqlen_q = 7;
         s.rotary = 20;
         s.caches = 4;
         s.cache_batch = {3, 1};
         s.leftpad_k = {155, 0};  // reaches into the new rows
         s.layout = Layout::kPadded;
       }},
      {"append_e4m3_pages",
       [](ProblemSpec& s) {
         append(s, 5, 16);
         s.heads_q = 4;
         s.heads_kv = 2;
         s.seqlen_q = 5;
         s.e4m3_keys = true;
       }},
      {"append_e4m3_queries",
       [](ProblemSpec& s) {
         append(s, 3, 0);
         s.seqlen_q = 3;
         s.e4m3_keys = s.e4m3_queries = true;
       }},
  };
  return list;
}

/// Keys of 8 bits, and queries: few of them in tiles of 8, 16 and 32 rows, and many.
const std::vector<Cover>& covers_of_8_bits() {
  static const std::vector<Cover> list = {
      {"e4m3_decode", [](ProblemSpec& s) { decode_e4m3(s, 64, 4, 1); }},
      {"e4m3_decode_pages_of_16",
       [](ProblemSpec& s) {
         decode_e4m3(s, 64, 7, 2);
         page(s, 16);
       }},
      {"e4m3_decode_pages_of_7_behind_padding",
       [](ProblemSpec& s) {
         decode_e4m3(s, 64, 4, 1);
         page(s, 7);
         s.leftpad_k = {0, 50};
       }},
      {"e4m3_decode_d128_rows_of_32",
       [](ProblemSpec& s) {
         decode_e4m3(s, 128, 8, 4);
         s.seqlen_k = 1100;
       }},
      {"e4m3_decode_queries",
       [](ProblemSpec& s) {
         decode_e4m3(s, 64, 4, 2);
         s.e4m3_queries = true;
       }},
      {"e4m3_keys", [](ProblemSpec& s) { s.e4m3_keys = true; }},
      {"e4m3_queries_causal",
       [](ProblemSpec& s) {
         s.e4m3_keys = s.e4m3_queries = true;
         s.heads_q = 2;
         s.causal = true;
       }},
      {"e4m3_queries_d128_packed",
       [](ProblemSpec& s) {
         sizes(s, 128, 128);
         pack(s);
         s.e4m3_keys = s.e4m3_queries = true;
         s.descale_broadcast = 1;
         s.sink = true;
       }},
      {"e4m3_queries_pages_of_48",
       [](ProblemSpec& s) {
         page(s, 48);
         s.e4m3_keys = s.e4m3_queries = true;
         s.window_left = 40;
       }},
  };
  return list;
}

/// Queries that meet values, and values that lie in keys.
const std::vector<Cover>& covers_of_values() {
  static const std::vector<Cover> list = {
      {"qv",
       [](ProblemSpec& s) {
         sizes(s, 32, 48);
         s.qv = s.causal = true;
         s.heads_q = 2;
       }},
      {"qv_e4m3_pages_of_7",
       [](ProblemSpec& s) {
         sizes(s, 32, 48);
         s.seqlen_q = 3;
         page(s, 7);
         s.qv = s.e4m3_keys = true;
       }},
      {"qv_d64_512_pages_of_64",
       [](ProblemSpec& s) {
         sizes(s, 64, 512);
         s.heads_q = 16;
         s.seqlen_q = 1;
         page(s, 64);
         s.qv = true;
       }},
      {"values_in_keys_d576_512_pages_of_64",
       [](ProblemSpec& s) {
         sizes(s, 576, 512);
         s.heads_q = 16;
         s.seqlen_q = 1;
         page(s, 64);
         s.values_in_keys = true;
       }},
  };
  return list;
}

std::vector<Cover> all_covers() {
  std::vector<Cover> all = covers();
  for (const auto* more : {&covers_of_appends(), &covers_of_8_bits(), &covers_of_values()})
    all.insert(all.end(), more->begin(), more->end());
  return all;
}

class CudaCover : public testing::TestWithParam<Cover> {};

TEST_P(CudaCover, Conform) {
  const std::vector<std::string> backends = cuda_backends_under_test();
  if (backends.empty()) GTEST_SKIP() << why_no_cuda_backend();
  ProblemSpec spec;
  spec.heads_q = spec.heads_kv = 1;
  spec.seqlen_q = 140;
  spec.seqlen_k = 150;
  sizes(spec, 64, 64);
  GetParam().make(spec);
  CheckOptions options;
  options.repeat = false;
  // Each backend with one type, because the type does not change which memory a kernel touches; except for
  // cuda_sm90, which reads float32 as bf16x3.
  std::set<std::string> done;
  for (const Type type : {Type::kF32, Type::kBF16, Type::kF16}) {
    spec.type = type;
    OwnedProblem problem(spec);
    Checker checker(problem, options);
    for (const std::string& backend : backends) {
      const std::string way = backend == "cuda_sm90" && type == Type::kF32 ? "cuda_sm90, bf16x3" : backend;
      if (done.count(way) > 0) continue;
      announce(backend + ": " + describe(spec));
      int ran = 0;
      const std::string failure = check_and_count(checker, backend, &ran);
      EXPECT_EQ(failure, "") << "    problem: " << describe(spec);
      if (ran > 0) done.insert(way);
    }
    EXPECT_TRUE(!done.empty() || only_one_backend()) << "no CUDA backend can do " << describe(spec);
  }
}

INSTANTIATE_TEST_SUITE_P(Set, CudaCover, testing::ValuesIn(all_covers()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

}  // namespace
}  // namespace fovea::conformance
