// Fragments as the figures of the PTX ISA manual draw them: for each element of a matrix the lane that holds it, and its
// number among the elements of that lane (a0, a1, ...). The tables are data, so that the maps are not compared with
// themselves: the four kinds of block of which the figures consist, and the number with which each block starts.
#pragma once

#include <array>
#include <cstddef>

namespace fovea::tile {

template <int kRows, int kColumns>
struct FragmentTable {
  std::array<std::array<int, kColumns>, kRows> lane, element;
};

// clang-format off

/// ldmatrix: an 8x8 matrix of 16-bit elements; the two of a lane are the halves of a register.
inline constexpr FragmentTable<8, 8> kLdmatrix = {
    {{
        { 0,  0,  1,  1,  2,  2,  3,  3},
        { 4,  4,  5,  5,  6,  6,  7,  7},
        { 8,  8,  9,  9, 10, 10, 11, 11},
        {12, 12, 13, 13, 14, 14, 15, 15},
        {16, 16, 17, 17, 18, 18, 19, 19},
        {20, 20, 21, 21, 22, 22, 23, 23},
        {24, 24, 25, 25, 26, 26, 27, 27},
        {28, 28, 29, 29, 30, 30, 31, 31},
    }},
    {{
        { 0,  1,  0,  1,  0,  1,  0,  1},
        { 0,  1,  0,  1,  0,  1,  0,  1},
        { 0,  1,  0,  1,  0,  1,  0,  1},
        { 0,  1,  0,  1,  0,  1,  0,  1},
        { 0,  1,  0,  1,  0,  1,  0,  1},
        { 0,  1,  0,  1,  0,  1,  0,  1},
        { 0,  1,  0,  1,  0,  1,  0,  1},
        { 0,  1,  0,  1,  0,  1,  0,  1},
    }},
};

/// ldmatrix.trans.
inline constexpr FragmentTable<8, 8> kLdmatrixTrans = {
    {{
        { 0,  4,  8, 12, 16, 20, 24, 28},
        { 0,  4,  8, 12, 16, 20, 24, 28},
        { 1,  5,  9, 13, 17, 21, 25, 29},
        { 1,  5,  9, 13, 17, 21, 25, 29},
        { 2,  6, 10, 14, 18, 22, 26, 30},
        { 2,  6, 10, 14, 18, 22, 26, 30},
        { 3,  7, 11, 15, 19, 23, 27, 31},
        { 3,  7, 11, 15, 19, 23, 27, 31},
    }},
    {{
        { 0,  0,  0,  0,  0,  0,  0,  0},
        { 1,  1,  1,  1,  1,  1,  1,  1},
        { 0,  0,  0,  0,  0,  0,  0,  0},
        { 1,  1,  1,  1,  1,  1,  1,  1},
        { 0,  0,  0,  0,  0,  0,  0,  0},
        { 1,  1,  1,  1,  1,  1,  1,  1},
        { 0,  0,  0,  0,  0,  0,  0,  0},
        { 1,  1,  1,  1,  1,  1,  1,  1},
    }},
};

/// A lane's one element of 32 bits: in rows of A, and in columns of B.
inline constexpr FragmentTable<8, 4> kWordsOfA = {
    {{
        { 0,  1,  2,  3},
        { 4,  5,  6,  7},
        { 8,  9, 10, 11},
        {12, 13, 14, 15},
        {16, 17, 18, 19},
        {20, 21, 22, 23},
        {24, 25, 26, 27},
        {28, 29, 30, 31},
    }}, {},
};
inline constexpr FragmentTable<4, 8> kWordsOfB = {
    {{
        { 0,  4,  8, 12, 16, 20, 24, 28},
        { 1,  5,  9, 13, 17, 21, 25, 29},
        { 2,  6, 10, 14, 18, 22, 26, 30},
        { 3,  7, 11, 15, 19, 23, 27, 31},
    }}, {},
};

// clang-format on

/// A figure of equal blocks. `first` is the number of a lane's first element in each.
template <int kDown, int kAcross, int kRows, int kColumns>
constexpr FragmentTable<kDown * kRows, kAcross * kColumns> figure(
    const FragmentTable<kRows, kColumns>& block,
    const std::array<std::array<int, static_cast<size_t>(kAcross)>, static_cast<size_t>(kDown)>& first) {
  FragmentTable<kDown * kRows, kAcross * kColumns> whole{};
  for (size_t r = 0; r < kDown * kRows; ++r) {
    for (size_t c = 0; c < kAcross * kColumns; ++c) {
      whole.lane[r][c] = block.lane[r % kRows][c % kColumns];
      whole.element[r][c] = first[r / kRows][c / kColumns] + block.element[r % kRows][c % kColumns];
    }
  }
  return whole;
}

/// mma.m16n8k16, 16-bit: A, 16 x 16, a0..a7; B, 16 x 8, b0..b3.
inline constexpr FragmentTable<16, 16> kM16N8K16A = figure<2, 2>(kLdmatrix, {{{0, 4}, {2, 6}}});
inline constexpr FragmentTable<16, 8> kM16N8K16B = figure<2, 1>(kLdmatrixTrans, {{{0}, {2}}});

/// mma.m16n8k8, 16-bit: A, 16 x 8, a0..a3; B, 8 x 8, b0, b1.
inline constexpr FragmentTable<16, 8> kM16N8K8A = figure<2, 1>(kLdmatrix, {{{0}, {2}}});
inline constexpr FragmentTable<8, 8> kM16N8K8B = kLdmatrixTrans;

/// mma.m16n8k8, tf32: A, 16 x 8, a0..a3; B, 8 x 8, b0, b1.
inline constexpr FragmentTable<16, 8> kM16N8K8Tf32A = figure<2, 2>(kWordsOfA, {{{0, 2}, {1, 3}}});
inline constexpr FragmentTable<8, 8> kM16N8K8Tf32B = figure<2, 1>(kWordsOfB, {{{0}, {1}}});

/// C and D of all of them: 16 x 8, c0..c3.
inline constexpr FragmentTable<16, 8> kM16N8Accumulator = figure<2, 1>(kLdmatrix, {{{0}, {2}}});

}  // namespace fovea::tile
