// The kernels as XLA custom calls: checks of every argument, the split of the work over threads, and the choice of the
// instruction-set variant. The arithmetic is in variant.cc.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "parallel.h"
#include "variant.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace ffi = xla::ffi;

namespace kestrel {

// Variants

extern const Variant variant_portable;
#if defined(__x86_64__)
extern const Variant variant_avx2;
extern const Variant variant_avx512vnni;
#elif defined(__aarch64__)
extern const Variant variant_dotprod;
#endif

namespace {

std::vector<const Variant*> runnable_variants() {
  std::vector<const Variant*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni"))
    found.push_back(&variant_avx512vnni);
  if (avx2) found.push_back(&variant_avx2);
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
  if (getauxval(AT_HWCAP) & kDotProduct) found.push_back(&variant_dotprod);
#endif
  found.push_back(&variant_portable);
  return found;
}

std::atomic<const Variant*> chosen{nullptr};

const Variant& variant() { return *chosen.load(std::memory_order_relaxed); }

// Arguments

std::string shown(ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "[";
  for (size_t i = 0; i < dimensions.size(); ++i) text += (i ? ", " : "") + std::to_string(dimensions[i]);
  return text + "]";
}

struct Check {
  std::string fault;

  template <typename Buffer>
  void shape(const char* name, const Buffer& buffer, std::vector<int64_t> wanted) {
    const auto found = buffer.dimensions();
    if (!fault.empty() || std::equal(found.begin(), found.end(), wanted.begin(), wanted.end())) return;
    fault = std::string(name) + " has shape " + shown(found) + ", wanted is " +
            shown(ffi::AnyBuffer::Dimensions(wanted.data(), wanted.size()));
  }

  template <typename Buffer>
  void aligned(const char* name, const Buffer& buffer, size_t bytes) {
    if (fault.empty() && reinterpret_cast<uintptr_t>(buffer.untyped_data()) % bytes != 0)
      fault = std::string(name) + " is not aligned to " + std::to_string(bytes) + " bytes";
  }

  void that(bool holds, const std::string& otherwise) {
    if (fault.empty() && !holds) fault = otherwise;
  }

  bool failed() const { return !fault.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(fault); }
};

// A weight [outputs, inputs], or `matrices` of them (experts). Quantised ones are stored in blocks of eight rows, float ones
// row by row, of which eight make a block here.
struct Weight {
  Format format;
  int64_t matrices, outputs, inputs, blocks;
  const char* bytes;
  const uint16_t* scales;

  bool quantised() const { return format == Format::kQ4 || format == Format::kQ8; }
  int64_t groups() const { return (inputs + kGroup - 1) / kGroup; }

  int64_t block_bytes() const {
    switch (format) {
      case Format::kQ4:
        return groups() * kBlock * kGroup / 2;
      case Format::kQ8:
        return groups() * kBlock * kGroup;
      case Format::kFloat32:
        return inputs * kBlock * 4;
      default:
        return inputs * kBlock * 2;
    }
  }

  int64_t height(int64_t block) const { return std::min(kBlock, outputs - block * kBlock); }

  const char* block(int64_t matrix, int64_t block) const {
    if (quantised()) return bytes + (matrix * blocks + block) * block_bytes();
    return bytes + (matrix * outputs + block * kBlock) * (block_bytes() / kBlock);
  }

