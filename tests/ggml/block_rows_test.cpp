// Few rows over blocks, each way that this processor has, against sums in float64 and against what rounding can make of them. Keys, values and
// masks end where memory ends.
#include "integrations/ggml/block_rows.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/ggml/block_formats.hpp"

namespace fovea_ggml {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr uint16_t kUnseen = 0xfc00, kHalfInfinity = 0x7c00, kHalfNaN = 0x7e00;

/// A float16 above its subnormal numbers, infinity, or NaN.
double number_of(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const double sign = half >> 15 ? -1 : 1;
  if (exponent == 31) return fraction == 0 ? sign * kInfinity : std::numeric_limits<double>::quiet_NaN();
  return exponent == 0 ? sign * std::ldexp(fraction, -24) : sign * std::ldexp(1024 + fraction, exponent - 25);
}

/// Bytes that end where a page begins that cannot be read.
class Bytes {
 public:
  explicit Bytes(size_t size) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t whole = (size + page - 1) / page * page;
    bytes_ = whole + page;
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory_, MAP_FAILED);
    EXPECT_EQ(mprotect(static_cast<char*>(memory_) + whole, page, PROT_NONE), 0);
    data_ = static_cast<char*>(memory_) + whole - size;
  }
  ~Bytes() { munmap(memory_, bytes_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  char* data() const { return data_; }

 private:
  void* memory_;
  size_t bytes_;
  char* data_;
};

struct Case {
  BlockType k = BlockType::kQ8_0, v = BlockType::kQ8_0;
  int64_t d = 128, d_v = 128, keys = 200, heads = 2, rows = 4;
  bool masked = false;
  float slope = 1, softcap = 0;
  bool has_sink = false;
  int64_t gap = 0;   ///< bytes between the rows of a key and those of the next
  float spread = 1;  ///< of queries

  std::string name() const {
    return std::to_string(static_cast<int>(k)) + std::to_string(static_cast<int>(v)) + " d " +
           std::to_string(d) + " " + std::to_string(d_v) + ", " + std::to_string(heads) + " x " +
           std::to_string(rows) + " rows, " + std::to_string(keys) + " keys" + (masked ? ", masked" : "");
  }
};

/// Rows of blocks, and what they are.
class Cache {
 public:
  Cache(const Case& c, BlockType type, int64_t size, std::mt19937& random)
      : type_(type),
        size_(size),
        row_bytes_(size / kBlockElements * bytes()),
        key_bytes_(c.heads * row_bytes_ + c.gap),
        bytes_(static_cast<size_t>(std::max<int64_t>(0, c.keys * key_bytes_ - c.gap))) {
    for (int64_t j = 0; j < c.keys; ++j) {
      for (int64_t h = 0; h < c.heads; ++h) {
        for (int64_t b = 0; b < size / kBlockElements; ++b) {
          char* to = block(j, h, b);
          for (int64_t i = numbers_at() - fifths(); i < bytes(); ++i) to[i] = static_cast<char>(random());
          const auto x = static_cast<uint32_t>(random());
          // Numbers of 8 bits times 1 / 128 to 1 / 32, of 5 and 4 bits times 1 / 8 to 1 / 2; some with a sign, some zero. Leasts up to 4.
          const bool small = type == BlockType::kQ8_0 || type == BlockType::kIq4Nl;
          const uint32_t scale = (small ? 0x2000u : 0x3000u) + (x & 0x7ffu) + (x >> 28 == 0 ? 0x8000u : 0);
          set_scale(j, h, b, x >> 24 == 7 ? uint16_t{0} : static_cast<uint16_t>(scale));
          if (has_least()) set_least(j, h, b, static_cast<uint16_t>((random() & 0x87ffu) + 0x3c00u));
        }
      }
    }
  }
  void set_scale(int64_t key, int64_t head, int64_t b, uint16_t half) {
    std::memcpy(block(key, head, b), &half, sizeof(half));
  }
  void set_least(int64_t key, int64_t head, int64_t b, uint16_t half) {
    std::memcpy(block(key, head, b) + 2, &half, sizeof(half));
  }
  BlockRows rows() const { return {type_, bytes_.data(), size_, key_bytes_, row_bytes_}; }
  bool has_least() const { return type_ == BlockType::kQ4_1 || type_ == BlockType::kQ5_1; }
  double scale(int64_t key, int64_t head, int64_t b) const { return half_at(block(key, head, b)); }
  double least(int64_t key, int64_t head, int64_t b) const {
    return has_least() ? half_at(block(key, head, b) + 2) : 0;
  }
  int number(int64_t key, int64_t head, int64_t c) const {
    const auto* of = reinterpret_cast<const uint8_t*>(block(key, head, c / kBlockElements));
    return number_in(type_, of, c % kBlockElements);
  }
  double operator()(int64_t key, int64_t head, int64_t c) const {
    return scale(key, head, c / kBlockElements) * number(key, head, c) + least(key, head, c / kBlockElements);
  }
  /// What an element is added up from, without signs.
  double size_of(int64_t key, int64_t head, int64_t c) const {
    return std::abs(scale(key, head, c / kBlockElements) * number(key, head, c)) +
           std::abs(least(key, head, c / kBlockElements));
  }

 private:
  int64_t fifths() const { return type_ == BlockType::kQ5_0 || type_ == BlockType::kQ5_1 ? 4 : 0; }
  int64_t numbers_at() const { return 2 + (has_least() ? 2 : 0) + fifths(); }
  int64_t bytes() const { return numbers_at() + (type_ == BlockType::kQ8_0 ? 32 : 16); }
  static double half_at(const char* at) {
    uint16_t half;
    std::memcpy(&half, at, sizeof(half));
    return number_of(half);
  }
  char* block(int64_t key, int64_t head, int64_t b) const {
    return bytes_.data() + key * key_bytes_ + head * row_bytes_ + b * bytes();
  }

  BlockType type_;
  int64_t size_, row_bytes_, key_bytes_;
  Bytes bytes_;
};

constexpr float kGuard = -12345.0f;

/// A problem with random numbers.
class Problem {
 public:
  Problem(const Case& of, uint32_t seed)
      : c(of), random(seed), k(c, c.k, c.d, random), v(c, c.v, c.d_v, random) {
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(c.heads * c.rows * c.d));
    for (float& x : q) x = c.spread * normal(random);
    o_size = c.d_v + 3;
    o.assign(static_cast<size_t>(c.heads * c.rows * o_size), kGuard);
    lse.assign(static_cast<size_t>(c.heads * c.rows), kGuard);
    for (int64_t r = 0; c.masked && r < c.rows; ++r) {
      masks.push_back(std::make_unique<Bytes>(static_cast<size_t>(c.keys) * sizeof(uint16_t)));
      for (int64_t j = 0; j < c.keys; ++j) {
        const auto x = static_cast<uint32_t>(random());
        // A long run of keys that nobody sees, others not seen, zeros, numbers from -2 to -1; the last row of several sees nothing.
        const bool unseen = (j >= 60 && j < 200) || x % 4 == 0 || (r > 0 && r + 1 == c.rows);
        set_mask(r, j,
                 unseen       ? kUnseen
                 : x % 4 == 1 ? uint16_t{0}
                              : static_cast<uint16_t>(0xbc00 + (x >> 8 & 1023)));
      }
    }
  }
  void set_mask(int64_t r, int64_t j, uint16_t half) {
    std::memcpy(masks[static_cast<size_t>(r)]->data() + 2 * j, &half, sizeof(half));
  }
  double mask(int64_t r, int64_t j) const {
    if (masks.empty()) return 0;
    uint16_t half;
    std::memcpy(&half, masks[static_cast<size_t>(r)]->data() + 2 * j, sizeof(half));
    return number_of(half);
  }
  float sink(int64_t x) const { return 0.5f * static_cast<float>(x % 5); }
  float slope(int64_t x) const { return c.slope * static_cast<float>(1 + x % 3); }

  void run(const BlockWay& way) {
    std::vector<QueryRow> rows(static_cast<size_t>(c.heads * c.rows));
    for (int64_t x = 0; x < c.heads * c.rows; ++x) {
      QueryRow& row = rows[static_cast<size_t>(x)];
      row.q = &q[static_cast<size_t>(x * c.d)];
      if (c.masked)
        row.mask = reinterpret_cast<const uint16_t*>(masks[static_cast<size_t>(x % c.rows)]->data());
      row.slope = slope(x);
      row.has_sink = c.has_sink;
      row.sink = sink(x);
      row.o = &o[static_cast<size_t>(x * o_size)];
      row.lse = &lse[static_cast<size_t>(x)];
    }
    way.attend({k.rows(), v.rows(), c.keys, c.heads, c.rows, rows.data(), scale(), c.softcap});
  }
  float scale() const { return 1 / std::sqrt(static_cast<float>(c.d)); }

  Case c;
  std::mt19937 random;
  Cache k, v;
  std::vector<float> q, o, lse;
  std::vector<std::unique_ptr<Bytes>> masks;  ///< a row
  int64_t o_size;                             ///< a row and guards
};

