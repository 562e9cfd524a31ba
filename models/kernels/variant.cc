// The inner loops, compiled once per instruction set (KESTREL_VARIANT names it). Nothing here may come from a C++ library
// header: an inline function compiled for AVX2 could be linked in place of the portable one.

#include "variant.h"

#include "lanes.h"
#include "spans.h"
#include "steps.h"

namespace {

using kestrel::CacheType;
using kestrel::Format;
using kestrel::kBlock;
using kestrel::kForbidden;
using kestrel::kGroup;
using kestrel::kStretch;
using kestrel::Largest;
using kestrel::Noise;
using kestrel::Penalties;
using kestrel::Row;
using kestrel::Scale;

// Quantising activations

void quantise(const float* row, int64_t groups, int8_t* values, float* scales, int32_t* sums) {
  for (int64_t group = 0; group < groups; ++group, row += kGroup, values += kGroup) {
    const Steps steps = steps_of(row, kGroup, 127.0f);
    IntLanes total = {};
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const IntLanes whole = counted(load(row + i), steps);
      const ByteLanes bytes = __builtin_convertvector(whole, ByteLanes);
      memcpy(values + i, &bytes, sizeof bytes);
      total += whole;
    }
    int32_t whole_sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) whole_sum += total[lane];
    sums[group] = whole_sum;
    scales[group] = steps.size;
  }
}

// Norm, SwiGLU and rotation

void norm(const float* row, const float* weight, int64_t size, float eps, float* out) {
  Lanes totals[2] = {all(0.0f), all(0.0f)};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes)
    for (int half = 0; half < 2; ++half) {
      const Lanes v = load(row + i + half * kLanes);
      totals[half] = fma(v, v, totals[half]);
    }
  float total = sum(totals[0] + totals[1]);
  for (; i < size; ++i) total += row[i] * row[i];
  const float scale = 1.0f / __builtin_sqrtf(total / (float)size + eps);
  for (i = 0; i + kLanes <= size; i += kLanes) store(out + i, load(row + i) * all(scale) * load(weight + i));
  for (; i < size; ++i) out[i] = row[i] * scale * weight[i];
}

inline Lanes gated(Lanes gate, Lanes up) {
  const Lanes power = exp_of(gate > all(0.0f) ? -gate : gate);
  return gate * ((gate > all(0.0f) ? all(1.0f) : power) / (all(1.0f) + power)) * up;
}

void gate(const float* gate, float* up, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(up + i, gated(load(gate + i), load(up + i)));
  if (i == count) return;
  float gates[kLanes] = {}, ups[kLanes] = {};
  memcpy(gates, gate + i, (count - i) * sizeof(float));
  memcpy(ups, up + i, (count - i) * sizeof(float));
  store(ups, gated(load(gates), load(ups)));
  memcpy(up + i, ups, (count - i) * sizeof(float));
}

void turn(const float* head, const float* weight, float eps, const float* cos, const float* sin, int64_t size, float* out) {
  if (weight != nullptr) {
    norm(head, weight, size, eps, out);
  } else {
    memcpy(out, head, size * sizeof(float));
  }
  const int64_t half = size / 2;
  int64_t j = 0;
  for (; j + kLanes <= half; j += kLanes) {
    const Lanes first = load(out + j), second = load(out + half + j);
    store(out + j, first * load(cos + j) - second * load(sin + j));
    store(out + half + j, second * load(cos + j) + first * load(sin + j));
  }
  for (; j < half; ++j) {
    const float first = out[j], second = out[half + j];
    out[j] = first * cos[j] - second * sin[j];
    out[half + j] = second * cos[j] + first * sin[j];
  }
}

// Writing the cache

void keep_int8(const float* head, int64_t size, int8_t* to, float* scale) {
  const Steps steps = steps_of(head, size, 127.0f);
  *scale = steps.size;
  for (int64_t i = 0; i < size; i += kLanes) {
    const ByteLanes bytes = __builtin_convertvector(counted(some<Lanes>(head, i, size), steps), ByteLanes);
    store_some(to, i, size, bytes);
  }
}

