// Attention of queries to a span of cached positions. Keys and values that are floats are multiplied by floats. The whole
// numbers of an int8 cache are multiplied by queries and weights that are rounded to 16 bits; those products are added up
// exactly. A rounded number is much finer than the cache is; many small weights beside a large one may be off together by
// 0.4 % of the largest, as much as the cache itself rounds.
#pragma once

#include <float.h>

#include "lanes.h"
#include "steps.h"
#include "variant.h"

namespace {

using kestrel::CacheType;
using kestrel::kSpan;
using kestrel::Span;

constexpr int kAtOnce = 16;   // numbers of a key, or columns of values, that are multiplied together
constexpr int kTogether = 4;  // positions whose values are added up together
constexpr float kMostShort = 127 * 256 + 127;  // the largest 16-bit number in use, for one way below to keep them
static_assert(kMostShort + 128 <= 32767, "its high byte is found by adding half of what a low byte counts");
static_assert(kSpan * kMostShort * 128 <= 2147483647.0, "the products of a span's weights and values fit in 32 bits");

template <typename T>
struct Arithmetic {
  typedef float Factor;
  typedef Lanes Totals;
  static constexpr int kParts = 2;  // totals of kAtOnce columns
};

template <>
struct Arithmetic<int8_t> {
  typedef int16_t Factor;
  typedef IntLanes Totals;
#if defined(__ARM_FEATURE_DOTPROD)
  static constexpr int kParts = 4;
#else
  static constexpr int kParts = 2;
#endif
};

template <typename T>
using Factor = typename Arithmetic<T>::Factor;
template <typename T>
using Totals = typename Arithmetic<T>::Totals;

// Factor `i` of an array of them.
inline float factor(const float* factors, int64_t i) { return factors[i]; }

// Adds the products of kAtOnce numbers of a key and of a query; what the totals' lanes add up to is in `products`.
template <typename T>
inline void add_key(Lanes& totals, const T* key, const float* query) {
  totals = fma(load(query), load(key), totals);
  totals = fma(load(query + kLanes), load(key + kLanes), totals);
}

inline Lanes products(Lanes totals) { return totals; }

// Adds kAtOnce columns of kTogether positions' values, from `position` on, times the weights of kQueries queries, which are
// kSpan apart.
template <int kQueries, int kParts, typename T>
inline void add_values(Lanes (*totals)[kParts], const T* const* values, const float* weights, int64_t position) {
  for (int part = 0; part < 2; ++part)
    for (int i = 0; i < kTogether; ++i) {
      const Lanes column = load(values[i] + part * kLanes);
      for (int q = 0; q < kQueries; ++q)
        totals[q][part] = fma(all(weights[q * kSpan + position + i]), column, totals[q][part]);
    }
}

inline void store_columns(float* to, const Lanes* totals) {
  store(to, totals[0]);
  store(to + kLanes, totals[1]);
}

#if defined(__ARM_FEATURE_DOTPROD)

// A 16-bit number is 256 high + low. The high bytes of kAtOnce numbers are kept before the low ones, and of the eight lanes of
// a total, four are for the products of high bytes and four for those of low ones.

inline void keep_shorts(const ShortLanes* numbers, int16_t* to) {
  int8_t* bytes = (int8_t*)to;
  for (int half = 0; half < 2; ++half, bytes += kLanes) {
    const ByteLanes high = __builtin_convertvector((numbers[half] + 128) >> 8, ByteLanes);
    const ByteLanes low = __builtin_convertvector(numbers[half], ByteLanes);
    memcpy(bytes, &high, sizeof high);
    memcpy(bytes + kAtOnce, &low, sizeof low);
  }
}

inline const int8_t* high_byte(const int16_t* factors, int64_t i) {
  return (const int8_t*)(factors + i / kAtOnce * kAtOnce) + i % kAtOnce;
}

inline int32_t factor(const int16_t* factors, int64_t i) {
  const int8_t* high = high_byte(factors, i);
  return 256 * high[0] + high[kAtOnce];
}

inline void add_dots(IntLanes& totals, int8x16_t numbers, int8x16_t high, int8x16_t low) {
  int32x4_t sums[2];
  memcpy(sums, &totals, sizeof sums);
  sums[0] = vdotq_s32(sums[0], numbers, high);
  sums[1] = vdotq_s32(sums[1], numbers, low);
  memcpy(&totals, sums, sizeof totals);
}

inline void add_key(IntLanes& totals, const int8_t* key, const int16_t* query) {
  const int8_t* bytes = (const int8_t*)query;
  add_dots(totals, vld1q_s8(key), vld1q_s8(bytes), vld1q_s8(bytes + kAtOnce));
}

inline IntLanes products(IntLanes totals) { return totals * IntLanes{256, 256, 256, 256, 1, 1, 1, 1}; }

// Four bytes, four times.
inline int8x16_t quads(const int8_t* bytes) {
  int32_t four;
  memcpy(&four, bytes, sizeof four);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

template <int kQueries, int kParts>
inline void add_values(IntLanes (*totals)[kParts], const int8_t* const* values, const int16_t* weights, int64_t position) {
  int8x16_t rows[kTogether];
  for (int i = 0; i < kTogether; ++i) rows[i] = vld1q_s8(values[i]);
  // Each part holds four columns, with the four positions' values of a column side by side.
  const int16x8_t first = vreinterpretq_s16_s8(vzip1q_s8(rows[0], rows[1]));
  const int16x8_t second = vreinterpretq_s16_s8(vzip1q_s8(rows[2], rows[3]));
  const int16x8_t third = vreinterpretq_s16_s8(vzip2q_s8(rows[0], rows[1]));
  const int16x8_t fourth = vreinterpretq_s16_s8(vzip2q_s8(rows[2], rows[3]));
  const int16x8_t columns[4] = {vzip1q_s16(first, second), vzip2q_s16(first, second), vzip1q_s16(third, fourth),
                                vzip2q_s16(third, fourth)};
  for (int q = 0; q < kQueries; ++q) {
    const int8_t* high = high_byte(weights + q * kSpan, position);
    const int8x16_t own[2] = {quads(high), quads(high + kAtOnce)};
    for (int part = 0; part < 4; ++part) add_dots(totals[q][part], vreinterpretq_s8_s16(columns[part]), own[0], own[1]);
  }
}

inline void store_columns(float* to, const IntLanes* totals) {
  for (int part = 0; part < 4; ++part) {
    int32x4_t sums[2];
    memcpy(sums, totals + part, sizeof sums);
    vst1q_f32(to + 4 * part, vcvtq_f32_s32(vmlaq_n_s32(sums[1], sums[0], 256)));
  }
}

#else

inline void keep_shorts(const ShortLanes* numbers, int16_t* to) { memcpy(to, numbers, 2 * sizeof *numbers); }

inline int32_t factor(const int16_t* factors, int64_t i) { return factors[i]; }

inline IntLanes products(IntLanes totals) { return totals; }

inline void store_columns(float* to, const IntLanes* totals) {
  store(to, __builtin_convertvector(totals[0], Lanes));
  store(to + kLanes, __builtin_convertvector(totals[1], Lanes));
}

#if defined(__AVX2__)

// sums[i] += a[2i] b[2i] + a[2i + 1] b[2i + 1]
inline void add_pairs(IntLanes& sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  sums = (IntLanes)_mm256_dpwssd_epi32((__m256i)sums, a, b);
#else
  sums += (IntLanes)_mm256_madd_epi16(a, b);
#endif
}

inline void add_key(IntLanes& totals, const int8_t* key, const int16_t* query) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)key));
  add_pairs(totals, wide, _mm256_loadu_si256((const __m256i*)query));
}

