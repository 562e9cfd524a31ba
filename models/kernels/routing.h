// The choice of a token's experts from the router's logits.
#pragma once

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "candidates.h"

namespace kestrel {

// The likeliest experts of one token and their shares of it: probabilities over all experts, or, normalised, over the
// chosen ones.
inline void choose_for_token(const float* logits, int64_t experts, int64_t top_k, bool normalise, float* shares,
                             int32_t* ids) {
  std::vector<float> weights(experts);
  const Scale scale = {variant().find_largest(logits, experts).value, 1.0f};
  const auto total = static_cast<float>(variant().weigh(logits, experts, scale, weights.data()));
  std::vector<Candidate> order(experts);
  for (int64_t i = 0; i < experts; ++i) {
    const float probability = weights[i] / total;
    order[i] = {probability >= 0.0f ? probability : -1.0f, static_cast<int32_t>(i)};  // what is not a number comes last
  }
  std::partial_sort(order.begin(), order.begin() + top_k, order.end(), better);
  float chosen = 0.0f;
  for (int64_t i = 0; i < top_k; ++i) {
    ids[i] = order[i].id;
    shares[i] = weights[order[i].id] / total;
    chosen += shares[i];
  }
  for (int64_t i = 0; normalise && i < top_k; ++i) shares[i] /= chosen;
}

// logits [tokens, experts]; shares [tokens, top_k] and ids [tokens, top_k], the best first, ties by lower id.
inline ffi::Error choose_experts(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::Result<ffi::AnyBuffer> shares,
                                 ffi::Result<ffi::AnyBuffer> ids, bool normalise) {
  Check check;
  check.that(logits.dimensions().size() == 2,
             "logits has shape " + shown(logits.dimensions()) + ", wanted is [tokens, experts]");
  check.that(shares->dimensions().size() == 2, "shares should be [tokens, top_k]");
  if (check.failed()) return check.error();
  const int64_t tokens = logits.dimensions()[0], experts = logits.dimensions()[1], top_k = shares->dimensions()[1];
  check.that(0 < top_k && top_k <= experts,
             "top_k is " + std::to_string(top_k) + ", wanted is 1 to " + std::to_string(experts));
  check.shape("shares", *shares, {tokens, top_k});
  check.shape("ids", *ids, {tokens, top_k});
  const float* given = check.floats("logits", logits);
  float* share = check.numbers<float>("shares", *shares);
  int32_t* chosen = check.numbers<int32_t>("ids", *ids);
  if (check.failed()) return check.error();
  constexpr int64_t kTokensAtOnce = 16;
  parallel_for(pool, (tokens + kTokensAtOnce - 1) / kTokensAtOnce, [&](int64_t piece) {
    for (int64_t i = piece * kTokensAtOnce; i < std::min(tokens, (piece + 1) * kTokensAtOnce); ++i)
      choose_for_token(given + i * experts, experts, top_k, normalise, share + i * top_k, chosen + i * top_k);
  });
  return ffi::Error::Success();
}

}  // namespace kestrel