  const uint16_t* block_scales(int64_t matrix, int64_t block) const {
    return quantised() ? scales + (matrix * blocks + block) * groups() * kBlock : nullptr;
  }
};

// Checks a weight and its scale, which for float weights is an empty array.
Weight read_weight(Check& check, const std::string& name, const ffi::AnyBuffer& weight, const ffi::AnyBuffer& scale,
                   bool stacked, int64_t inputs, int64_t outputs) {
  const std::string scale_name = "the scale of " + name;
  const size_t axes = (stacked ? 1 : 0) + (weight.element_type() == ffi::U8 || weight.element_type() == ffi::S8 ? 3 : 2);
  Weight read{Format::kQ4, 1, outputs, inputs, (outputs + kBlock - 1) / kBlock, static_cast<char*>(weight.untyped_data()),
              static_cast<uint16_t*>(scale.untyped_data())};
  switch (weight.element_type()) {
    case ffi::U8:
      break;
    case ffi::S8:
      read.format = Format::kQ8;
      break;
    case ffi::F32:
      read.format = Format::kFloat32;
      break;
    case ffi::BF16:
      read.format = Format::kBFloat16;
      break;
    default:
      check.that(false, name + " should be uint8 (q4), int8 (q8), float32 or bfloat16");
  }
  check.that(weight.dimensions().size() == axes,
             name + " has shape " + shown(weight.dimensions()) + ", wanted are " + std::to_string(axes) + " axes");
  check.that(scale.element_type() == ffi::F16, scale_name + " should be float16");
  if (check.failed()) return read;
  std::vector<int64_t> shape, scale_shape;
  if (stacked) {
    read.matrices = weight.dimensions()[0];
    shape = scale_shape = {read.matrices};
  }
  if (read.quantised()) {
    const int64_t bytes = kBlock * kGroup / (read.format == Format::kQ4 ? 2 : 1);
    shape.insert(shape.end(), {read.blocks, read.groups(), bytes});
    scale_shape.insert(scale_shape.end(), {read.blocks, read.groups(), kBlock});
  } else {
    shape.insert(shape.end(), {outputs, inputs});
    scale_shape = {0};
  }
  check.shape(name.c_str(), weight, shape);
  check.shape(scale_name.c_str(), scale, scale_shape);
  check.aligned(name.c_str(), weight, read.format == Format::kFloat32 ? 4 : read.format == Format::kBFloat16 ? 2 : 1);
  check.aligned(scale_name.c_str(), scale, alignof(uint16_t));
  return read;
}

// Memory for a call's intermediate values, kept by the thread for its next call. It never shrinks.
class Scratch {
 public:
  void reserve(size_t bytes) {
    if (memory_.size() < bytes + kAlignment) memory_.resize(bytes + kAlignment);
    used_ = 0;
  }

  template <typename T>
  T* take(int64_t count) {
    auto base = reinterpret_cast<uintptr_t>(memory_.data()) + used_;
    base = (base + kAlignment - 1) / kAlignment * kAlignment;
    used_ = base - reinterpret_cast<uintptr_t>(memory_.data()) + count * sizeof(T);
    return reinterpret_cast<T*>(base);
  }

  static size_t room(size_t bytes) { return bytes + kAlignment; }

 private:
  static constexpr size_t kAlignment = 64;
  std::vector<char> memory_;
  size_t used_ = 0;
};

thread_local Scratch scratch;

// Activation rows, quantised one by one if a quantised weight will read them.
struct Activations {
  int64_t rows, inputs, groups;
  const float* floats;
  int8_t* values = nullptr;
  float* scales = nullptr;
  int32_t* sums = nullptr;

  static size_t room(int64_t rows, int64_t inputs) {
    const int64_t groups = (inputs + kGroup - 1) / kGroup;
    return Scratch::room(rows * groups * kGroup) + 2 * Scratch::room(rows * groups * sizeof(float));
  }

  Activations(int64_t rows, int64_t inputs, const float* floats, bool quantised)
      : rows(rows), inputs(inputs), groups((inputs + kGroup - 1) / kGroup), floats(floats) {
    if (!quantised) return;
    values = scratch.take<int8_t>(rows * groups * kGroup);
    scales = scratch.take<float>(rows * groups);
    sums = scratch.take<int32_t>(rows * groups);
  }

  Row row(int64_t index) const {
    if (values == nullptr) return {floats + index * inputs, nullptr, nullptr, nullptr};
    return {floats + index * inputs, values + index * groups * kGroup, scales + index * groups, sums + index * groups};
  }

  void quantise(int64_t index) const {
    const float* from = floats + index * inputs;
    const int64_t whole = inputs / kGroup, first = index * groups;
    variant().quantise(from, whole, values + first * kGroup, scales + first, sums + first);
    if (whole == groups) return;
    float rest[kGroup] = {};
    std::copy(from + whole * kGroup, from + inputs, rest);
    const int64_t last = first + whole;
    variant().quantise(rest, 1, values + last * kGroup, scales + last, sums + last);
  }

