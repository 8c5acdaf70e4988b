// A window and the rest of `sees` are true together exactly where `sees` is, for every pair of small sequences.
#include "expr/windows.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "expr/print.hpp"
#include "random_expression.hpp"

namespace fovea::expr {
namespace {

constexpr int64_t kNoEnd = KeyWindow::kNoEnd;

/// "[lowest, highest] rest"; "" for an end that there is not, and for no rest.
std::string split(std::string_view text, const std::optional<KnownLengths>& lengths = std::nullopt) {
  const WindowAndRest found = split_window(parsed(text, Use::kSees), lengths);
  const auto end = [](int64_t x) { return x == kNoEnd || x == -kNoEnd ? "" : std::to_string(x); };
  return "[" + end(found.window.lowest) + ", " + end(found.window.highest) + "] " +
         (found.rest ? print(*found.rest) : "");
}

TEST(Windows, WithoutLengths) {
  EXPECT_EQ(split("k <= q + nk - nq"), "[, 0] ");
  EXPECT_EQ(split("k <= q + nk - nq && q + nk - nq - k <= 1023"), "[-1023, 0] ");
  EXPECT_EQ(split("abs(q + nk - nq - k) < 8"), "[-7, 7] ");
  EXPECT_EQ(split("8 >= abs(k + nq - nk - q)"), "[-8, 8] ");
  EXPECT_EQ(split("q + nk == k + nq"), "[0, 0] ");
  EXPECT_EQ(split("!(k > q + nk - nq || 2 * (q + nk - nq - k) > 9)"), "[-4, 0] ");
  EXPECT_EQ(split("3 * k - 3 * q + 3 * nq < 3 * nk + 5"), "[, 1] ");
}

TEST(Windows, WithLengths) {
  EXPECT_EQ(split("k <= q"), "[, ] k <= q");
  EXPECT_EQ(split("k <= q", KnownLengths{7, 7}), "[, 0] ");
  EXPECT_EQ(split("k <= q", KnownLengths{4, 9}), "[, ] k <= q") << "the diagonal is not seen";
  EXPECT_EQ(split("k <= q + 6", KnownLengths{4, 9}), "[, 1] ");
  EXPECT_EQ(split("abs(q - k) <= 3", KnownLengths{9, 9}), "[-3, 3] ");
  EXPECT_EQ(split("abs(q - k) <= nk", KnownLengths{9, 9}), "[, ] abs(q - k) <= nk");
}

TEST(Windows, TheRestStays) {
  EXPECT_EQ(split("k <= q + nk - nq && doc[b, q] == doc[b, k]"), "[, 0] doc[b, q] == doc[b, k]");
  EXPECT_EQ(split("doc[b, q] == doc[b, k] && (flag[k] != 0 && abs(q - k + nk - nq) <= 3) && k > 2"),
            "[-3, 3] doc[b, q] == doc[b, k] && flag[k] != 0 && k > 2");
  for (const char* text :
       {"k < q + nk - nq", "k - q - nk + nq > 2", "k <= q + nk - nq || k < 4", "k + q <= nk - nq",
        "k <= 2 * q + nk - nq", "k != q + nk - nq", "abs(q + nk - nq - k) > 2", "2 * (k - q + nq - nk) == 1",
        "k <= q + nk - nq + h", "k - q <= 2 * (nk - nq)", "(q + nk - nq - k) / 4 <= 2",
        "float(k) <= float(q + nk - nq)", "abs(q + nk - nq - k) <= -1",
        "9223372036854775807 + k <= q + nk - nq + 9223372036854775807"})
    EXPECT_EQ(split(text), std::string("[, ] ").append(print(parsed(text, Use::kSees))));
}

/// Compares all pairs, of all lengths or of one.
void expect_same(const std::string& text, const std::optional<KnownLengths>& lengths) {
  const Expression sees = parsed(text, Use::kSees);
  const WindowAndRest found = split_window(sees, lengths);
  EXPECT_LE(found.window.lowest, 0);
  EXPECT_GE(found.window.highest, 0);
  const MadeUpTensors tensors;
  Evaluator whole(sees, &tensors);
  std::optional<Evaluator> rest;
  if (found.rest) rest.emplace(*found.rest, &tensors);
  for (const int64_t nq : lengths ? std::vector<int64_t>{lengths->nq} : std::vector<int64_t>{1, 4, 7}) {
    for (const int64_t nk : lengths ? std::vector<int64_t>{lengths->nk} : std::vector<int64_t>{1, 5, 9}) {
      for (int64_t q = 0; q < nq; ++q) {
        for (int64_t k = 0; k < nk; ++k) {
          const Pair pair = {.b = 1, .h = 1, .q = q, .k = k, .nq = nq, .nk = nk};
          const int64_t distance = k - (q + nk - nq);
          const bool inside = found.window.lowest <= distance && distance <= found.window.highest;
          ASSERT_EQ(inside && (!rest || rest->sees(pair)), whole.sees(pair))
              << text << " at query " << q << " of " << nq << ", key " << k << " of " << nk;
        }
      }
    }
  }
}

/// A comparison that is a window as often as not: sums of positions, lengths and numbers.
class RandomComparison {
 public:
  explicit RandomComparison(RandomText& random) : random_(random) {}

  std::string text() {
    const bool absolute = random_.below(3) == 0;
    std::string sum = terms();
    if (absolute) sum = "abs(" + sum + ")";
    const std::string other = absolute || random_.below(2) == 0 ? number() : terms();
    return random_.below(2) == 0 ? sum + comparison() + other : other + comparison() + sum;
  }

 private:
  std::string number() { return std::to_string(random_.below(13) - 3); }
  std::string comparison() {
    static constexpr std::array kAll = {" < ", " <= ", " > ", " >= ", " == ", " != "};
    return kAll[static_cast<size_t>(random_.below(6))];
  }
  std::string terms() {
    static constexpr std::array kDistances = {
        "q + nk - nq - k", "k - q - nk + nq", "k - q", "2 * (q + nk - nq - k)", "-3 * (k - q)", "q", "k + q"};
    return kDistances[static_cast<size_t>(random_.below(7))] + std::string(" + ") + number();
  }

  RandomText& random_;
};

TEST(Windows, RandomConjunctionsSayTheSame) {
  constexpr int kTexts = 4000;
  int windows = 0, rests = 0;
  for (int i = 0; i < kTexts; ++i) {
    RandomText random(static_cast<uint64_t>(i), Use::kSees);
    RandomComparison comparison(random);
    std::string text = comparison.text();
    for (int more = random.below(3); more > 0; --more) {
      const std::string term = random.below(3) == 0 ? random.of(Type::kBool, 2) : comparison.text();
      text =
          random.below(4) == 0 ? "!(!(" + text + ") || !(" + term + "))" : "(" + text + ") && (" + term + ")";
    }
    std::optional<KnownLengths> lengths;
    if (random.below(2) == 0) lengths = {1 + random.below(8), 1 + random.below(8)};
    expect_same(text, lengths);
    const WindowAndRest found = split_window(parsed(text, Use::kSees), lengths);
    windows += found.window == KeyWindow{} ? 0 : 1;
    rests += found.rest && found.window != KeyWindow{} ? 1 : 0;
  }
  EXPECT_GT(windows, kTexts / 8);
  EXPECT_GT(rests, kTexts / 20);
}

TEST(Windows, RandomTreesSayTheSame) {
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    RandomText random(seed, Use::kSees);
    expect_same(random.of(Type::kBool, 4), std::nullopt);
    expect_same(random.of(Type::kBool, 4), KnownLengths{5, 7});
  }
}

}  // namespace
}  // namespace fovea::expr
