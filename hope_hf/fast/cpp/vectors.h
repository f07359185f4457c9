// Vectors of the processor's width, as GCC and Clang have them, and operations on rows of numbers, whose length is a
// multiple of a vector's.

#pragma once

#include <cstdint>
#include <cstring>

namespace hope {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct Types;
template <>
struct Types<float> {
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  typedef float Loose __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  typedef uint32_t Integers __attribute__((vector_size(kVectorBytes)));
  static constexpr int kMantissaBits = 23, kBias = 127, kTerms = 7;
  // 1.5 * 2^23: a small number added to it is rounded to a whole one
  static constexpr float kLargest = 87, kRounds = 12582912;
};
template <>
struct Types<double> {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef double Loose __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  typedef uint64_t Integers __attribute__((vector_size(kVectorBytes)));
  static constexpr int kMantissaBits = 52, kBias = 1023, kTerms = 13;
  // 1.5 * 2^52
  static constexpr double kLargest = 700, kRounds = 6755399441055744;
};

template <class T>
using Vector = typename Types<T>::Vector;
template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);

template <class T>
inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename Types<T>::Loose*>(from);
}
template <class T>
inline void store(T* to, Vector<T> vector) {
  *reinterpret_cast<typename Types<T>::Loose*>(to) = vector;
}

// The sum of `Lanes` numbers, half to half.
template <class T, int Lanes, class Numbers>
inline T sum_of_lanes(Numbers numbers) {
  if constexpr (Lanes == 2) {
    return numbers[0] + numbers[1];
  } else {
    typedef T Half __attribute__((vector_size(Lanes / 2 * sizeof(T))));
    Half halves[2];
    memcpy(halves, &numbers, sizeof(halves));
    return sum_of_lanes<T, Lanes / 2>(halves[0] + halves[1]);
  }
}
template <class T>
inline T sum_of(Vector<T> vector) {
  return sum_of_lanes<T, kLanes<T>>(vector);
}

// 1 / n! for each n.
template <class T>
struct Taylor {
  T terms[Types<T>::kTerms + 1] = {1};
  constexpr Taylor() {
    for (int n = 1; n <= Types<T>::kTerms; ++n) terms[n] = terms[n - 1] / n;
  }
};
template <class T>
constexpr Taylor<T> kTaylor;

// e^x, of x cut to +-kLargest: 2^n times the Taylor series of the rest, which is at most ln 2 / 2.
template <class T>
inline Vector<T> exp_of(Vector<T> x) {
  using Integers = typename Types<T>::Integers;
  constexpr int terms = Types<T>::kTerms;
  const Vector<T> largest = Vector<T>{} + Types<T>::kLargest;
  x = x > largest ? largest : x;
  x = x < -largest ? -largest : x;
  // n stands in the last bits
  const Vector<T> shifted = x * T(1.4426950408889634) + Types<T>::kRounds;
  const Vector<T> whole = shifted - Types<T>::kRounds;
  // ln 2 in two parts, of which the first has few digits
  const Vector<T> rest = (x - whole * T(0.693145751953125)) - whole * T(1.4286068203094173e-06);
  Vector<T> series = Vector<T>{} + kTaylor<T>.terms[terms];
  for (int n = terms - 1; n >= 0; --n) series = kTaylor<T>.terms[n] + series * rest;
  const Integers bits = ((Integers)shifted + Types<T>::kBias) << Types<T>::kMantissaBits;
  return series * (Vector<T>)bits;
}

template <class T>
inline Vector<T> sigmoid_of(Vector<T> x) {
  return 1 / (1 + exp_of<T>(-x));
}

// to = from, of `width` numbers.
template <class T>
inline void copy(int width, const T* from, T* to) {
  for (int c = 0; c < width; c += kLanes<T>) store<T>(to + c, load(from + c));
}

// y += factor * x, of `width` numbers.
template <class T>
inline void add_scaled(int width, T factor, const T* x, T* y) {
  for (int c = 0; c < width; c += kLanes<T>) store<T>(y + c, load(y + c) + factor * load(x + c));
}

// y = factor * x.
template <class T>
inline void scale(int width, T factor, const T* x, T* y) {
  for (int c = 0; c < width; c += kLanes<T>) store<T>(y + c, factor * load(x + c));
}

template <class T>
inline T dot(int width, const T* x, const T* y) {
  Vector<T> sums{};
  for (int c = 0; c < width; c += kLanes<T>) sums += load(x + c) * load(y + c);
  return sum_of<T>(sums);
}

}  // namespace hope