template <int kQueries, int kParts>
inline void add_values(IntLanes (*totals)[kParts], const int8_t* const* values, const int16_t* weights, int64_t position) {
  for (int i = 0; i < kTogether; i += 2) {
    const __m128i own = _mm_loadu_si128((const __m128i*)values[i]);
    const __m128i next = _mm_loadu_si128((const __m128i*)values[i + 1]);
    const __m256i low = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(own, next));
    const __m256i high = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(own, next));
    for (int q = 0; q < kQueries; ++q) {
      int32_t both;
      memcpy(&both, weights + q * kSpan + position + i, sizeof both);
      add_pairs(totals[q][0], low, _mm256_set1_epi32(both));
      add_pairs(totals[q][1], high, _mm256_set1_epi32(both));
    }
  }
}

#else

inline void add_products(IntLanes& sums, ShortLanes a, ShortLanes b) {
#if defined(__ARM_NEON)
  int32x4_t parts[2];
  memcpy(parts, &sums, sizeof parts);
  parts[0] = vmlal_s16(parts[0], vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  parts[1] = vmlal_high_s16(parts[1], (int16x8_t)a, (int16x8_t)b);
  memcpy(&sums, parts, sizeof sums);
#else
  sums += __builtin_convertvector(a, IntLanes) * __builtin_convertvector(b, IntLanes);
#endif
}

inline ShortLanes shorts(const int8_t* from) {
  ByteLanes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, ShortLanes);
}

