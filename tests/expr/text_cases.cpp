#include "text_cases.hpp"

namespace fovea::expr {
namespace {

/// Scores, and what keys they see; docs/expressions.md comes first.
const std::vector<TextCase> kChosen = {
    {"s - slope[h] * abs(q + nk - nq - k)", "k <= q + nk - nq && q + nk - nq - k <= 1023"},
    {"30 * tanh(s / 30)", "doc[b, q] == doc[b, k]"},
    {"s + bias[b, h, q, k]", "k < limit[b] || k <= q"},
    {"s + table[h, clamp(k - q, -12, 11) + 12]", "(q / 16 - k / 16) % 4 == 0"},
    {"", "k < 16 && flag[k] != 0"},
    {"s", ""},
    {"s * 1e300 - 1e300", "true"},
    {"q - k", "q - k == 2147483648"},
    // distances: what is exact in floats
    {"s - 0.5 * (q - k)", "q - k < 5 && k - q < 5"},
    {"s + 2.0 * (k - q - nk)", "2 * q - 3 * k > nk - nq"},
    {"s * min(q - k, 7) + max(k - q, -3) * s", "min(q - k, k - q) > -4"},
    {"s + clamp(q - k, -5, abs(k - nq))", "clamp(q - k, -5, 5) != 5"},
    {"s + (abs(q - k) - abs(q + k)) * 0.25", "abs(q - k) + abs(k - 5) <= 9"},
    {"s / (q - k)", "-(q - k) >= 0"},
    {"s / -(q - k + k - q)", "q - k + k - q == 0"},
    {"s + (q - k) * 3 * 0.5 - 1", "q * 3 - k * 2 + 4 >= -nq + 3 * q"},
    {"s + flag[k] * (q - k) + where(q < k, q, k - 2 * q)", "flag[k] + q - k < 3"},
    // ints of 64 bits that wrap around
    {"s + q * k * 3037000500 * 3037000500", "q * 9223372036854775807 - k * 4611686018427387904 < 5"},
    {"s + -(q * 9223372036854775807 - 2)", "abs(q * 9223372036854775807 + k) % 7 < 3"},
    {"s + min(q * 2147483647, k * 2147483647)", "q * 2147483647 / (k - 3) > q % (k * 2147483647 - 2)"},
    {"s + (doc[b, q] + 9223372036854775807 - doc[b, k])", "doc[b, q] * 4294967296 > doc[b, k] * 4294967297"},
    // division
    {"s + q / k - q % k", "q / (k - q) < 0 || k % (q - 7) >= 0"},
    {"s + (q - k) / 3 + (q - k) % 3", "(k - q) / -4 > (q - k) % -5"},
    {"s + (q - 3 * k) / -1 + q % -1", "(q - k) / 8 % 2 == (q - k) % 8 / 4"},
    {"s + (q + k) / 7 - (q + k) % 7 + q % 1", "1 / q + 1 % k >= 0"},
    {"s + half[(q - k) / 0]", "1 / 0 == 1"},
    // elements outside
    {"s + table[h, q - k] + half[k - 4]", "flag[q - k] != 0"},
    {"s + table[q, 3] * half[8] + half[nk - nq]", "doc[q % 3, k] == doc[k - 1, q] || flag[0] == 1"},
    {"s + half[q * 9223372036854775807 + k]", "flag[q + k * 4294967296] == 0"},
    {"s + half[9] + table[h, limit[b]]", "doc[limit[b], q] == 1 && limit[1] > 0"},
    // what is not chosen is not needed
    {"where(k >= 4 && k < 13, half[k - 4], s)", "k >= 4 && k < 13 && half[k - 4] > 0 || flag[k - 3] == 1"},
    {"where(q == 0, s, s + 1 / q)", "q == 0 || k / q == 1"},
    {"where(1 / (q - k) > 0, s, 2 * s)", "where(q > 3, flag[q - 4] == 0, flag[q + 9] == 1)"},
    {"s + where(q < k, 1 / (q - 3), doc[b, q] % (k - 4))", "!(q / k == 1) && !(k % q == 0)"},
    // floats, NaN and all functions
    {"min(s, gain) + max(slope[h], s) - clamp(s, slope[0], gain)", "where(slope[h] < gain, q > 3, k > 3)"},
    {"min(s, 2) - max(-1, s) + clamp(1, s, 3)", "min(half[q % 9], half[k % 9]) <= 0"},
    {"exp(s) + log(s) + sqrt(s) + floor(s) + abs(s) - -s", "!(half[k % 9] < 0.25)"},
    {"exp(-s * s / 2) / (1 + exp(s))", "exp(half[k % 9]) > 1.5"},
    {"log(abs(s) + 1e-3) * sqrt(bias[b, h, q, k] * bias[b, h, q, k])", "floor(table[h, k] * 3) == -1.0"},
    {"s / table[h, q % 20] / 3.0 / 1e-40 / 1e39", "table[h, q] / gain > 0"},
    // gradients of what is shared, chosen and outside
    {"s * table[h, q] + table[h, k] * table[h, q]", "k <= q"},
    {"where(s > gain, table[h, k - q] * s, half[q - k] * gain)", "k <= q"},
    {"tanh(s * slope[h] + bias[b, h, q, k]) * gain", "q >= k - 3"},
    {"s + max(table[h, k], table[h, q]) / slope[hk]", "h == hk || b == 1"},
};

/// A random text, half of them with random indices, which may be outside.
std::string random_text(uint64_t seed, Use use) {
  RandomText random(seed, use);
  std::string text =
      random.of(use == Use::kScore ? Type::kFloat : Type::kBool, 1 + static_cast<int>(seed % 4));
  if (seed % 2 == 0) return text;
  for (const std::string name : {"slope[h", "flag[k", "doc[b, k", "doc[b, q", "bias[b, h, q, k"}) {
    const size_t at = text.find(name + "]");
    if (at == std::string::npos) continue;
    const size_t end = at + name.size(), begin = text.find_last_of(" [", end - 1) + 1;
    // A name alone would promise that it is inside.
    text.replace(begin, end - begin, random.of(Type::kInt, random.below(3)) + " - 1");
  }
  return text;
}

}  // namespace

std::vector<TextCase> text_cases() {
  std::vector<TextCase> cases;
  for (TextCase chosen : kChosen) {
    for (const Facts facts : {Facts::kNothing, Facts::kPositions, Facts::kAll}) {
      chosen.facts = facts;
      cases.push_back(chosen);
    }
  }
  for (uint64_t seed = 0; seed < 150; ++seed) {
    cases.push_back(
        {random_text(seed, Use::kScore), random_text(seed, Use::kSees), static_cast<Facts>(seed % 3)});
  }
  return cases;
}

}  // namespace fovea::expr
