// Makes the AVX2 variant take the VNNI path, with the instructions that it needs spelled out: so that the path is tested
// on processors without it.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static inline __m256i spelled_out_dpbusd(__m256i sums, __m256i bytes, __m256i values) {
  int32_t total[8];
  uint8_t without_sign[32];
  int8_t with_sign[32];
  memcpy(total, &sums, sizeof total);
  memcpy(without_sign, &bytes, sizeof without_sign);
  memcpy(with_sign, &values, sizeof with_sign);
  for (int i = 0; i < 32; ++i) total[i / 4] += without_sign[i] * with_sign[i];
  memcpy(&sums, total, sizeof total);
  return sums;
}

static inline __m256i spelled_out_dpwssd(__m256i sums, __m256i numbers, __m256i factors) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(numbers, factors));
}

#define _mm256_dpbusd_epi32 spelled_out_dpbusd
#define _mm256_dpwssd_epi32 spelled_out_dpwssd
#if !defined(__AVX512VNNI__)
#define __AVX512VNNI__ 1
#define __AVX512VL__ 1
#endif
#endif
