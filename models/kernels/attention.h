// Attention of new tokens: norms and rotates their queries and keys, writes keys and values into the cache, and attends.
// A row of the batch belongs to a slot of the cache, or to none: then it is not computed.
#pragma once

#include <cmath>

#include "arguments.h"

namespace kestrel {

// Keys or values [slots, kv_heads, capacity, head_dim], and if they are int8 their scales [slots, kv_heads, capacity].
struct Cache {
  CacheType type;
  int64_t bytes;  // of one number
  char* numbers;
  float* scales;

  char* at(int64_t line, int64_t head_dim) const { return numbers + line * head_dim * bytes; }
  float* scales_at(int64_t line) const { return scales == nullptr ? nullptr : scales + line; }
};

// Reads array `index` of the cache (keys, values) with its scale, which are arguments and, changed in place, results.
inline Cache read_cache(Check& check, size_t index, const std::string& name, std::vector<int64_t> shape,
                        const ffi::RemainingArgs& arrays, const ffi::RemainingRets& results) {
  Cache cache{CacheType::kFloat32, 4, nullptr, nullptr};
  const auto array = arrays.get<ffi::AnyBuffer>(index);
  auto result = results.get<ffi::AnyBuffer>(index);
  check.that(array.has_value() && result.has_value(), name + " is missing");
  if (check.failed()) return cache;
  const auto type = array->element_type();
  check.that(type == ffi::F32 || type == ffi::BF16 || type == ffi::S8, name + " should be float32, bfloat16 or int8");
  check.shape(name.c_str(), *array, shape);
  check.aligned(name.c_str(), *array, type == ffi::F32 ? 4 : type == ffi::BF16 ? 2 : 1);
  check.that(array->untyped_data() == (*result)->untyped_data(), name + " should be changed in place");
  const bool narrow = type == ffi::S8;
  check.that(arrays.size() == (narrow ? 4u : 2u) && results.size() == arrays.size(),
             "an int8 cache needs key_scales and value_scales, others take none");
  if (check.failed()) return cache;
  if (type == ffi::BF16) cache = {CacheType::kBFloat16, 2, nullptr, nullptr};
  if (narrow) cache = {CacheType::kInt8, 1, nullptr, nullptr};
  cache.numbers = static_cast<char*>(array->untyped_data());
  if (!narrow) return cache;
  const auto scales = arrays.get<ffi::BufferR3<ffi::F32>>(index + 2);
  auto changed = results.get<ffi::AnyBuffer>(index + 2);
  check.that(scales.has_value() && changed.has_value(), "the scales of " + name + " should be float32 with 3 axes");
  if (check.failed()) return cache;
  shape.pop_back();
  check.shape(("the scales of " + name).c_str(), scales.value(), shape);
  check.aligned(("the scales of " + name).c_str(), scales.value(), alignof(float));
  check.that(scales->untyped_data() == (*changed)->untyped_data(), "the scales of " + name + " should be changed in place");
  cache.scales = scales->typed_data();
  return cache;
}

// The new tokens' heads as they come from the projections.
struct NewTokens {
  int64_t batch, length, heads, kv_heads, head_dim;
  const float *queries, *keys, *values;  // [batch, length, heads or kv_heads, head_dim]
  Norm query_norm, key_norm;
  const float *cos, *sin;  // [batch, length, head_dim / 2]

  int64_t group() const { return heads / kv_heads; }
};

struct Layer {
  NewTokens fresh;
  const int32_t *slots, *first;
  int64_t capacity;
  Cache keys, values;

  bool empty(int64_t row) const { return slots[row] < 0; }

