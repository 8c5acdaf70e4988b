// The rows of `fovea bench --decode`, their data, and the oracle on slices of them.
#include "cli/bench/decode.hpp"

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>

#include "cli/bench/data.hpp"
#include "cli/terminal/failure.hpp"

namespace fovea::cli {
namespace {

constexpr const char* kE4M3 = "float8_e4m3fn";

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// Pages of a sequence; 0: the cache has none.
int64_t columns_of(const BenchCase& what) {
  return what.cache->page == 0 ? 0 : ceil_div(what.shape.seqlen_k, what.cache->page);
}

/// A tensor with the memory of `array`, k or v, whose second and third dimension lie in the other order where heads are outside.
Tensor in_order(const BenchCase& what, const Tensor& array) {
  if (!what.cache->heads_outside) return array;
  const auto shape = array.shape();
  const int64_t rows = shape[1], heads = shape[2], size = shape[3];
  return {array.data(), array.dtype(), shape, std::array{heads * rows * size, size, rows * size, int64_t{1}}};
}

/// Of k or v with heads of `size`.
std::vector<int64_t> cache_shape(const BenchCase& what, int64_t size) {
  const Shape& s = what.shape;
  const int64_t page = what.cache->page;
  if (page == 0) return {s.batch, s.seqlen_k, s.heads_kv, size};
  return {s.batch * columns_of(what), page, s.heads_kv, size};
}

ElementType type_of_cache(const BenchCase& what) {
  return what.cache->of_8_bits ? ElementType::e4m3 : what.shape.type;
}

std::string name_of(const BenchCase& what) {
  const Shape& s = what.shape;
  std::string name = fmt::format("decode_{}_b{}_q{}_k{}_h{}_{}_d{}", type_name(s.type), s.batch, s.seqlen_q,
                                 s.seqlen_k, s.heads_q, s.heads_kv, s.head_dim);
  if (s.head_dim_v != s.head_dim) name += fmt::format("_{}", s.head_dim_v);
  if (what.cache->page > 0) name += fmt::format("_page{}", what.cache->page);
  if (what.cache->of_8_bits) name += "_e4m3";
  if (what.cache->heads_outside) name += "_bhsd";
  if (what.cache->copies > 1) name += fmt::format("_caches{}", what.cache->copies);
  return name;
}

}  // namespace

void DecodeOptions::add_options(CLI::App& command) {
  constexpr const char* kGroup = "Decoding";
  options_ = {
      command
          .add_option("--page", page, "Rows of a page of the cache; 0: one piece for each sequence (0,64)")
          ->delimiter(',')
          ->check(CLI::NonNegativeNumber)
          ->type_name("N,...")
          ->group(kGroup),
      command
          .add_option("--cache-dtype", cache_type,
                      "Type of the cache: q (that of the queries) or float8_e4m3fn (default: both)")
          ->delimiter(',')
          ->check(CLI::IsMember({"q", kE4M3}))
          ->type_name("TYPE,...")
          ->group(kGroup),
      command
          .add_option(
              "--caches", copies,
              "Caches that runs take in turn: more than a processor's caches hold are read from memory, "
              "as those of a model's layers are (1)")
          ->check(CLI::PositiveNumber)
          ->type_name("N")
          ->group(kGroup)};
}

bool DecodeOptions::given() const {
  return std::ranges::any_of(options_, [](const CLI::Option* option) { return option->count() > 0; });
}

std::vector<BenchCase> DecodeOptions::cases(const std::vector<Shape>& shapes, const Terms& terms) const {
  std::vector<BenchCase> all;
  for (const Shape& shape : shapes) {
    for (const std::string& type : cache_type) {
      if (shape.type == ElementType::e4m3 && &type != cache_type.data()) break;  // it is the same
      for (const int64_t rows : page) {
        BenchCase what{"",    shape, Pass::forward,
                       terms, true,  CacheForm{rows, type == kE4M3, heads_outside, copies}};
        what.name = name_of(what);
        all.push_back(std::move(what));
      }
    }
  }
  return all;
}

ShapeOptions default_decode_shapes() {
  ShapeOptions shapes;
  shapes.batch = {1, 8};
  shapes.seqlen = {1};
  shapes.seqlen_k = {8192};
  shapes.heads = {32};
  shapes.heads_kv = {8};
  shapes.head_dim = {128};
  return shapes;
}

DecodeData::DecodeData(const BenchCase& what, Gpu* gpu) : what_(what), mirrors_(gpu) {
  const Shape& s = what.shape;
  const auto sizes = [](const auto& shape) { return std::vector<int64_t>(shape.begin(), shape.end()); };
  q_ = io::make_array("q", s.type, sizes(s.q()));
  o_ = io::make_array("o", output_type(s.type), sizes(s.o()));
  lse_ = io::make_array("lse", ElementType::f32, sizes(s.lse()));
  fill_normal(q_, 1);
  k_ = io::make_array("k", type_of_cache(what), cache_shape(what, s.head_dim));
  v_ = io::make_array("v", type_of_cache(what), cache_shape(what, s.head_dim_v));
  fill_normal(k_, 2);
  fill_normal(v_, 3);
  used_ = io::make_array("seqused_k", ElementType::i32, {s.batch});
  std::ranges::fill(used_.elements<int32_t>(), static_cast<int32_t>(s.seqlen_k));
  if (what.cache->page > 0) {
    pages_ = io::make_array("page_table", ElementType::i32, {s.batch, columns_of(what)});
    const std::span<int32_t> pages = pages_.elements<int32_t>();
    std::iota(pages.begin(), pages.end(), 0);
    uint64_t state = 5;
    for (size_t last = pages.size(); last > 1; --last) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(pages[last - 1], pages[(state >> 33) % last]);
    }
  }
  for (const Array* array : {&q_, &k_, &v_, &o_, &lse_, &used_, &pages_}) mirrors_.add(*array);
  copies_.assign(static_cast<size_t>(what.cache->copies - 1), {k_, v_});
}

