// Texts of random tokens, and expressions with a few characters changed. FOVEA_TEST_TEXTS sets how many.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>

#include "check_text.hpp"

namespace fovea::expr {
namespace {

constexpr std::array<std::string_view, 58> kTokens = {"s",     "b",     "h",
                                                      "hk",    "q",     "k",
                                                      "nq",    "nk",    "slope",
                                                      "bias",  "doc",   "flag",
                                                      "gain",  "x",     "true",
                                                      "+",     "-",     "*",
                                                      "/",     "%",     "<",
                                                      "<=",    ">",     ">=",
                                                      "==",    "!=",    "&&",
                                                      "||",    "!",     "(",
                                                      ")",     "[",     "]",
                                                      ",",     "0",     "1",
                                                      "2",     "16",    "0.5",
                                                      "1e30",  "2e",    ".",
                                                      "&",     "=",     "where",
                                                      "abs",   "min",   "clamp",
                                                      "exp",   "log",   "tanh",
                                                      "floor", "float", "\n",
                                                      "\x01",  "\xff",  "9223372036854775807",
                                                      "(q"};

class Texts {
 public:
  explicit Texts(uint64_t seed) : random_(seed) {}

  std::string next(Use use) {
    if (below(4) == 0) return tokens(below(24));
    std::string text = RandomText(random_(), use)
                           .of(use == Use::kSees ? Type::kBool : Type::kFloat, static_cast<int>(below(4)));
    for (size_t changes = below(3); changes > 0 && !text.empty(); --changes) {
      text.replace(below(text.size()), below(4), tokens(below(2)));
    }
    return text;
  }

 private:
  size_t below(size_t limit) { return random_() % limit; }
  std::string tokens(size_t count) {
    std::string text;
    for (size_t i = 0; i < count; ++i)
      text.append(kTokens[below(kTokens.size())]).append(below(3) ? " " : "");
    return text;
  }

  std::mt19937_64 random_;
};

TEST(RandomTexts, KeepEveryPromise) {
  const char* given = std::getenv("FOVEA_TEST_TEXTS");
  const int count = given ? std::atoi(given) : 20000;
  Texts texts(17);
  int expressions = 0;
  for (int i = 0; i < count; ++i) {
    const Use use = i % 2 ? Use::kSees : Use::kScore;
    const std::string text = texts.next(use);
    bool parses = false;
    const char* broken = broken_promise(text, use, parses);
    ASSERT_EQ(broken, nullptr) << name_of(use) << ": " << text;
    expressions += parses;
  }
  EXPECT_GT(expressions, count / 5);
  RecordProperty("expressions", expressions);
}

}  // namespace
}  // namespace fovea::expr