  // The place of a row's position in the cache.
  int64_t line(int64_t row, int64_t kv_head, int64_t position) const {
    return (slots[row] * fresh.kv_heads + kv_head) * capacity + position;
  }
};

// Takes one token's keys and values into the cache, and leaves its queries, rotated and scaled, in `queries`.
inline void take_token(const Layer& layer, int64_t row, int64_t place, float scale, float* queries) {
  const NewTokens& fresh = layer.fresh;
  const int64_t token = row * fresh.length + place, size = fresh.head_dim;
  const float *cos = fresh.cos + token * (size / 2), *sin = fresh.sin + token * (size / 2);
  for (int64_t head = 0; head < fresh.heads; ++head) {
    float* query = queries + head * size;
    variant().turn(fresh.queries + (token * fresh.heads + head) * size, fresh.query_norm.weight, fresh.query_norm.eps,
                   cos, sin, size, query);
    for (int64_t i = 0; i < size; ++i) query[i] *= scale;
  }
  float* key = queries + fresh.heads * size;  // the last head_dim floats of `queries` are room for one key
  for (int64_t head = 0; head < fresh.kv_heads; ++head) {
    const int64_t from = (token * fresh.kv_heads + head) * size, line = layer.line(row, head, layer.first[row] + place);
    variant().turn(fresh.keys + from, fresh.key_norm.weight, fresh.key_norm.eps, cos, sin, size, key);
    variant().keep(layer.keys.type, key, size, layer.keys.at(line, size), layer.keys.scales_at(line));
    variant().keep(layer.values.type, fresh.values + from, size, layer.values.at(line, size),
                   layer.values.scales_at(line));
  }
}

// Attention of the queries of one key/value head, `count` of them, to its first `visible` positions.
inline void attend_head(const Layer& layer, int64_t row, int64_t kv_head, int64_t visible, const float* queries, float* y) {
  const int64_t size = layer.fresh.head_dim, count = layer.fresh.group(), spans = (visible + kSpan - 1) / kSpan;
  const int64_t shorts = 2 * ((size + 15) / 16 * 16);
  thread_local Scratch partial;
  partial.reserve(2 * Scratch::room(spans * count * sizeof(float)) + Scratch::room(spans * count * size * sizeof(float)) +
                  Scratch::room(shorts * sizeof(int16_t)));
  float* largest = partial.take<float>(spans * count);
  float* totals = partial.take<float>(spans * count);
  float* mixed = partial.take<float>(spans * count * size);
  int16_t* rounded_queries = partial.take<int16_t>(shorts);
  for (int64_t span = 0; span < spans; ++span) {
    const int64_t start = span * kSpan, line = layer.line(row, kv_head, start), at = span * count;
    const char *keys = layer.keys.at(line, size), *ahead = span + 1 < spans ? layer.keys.at(line + kSpan, size) : keys;
    variant().attend(layer.keys.type, {queries, count, size, keys, layer.values.at(line, size),
                                       layer.keys.scales_at(line), layer.values.scales_at(line),
                                       std::min(kSpan, visible - start), rounded_queries, ahead, largest + at,
                                       totals + at, mixed + at * size});
  }
  for (int64_t query = 0; query < count; ++query) {
    float* out = y + query * size;
    float top = largest[query], total = 0.0f;
    for (int64_t at = query; at < spans * count; at += count) top = std::max(top, largest[at]);
    std::fill(out, out + size, 0.0f);
    for (int64_t at = query; at < spans * count; at += count) {
      const float weight = std::exp(largest[at] - top);
      total += weight * totals[at];
      for (int64_t i = 0; i < size; ++i) out[i] += weight * mixed[at * size + i];
    }
    for (int64_t i = 0; i < size; ++i) out[i] /= total;
  }
}

inline void attend(ffi::ThreadPool& pool, const Layer& layer, float scale, float* y) {
  const NewTokens& fresh = layer.fresh;
  const int64_t length = fresh.length, kv_heads = fresh.kv_heads, tokens = fresh.batch * length;
  const int64_t width = (fresh.heads + 1) * fresh.head_dim;  // of one token's queries, and one key
  scratch.reserve(Scratch::room(tokens * width * sizeof(float)));
  float* queries = scratch.take<float>(tokens * width);
  constexpr int64_t kTokensAtOnce = 4;
  parallel_for(pool, (tokens + kTokensAtOnce - 1) / kTokensAtOnce, [&](int64_t piece) {
    for (int64_t token = piece * kTokensAtOnce; token < std::min(tokens, (piece + 1) * kTokensAtOnce); ++token)
      if (!layer.empty(token / length)) take_token(layer, token / length, token % length, scale, queries + token * width);
  });
  parallel_for(pool, tokens * kv_heads, [&](int64_t item) {
    const int64_t token = item / kv_heads, kv_head = item % kv_heads, row = token / length;
    // Heads of one key/value head are neighbours, so its queries and results are one stretch of memory.
    const int64_t own = kv_head * fresh.group() * fresh.head_dim;
    float* out = y + token * fresh.heads * fresh.head_dim + own;
    if (layer.empty(row)) {
      std::fill(out, out + fresh.group() * fresh.head_dim, 0.0f);
      return;
    }
    attend_head(layer, row, kv_head, layer.first[row] + token % length + 1, queries + token * width + own, out);
  });
}

// queries [batch, length, heads, head_dim], keys and values [batch, length, kv_heads, head_dim], and a layer's cache. A row's
// slot, or none if it is negative, holds `first` tokens: query i of the row sees the positions 0 .. first + i.
inline ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                            ffi::AnyBuffer query_norm, ffi::AnyBuffer key_norm, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
                            ffi::AnyBuffer slots, ffi::AnyBuffer first, ffi::RemainingArgs cache,
                            ffi::Result<ffi::Buffer<ffi::F32>> y, ffi::RemainingRets changed, float scale, float eps) {
  Check check;
  check.that(queries.dimensions().size() == 4,
             "queries has shape " + shown(queries.dimensions()) + ", wanted is [batch, length, heads, head_dim]");
  check.that(keys.dimensions().size() == 4,
             "keys has shape " + shown(keys.dimensions()) + ", wanted is [batch, length, kv_heads, head_dim]");
  const auto held = cache.get<ffi::AnyBuffer>(0);
  check.that(held.has_value() && held->dimensions().size() == 4,
             "cached keys should be [slots, kv_heads, capacity, head_dim]");
  if (check.failed()) return check.error();
  const auto shape = queries.dimensions();
  const int64_t batch = shape[0], length = shape[1], heads = shape[2], head_dim = shape[3];
  const int64_t kv_heads = keys.dimensions()[2], capacity = held->dimensions()[2], all_slots = held->dimensions()[0];
  check.shape("keys", keys, {batch, length, kv_heads, head_dim});
  check.shape("values", values, {batch, length, kv_heads, head_dim});
  check.shape("cos", cos, {batch, length, head_dim / 2});
  check.shape("sin", sin, {batch, length, head_dim / 2});
  check.shape("slots", slots, {batch});
  check.shape("first", first, {batch});
  check.shape("y", *y, {batch, length, heads * head_dim});
  check.that(head_dim % 2 == 0, "head_dim should be even");
  check.that(kv_heads > 0 && heads % kv_heads == 0, "the number of heads should be a multiple of kv_heads");
  const NewTokens fresh = {batch,
                           length,
                           heads,
                           kv_heads,
                           head_dim,
                           check.floats("queries", queries),
                           check.floats("keys", keys),
                           check.floats("values", values),
                           read_norm(check, "query_norm", query_norm, eps, head_dim),
                           read_norm(check, "key_norm", key_norm, eps, head_dim),
                           check.floats("cos", cos),
                           check.floats("sin", sin)};
  const int32_t *slot_of = check.integers("slots", slots), *held_by = check.integers("first", first);
  const std::vector<int64_t> wanted = {all_slots, kv_heads, capacity, head_dim};
  const Cache cached_keys = read_cache(check, 0, "cached keys", wanted, cache, changed);
  const Cache cached_values = read_cache(check, 1, "cached values", wanted, cache, changed);
  check.that(cached_keys.type == cached_values.type, "cached values have another dtype than cached keys");
  check.slots(slot_of, batch, all_slots);
  for (int64_t row = 0; row < batch && !check.failed(); ++row) {
    const int64_t begun = held_by[row];
    if (slot_of[row] < 0) continue;
    check.that(begun >= 0 && begun + length <= capacity,
               "first: row " + std::to_string(row) + " holds " + std::to_string(begun) + " tokens and gets " +
                   std::to_string(length) + ", capacity is " + std::to_string(capacity));
  }
  if (check.failed()) return check.error();
  if (batch * length == 0) return ffi::Error::Success();
  attend(pool, {fresh, slot_of, held_by, capacity, cached_keys, cached_values}, scale, y->typed_data());
  return ffi::Error::Success();
}

// Memory as the allocator gives it: the pages of a large cache are not taken before they are written.
inline ffi::Error unwritten(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }

}  // namespace kestrel