// Rounds to the nearest, ties to even; what is not a number stays so.
inline uint16_t narrowed(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void keep(CacheType type, const float* head, int64_t size, void* to, float* scale) {
  switch (type) {
    case CacheType::kFloat32:
      memcpy(to, head, size * sizeof(float));
      return;
    case CacheType::kBFloat16:
      for (int64_t i = 0; i < size; ++i) ((uint16_t*)to)[i] = narrowed(head[i]);
      return;
    case CacheType::kInt8:
      return keep_int8(head, size, (int8_t*)to, scale);
  }
}

// Float16 scales of a block's eight rows

inline Lanes widen_halves(const uint16_t* halves) {
#if defined(__F16C__)
  __m128i bits;
  memcpy(&bits, halves, sizeof bits);
  return (Lanes)_mm256_cvtph_ps(bits);
#elif defined(__ARM_NEON)
  float16x4_t parts[2];
  memcpy(parts, halves, sizeof parts);
  float32x4_t wide[2] = {vcvt_f32_f16(parts[0]), vcvt_f32_f16(parts[1])};
  Lanes lanes;
  memcpy(&lanes, wide, sizeof lanes);
  return lanes;
#else
  // Shifted into place, a float16 is a float32 whose exponent is 112 too small, subnormals included.
  HalfLanes bits;
  memcpy(&bits, halves, sizeof bits);
  const WordLanes wide = __builtin_convertvector(bits, WordLanes);
  const Lanes magnitude = (Lanes)((wide & 0x7fff) << 13) * all(0x1p112f);
  return (Lanes)((WordLanes)magnitude | (wide & 0x8000) << 16);
#endif
}

// The exact integer products of one group of a block with up to kTile rows; what is unpacked of the weights is shared by
// the rows.

#if defined(__AVX2__)
// Four activations, in every lane.
inline __m256i quad(const int8_t* values) {
  int32_t bits;
  memcpy(&bits, values, sizeof bits);
  return _mm256_set1_epi32(bits);
}

// Has the compiler add a sum up now: it would rather compute all products first, for which there are too few registers.
inline void settle(__m256i& sum) { asm("" : "+x"(sum)); }
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

template <int kRows>
inline void group_q4(const uint8_t* packed, const Row* rows, int64_t group, IntLanes* products) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = _mm256_set1_epi32(-8 * rows[r].sums[group]);
  for (int j = 0; j < 4; ++j) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(packed + 32 * j));
    const __m256i first = _mm256_and_si256(bytes, low);
    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
    for (int r = 0; r < kRows; ++r) {
      const int8_t* values = rows[r].values + group * kGroup + 8 * j;
      sums[r] = _mm256_dpbusd_epi32(sums[r], first, quad(values));
      sums[r] = _mm256_dpbusd_epi32(sums[r], second, quad(values + 4));
    }
  }
  for (int r = 0; r < kRows; ++r) products[r] = (IntLanes)sums[r];
}

template <int kRows>
inline void group_q8(const uint8_t* bytes, const Row* rows, int64_t group, IntLanes* products) {
  const __m256i flip = _mm256_set1_epi8(-128);
  __m256i sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = _mm256_set1_epi32(-128 * rows[r].sums[group]);
  for (int j = 0; j < 8; ++j) {
    const __m256i weights = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(bytes + 32 * j)), flip);
    for (int r = 0; r < kRows; ++r)
      sums[r] = _mm256_dpbusd_epi32(sums[r], weights, quad(rows[r].values + group * kGroup + 4 * j));
  }
  for (int r = 0; r < kRows; ++r) products[r] = (IntLanes)sums[r];
}

#elif defined(__AVX2__)