inline void add_key(IntLanes& totals, const int8_t* key, const int16_t* query) {
  for (int half = 0; half < 2; ++half) {
    ShortLanes own;
    memcpy(&own, query + half * kLanes, sizeof own);
    add_products(totals, shorts(key + half * kLanes), own);
  }
}

template <int kQueries, int kParts>
inline void add_values(IntLanes (*totals)[kParts], const int8_t* const* values, const int16_t* weights, int64_t position) {
  for (int part = 0; part < 2; ++part)
    for (int i = 0; i < kTogether; ++i) {
      const ShortLanes column = shorts(values[i] + part * kLanes);
      for (int q = 0; q < kQueries; ++q)
        add_products(totals[q][part], column, ShortLanes{} + weights[q * kSpan + position + i]);
    }
}

#endif
#endif

// Has numbers on their way from memory. Only few at a time, between other work: a core waits for a dozen cache lines at
// most, and while it does, it cannot load from its second cache either.
template <int kNumbers, typename T>
inline void fetch(const T* numbers) {
  for (int i = 0; i < kNumbers * (int)sizeof(T); i += 64) __builtin_prefetch((const char*)numbers + i, 0, 2);
}

// The sums of eight vectors' lanes, each in the order of `sum`.
template <typename Vector>
inline Vector sums_of(const Vector* v) {
#if defined(__AVX2__)
  // Lanes 0 + 4, 1 + 5, 2 + 6, 3 + 7 of each vector, two vectors to a register.
  Vector folded[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 first = (__m256)v[i], second = (__m256)v[i + 4];
    folded[i] = (Vector)_mm256_permute2f128_ps(first, second, 0x20) + (Vector)_mm256_permute2f128_ps(first, second, 0x31);
  }
  // Then (0 + 2) + (1 + 3): even and odd lanes are brought side by side before each addition.
  const auto beside = [](Vector a, Vector b) {
    return (Vector)_mm256_unpacklo_ps((__m256)a, (__m256)b) + (Vector)_mm256_unpackhi_ps((__m256)a, (__m256)b);
  };
  return beside(beside(folded[0], folded[2]), beside(folded[1], folded[3]));
#else
  Vector found;
  for (int i = 0; i < kLanes; ++i) found[i] = sum(v[i]);
  return found;
#endif
}

// The products of kQueries queries, `apart` from each other, with kKeys keys, still in lanes, those of a query kLanes apart. A
// part of a query is loaded once for all keys. As much as there is of the keys is fetched of `ahead`.
template <int kQueries, int kKeys, typename T>
inline void compare(const Factor<T>* queries, int64_t apart, const T* const* keys, int64_t size, const T* ahead,
                    Totals<T>* found) {
  Totals<T> totals[kQueries][kKeys] = {};
  for (int64_t i = 0; i + kAtOnce <= size; i += kAtOnce) {
    fetch<kKeys * kAtOnce>(ahead + kKeys * i);
    for (int k = 0; k < kKeys; ++k)
      for (int q = 0; q < kQueries; ++q) add_key(totals[q][k], keys[k] + i, queries + q * apart + i);
  }
  for (int q = 0; q < kQueries; ++q)
    for (int k = 0; k < kKeys; ++k) found[q * kLanes + k] = products(totals[q][k]);
}

