// What each instruction-set variant of the kernels offers. `variant.cc` is compiled once per variant; `ffi.cc` chooses one
// at run time.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kestrel {

constexpr int64_t kGroup = 32;   // inputs that share a scale
constexpr int64_t kBlock = 8;    // output rows stored together
constexpr int64_t kTile = 4;     // activation rows that read a block of weights at once
constexpr int64_t kSpan = 256;   // cached positions whose attention is computed in one piece
constexpr int64_t kStretch = 64; // tokens of the vocabulary whose largest logit is looked for together
constexpr float kForbidden = -__builtin_inff();  // the logit of a token that must not be chosen

enum class Format { kQ4, kQ8, kFloat32, kBFloat16 };
enum class CacheType { kFloat32, kBFloat16, kInt8 };

// One activation row: `floats` [inputs], and for quantised weights `values` [groups * 32], `scales` [groups] and `sums`
// [groups] of the values.
struct Row {
  const float* floats;
  const int8_t* values;
  const float* scales;
  const int32_t* sums;
};

// One piece of attention: the queries of one key/value head over up to kSpan positions. Arrays of positions are dense:
// keys and values [positions, head_dim], scales [positions] where the cache is int8.
struct Span {
  const float* queries;  // [queries, head_dim], scaled
  int64_t count;         // queries
  int64_t head_dim;
  const void* keys;
  const void* values;
  const float* key_scales;
  const float* value_scales;
  int64_t positions;
  int16_t* shorts;    // if the cache is int8, room for two queries of head_dim numbers, filled up to a multiple of 16
  const void* ahead;  // keys that are compared next, fetched while values are mixed
  float* largest;  // [queries]: the largest score
  float* total;    // [queries]: the sum of e^(score - largest)
  float* mixed;    // [queries, head_dim]: the sum of e^(score - largest) * value
};

// Of some logits the largest, the first place that has it, and the largest of all others. What is not a number does not
// count; without any number, the largest is minus infinity, at place 0.
struct Largest {
  float value;
  int64_t first;
  float second;
};

// How logits become weights: e^((logit - largest) / temperature).
struct Scale {
  float largest;
  float temperature;
};

// Penalties of a row and what they go by, [vocab] each.
struct Penalties {
  float repetition, presence, frequency;
  const float* bias;
  const bool* in_prompt;
  const int32_t* counts;
};

// Where a row's noise comes from: the key of its threefry generator, and the number of its draw.
struct Noise {
  uint32_t key[2];
  uint32_t step;
};

struct Variant {
  const char* name;

  // Quantises `groups` groups of a row: scale = max|x| / 127, value = round(x / scale), ties to even. A group with a value
  // that is not finite gets a scale of NaN.
  void (*quantise)(const float* row, int64_t groups, int8_t* values, float* scales, int32_t* sums);

  // out = row / sqrt(mean(row^2) + eps) * weight
  void (*norm)(const float* row, const float* weight, int64_t size, float eps, float* out);

  // up = silu(gate) * up
  void (*gate)(const float* gate, float* up, int64_t count);

  // One head, normed unless `weight` is null, then rotated: pairs (j, j + size / 2) by cos[j] and sin[j].
  void (*turn)(const float* head, const float* weight, float eps, const float* cos, const float* sin, int64_t size,
               float* out);

  // Writes one head into a cache; int8 as `quantise` does, with one scale.
  void (*keep)(CacheType type, const float* head, int64_t size, void* to, float* scale);

  // out[tile][8] = one block of weights times up to kTile rows, in an order that does not depend on the number of rows.
  // Quantised: one fused multiply-add per group, in order, on the exact integer product. Float: the block holds `height`
  // rows of `inputs` numbers; 16 running sums per output.
  void (*multiply)(Format format, const void* block, const uint16_t* scales, int64_t inputs, int64_t height,
                   const Row* rows, int64_t tile, float* out);

  // Attention of a span's queries to its positions, in the order of the positions. What an int8 cache is multiplied by is
  // rounded to 16 bits: a query by its largest number, the weights of a span, with the values' scales, by the largest one.
  void (*attend)(CacheType type, const Span& span);

  Largest (*find_largest)(const float* logits, int64_t count);

  // out[i] = the largest of logits [i * kStretch, (i + 1) * kStretch)
  void (*stretch_largest)(const float* logits, int64_t count, float* out);

  // The weights of logits, unless `weights` is null, and their sum.
  double (*weigh)(const float* logits, int64_t count, const Scale& scale, float* weights);

  void (*penalise)(const float* logits, int64_t count, const Penalties& penalties, float* out);

  // Makes the logits of tokens that a constraint forbids minus infinity: token i has bit i % 32 of word i / 32.
  void (*forbid)(const uint32_t* allowed, int64_t count, float* logits);

  // A draw in proportion to the logits' weights, by the Gumbel-max trick: the token with the largest sum of scaled logit and
  // noise, of equal ones the lowest. `tokens` are those of the logits, in any order, or null if they are the vocabulary.
  int32_t (*draw)(const float* logits, const int32_t* tokens, int64_t count, const Scale& scale, const Noise& noise);
};

// The variant in use.
const Variant& variant();

}  // namespace kestrel
