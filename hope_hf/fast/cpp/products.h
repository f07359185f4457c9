// Products of small matrices that lie in a core's cache, in tiles of four rows whose sums stay in registers.

#pragma once

#include <cstdint>

#include "vectors.h"

namespace hope {

constexpr int kTileRows = 4;
// Vectors of a tile's row. A tile of 4 x 4 takes half of 32 registers; processors with vectors of 32 bytes have 16.
constexpr int kTileVectors = kVectorBytes == 32 ? 2 : 4;

// Rows 0 to 3 and `N` vectors of columns of C (+)= A B, of the terms k0 to k1. A is read at a[m * am + k * ak].
template <class T, int N>
inline __attribute__((always_inline)) void tile(
    int k0, int k1, const T* a, long am, long ak, const T* b, long ldb, T* c, long ldc, bool adds) {
  Vector<T> sums[kTileRows][N];
#pragma GCC unroll 4
  for (int m = 0; m < kTileRows; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      sums[m][j] = Vector<T>{};
      if (adds) sums[m][j] = load(c + m * ldc + j * kLanes<T>);
    }
  for (int k = k0; k < k1; ++k) {
    Vector<T> row[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) row[j] = load(b + k * ldb + j * kLanes<T>);
#pragma GCC unroll 4
    for (int m = 0; m < kTileRows; ++m) {
      const T factor = a[m * am + k * ak];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[m][j] += factor * row[j];
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kTileRows; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store<T>(c + m * ldc + j * kLanes<T>, sums[m][j]);
}

// Four rows of C (+)= A B.
template <class T>
inline void four_rows(
    int columns, int k0, int k1, const T* a, long am, long ak, const T* b, long ldb, T* c, long ldc, bool adds) {
  constexpr int lanes = kLanes<T>;
  int j = 0;
  for (; j + kTileVectors * lanes <= columns; j += kTileVectors * lanes)
    tile<T, kTileVectors>(k0, k1, a, am, ak, b + j, ldb, c + j, ldc, adds);
  for (; j + 2 * lanes <= columns; j += 2 * lanes) tile<T, 2>(k0, k1, a, am, ak, b + j, ldb, c + j, ldc, adds);
  for (; j < columns; j += lanes) tile<T, 1>(k0, k1, a, am, ak, b + j, ldb, c + j, ldc, adds);
}

// Which part of a product is computed, where one factor or the result is a lower triangle.
enum class Part {
  kAll,
  // columns up to the row's own: the result is a triangle
  kLowerResult,
  // terms up to the row's own: A is a triangle
  kLowerFactor,
  // terms from the row's own on: A is a transposed triangle
  kUpperFactor,
};

// C [rows, columns] (+)= A [rows, terms] B [terms, columns].
template <class T>
void product(
    int rows, int columns, int terms, const T* a, long am, long ak, const T* b, long ldb, T* c, long ldc,
    bool adds = false, Part part = Part::kAll) {
  constexpr int lanes = kLanes<T>;
  for (int m = 0; m < rows; m += kTileRows) {
    int used = columns, k0 = 0, k1 = terms;
    const int next = m + kTileRows;
    if (part == Part::kLowerResult) used = (next + lanes - 1) / lanes * lanes;
    if (part == Part::kLowerFactor) k1 = next;
    if (part == Part::kUpperFactor) k0 = m;
    four_rows(used, k0, k1, a + m * am, am, ak, b, ldb, c + m * ldc, ldc, adds);
  }
}

// to [columns, rows] = from [rows, columns], in squares of four.
template <class T>
void transpose(int rows, int columns, const T* from, long ldf, T* to, long ldt) {
  typedef T Four __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
  for (int m = 0; m < rows; m += 4)
    for (int j = 0; j < columns; j += 4) {
      Four lines[4];
      for (int i = 0; i < 4; ++i) lines[i] = *reinterpret_cast<const Four*>(from + (m + i) * ldf + j);
      const Four left_01 = __builtin_shufflevector(lines[0], lines[1], 0, 4, 1, 5);
      const Four right_01 = __builtin_shufflevector(lines[0], lines[1], 2, 6, 3, 7);
      const Four left_23 = __builtin_shufflevector(lines[2], lines[3], 0, 4, 1, 5);
      const Four right_23 = __builtin_shufflevector(lines[2], lines[3], 2, 6, 3, 7);
      T* corner = to + j * ldt + m;
      *reinterpret_cast<Four*>(corner) = __builtin_shufflevector(left_01, left_23, 0, 1, 4, 5);
      *reinterpret_cast<Four*>(corner + ldt) = __builtin_shufflevector(left_01, left_23, 2, 3, 6, 7);
      *reinterpret_cast<Four*>(corner + 2 * ldt) = __builtin_shufflevector(right_01, right_23, 0, 1, 4, 5);
      *reinterpret_cast<Four*>(corner + 3 * ldt) = __builtin_shufflevector(right_01, right_23, 2, 3, 6, 7);
    }
}

}  // namespace hope