  void quantise_all(ffi::ThreadPool& pool) const {
    constexpr int64_t kRowsAtOnce = 8;
    if (values == nullptr) return;
    parallel_for(pool, (rows + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t piece) {
      for (int64_t i = piece * kRowsAtOnce; i < std::min(rows, (piece + 1) * kRowsAtOnce); ++i) quantise(i);
    });
  }
};

// One block of a weight times rows, written to outs[row][8 * block ..].
void multiply_block(const Weight& weight, int64_t matrix, int64_t block, const std::vector<Row>& rows,
                    const std::vector<float*>& outs) {
  float products[kTile * kBlock];
  const int64_t count = static_cast<int64_t>(rows.size()), height = weight.height(block);
  for (int64_t start = 0; start < count; start += kTile) {
    const int64_t tile = std::min(kTile, count - start);
    variant().multiply(weight.format, weight.block(matrix, block), weight.block_scales(matrix, block), weight.inputs,
                       height, rows.data() + start, tile, products);
    for (int64_t r = 0; r < tile; ++r)
      std::memcpy(outs[start + r] + block * kBlock, products + r * kBlock, height * sizeof(float));
  }
}

// The blocks of a weight in pieces that a thread takes at once: enough bytes for the memory's read-ahead to get going.
struct Pieces {
  int64_t blocks, step, count;

  explicit Pieces(const Weight& weight)
      : blocks(weight.blocks),
        step(std::max<int64_t>(1, 64 * 1024 / std::max<int64_t>(1, weight.block_bytes()))),
        count((blocks + step - 1) / step) {}

  template <typename Visit>
  void each_block(int64_t piece, const Visit& visit) const {
    for (int64_t block = piece * step; block < std::min(blocks, (piece + 1) * step); ++block) visit(block);
  }
};

// Matrix product: x [rows, inputs] with one or more weights, each with its result [rows, outputs]

struct Product {
  Weight weight;
  Pieces pieces;
  std::vector<float*> outs;
};

Product read_product(Check& check, size_t index, const ffi::Buffer<ffi::F32>& x, const ffi::RemainingArgs& weights,
                     const ffi::RemainingRets& results) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  const std::string number = std::to_string(index);
  auto weight = weights.get<ffi::AnyBuffer>(2 * index), scale = weights.get<ffi::AnyBuffer>(2 * index + 1);
  auto result = results.get<ffi::BufferR2<ffi::F32>>(index);
  if (!weight.has_value() || !scale.has_value() || !result.has_value()) {
    check.that(false, "result " + number + " should be float32 [rows, outputs]");
    return {{}, Pieces(Weight{}), {}};
  }
  const auto shape = (*result)->dimensions();
  check.that(shape[0] == rows, "result " + number + " has shape " + shown(shape) + ", but x has " + std::to_string(rows) + " rows");
  const Weight read = read_weight(check, "weight " + number, *weight, *scale, false, inputs, shape[1]);
  Product product{read, Pieces(read), {}};
  for (int64_t row = 0; row < rows; ++row) product.outs.push_back((*result)->typed_data() + row * shape[1]);
  return product;
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights, ffi::RemainingRets results) {
  Check check;
  check.that(x.dimensions().size() == 2, "x has shape " + shown(x.dimensions()) + ", wanted is [rows, inputs]");
  check.aligned("x", x, alignof(float));
  check.that(weights.size() == 2 * results.size() && results.size() > 0, "every result needs a weight and its scale");
  if (check.failed()) return check.error();
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  std::vector<Product> products;
  bool quantised = false;
  int64_t pieces = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    products.push_back(read_product(check, i, x, weights, results));
    quantised |= products.back().weight.quantised();
    pieces += products.back().pieces.count;
  }
  if (check.failed()) return check.error();

  scratch.reserve(Activations::room(rows, inputs));
  const Activations activations(rows, inputs, x.typed_data(), quantised);
  std::vector<Row> own;
  for (int64_t row = 0; row < rows; ++row) own.push_back(activations.row(row));
  activations.quantise_all(pool);
  parallel_for(pool, pieces, [&](int64_t piece) {
    const Product* product = products.data();
    while (piece >= product->pieces.count) piece -= (product++)->pieces.count;
    product->pieces.each_block(
        piece, [&](int64_t block) { multiply_block(product->weight, 0, block, own, product->outs); });
  });
  return ffi::Error::Success();
}