/// A row in float64, and how far results may be from it.
struct Row {
  std::vector<double> o, most;
  double lse, most_lse;
};

// Float32 rounds to 2^-24. A dot product of so many terms, exp, tanh and sums of weights lose some of that; the rest comes from bytes and words.
Row row_of(const Problem& p, int64_t x, bool integers) {
  const Case& c = p.c;
  const int64_t h = x / c.rows, r = x % c.rows;
  const float* q = &p.q[static_cast<size_t>(x * c.d)];
  double largest_q = 0, largest = c.has_sink ? p.sink(x) : -kInfinity, score_error = 0;
  for (int64_t i = 0; i < c.d; ++i) largest_q = std::max<double>(largest_q, std::abs(q[i]));
  std::vector<double> s(static_cast<size_t>(c.keys));
  for (int64_t j = 0; j < c.keys; ++j) {
    double dot = 0, sizes = 0, key_size = 0;
    const double mask = p.mask(r, j);
    for (int64_t i = 0; i < c.d && mask != -kInfinity; ++i) {
      dot += q[i] * p.k(j, h, i);
      sizes += std::abs(q[i]) * p.k.size_of(j, h, i);
      key_size += p.k.size_of(j, h, i);
    }
    double score = p.scale() * dot;
    if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
    score = mask == -kInfinity ? -kInfinity : score + p.slope(x) * mask;
    s[static_cast<size_t>(j)] = score;
    largest = std::max(largest, score);
    double error = p.scale() * 0x1p-24 * static_cast<double>(c.d) * sizes;
    if (integers) error += p.scale() * largest_q / (127 * 128) / 2 * key_size;
    if (std::isfinite(score))
      score_error = std::max(score_error, error + 0x1p-21 * (std::abs(score) + c.softcap));
  }
  double sum = c.has_sink ? std::exp(p.sink(x) - largest) : 0;
  Row row{std::vector<double>(static_cast<size_t>(c.d_v)), std::vector<double>(static_cast<size_t>(c.d_v)), 0,
          0};
  for (double& score : s) {
    score = score == -kInfinity ? 0 : std::exp(score - largest);
    sum += score;
  }
  row.lse = sum == 0 ? -kInfinity : largest + std::log(sum);
  row.most_lse = score_error + 0x1p-20 * (1 + std::abs(row.lse)) + 0x1p-23 * static_cast<double>(c.keys);
  for (int64_t i = 0; i < c.d_v && sum != 0; ++i) {
    double o = 0, sizes = 0, words = 0, weight = 0, numbers = 0, floor = 0x1p-126;
    for (int64_t j = 0; j < c.keys; ++j) {
      const double share = s[static_cast<size_t>(j)];
      if (share != 0) o += share * p.v(j, h, i);
      sizes += share == 0 ? 0 : share * p.v.size_of(j, h, i);
      if (share != 0) weight = std::max(weight, std::abs(share * p.v.scale(j, h, i / kBlockElements)));
      numbers += std::abs(p.v.number(j, h, i));
      // Weights below the normal numbers are 0, and such times a scale that are not 32,767 times as large.
      if (share != 0)
        floor += 0x1p-126 * p.v.size_of(j, h, i) + (integers ? 0x1p-100 * std::abs(p.v.number(j, h, i)) : 0);
      if (j % 64 < 63 && j + 1 < c.keys) continue;  // a step ends
      words += weight / 32767 * 0.51 * numbers;
      weight = numbers = 0;
    }
    row.o[static_cast<size_t>(i)] = o / sum;
    row.most[static_cast<size_t>(i)] =
        (sizes * (2 * score_error + 0x1p-20 + 0x1p-23 * static_cast<double>(c.keys)) +
         (integers ? words : 0) + floor) /
        sum;
  }
  return row;
}