// The products of kQueries queries with the eight keys from `start` on, lane by lane; behind the last one, its product again.
template <int kQueries, typename T>
inline void score_keys(const Factor<T>* queries, int64_t apart, const T* keys, int64_t start, int64_t positions,
                       int64_t size, const T* ahead, Lanes* scores) {
  constexpr int kKeys = 4;  // with two queries, as many sums as registers hold beside what is loaded
  const T* key[kLanes];
  Totals<T> totals[kQueries * kLanes];
  for (int k = 0; k < kLanes; ++k) key[k] = keys + (start + k < positions ? start + k : positions - 1) * size;
  for (int k = 0; k < kLanes; k += kKeys)
    compare<kQueries, kKeys>(queries, apart, key + k, size, ahead + k * size, totals + k);
  for (int q = 0; q < kQueries; ++q) {
    Totals<T> sums = sums_of(totals + q * kLanes);
    for (int64_t i = size / kAtOnce * kAtOnce; i < size; ++i)
      for (int k = 0; k < kLanes; ++k) sums[k] += factor(queries + q * apart, i) * value_of(key[k][i]);
    scores[q] = __builtin_convertvector(sums, Lanes);
  }
}

// The products of kQueries queries with all keys of a span, in whole lanes. Its values are fetched meanwhile.
template <int kQueries, typename T>
inline void score(const Span& span, const Factor<T>* queries, int64_t apart, float (*scores)[kSpan]) {
  const T *keys = (const T*)span.keys, *values = (const T*)span.values;
  for (int64_t start = 0; start < span.positions; start += kLanes) {
    Lanes found[kQueries];
    score_keys<kQueries>(queries, apart, keys, start, span.positions, span.head_dim, values + start * span.head_dim,
                         found);
    for (int q = 0; q < kQueries; ++q) store(scores[q] + start, found[q]);
  }
}

// mixed = weights . values for kQueries queries and kWide times kAtOnce columns, kept in registers. As much as there is of
// the values is fetched of `ahead`.
template <int kQueries, int kWide, typename T>
inline void mix_columns(const Factor<T>* weights, const T* values, int64_t positions, int64_t size, const T* ahead,
                        float* mixed) {
  constexpr int kParts = Arithmetic<T>::kParts;
  constexpr int kAhead = kTogether * kWide * kAtOnce;
  Totals<T> totals[kWide][kQueries][kParts] = {};
  const auto add = [&](const T* const* rows, int64_t position) {
    fetch<kAhead>(ahead);
    ahead += kAhead;
    for (int wide = 0; wide < kWide; ++wide) {
      const T* columns[kTogether];
      for (int i = 0; i < kTogether; ++i) columns[i] = rows[i] + wide * kAtOnce;
      add_values<kQueries, kParts>(totals[wide], columns, weights, position);
    }
  };
  const T* rows[kTogether];
  int64_t position = 0;
  for (; position + kTogether <= positions; position += kTogether, values += kTogether * size) {
    for (int i = 0; i < kTogether; ++i) rows[i] = values + i * size;
    add(rows, position);
  }
  if (position < positions) {  // behind the last position it is repeated: the weights are 0 there
    for (int i = 0; i < kTogether; ++i) rows[i] = position + i < positions ? values + i * size : rows[i - 1];
    add(rows, position);
  }
  for (int wide = 0; wide < kWide; ++wide)
    for (int q = 0; q < kQueries; ++q) store_columns(mixed + q * size + wide * kAtOnce, totals[wide][q]);
}

template <int kQueries, typename T>
inline void mix(const Span& span, const Factor<T>* weights, float* mixed) {
  constexpr int kWide = 4 / Arithmetic<T>::kParts;
  const int64_t positions = span.positions, size = span.head_dim;
  const T *values = (const T*)span.values, *ahead = (const T*)span.ahead;
  int64_t column = 0;
  for (; column + kWide * kAtOnce <= size; column += kWide * kAtOnce)
    mix_columns<kQueries, kWide>(weights, values + column, positions, size, ahead + column * positions, mixed + column);
  for (; column + kAtOnce <= size; column += kAtOnce)
    mix_columns<kQueries, 1>(weights, values + column, positions, size, ahead + column * positions, mixed + column);
  for (; column < size; ++column)
    for (int q = 0; q < kQueries; ++q) {
      decltype(factor(weights, 0) * value_of(values[0])) total = 0;
      for (int64_t position = 0; position < positions; ++position)
        total += factor(weights + q * kSpan, position) * value_of(values[position * size + column]);
      mixed[q * size + column] = (float)total;
    }
}