// Mixture of experts: for every token the sum over its experts of share * down(silu(gate(x)) * up(x))

float silu(float v) { return v / (1.0f + std::exp(-v)); }

ffi::Error experts(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> shares,
                   ffi::AnyBuffer gate_up, ffi::AnyBuffer gate_up_scale, ffi::AnyBuffer down, ffi::AnyBuffer down_scale,
                   ffi::Result<ffi::Buffer<ffi::F32>> y, int64_t intermediate) {
  Check check;
  check.that(x.dimensions().size() == 2, "x has shape " + shown(x.dimensions()) + ", wanted is [tokens, hidden]");
  check.that(ids.dimensions().size() == 2, "ids has shape " + shown(ids.dimensions()) + ", wanted is [tokens, top_k]");
  check.that(intermediate > 0, "intermediate should be positive");
  if (check.failed()) return check.error();
  const int64_t tokens = x.dimensions()[0], hidden = x.dimensions()[1], top_k = ids.dimensions()[1];
  check.shape("ids", ids, {tokens, top_k});
  check.shape("shares", shares, {tokens, top_k});
  check.shape("y", *y, {tokens, hidden});
  const Weight widen = read_weight(check, "gate_up", gate_up, gate_up_scale, true, hidden, 2 * intermediate);
  const Weight narrow = read_weight(check, "down", down, down_scale, true, intermediate, hidden);
  check.that(widen.matrices == narrow.matrices, "gate_up and down have different numbers of experts");
  check.that(widen.quantised() == narrow.quantised(), "gate_up and down should both be quantised or both be float");
  if (check.failed()) return check.error();

  const int64_t pairs = tokens * top_k;  // pair = token * top_k + place among the token's experts
  std::vector<std::vector<int64_t>> chosen_by(widen.matrices);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int32_t expert = ids.typed_data()[pair];
    if (expert < 0 || expert >= widen.matrices)
      return ffi::Error::InvalidArgument("ids: token " + std::to_string(pair / top_k) + " wants expert " +
                                         std::to_string(expert) + " of " + std::to_string(widen.matrices));
    chosen_by[expert].push_back(pair);
  }
  std::vector<int64_t> used;
  for (int64_t expert = 0; expert < widen.matrices; ++expert)
    if (!chosen_by[expert].empty()) used.push_back(expert);

  scratch.reserve(Activations::room(tokens, hidden) + Activations::room(pairs, intermediate) +
                  Scratch::room(pairs * 2 * intermediate * sizeof(float)) +
                  Scratch::room(pairs * intermediate * sizeof(float)) + Scratch::room(pairs * hidden * sizeof(float)));
  float* wide = scratch.take<float>(pairs * 2 * intermediate);
  float* gated = scratch.take<float>(pairs * intermediate);
  float* outputs = scratch.take<float>(pairs * hidden);
  const Activations inputs(tokens, hidden, x.typed_data(), widen.quantised());
  const Activations middle(pairs, intermediate, gated, narrow.quantised());

  const auto multiply_used = [&](const Weight& weight, const auto& row_of, float* results) {
    const Pieces pieces(weight);
    parallel_for(pool, static_cast<int64_t>(used.size()) * pieces.count, [&](int64_t item) {
      const int64_t expert = used[item / pieces.count];
      std::vector<Row> own;
      std::vector<float*> outs;
      for (const int64_t pair : chosen_by[expert]) {
        own.push_back(row_of(pair));
        outs.push_back(results + pair * weight.outputs);
      }
      pieces.each_block(item % pieces.count,
                        [&](int64_t block) { multiply_block(weight, expert, block, own, outs); });
    });
  };
  inputs.quantise_all(pool);
  multiply_used(widen, [&](int64_t pair) { return inputs.row(pair / top_k); }, wide);
  parallel_for(pool, pairs, [&](int64_t pair) {
    const float* gate = wide + pair * 2 * intermediate;
    for (int64_t i = 0; i < intermediate; ++i)
      gated[pair * intermediate + i] = silu(gate[i]) * gate[intermediate + i];
  });
  middle.quantise_all(pool);
  multiply_used(narrow, [&](int64_t pair) { return middle.row(pair); }, outputs);
  for (int64_t token = 0; token < tokens; ++token) {
    float* sum = y->typed_data() + token * hidden;
    std::fill(sum, sum + hidden, 0.0f);
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair)
      for (int64_t i = 0; i < hidden; ++i) sum[i] += shares.typed_data()[pair] * outputs[pair * hidden + i];
  }
  return ffi::Error::Success();
}