bool multiplies_integers(const BlockWay& way) {
  return std::string(way.name).ends_with("VNNI");
}

void expect_right(const BlockWay& way, Problem& p) {
  p.run(way);
  for (int64_t x = 0; x < p.c.heads * p.c.rows; ++x) {
    const Row expected = row_of(p, x, multiplies_integers(way));
    const float lse = p.lse[static_cast<size_t>(x)];
    if (std::isfinite(expected.lse)) {
      EXPECT_NEAR(lse, expected.lse, expected.most_lse) << way.name << ": " << p.c.name() << ", row " << x;
    } else {
      EXPECT_EQ(lse, static_cast<float>(expected.lse)) << way.name << ": " << p.c.name() << ", row " << x;
    }
    const float* o = &p.o[static_cast<size_t>(x * p.o_size)];
    for (int64_t i = 0; i < p.c.d_v; ++i) {
      const auto at = static_cast<size_t>(i);
      ASSERT_NEAR(o[i], expected.o[at], expected.most[at])
          << way.name << ": " << p.c.name() << ", row " << x << ", element " << i;
    }
    for (int64_t i = p.c.d_v; i < p.o_size; ++i) ASSERT_EQ(o[i], kGuard) << way.name << ": " << p.c.name();
  }
}

template <class T>
T one_of(std::mt19937& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

TEST(GgmlBlockRows, RandomProblems) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int i = 0; i < 80; ++i) {
    Case c;
    c.k = static_cast<BlockType>(random() % kBlockTypes);
    c.v = static_cast<BlockType>(random() % kBlockTypes);
    c.d = one_of<int64_t>(random, {32, 64, 96, 128, 160, 256, 576});
    c.d_v = one_of<int64_t>(random, {32, 64, 96, 128, 160, 512});
    c.keys = one_of<int64_t>(random, {0, 1, 2, 7, 16, 31, 33, 63, 64, 65, 127, 128, 201, 333});
    c.heads = one_of<int64_t>(random, {1, 2, 3});
    c.rows = one_of<int64_t>(random, {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31, kMostBlockRows});
    c.masked = random() % 2 == 0;
    c.slope = one_of(random, {1.0f, 0.25f});
    c.softcap = one_of(random, {0.0f, 0.0f, 5.0f});
    c.has_sink = random() % 4 == 0;
    c.gap = one_of<int64_t>(random, {0, 2, 34, 96});
    c.spread = one_of(random, {1.0f, 1.0f, 0.01f, 30.0f, 0.0f});
    const auto problem_seed = static_cast<uint32_t>(random());
    for (const BlockWay& way : block_ways()) {
      Problem p(c, problem_seed);
      expect_right(way, p);
      if (HasFailure()) return;
    }
  }
}

