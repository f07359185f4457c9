// Vectors of the processor's width, as GCC and Clang have them, and operations on rows of numbers, whose length is a
// multiple of a vector's.

#pragma once

#include <cstdint>

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
  typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
  static constexpr int kMantissaBits = 23, kBias = 127, kTerms = 7;
  static constexpr float kLargest = 87;
};
template <>
struct Types<double> {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef double Loose __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  typedef int64_t Integers __attribute__((vector_size(kVectorBytes)));
  static constexpr int kMantissaBits = 52, kBias = 1023, kTerms = 13;
  static constexpr double kLargest = 700;
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
template <class T>
inline T sum_of(Vector<T> vector) {
  T total = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) total += vector[lane];
  return total;
}

// e^x, of x cut to +-kLargest: 2^n times the Taylor series of the rest, which is at most ln 2 / 2.
template <class T>
inline Vector<T> exp_of(Vector<T> x) {
  using Integers = typename Types<T>::Integers;
  const Vector<T> largest = Vector<T>{} + Types<T>::kLargest, half = Vector<T>{} + T(0.5);
  x = x > largest ? largest : x;
  x = x < -largest ? -largest : x;
  const Vector<T> scaled = x * T(1.4426950408889634);
  // conversion cuts digits off, towards 0
  const Integers power = __builtin_convertvector(scaled + (scaled < 0 ? -half : half), Integers);
  const Vector<T> whole = __builtin_convertvector(power, Vector<T>);
  // ln 2 in two parts, of which the first has few digits
  const Vector<T> rest = (x - whole * T(0.693145751953125)) - whole * T(1.4286068203094173e-06);
  Vector<T> series = Vector<T>{} + T(1);
  for (int term = Types<T>::kTerms; term > 0; --term) series = 1 + series * rest * (T(1) / term);
  const Integers bits = (power + Types<T>::kBias) << Types<T>::kMantissaBits;
  return series * (Vector<T>)bits;
}

template <class T>
inline Vector<T> sigmoid_of(Vector<T> x) {
  return 1 / (1 + exp_of<T>(-x));
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