// Attention of queries [batch, length, heads, head_dim] to the cache [batch, kv_heads, capacity, head_dim]: query i of a
// row sees the positions 0 .. first + i. A cache of int8 comes with scales [batch, kv_heads, capacity].

ffi::Error attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                     ffi::Buffer<ffi::S32> first, ffi::RemainingArgs scales, ffi::Result<ffi::Buffer<ffi::F32>> y,
                     float scale) {
  Check check;
  const auto type = keys.element_type();
  const bool narrow = type == ffi::S8;
  check.that(queries.dimensions().size() == 4,
             "queries has shape " + shown(queries.dimensions()) + ", wanted is [batch, length, heads, head_dim]");
  check.that(keys.dimensions().size() == 4,
             "keys has shape " + shown(keys.dimensions()) + ", wanted is [batch, kv_heads, capacity, head_dim]");
  check.that(narrow || type == ffi::F32 || type == ffi::BF16, "keys should be float32, bfloat16 or int8");
  check.that(values.element_type() == type, "values has another dtype than keys");
  check.that(scales.size() == (narrow ? 2u : 0u), "an int8 cache needs key_scales and value_scales, others take none");
  if (check.failed()) return check.error();
  const auto shape = queries.dimensions();
  const int64_t batch = shape[0], length = shape[1], heads = shape[2], head_dim = shape[3];
  const int64_t kv_heads = keys.dimensions()[1], capacity = keys.dimensions()[2];
  check.shape("keys", keys, {batch, kv_heads, capacity, head_dim});
  check.shape("values", values, {batch, kv_heads, capacity, head_dim});
  check.shape("first", first, {batch});
  check.shape("y", *y, {batch, length, heads * head_dim});
  check.that(kv_heads > 0 && heads % kv_heads == 0, "the number of heads should be a multiple of kv_heads");
  const float* key_scales = nullptr;
  const float* value_scales = nullptr;
  if (narrow && !check.failed()) {
    auto of_keys = scales.get<ffi::BufferR3<ffi::F32>>(0), of_values = scales.get<ffi::BufferR3<ffi::F32>>(1);
    check.that(of_keys.has_value() && of_values.has_value(), "key_scales and value_scales should be float32 with 3 axes");
    if (check.failed()) return check.error();
    check.shape("key_scales", of_keys.value(), {batch, kv_heads, capacity});
    check.shape("value_scales", of_values.value(), {batch, kv_heads, capacity});
    key_scales = of_keys.value().typed_data();
    value_scales = of_values.value().typed_data();
  }
  int64_t most = 0;
  for (int64_t row = 0; row < batch && !check.failed(); ++row) {
    const int64_t begun = first.typed_data()[row];
    check.that(begun >= 0 && begun + length <= capacity,
               "first: row " + std::to_string(row) + " holds " + std::to_string(begun) + " tokens and gets " +
                   std::to_string(length) + ", capacity is " + std::to_string(capacity));
    most = std::max(most, begun + length);
  }
  if (check.failed()) return check.error();
  if (batch * length == 0) return ffi::Error::Success();

  const int64_t count = heads / kv_heads, spans = (most + kSpan - 1) / kSpan, places = batch * length * kv_heads;
  const int64_t bytes = narrow ? 1 : type == ffi::F32 ? 4 : 2;
  const CacheType cache_type =
      narrow ? CacheType::kInt8 : type == ffi::F32 ? CacheType::kFloat32 : CacheType::kBFloat16;
  scratch.reserve(Scratch::room(places * count * head_dim * sizeof(float)) +
                  2 * Scratch::room(places * spans * count * sizeof(float)) +
                  Scratch::room(places * spans * count * head_dim * sizeof(float)));
  float* scaled = scratch.take<float>(places * count * head_dim);
  float* largest = scratch.take<float>(places * spans * count);
  float* totals = scratch.take<float>(places * spans * count);
  float* mixed = scratch.take<float>(places * spans * count * head_dim);
  // Heads of one key/value head are neighbours, so a place's queries and results are one stretch of memory.
  for (int64_t i = 0; i < places * count * head_dim; ++i) scaled[i] = queries.typed_data()[i] * scale;

  const auto visible = [&](int64_t place) {
    const int64_t row = place / (length * kv_heads), query = place / kv_heads % length;
    return first.typed_data()[row] + query + 1;
  };
  parallel_for(pool, places * spans, [&](int64_t item) {
    const int64_t place = item / spans, start = item % spans * kSpan, end = std::min(start + kSpan, visible(place));
    if (start >= end) return;
    const int64_t line = (place / (length * kv_heads) * kv_heads + place % kv_heads) * capacity + start;
    variant().attend(cache_type,
                     {scaled + place * count * head_dim, count, head_dim,
                      static_cast<const char*>(keys.untyped_data()) + line * head_dim * bytes,
                      static_cast<const char*>(values.untyped_data()) + line * head_dim * bytes,
                      narrow ? key_scales + line : nullptr, narrow ? value_scales + line : nullptr, end - start,
                      largest + item * count, totals + item * count, mixed + item * count * head_dim});
  });
  for (int64_t place = 0; place < places; ++place) {
    const int64_t own = (visible(place) + kSpan - 1) / kSpan;
    for (int64_t query = 0; query < count; ++query) {
      float* out = y->typed_data() + (place * count + query) * head_dim;
      const auto at = [&](int64_t span) { return (place * spans + span) * count + query; };
      float top = largest[at(0)], total = 0.0f;
      for (int64_t span = 1; span < own; ++span) top = std::max(top, largest[at(span)]);
      std::fill(out, out + head_dim, 0.0f);
      for (int64_t span = 0; span < own; ++span) {
        const float weight = std::exp(largest[at(span)] - top);
        const float* from = mixed + at(span) * head_dim;
        total += weight * totals[at(span)];
        for (int64_t i = 0; i < head_dim; ++i) out[i] += weight * from[i];
      }
      for (int64_t i = 0; i < head_dim; ++i) out[i] /= total;
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace kestrel

#define KESTREL_EXPORT extern "C" __attribute__((visibility("default")))

// The version of this interface; models/kernels/loader.py refuses another.
KESTREL_EXPORT int kestrel_version() { return 1; }

// The names of the variants this CPU can run, best first, separated by spaces.
KESTREL_EXPORT const char* kestrel_variants() {
  static const std::string names = [] {
    std::string text;
    for (const auto* variant : kestrel::runnable_variants()) text += (text.empty() ? "" : " ") + std::string(variant->name);
    return text;
  }();
  return names.c_str();
}

// Uses the named variant from now on; 0 if this CPU cannot run it.
KESTREL_EXPORT int kestrel_choose(const char* name) {
  for (const auto* variant : kestrel::runnable_variants())
    if (std::strcmp(variant->name, name) == 0) {
      kestrel::chosen = variant;
      return 1;
    }
  return 0;
}

#define KESTREL_HANDLER(name, function, binding) \
  KESTREL_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { \
    static auto* handler = (binding).To(function).release(); \
    return handler->Call(frame); \
  }

KESTREL_HANDLER(kestrel_matmul, kestrel::matmul,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().RemainingArgs().RemainingRets())

KESTREL_HANDLER(kestrel_experts, kestrel::experts,
                ffi::Ffi::Bind()
                    .Ctx<ffi::ThreadPool>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::Buffer<ffi::S32>>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>()
                    .Ret<ffi::Buffer<ffi::F32>>()
                    .Attr<int64_t>("intermediate"))

KESTREL_HANDLER(kestrel_attention, kestrel::attention,
                ffi::Ffi::Bind()
                    .Ctx<ffi::ThreadPool>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::Buffer<ffi::S32>>()
                    .RemainingArgs()
                    .Ret<ffi::Buffer<ffi::F32>>()
                    .Attr<float>("scale"))