TEST(GgmlBlockRows, TheSameBitsAgain) {
  for (const BlockWay& way : block_ways()) {
    Problem a(Case{}, 3), b(Case{}, 3);
    a.run(way);
    b.run(way);
    EXPECT_EQ(a.o, b.o) << way.name;
    EXPECT_EQ(a.lse, b.lse) << way.name;
  }
}

/// Formats whose blocks have a scale alone, and those with a least as well.
constexpr BlockType kWithAndWithoutLeast[] = {BlockType::kQ8_0, BlockType::kQ5_1, BlockType::kQ4_1};

TEST(GgmlBlockRows, UnseenKeysMayHoldAnything) {
  Case c;
  c.masked = true;
  for (const BlockType type : kWithAndWithoutLeast) {
    c.k = c.v = type;
    for (const uint16_t half : {kHalfInfinity, kHalfNaN}) {
      for (const BlockWay& way : block_ways()) {
        Problem p(c, 5);
        for (int64_t r = 0; r < c.rows; ++r) p.set_mask(r, 20, kUnseen);
        for (int64_t b = 0; b < 4; ++b) {
          for (Cache* cache : {&p.k, &p.v}) {
            cache->set_scale(20, 1, b, half);
            if (cache->has_least()) cache->set_least(20, 1, b, half);
          }
        }
        expect_right(way, p);
      }
    }
  }
}