Problem DecodeData::described(const BenchCase& what, const Gpu* gpu) {
  Problem p = fovea::cli::described(what.shape, Pass::forward);
  what.terms.apply(p);
  p.k = in_order(what, fovea::cli::described(type_of_cache(what), cache_shape(what, what.shape.head_dim)));
  p.v = in_order(what, fovea::cli::described(type_of_cache(what), cache_shape(what, what.shape.head_dim_v)));
  p.seqused_k = fovea::cli::described(ElementType::i32, std::array{what.shape.batch});
  if (what.cache->page > 0)
    p.page_table = fovea::cli::described(ElementType::i32, std::array{what.shape.batch, columns_of(what)});
  if (gpu == nullptr) return p;
  for (Tensor* t : {&p.q, &p.k, &p.v, &p.o, &p.lse, &p.seqused_k, &p.page_table}) {
    if (*t) *t = t->on(gpu->device());
  }
  return p;
}

Problem DecodeData::problem() const {
  Problem p;
  what_.terms.apply(p);
  p.q = mirrors_.tensor(q_);
  p.o = mirrors_.tensor(o_);
  p.lse = mirrors_.tensor(lse_);
  p.k = mirrors_.on_device(in_order(what_, mirrors_.tensor(k_)));
  p.v = mirrors_.on_device(in_order(what_, mirrors_.tensor(v_)));
  p.seqused_k = mirrors_.tensor(used_);
  if (!pages_.shape.empty()) p.page_table = mirrors_.tensor(pages_);
  return p;
}

void DecodeData::download_outputs() {
  mirrors_.download(o_);
  mirrors_.download(lse_);
}

/// The rows of one sequence and head of keys in their order, (1, keys, 1, size) in float64.
Array DecodeData::keys_of(const Array& cache, int64_t batch, int64_t head_kv) const {
  const int64_t size = cache.shape[3], heads = cache.shape[2], rows = cache.shape[1];
  const size_t bytes = static_cast<size_t>(size) * io::element_size(cache.type);
  Array part = io::make_array(cache.name, cache.type, {1, what_.shape.seqlen_k, 1, size});
  auto to = part.bytes.begin();
  for (int64_t key = 0; key < what_.shape.seqlen_k; ++key) {
    int64_t piece = batch;
    if (what_.cache->page > 0)
      piece = pages_.elements<int32_t>()[static_cast<size_t>(batch * columns_of(what_) + key / rows)];
    const int64_t row = key % rows;
    const int64_t inside = what_.cache->heads_outside ? head_kv * rows + row : row * heads + head_kv;
    const int64_t first = (piece * rows * heads + inside) * size;
    to = std::copy_n(cache.bytes.begin() + first * static_cast<int64_t>(io::element_size(cache.type)), bytes,
                     to);
  }
  return converted(std::move(part), ElementType::f64);
}

double DecodeData::error_of(int64_t batch, int64_t head_kv) const {
  const Shape& s = what_.shape;
  const int64_t group = s.heads_q / s.heads_kv;
  const IndexRange heads{head_kv * group, (head_kv + 1) * group}, rows{0, s.seqlen_q};
  Shape small = s;
  small.batch = small.heads_kv = 1;
  small.heads_q = group;
  small.type = ElementType::f64;
  BenchData oracle(small, false);
  const auto part_of = [&](const Array& array, const std::array<int64_t, 4>& shape) {
    HeadArray heads_of(array.name.c_str(), shape, array.type, Layout::bshd);
    heads_of.array() = array;
    return converted(heads_of.cut_out(batch, rows, heads), ElementType::f64);
  };
  oracle.q.array() = part_of(q_, s.q());
  oracle.k.array() = keys_of(k_, batch, head_kv);
  oracle.v.array() = keys_of(v_, batch, head_kv);
  attend(oracle.problem(Pass::forward, what_.terms), {.backend = "reference"});

  const double of_o = error_between(to_doubles(part_of(o_, s.o())), to_doubles(oracle.o.array())).relative;
  std::vector<double> got, expected;
  const std::span<const float> lse = lse_.elements<float>(), expected_lse = oracle.lse.elements<float>();
  for (int64_t i = 0; i < group * s.seqlen_q; ++i) {
    const float found = lse[static_cast<size_t>((batch * s.heads_q + heads.first) * s.seqlen_q + i)];
    if (found == expected_lse[static_cast<size_t>(i)]) continue;  // also -inf, of a row without keys
    got.push_back(found);
    expected.push_back(expected_lse[static_cast<size_t>(i)]);
  }
  const double of_lse = error_between(got, expected).relative;
  return std::isnan(of_o) || of_o > of_lse ? of_o : of_lse;
}

double DecodeData::largest_error() const {
  const Shape& s = what_.shape;
  if (s.batch == 0 || s.seqlen_q == 0 || s.seqlen_k == 0) return 0;
  const double first = error_of(0, 0), last = error_of(s.batch - 1, s.heads_kv - 1);
  return std::isnan(first) || first > last ? first : last;
}

}  // namespace fovea::cli
