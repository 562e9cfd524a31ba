// Eight float32 lanes, in the same arithmetic for every instruction set: only `fma` rounds differently where the
// instruction set has none (two roundings instead of one).
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

constexpr int kLanes = 8;

typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t IntLanes __attribute__((vector_size(32)));
typedef int8_t ByteLanes __attribute__((vector_size(8)));
typedef int16_t ShortLanes __attribute__((vector_size(16)));
typedef uint16_t HalfLanes __attribute__((vector_size(16)));
typedef uint32_t WordLanes __attribute__((vector_size(32)));

inline Lanes all(float value) { return Lanes{value, value, value, value, value, value, value, value}; }

inline Lanes load(const float* from) {
  Lanes lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline void store(float* to, Lanes lanes) { memcpy(to, &lanes, sizeof lanes); }

// Numbers from `i` on, and behind the last what `lanes` has there.
template <typename Vector, typename T>
inline Vector some(const T* from, int64_t i, int64_t count, Vector lanes = Vector{}) {
  if (i + kLanes <= count) {
    memcpy(&lanes, from + i, sizeof lanes);
  } else {
    memcpy(&lanes, from + i, (count - i) * sizeof(T));
  }
  return lanes;
}

template <typename Vector, typename T>
inline void store_some(T* to, int64_t i, int64_t count, Vector lanes) {
  if (i + kLanes <= count) {
    memcpy(to + i, &lanes, sizeof lanes);
  } else {
    memcpy(to + i, &lanes, (count - i) * sizeof(T));
  }
}

struct BFloat16 {
  uint16_t bits;
};

inline Lanes load(const BFloat16* from) {
  HalfLanes halves;
  memcpy(&halves, from, sizeof halves);
  return (Lanes)(__builtin_convertvector(halves, WordLanes) << 16);
}

inline float value_of(float value) { return value; }
inline int32_t value_of(int8_t value) { return value; }
inline float value_of(BFloat16 value) {
  uint32_t bits = (uint32_t)value.bits << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  float32x4_t parts[2], x[2], y[2];
  memcpy(parts, &c, sizeof parts);
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  parts[0] = vfmaq_f32(parts[0], x[0], y[0]);
  parts[1] = vfmaq_f32(parts[1], x[1], y[1]);
  memcpy(&c, parts, sizeof parts);
  return c;
#else
  return a * b + c;
#endif
}

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

template <typename Vector>
inline auto sum(Vector v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

inline float largest(Lanes v) {
  float found = v[0];
  for (int lane = 1; lane < kLanes; ++lane) found = v[lane] > found ? v[lane] : found;
  return found;
}

// Rounds to the nearest whole number, ties to even, for |v| < 2^22: beyond this constant a float has no fraction bits.
constexpr float kRounder = 12582912.0f;
inline Lanes rounded(Lanes v) { return (v + all(kRounder)) - all(kRounder); }

// e^v for v <= 0, within 2 units in the last place; below -87, where float32 turns subnormal, 0. The polynomial is that
// of Cephes' expf (Moshier).
inline Lanes exp_of(Lanes v) {
  const Lanes n = rounded(v * all(1.44269504088896341f));
  Lanes r = fma(n, all(-0.693359375f), v);
  r = fma(n, all(2.12194440e-4f), r);
  Lanes p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  const IntLanes exponent = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  const Lanes power = p * (Lanes)exponent;
  return v < all(-87.0f) ? all(0.0f) : power;
}

// ln v for normal v > 0, within 2 units in the last place. The polynomial is that of Cephes' logf (Moshier).
inline Lanes log_of(Lanes v) {
  const WordLanes bits = (WordLanes)v;
  Lanes m = (Lanes)((bits & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
  Lanes e = __builtin_convertvector((IntLanes)(bits >> 23) - 126, Lanes);
  const IntLanes low = m < all(0.707106781186547524f);
  e = low ? e - all(1.0f) : e;
  m = (low ? m + m : m) - all(1.0f);
  const Lanes z = m * m;
  Lanes p = all(7.0376836292e-2f);
  p = fma(p, m, all(-1.1514610310e-1f));
  p = fma(p, m, all(1.1676998740e-1f));
  p = fma(p, m, all(-1.2420140846e-1f));
  p = fma(p, m, all(1.4249322787e-1f));
  p = fma(p, m, all(-1.6668057665e-1f));
  p = fma(p, m, all(2.0000714765e-1f));
  p = fma(p, m, all(-2.4999993993e-1f));
  p = fma(p, m, all(3.3333331174e-1f));
  p = fma(p * m, z, e * all(-2.12194440e-4f));
  return fma(e, all(0.693359375f), m + fma(z, all(-0.5f), p));
}

}  // namespace