// Elements 64 to 95 of a key of the second head, and nothing else.
void expect_where_it_is(const BlockWay& way, Problem& p) {
  p.run(way);
  for (int64_t x = 0; x < p.c.heads * p.c.rows; ++x) {
    for (int64_t i = 0; i < p.c.d_v; ++i) {
      const float o = p.o[static_cast<size_t>(x * p.o_size + i)];
      const double value = p.v(20, 1, i);
      if (x < p.c.rows || i / kBlockElements != 2) {
        EXPECT_TRUE(std::isfinite(o)) << way.name << ", row " << x << ", element " << i;
      } else if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(o)) << way.name << ", row " << x << ", element " << i;
      } else {
        EXPECT_EQ(o, static_cast<float>(value)) << way.name << ", row " << x << ", element " << i;
      }
    }
  }
}

TEST(GgmlBlockRows, AScaleOrALeastThatIsNotFinite) {
  for (const BlockType type : kWithAndWithoutLeast) {
    Case c;
    c.v = type;
    for (const uint16_t half : {kHalfInfinity, kHalfNaN}) {
      for (const BlockWay& way : block_ways()) {
        SCOPED_TRACE("format " + std::to_string(static_cast<int>(type)));
        Problem scale(c, 7), least(c, 7);
        scale.v.set_scale(20, 1, 2, half);
        expect_where_it_is(way, scale);
        if (!least.v.has_least()) continue;
        least.v.set_least(20, 1, 2, half);
        expect_where_it_is(way, least);
      }
    }
  }
}

TEST(GgmlBlockRows, AKeyOrAQueryThatIsNotFinite) {
  for (const BlockWay& way : block_ways()) {
    Problem key(Case{}, 8), query(Case{}, 8);
    key.k.set_scale(150, 0, 1, kHalfNaN);
    query.q[static_cast<size_t>(query.c.d * 2 + 5)] = std::numeric_limits<float>::quiet_NaN();
    key.run(way);
    query.run(way);
    for (int64_t x = 0; x < key.c.heads * key.c.rows; ++x) {
      for (int64_t i = 0; i < key.c.d_v; ++i) {
        const auto at = static_cast<size_t>(x * key.o_size + i);
        EXPECT_EQ(std::isnan(key.o[at]), x < key.c.rows) << way.name << ", row " << x;
        EXPECT_EQ(std::isnan(query.o[at]), x == 2) << way.name << ", row " << x;
      }
      EXPECT_EQ(std::isnan(key.lse[static_cast<size_t>(x)]), x < key.c.rows) << way.name << ", row " << x;
    }
  }
}

// Weights and queries as small as float32 has them: nothing is divided by what is nearly 0.
TEST(GgmlBlockRows, TinyNumbers) {
  Case c;
  for (const BlockWay& way : block_ways()) {
    Problem p(c, 9);
    for (float& x : p.q) x *= 1e-39f;
    for (int64_t b = 0; b < 4; ++b) {
      for (int64_t j = 0; j < c.keys; ++j) p.v.set_scale(j, 0, b, uint16_t{1});
    }
    expect_right(way, p);
  }
}

// Scores whose weights, but for one key's, are the smallest of float32.
TEST(GgmlBlockRows, ExtremeScores) {
  Case c;
  c.spread = 300;
  for (const BlockWay& way : block_ways()) {
    Problem p(c, 10);
    p.run(way);
    for (int64_t x = 0; x < c.heads * c.rows; ++x) {
      const Row expected = row_of(p, x, multiplies_integers(way));
      EXPECT_NEAR(p.lse[static_cast<size_t>(x)], expected.lse, expected.most_lse) << way.name;
      for (int64_t i = 0; i < c.d_v; ++i)
        EXPECT_TRUE(std::isfinite(p.o[static_cast<size_t>(x * p.o_size + i)])) << way.name;
    }
  }
}

}  // namespace
}  // namespace fovea_ggml