template <int kRows>
inline void group_q4(const uint8_t* packed, const Row* rows, int64_t group, IntLanes* products) {
  // Eight products of pairs are at most 8 * 2 * 15 * 127 = 30,480: they add up in 16 bits.
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = _mm256_setzero_si256();
  for (int j = 0; j < 4; ++j) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(packed + 32 * j));
    const __m256i first = _mm256_and_si256(bytes, low);
    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
    for (int r = 0; r < kRows; ++r) {
      const int8_t* values = rows[r].values + group * kGroup + 8 * j;
      sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(first, quad(values)));
      sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(second, quad(values + 4)));
      settle(sums[r]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    products[r] = (IntLanes)_mm256_sub_epi32(_mm256_madd_epi16(sums[r], ones),
                                             _mm256_set1_epi32(8 * rows[r].sums[group]));
}

template <int kRows>
inline void group_q8(const uint8_t* bytes, const Row* rows, int64_t group, IntLanes* products) {
  // maddubs wants one operand without sign: the weight's sign moves to the activation.
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = _mm256_setzero_si256();
  for (int j = 0; j < 8; ++j) {
    const __m256i weights = _mm256_loadu_si256((const __m256i*)(bytes + 32 * j));
    const __m256i magnitude = _mm256_abs_epi8(weights);
    for (int r = 0; r < kRows; ++r) {
      const __m256i values = _mm256_sign_epi8(quad(rows[r].values + group * kGroup + 4 * j), weights);
      sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, values), ones));
      settle(sums[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) products[r] = (IntLanes)sums[r];
}

#elif defined(__ARM_FEATURE_DOTPROD)

struct Sums {
  int32x4_t rows_0_to_3, rows_4_to_7;
};

inline IntLanes joined(Sums sums) {
  IntLanes lanes;
  memcpy(&lanes, &sums, sizeof lanes);
  return lanes;
}

template <int kLane>
inline void add_quad(Sums& sums, int8x16_t first, int8x16_t second, int8x16_t values) {
  sums.rows_0_to_3 = vdotq_laneq_s32(sums.rows_0_to_3, first, values, kLane);
  sums.rows_4_to_7 = vdotq_laneq_s32(sums.rows_4_to_7, second, values, kLane);
}

template <int kRows, int kJ>
inline void add_packed(const uint8_t* packed, const Row* rows, int64_t group, Sums* sums) {
  const uint8x16_t low = vdupq_n_u8(15);
  const uint8x16_t first = vld1q_u8(packed + 32 * kJ), second = vld1q_u8(packed + 32 * kJ + 16);
  for (int r = 0; r < kRows; ++r) {
    const int8x16_t values = vld1q_s8(rows[r].values + group * kGroup + 16 * (kJ / 2));
    add_quad<2 * (kJ % 2)>(sums[r], vreinterpretq_s8_u8(vandq_u8(first, low)),
                           vreinterpretq_s8_u8(vandq_u8(second, low)), values);
    add_quad<2 * (kJ % 2) + 1>(sums[r], vreinterpretq_s8_u8(vshrq_n_u8(first, 4)),
                               vreinterpretq_s8_u8(vshrq_n_u8(second, 4)), values);
  }
}

template <int kRows>
inline void group_q4(const uint8_t* packed, const Row* rows, int64_t group, IntLanes* products) {
  Sums sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int32x4_t bias = vdupq_n_s32(-8 * rows[r].sums[group]);
    sums[r] = {bias, bias};
  }
  add_packed<kRows, 0>(packed, rows, group, sums);
  add_packed<kRows, 1>(packed, rows, group, sums);
  add_packed<kRows, 2>(packed, rows, group, sums);
  add_packed<kRows, 3>(packed, rows, group, sums);
  for (int r = 0; r < kRows; ++r) products[r] = joined(sums[r]);
}

template <int kRows, int kJ>
inline void add_bytes(const uint8_t* bytes, const Row* rows, int64_t group, Sums* sums) {
  const int8x16_t first = vreinterpretq_s8_u8(vld1q_u8(bytes + 32 * kJ));
  const int8x16_t second = vreinterpretq_s8_u8(vld1q_u8(bytes + 32 * kJ + 16));
  for (int r = 0; r < kRows; ++r)
    add_quad<kJ % 4>(sums[r], first, second, vld1q_s8(rows[r].values + group * kGroup + 16 * (kJ / 4)));
}

