// Products of activation rows with stored weights: plain ones, the gated MLP, and mixtures of experts.
#pragma once

#include <utility>

#include "arguments.h"

namespace kestrel {

// One block of a weight times rows, written to outs[row][8 * block ..].
inline void multiply_block(const Weight& weight, int64_t matrix, int64_t block, const std::vector<Row>& rows,
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

// The blocks of a weight in the pieces that threads take.
struct Pieces {
  int64_t blocks, step, count;

  explicit Pieces(const Weight& weight)
      : blocks(weight.blocks),
        step(std::max<int64_t>(1, 32 * 1024 / std::max<int64_t>(1, weight.block_bytes()))),
        count((blocks + step - 1) / step) {}

  // The first of a piece's outputs, and the one behind its last.
  std::pair<int64_t, int64_t> outputs(int64_t piece, int64_t all) const {
    return {piece * step * kBlock, std::min(all, (piece + 1) * step * kBlock)};
  }

  template <typename Visit>
  void each_block(int64_t piece, const Visit& visit) const {
    for (int64_t block = piece * step; block < std::min(blocks, (piece + 1) * step); ++block) visit(block);
  }
};

// Products: x [rows, inputs] with one or more weights, each with its result [rows, outputs]

struct Product {
  Weight weight;
  Pieces pieces;
  std::vector<float*> outs;
};

inline std::vector<float*> row_starts(float* first, int64_t rows, int64_t width) {
  std::vector<float*> starts;
  for (int64_t row = 0; row < rows; ++row) starts.push_back(first + row * width);
  return starts;
}

inline const float* read_rows(Check& check, const ffi::AnyBuffer& x) {
  check.that(x.dimensions().size() == 2, "x has shape " + shown(x.dimensions()) + ", wanted is [rows, inputs]");
  return check.floats("x", x);
}

inline Product read_product(Check& check, size_t index, const ffi::AnyBuffer& x, const ffi::RemainingArgs& weights,
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
  check.that(shape[0] == rows,
             "result " + number + " has shape " + shown(shape) + ", but x has " + std::to_string(rows) + " rows");
  const Weight read = read_weight(check, "weight " + number, *weight, *scale, false, inputs, shape[1]);
  return {read, Pieces(read), row_starts((*result)->typed_data(), rows, shape[1])};
}

inline ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm, ffi::RemainingArgs weights,
                         ffi::RemainingRets results, float eps) {
  Check check;
  const float* floats = read_rows(check, x);
  check.that(weights.size() == 2 * results.size() && results.size() > 0, "every result needs a weight and its scale");
  if (check.failed()) return check.error();
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  const Norm own_norm = read_norm(check, "norm", norm, eps, inputs);
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
  const Activations activations(rows, inputs, floats, own_norm, quantised);
  activations.prepare_all(pool);
  const std::vector<Row> own = activations.all_rows();
  parallel_for(pool, pieces, [&](int64_t piece) {
    const Product* product = products.data();
    while (piece >= product->pieces.count) piece -= (product++)->pieces.count;
    product->pieces.each_block(
        piece, [&](int64_t block) { multiply_block(product->weight, 0, block, own, product->outs); });
  });
  return ffi::Error::Success();
}

// Gated MLP: y = down(silu(gate(x)) * up(x)), x normed first

inline ffi::Error gated_mlp(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm, ffi::AnyBuffer gate,
                            ffi::AnyBuffer gate_scale, ffi::AnyBuffer up, ffi::AnyBuffer up_scale,
                            ffi::AnyBuffer down, ffi::AnyBuffer down_scale, ffi::Result<ffi::Buffer<ffi::F32>> y,
                            int64_t intermediate, float eps) {
  Check check;
  const float* floats = read_rows(check, x);
  check.that(intermediate > 0, "intermediate should be positive");
  if (check.failed()) return check.error();
  const int64_t rows = x.dimensions()[0], hidden = x.dimensions()[1];
  check.shape("y", *y, {rows, hidden});
  const Norm own_norm = read_norm(check, "norm", norm, eps, hidden);
  const Weight gating = read_weight(check, "gate", gate, gate_scale, false, hidden, intermediate);
  const Weight widen = read_weight(check, "up", up, up_scale, false, hidden, intermediate);
  const Weight narrow = read_weight(check, "down", down, down_scale, false, intermediate, hidden);
  if (check.failed()) return check.error();

  scratch.reserve(Activations::room(rows, hidden) + Activations::room(rows, intermediate) +
                  2 * Scratch::room(rows * intermediate * sizeof(float)));
  const Activations activations(rows, hidden, floats, own_norm, gating.quantised() || widen.quantised());
  const auto gates = row_starts(scratch.take<float>(rows * intermediate), rows, intermediate);
  float* wide = scratch.take<float>(rows * intermediate);
  const auto wide_rows = row_starts(wide, rows, intermediate);
  const Activations middle(rows, intermediate, wide, Norm{}, narrow.quantised());

  activations.prepare_all(pool);
  const std::vector<Row> own = activations.all_rows();
  const Pieces pieces(widen);
  parallel_for(pool, pieces.count, [&](int64_t piece) {
    // One matrix after the other: memory is read faster in long stretches.
    pieces.each_block(piece, [&](int64_t block) { multiply_block(gating, 0, block, own, gates); });
    pieces.each_block(piece, [&](int64_t block) { multiply_block(widen, 0, block, own, wide_rows); });
    const auto [start, end] = pieces.outputs(piece, intermediate);
    for (int64_t row = 0; row < rows; ++row) variant().gate(gates[row] + start, wide_rows[row] + start, end - start);
  });
  middle.prepare_all(pool);
  const std::vector<Row> gated = middle.all_rows();
  const auto outs = row_starts(y->typed_data(), rows, hidden);
  const Pieces narrowing(narrow);
  parallel_for(pool, narrowing.count, [&](int64_t piece) {
    narrowing.each_block(piece, [&](int64_t block) { multiply_block(narrow, 0, block, gated, outs); });
  });
  return ffi::Error::Success();
}

// Mixture of experts: for every token the sum over its experts of share * down(silu(gate(x)) * up(x)), x normed first

inline ffi::Error experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm, ffi::AnyBuffer ids,
                          ffi::AnyBuffer shares, ffi::AnyBuffer gate_up, ffi::AnyBuffer gate_up_scale,
                          ffi::AnyBuffer down, ffi::AnyBuffer down_scale, ffi::Result<ffi::Buffer<ffi::F32>> y,
                          int64_t intermediate, float eps) {
  Check check;
  const float* floats = read_rows(check, x);
  const int32_t* wanted = check.integers("ids", ids);
  const float* share = check.floats("shares", shares);
  check.that(ids.dimensions().size() == 2, "ids has shape " + shown(ids.dimensions()) + ", wanted is [tokens, top_k]");
  check.that(intermediate > 0, "intermediate should be positive");
  if (check.failed()) return check.error();
  const int64_t tokens = x.dimensions()[0], hidden = x.dimensions()[1], top_k = ids.dimensions()[1];
  check.shape("ids", ids, {tokens, top_k});
  check.shape("shares", shares, {tokens, top_k});
  check.shape("y", *y, {tokens, hidden});
  const Norm own_norm = read_norm(check, "norm", norm, eps, hidden);
  const Weight widen = read_weight(check, "gate_up", gate_up, gate_up_scale, true, hidden, 2 * intermediate);
  const Weight narrow = read_weight(check, "down", down, down_scale, true, intermediate, hidden);
  check.that(widen.matrices == narrow.matrices, "gate_up and down have different numbers of experts");
  check.that(widen.quantised() == narrow.quantised(), "gate_up and down should both be quantised or both be float");
  if (check.failed()) return check.error();

  const int64_t pairs = tokens * top_k;  // pair = token * top_k + place among the token's experts
  std::vector<std::vector<int64_t>> chosen_by(widen.matrices);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int32_t expert = wanted[pair];
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
  const Activations inputs(tokens, hidden, floats, own_norm, widen.quantised());
  const Activations middle(pairs, intermediate, gated, Norm{}, narrow.quantised());

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
  inputs.prepare_all(pool);
  multiply_used(widen, [&](int64_t pair) { return inputs.row(pair / top_k); }, wide);
  parallel_for(pool, pairs, [&](int64_t pair) {
    const float* gate = wide + pair * 2 * intermediate;
    float* own = gated + pair * intermediate;
    std::copy(gate + intermediate, gate + 2 * intermediate, own);
    variant().gate(gate, own, intermediate);
    middle.prepare(pair);
  });
  multiply_used(narrow, [&](int64_t pair) { return middle.row(pair); }, outputs);
  parallel_for(pool, tokens, [&](int64_t token) {
    float* sum = y->typed_data() + token * hidden;
    std::fill(sum, sum + hidden, 0.0f);
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair)
      for (int64_t i = 0; i < hidden; ++i) sum[i] += share[pair] * outputs[pair * hidden + i];
  });
  return ffi::Error::Success();
}

}  // namespace kestrel