// Turns the scores of one query, in whole lanes, into e^(score - largest), 0 behind the last position.
inline void soften(float* scores, int64_t positions, float* most, float* total) {
  Lanes found = load(scores);
  for (int64_t i = kLanes; i < positions; i += kLanes) found = larger(found, load(scores + i));
  *most = largest(found);
  const float from = *most < -FLT_MAX ? 0.0f : *most;  // a span of scores that are all infinitely small counts nothing
  Lanes totals = all(0.0f);
  for (int64_t i = 0; i < positions; i += kLanes) {
    Lanes powers = exp_of(load(scores + i) - all(from));
    for (int64_t k = positions - i; k < kLanes; ++k) powers[k] = 0.0f;
    store(scores + i, powers);
    totals += powers;
  }
  *total = sum(totals);
}

template <int kQueries, typename T>
void attend_queries(const Span& span, int64_t first) {
  alignas(32) float scores[kQueries][kSpan];
  score<kQueries, T>(span, span.queries + first * span.head_dim, span.head_dim, scores);
  for (int q = 0; q < kQueries; ++q)
    soften(scores[q], span.positions, span.largest + first + q, span.total + first + q);
  mix<kQueries, T>(span, scores[0], span.mixed + first * span.head_dim);
}

// Rounds numbers to 16-bit counts of steps, the largest `limit` of them, and behind the last 0 up to a multiple of kAtOnce;
// returns the step.
inline float shorten(const float* from, int64_t count, float limit, int16_t* to) {
  const Steps steps = steps_of(from, count, limit);
  for (int64_t i = 0; i < count; i += kAtOnce) {
    ShortLanes whole[2] = {};
    for (int64_t half = 0; half < 2 && i + half * kLanes < count; ++half)
      whole[half] = __builtin_convertvector(counted(some<Lanes>(from, i + half * kLanes, count), steps), ShortLanes);
    keep_shorts(whole, to + i);
  }
  return steps.size;
}

// scores[i] *= scales[i] * times, and those that repeat the last one like it.
inline void scale_by(float* scores, const float* scales, float times, int64_t positions) {
  int64_t i = 0;
  for (; i + kLanes <= positions; i += kLanes) store(scores + i, load(scores + i) * (load(scales + i) * all(times)));
  for (int64_t k = i; k < i + kLanes && i < positions; ++k)
    scores[k] *= scales[k < positions ? k : positions - 1] * times;
}

template <int kQueries>
void attend_int8(const Span& span, int64_t first) {
  const int64_t size = span.head_dim, apart = (size + kAtOnce - 1) / kAtOnce * kAtOnce;
  const float* queries = span.queries + first * size;
  const float limit = (float)(16777215 / size);  // a whole number: so many times 128, added up over a head, fit in 32 bits
  float* mixed = span.mixed + first * size;
  alignas(32) float scores[kQueries][kSpan];
  alignas(32) int16_t weights[kQueries][kSpan];
  float steps[kQueries];
  for (int q = 0; q < kQueries; ++q)
    steps[q] = shorten(queries + q * size, size, limit < kMostShort ? limit : kMostShort, span.shorts + q * apart);
  score<kQueries, int8_t>(span, span.shorts, apart, scores);
  for (int q = 0; q < kQueries; ++q) {
    scale_by(scores[q], span.key_scales, steps[q], span.positions);
    soften(scores[q], span.positions, span.largest + first + q, span.total + first + q);
    scale_by(scores[q], span.value_scales, 1.0f, span.positions);
    steps[q] = shorten(scores[q], span.positions, kMostShort, weights[q]);
  }
  mix<kQueries, int8_t>(span, weights[0], mixed);
  for (int q = 0; q < kQueries; ++q)
    for (int64_t i = 0; i < size; ++i) mixed[q * size + i] *= steps[q];
}

void attend(CacheType type, const Span& span) {
  const auto in_twos = [&](void (*two)(const Span&, int64_t), void (*one)(const Span&, int64_t)) {
    int64_t query = 0;
    for (; query + 2 <= span.count; query += 2) two(span, query);
    if (query < span.count) one(span, query);
  };
  switch (type) {
    case CacheType::kFloat32:
      return in_twos(attend_queries<2, float>, attend_queries<1, float>);
    case CacheType::kBFloat16:
      return in_twos(attend_queries<2, BFloat16>, attend_queries<1, BFloat16>);
    case CacheType::kInt8:
      return in_twos(attend_int8<2>, attend_int8<1>);
  }
}

}  // namespace