template <int kRows>
inline void group_q8(const uint8_t* bytes, const Row* rows, int64_t group, IntLanes* products) {
  Sums sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = {vdupq_n_s32(0), vdupq_n_s32(0)};
  add_bytes<kRows, 0>(bytes, rows, group, sums);
  add_bytes<kRows, 1>(bytes, rows, group, sums);
  add_bytes<kRows, 2>(bytes, rows, group, sums);
  add_bytes<kRows, 3>(bytes, rows, group, sums);
  add_bytes<kRows, 4>(bytes, rows, group, sums);
  add_bytes<kRows, 5>(bytes, rows, group, sums);
  add_bytes<kRows, 6>(bytes, rows, group, sums);
  add_bytes<kRows, 7>(bytes, rows, group, sums);
  for (int r = 0; r < kRows; ++r) products[r] = joined(sums[r]);
}

#else

inline int32_t quad_product(const int8_t* weights, const int8_t* values) {
  return weights[0] * values[0] + weights[1] * values[1] + weights[2] * values[2] + weights[3] * values[3];
}

template <int kRows>
inline void group_q4(const uint8_t* packed, const Row* rows, int64_t group, IntLanes* products) {
  int8_t weights[kBlock * kGroup];
  for (int j = 0; j < 4; ++j)
    for (int byte = 0; byte < 32; ++byte) {
      weights[64 * j + byte] = (int8_t)(packed[32 * j + byte] & 15) - 8;
      weights[64 * j + 32 + byte] = (int8_t)(packed[32 * j + byte] >> 4) - 8;
    }
  for (int r = 0; r < kRows; ++r)
    for (int row = 0; row < kBlock; ++row) {
      int32_t total = 0;
      for (int j = 0; j < 8; ++j)
        total += quad_product(weights + 32 * j + 4 * row, rows[r].values + group * kGroup + 4 * j);
      products[r][row] = total;
    }
}

template <int kRows>
inline void group_q8(const uint8_t* bytes, const Row* rows, int64_t group, IntLanes* products) {
  for (int r = 0; r < kRows; ++r)
    for (int row = 0; row < kBlock; ++row) {
      int32_t total = 0;
      for (int j = 0; j < 8; ++j)
        total += quad_product((const int8_t*)bytes + 32 * j + 4 * row, rows[r].values + group * kGroup + 4 * j);
      products[r][row] = total;
    }
}

#endif

// Weights times activations

template <Format kFormat, int kRows>
void multiply_quantised(const void* weights, const uint16_t* scales, int64_t inputs, const Row* rows, float* out) {
  constexpr int64_t kBytes = kFormat == Format::kQ4 ? kBlock * kGroup / 2 : kBlock * kGroup;
  constexpr int64_t kLine = 64, kAhead = 2048;
  const uint8_t* block = (const uint8_t*)weights;
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  Lanes totals[kRows];
  for (int r = 0; r < kRows; ++r) totals[r] = all(0.0f);
  for (int64_t group = 0; group < groups; ++group, block += kBytes, scales += kBlock) {
    // The hardware's own read-ahead stops at the end of a page.
    for (int64_t line = 0; line < kBytes; line += kLine) __builtin_prefetch(block + kAhead + line);
    IntLanes products[kRows];
    if (kFormat == Format::kQ4) {
      group_q4<kRows>(block, rows, group, products);
    } else {
      group_q8<kRows>(block, rows, group, products);
    }
    const Lanes own = widen_halves(scales);
    for (int r = 0; r < kRows; ++r)
      totals[r] = fma(__builtin_convertvector(products[r], Lanes), own * all(rows[r].scales[group]), totals[r]);
  }
  for (int r = 0; r < kRows; ++r) store(out + r * kBlock, totals[r]);
}

template <typename T, int kRows>
void multiply_floats(const T* weights, int64_t inputs, int64_t height, const Row* rows, float* out) {
  for (int64_t row = 0; row < height; ++row, weights += inputs) {
    Lanes totals[kRows][2];
    for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = all(0.0f);
    int64_t i = 0;
    for (; i + 2 * kLanes <= inputs; i += 2 * kLanes) {
      const Lanes first = load(weights + i), second = load(weights + i + kLanes);
      for (int r = 0; r < kRows; ++r) {
        totals[r][0] = fma(load(rows[r].floats + i), first, totals[r][0]);
        totals[r][1] = fma(load(rows[r].floats + i + kLanes), second, totals[r][1]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float total = sum(totals[r][0] + totals[r][1]);
      for (int64_t rest = i; rest < inputs; ++rest) total += rows[r].floats[rest] * value_of(weights[rest]);
      out[r * kBlock + row] = total;
    }
  }
}

template <int kRows>
void multiply_rows(Format format, const void* block, const uint16_t* scales, int64_t inputs, int64_t height,
                   const Row* rows, float* out) {
  switch (format) {
    case Format::kQ4:
      return multiply_quantised<Format::kQ4, kRows>(block, scales, inputs, rows, out);
    case Format::kQ8:
      return multiply_quantised<Format::kQ8, kRows>(block, scales, inputs, rows, out);
    case Format::kFloat32:
      return multiply_floats<float, kRows>((const float*)block, inputs, height, rows, out);
    case Format::kBFloat16:
      return multiply_floats<BFloat16, kRows>((const BFloat16*)block, inputs, height, rows, out);
  }
}

void multiply(Format format, const void* block, const uint16_t* scales, int64_t inputs, int64_t height, const Row* rows,
              int64_t tile, float* out) {
  switch (tile) {
    case 1:
      return multiply_rows<1>(format, block, scales, inputs, height, rows, out);
    case 2:
      return multiply_rows<2>(format, block, scales, inputs, height, rows, out);
    case 3:
      return multiply_rows<3>(format, block, scales, inputs, height, rows, out);
    default:
      return multiply_rows<4>(format, block, scales, inputs, height, rows, out);
  }
}

// Sampling. `larger(v, most)` keeps `most` where v is not a number.

// The logits from `start` on, minus infinity behind the last.
inline Lanes load_some(const float* logits, int64_t start, int64_t count) {
  return some<Lanes>(logits, start, count, all(kForbidden));
}

constexpr WordLanes kFirstPlaces = {0, 1, 2, 3, 4, 5, 6, 7};

// The lane of the largest value; of equal ones, that of the first place.
inline int first_of_largest(Lanes values, WordLanes places) {
  int best = 0;
  for (int lane = 1; lane < kLanes; ++lane)
    if (values[lane] > values[best] || (values[lane] == values[best] && places[lane] < places[best])) best = lane;
  return best;
}

Largest find_largest(const float* logits, int64_t count) {
  Lanes most = all(kForbidden), next = all(kForbidden);
  WordLanes places = kFirstPlaces;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = load_some(logits, i, count);
    const IntLanes better = v > most;
    next = larger(better ? most : v, next);
    places = better ? kFirstPlaces + (uint32_t)i : places;
    most = better ? v : most;
  }
  const int best = first_of_largest(most, places);
  if (!(most[best] > kForbidden)) return {kForbidden, 0, kForbidden};
  const float found = most[best];
  most[best] = next[best];
  return {found, (int64_t)places[best], largest(larger(most, next))};
}

void stretch_largest(const float* logits, int64_t count, float* out) {
  for (int64_t start = 0; start < count; start += kStretch) {
    Lanes most = all(kForbidden);
    for (int64_t i = start; i < start + kStretch && i < count; i += kLanes)
      most = larger(load_some(logits, i, count), most);
    *out++ = largest(most);
  }
}

inline Lanes scaled(Lanes logits, const Scale& scale) { return (logits - all(scale.largest)) / all(scale.temperature); }

double weigh(const float* logits, int64_t count, const Scale& scale, float* weights) {
  constexpr int64_t kAtOnce = 4096;  // added up in float32
  double total = 0.0;
  for (int64_t start = 0; start < count; start += kAtOnce) {
    const int64_t end = start + kAtOnce < count ? start + kAtOnce : count;
    Lanes totals = all(0.0f);
    for (int64_t i = start; i < end; i += kLanes) {
      const Lanes powers = exp_of(scaled(load_some(logits, i, count), scale));
      totals += powers;
      if (weights != nullptr) store_some(weights, i, count, powers);
    }
    total += sum(totals);
  }
  return total;
}

void penalise(const float* logits, int64_t count, const Penalties& penalties, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const IntLanes times = some<IntLanes>(penalties.counts, i, count);
    const IntLanes answered = times > 0;
    const IntLanes seen = __builtin_convertvector(some<ByteLanes>(penalties.in_prompt, i, count), IntLanes) | answered;
    const Lanes repetition = seen ? all(penalties.repetition) : all(1.0f);
    Lanes v = some<Lanes>(logits, i, count);
    v = v > all(0.0f) ? v / repetition : v * repetition;
    v -= all(penalties.frequency) * __builtin_convertvector(times, Lanes);
    v -= answered ? all(penalties.presence) : all(0.0f);
    v += some<Lanes>(penalties.bias, i, count);
    store_some(out, i, count, v);
  }
}

void forbid(const uint32_t* allowed, int64_t count, float* logits) {
  for (int64_t start = 0; start < count; start += 32, ++allowed) {
    if (*allowed == 0xffffffffu) continue;
    const int64_t end = start + 32 < count ? start + 32 : count;
    for (int64_t i = start; i < end; ++i) logits[i] = *allowed >> (i - start) & 1 ? logits[i] : kForbidden;
  }
}

// The first word that threefry2x32 makes of (step, token) in 20 rounds (Salmon et al. 2011).
inline WordLanes threefry(const Noise& noise, WordLanes tokens) {
  const uint32_t keys[3] = {noise.key[0], noise.key[1], noise.key[0] ^ noise.key[1] ^ 0x1bd11bdau};
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  WordLanes x = WordLanes{} + (noise.step + keys[0]), y = tokens + keys[1];
  for (uint32_t part = 0; part < 5; ++part) {
    for (int turn : kTurns[part % 2]) {
      x += y;
      y = (y << turn | y >> (32 - turn)) ^ x;
    }
    x += keys[(part + 1) % 3];
    y += keys[(part + 2) % 3] + (part + 1);
  }
  return x;
}

// Standard Gumbel noise from 23 random bits and a half, as many as float32 holds without rounding up to 1.
inline Lanes gumbel(WordLanes bits) {
  const Lanes uniform = (__builtin_convertvector((IntLanes)(bits >> 9), Lanes) + all(0.5f)) * all(0x1p-23f);
  return -log_of(-log_of(uniform));
}

int32_t draw(const float* logits, const int32_t* tokens, int64_t count, const Scale& scale, const Noise& noise) {
  Lanes most = all(kForbidden);
  WordLanes best = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    WordLanes own = kFirstPlaces + (uint32_t)i;
    if (tokens != nullptr) own = some<WordLanes>(tokens, i, count);
    const Lanes sums = scaled(load_some(logits, i, count), scale) + gumbel(threefry(noise, own));
    const IntLanes better = sums > most | (sums == most & own < best);
    best = better ? own : best;
    most = better ? sums : most;
  }
  return (int32_t)best[first_of_largest(most, best)];
}

}  // namespace

#define KESTREL_NAME_(name) #name
#define KESTREL_NAME(name) KESTREL_NAME_(name)
#define KESTREL_JOIN_(a, b) a##b
#define KESTREL_JOIN(a, b) KESTREL_JOIN_(a, b)

namespace kestrel {

extern const Variant KESTREL_JOIN(variant_, KESTREL_VARIANT);
const Variant KESTREL_JOIN(variant_, KESTREL_VARIANT) = {KESTREL_NAME(KESTREL_VARIANT),
                                                                  quantise,
                                                                  norm,
                                                                  gate,
                                                                  turn,
                                                                  keep,
                                                                  multiply,
                                                                  attend,
                                                                  find_largest,
                                                                  stretch_largest,
                                                                  weigh,
                                                                  penalise,
                                                                  forbid,
                                                                  draw};

}  // namespace kestrel
