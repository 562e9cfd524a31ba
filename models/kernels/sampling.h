// The choice of the next tokens: penalties, bias and constraint, then the first largest logit or a seeded draw among the
// tokens that top-k, min-p and top-p leave. A row is chosen by one thread, from nothing but its own numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "arguments.h"
#include "candidates.h"

namespace kestrel {

// What the sequences of all slots choose by; the names are those of models/sampling.py.
struct SamplingState {
  const float* temperature;
  const float* top_p;
  const int32_t* top_k;
  const float* min_p;
  const float *repetition_penalty, *presence_penalty, *frequency_penalty;
  const int32_t* top_logprobs;
  const bool* adjusted;
  const float* bias;  // [slots, vocab], as the next two
  const bool* in_prompt;
  int32_t* counts;
  const uint32_t* key;  // [slots, 2]
  int32_t* step;
};

// What is told of every row, [batch] or [batch, top].
struct Choices {
  int32_t* token;
  float *logprob, *margin;
  int32_t* top_tokens;
  float* top_logprobs;
  int64_t top;
};

// The best tokens, in any order, `count` of them or all that are not forbidden. The `count` best of the vocabulary's stretches
// have a token each that is as good as the worst of them, so no token that is worse needs to be looked at.
inline std::vector<Candidate> best_tokens(const float* logits, int64_t vocab, int64_t count) {
  const int64_t stretches = (vocab + kStretch - 1) / kStretch;
  std::vector<float> most(stretches);
  variant().stretch_largest(logits, vocab, most.data());
  float least = kForbidden;
  if (count < stretches) {
    std::vector<float> ordered = most;
    std::nth_element(ordered.begin(), ordered.begin() + (count - 1), ordered.end(), std::greater<float>());
    least = ordered[count - 1];
  }
  std::vector<Candidate> found;
  for (int64_t stretch = 0; stretch < stretches; ++stretch) {
    if (most[stretch] < least) continue;
    for (int64_t token = stretch * kStretch; token < std::min(vocab, (stretch + 1) * kStretch); ++token)
      if (logits[token] >= least && logits[token] > kForbidden)
        found.push_back({logits[token], static_cast<int32_t>(token)});
  }
  if (count < static_cast<int64_t>(found.size())) {
    std::nth_element(found.begin(), found.begin() + count, found.end(), better);
    found.resize(count);
  }
  return found;
}

// A draw from logits, of which the largest is known. Without a limit `top_k` is the vocabulary's size, `min_p` is 0 and
// `top_p` is 1.
struct Draw {
  const float* logits;
  int64_t vocab;
  Largest largest;
  float temperature;
  int64_t top_k;
  float min_p, top_p;
  Noise noise;

  Scale scale() const { return {largest.value, temperature}; }
  bool from_all() const { return top_k == vocab && min_p == 0.0f; }
};

// How many of the best tokens, which have these weights, the filters leave; -1 if that takes more of them to tell. `last`:
// there are no others; else `total` is the weight of all that top-p takes its share of, or negative if that is not known.
inline int64_t left_by(const Draw& draw, const std::vector<float>& weights, bool last, double total) {
  const auto size = static_cast<int64_t>(weights.size());
  int64_t count = 0;
  double sum = 0.0;
  for (; count < size && weights[count] >= draw.min_p; ++count) sum += weights[count];
  const bool complete = last || count < size;
  if (draw.top_p == 1.0f || (!complete && total < 0.0)) return complete ? count : -1;
  const double wanted = draw.top_p * (complete ? sum : total);
  int64_t taken = 0;
  double before = 0.0;
  for (; taken < count && before < wanted; ++taken) before += weights[taken];
  return complete || before >= wanted ? taken : -1;
}

inline std::vector<float> values_of(const std::vector<Candidate>& tokens) {
  std::vector<float> values;
  for (const Candidate& token : tokens) values.push_back(token.value);
  return values;
}

// Finds what the filters leave if it is among the best few tokens; if not, gives false.
inline bool left_of_few(const Draw& draw, std::vector<Candidate>& left) {
  constexpr int64_t kFew = 256;
  const int64_t count = std::min(draw.top_k, kFew);
  left = best_tokens(draw.logits, draw.vocab, count);
  std::sort(left.begin(), left.end(), better);
  const auto size = static_cast<int64_t>(left.size());
  const std::vector<float> values = values_of(left);
  std::vector<float> weights(size);
  variant().weigh(values.data(), size, draw.scale(), weights.data());
  const double total = draw.from_all() ? variant().weigh(draw.logits, draw.vocab, draw.scale(), nullptr) : -1.0;
  const int64_t found = left_by(draw, weights, size < count || count == draw.top_k, total);
  if (found >= 0) left.resize(found);
  return found >= 0;
}

// Leaves of some tokens the smallest set of best ones that holds a share of their weight, which `weights` has by token.
// Tokens are put into buckets by their logit, so that only those in the bucket where the share is reached need an order.
inline void keep_share(std::vector<Candidate>& tokens, const float* weights, const Scale& scale, float share) {
  constexpr int64_t kBuckets = 4096;
  const float step = kBuckets / 88.0f / scale.temperature;  // e^-88 is nothing beside 1
  const auto bucket_of = [&](const Candidate& token) {
    const float place = (scale.largest - token.value) * step;
    return place < kBuckets - 1 ? static_cast<int64_t>(place) : kBuckets - 1;
  };
  std::vector<double> masses(kBuckets);
  for (const Candidate& token : tokens) masses[bucket_of(token)] += weights[token.id];
  double wanted = 0.0;
  for (const double mass : masses) wanted += mass;
  wanted *= share;
  int64_t last = 0;
  for (; last < kBuckets - 1 && masses[last] < wanted; ++last) wanted -= masses[last];
  const auto middle =
      std::partition(tokens.begin(), tokens.end(), [&](const Candidate& token) { return bucket_of(token) < last; });
  auto end = std::partition(middle, tokens.end(), [&](const Candidate& token) { return bucket_of(token) == last; });
  std::sort(middle, end, better);
  double before = 0.0;
  auto taken = middle;
  for (; taken < end && before < wanted; ++taken) before += weights[taken->id];
  tokens.erase(taken, tokens.end());
}

// Finds what the filters leave of the vocabulary.
inline std::vector<Candidate> left_of_all(const Draw& draw) {
  std::vector<float> weights(draw.vocab);
  variant().weigh(draw.logits, draw.vocab, draw.scale(), weights.data());
  std::vector<Candidate> left = best_tokens(draw.logits, draw.vocab, draw.top_k);
  const auto too_light = [&](const Candidate& token) { return !(weights[token.id] >= draw.min_p); };
  left.erase(std::remove_if(left.begin(), left.end(), too_light), left.end());
  if (draw.top_p < 1.0f) keep_share(left, weights.data(), draw.scale(), draw.top_p);
  return left;
}

inline int32_t drawn_token(const Draw& draw) {
  if (draw.from_all() && draw.top_p == 1.0f)
    return variant().draw(draw.logits, nullptr, draw.vocab, draw.scale(), draw.noise);
  std::vector<Candidate> left;
  if (!left_of_few(draw, left)) left = left_of_all(draw);
  if (left.empty()) return static_cast<int32_t>(draw.largest.first);
  const std::vector<float> values = values_of(left);
  std::vector<int32_t> tokens;
  for (const Candidate& token : left) tokens.push_back(token.id);
  return variant().draw(values.data(), tokens.data(), static_cast<int64_t>(left.size()), draw.scale(), draw.noise);
}

struct Sampling {
  const float* logits;      // [batch, vocab]
  const int32_t* slots;     // [batch]
  const uint32_t* allowed;  // [batch, words]
  int64_t vocab, words;
  SamplingState state;
  Choices choices;
};

// The logits that a row chooses by: those of the model, or what penalties, bias and constraint make of them; those are in
// this thread's scratch memory until it chooses for the next row.
inline const float* adjusted_logits(const Sampling& call, int64_t row, int64_t slot) {
  const SamplingState& state = call.state;
  const float* own = call.logits + row * call.vocab;
  const uint32_t* allowed = call.allowed + row * call.words;
  const bool constrained = std::any_of(allowed, allowed + call.words, [](uint32_t word) { return word != 0xffffffffu; });
  if (!state.adjusted[slot] && !constrained) return own;
  scratch.reserve(Scratch::room(call.vocab * sizeof(float)));
  float* adjusted = scratch.take<float>(call.vocab);
  if (state.adjusted[slot]) {
    const int64_t first = slot * call.vocab;
    variant().penalise(own, call.vocab,
                       {state.repetition_penalty[slot], state.presence_penalty[slot], state.frequency_penalty[slot],
                        state.bias + first, state.in_prompt + first, state.counts + first},
                       adjusted);
  } else {
    std::copy(own, own + call.vocab, adjusted);
  }
  if (constrained) variant().forbid(allowed, call.vocab, adjusted);
  return adjusted;
}

inline int32_t chosen_token(const Sampling& call, int64_t row, int64_t slot, const Largest& own) {
  const SamplingState& state = call.state;
  const float *logits = call.logits + row * call.vocab, *adjusted = adjusted_logits(call, row, slot);
  const Largest largest = adjusted == logits ? own : variant().find_largest(adjusted, call.vocab);
  if (!(state.temperature[slot] > 0.0f)) return static_cast<int32_t>(largest.first);
  Draw draw{};
  draw.logits = adjusted;
  draw.vocab = call.vocab;
  draw.largest = largest;
  draw.temperature = state.temperature[slot];
  draw.top_k = state.top_k[slot] > 0 ? std::min<int64_t>(state.top_k[slot], call.vocab) : call.vocab;
  draw.min_p = state.min_p[slot];
  draw.top_p = state.top_p[slot];
  draw.noise = {{state.key[2 * slot], state.key[2 * slot + 1]}, static_cast<uint32_t>(state.step[slot])};
  return drawn_token(draw);
}

// Chooses a row's token, and describes it by the model's own logits.
inline void choose(const Sampling& call, int64_t row) {
  const int64_t slot = call.slots[row];
  const Choices& choices = call.choices;
  int32_t* top_tokens = choices.top_tokens + row * choices.top;
  float* top_logprobs = choices.top_logprobs + row * choices.top;
  std::fill(top_tokens, top_tokens + choices.top, 0);
  std::fill(top_logprobs, top_logprobs + choices.top, 0.0f);
  if (slot < 0) {
    choices.token[row] = 0;
    choices.logprob[row] = choices.margin[row] = 0.0f;
    return;
  }
  const float* logits = call.logits + row * call.vocab;
  const Largest own = variant().find_largest(logits, call.vocab);
  const auto spread = static_cast<float>(std::log(variant().weigh(logits, call.vocab, {own.value, 1.0f}, nullptr)));
  const int32_t token = chosen_token(call, row, slot, own);
  choices.token[row] = token;
  choices.logprob[row] = logits[token] - own.value - spread;
  choices.margin[row] = own.value - own.second;
  if (call.state.top_logprobs[slot] == 0) return;
  std::vector<Candidate> best = best_tokens(logits, call.vocab, choices.top);
  std::sort(best.begin(), best.end(), better);
  std::fill(top_logprobs, top_logprobs + choices.top, kForbidden);  // of tokens that there are too few of
  for (size_t i = 0; i < best.size(); ++i) {
    top_tokens[i] = best[i].id;
    top_logprobs[i] = best[i].value - own.value - spread;
  }
}

// Reads the call's arrays one after the other.
template <typename Arrays>
class Reader {
 public:
  Reader(Check& check, const Arrays& arrays) : check_(check), arrays_(arrays) {}

  template <typename T>
  T* next(const char* name, std::vector<int64_t> shape) {
    if (check_.failed()) return nullptr;
    auto array = arrays_.template get<ffi::AnyBuffer>(index_++);
    check_.that(array.has_value(), std::string(name) + " is missing");
    if (check_.failed()) return nullptr;
    const ffi::AnyBuffer& buffer = buffer_of(*array);
    check_.shape(name, buffer, shape);
    return check_.numbers<T>(name, buffer);
  }

 private:
  static const ffi::AnyBuffer& buffer_of(const ffi::AnyBuffer& argument) { return argument; }
  static const ffi::AnyBuffer& buffer_of(ffi::Result<ffi::AnyBuffer>& result) { return *result; }

  Check& check_;
  const Arrays& arrays_;
  size_t index_ = 0;
};

inline SamplingState read_state(Reader<ffi::RemainingArgs>& read, int64_t slots, int64_t vocab) {
  SamplingState state{};
  state.temperature = read.next<float>("temperature", {slots});
  state.top_p = read.next<float>("top_p", {slots});
  state.top_k = read.next<int32_t>("top_k", {slots});
  state.min_p = read.next<float>("min_p", {slots});
  state.repetition_penalty = read.next<float>("repetition_penalty", {slots});
  state.presence_penalty = read.next<float>("presence_penalty", {slots});
  state.frequency_penalty = read.next<float>("frequency_penalty", {slots});
  state.top_logprobs = read.next<int32_t>("top_logprobs", {slots});
  state.adjusted = read.next<bool>("adjusted", {slots});
  state.bias = read.next<float>("bias", {slots, vocab});
  state.in_prompt = read.next<bool>("in_prompt", {slots, vocab});
  state.counts = read.next<int32_t>("counts", {slots, vocab});
  state.key = read.next<uint32_t>("key", {slots, 2});
  state.step = read.next<int32_t>("step", {slots});
  return state;
}

inline Choices read_choices(Reader<ffi::RemainingRets>& read, int64_t batch, int64_t top) {
  Choices choices{};
  choices.top = top;
  choices.token = read.next<int32_t>("token", {batch});
  choices.logprob = read.next<float>("logprob", {batch});
  choices.margin = read.next<float>("margin", {batch});
  choices.top_tokens = read.next<int32_t>("top_tokens", {batch, top});
  choices.top_logprobs = read.next<float>("top_logprobs", {batch, top});
  return choices;
}

// logits [batch, vocab], the rows' slots [batch] (negative: none), constraints [batch, words], and the state of all slots,
// in the order of its fields; then what is told of the rows, and `counts` and `step`, which are changed in place.
inline ffi::Error sample(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::RemainingRets results, int64_t top) {
  Check check;
  const auto logits = given.get<ffi::AnyBuffer>(0), temperature = given.get<ffi::AnyBuffer>(3);
  check.that(logits.has_value() && logits->dimensions().size() == 2, "logits should be [batch, vocab]");
  check.that(temperature.has_value() && temperature->dimensions().size() == 1, "temperature should be [slots]");
  if (check.failed()) return check.error();
  const int64_t batch = logits->dimensions()[0], vocab = logits->dimensions()[1], slots = temperature->dimensions()[0];
  check.that(0 < top && top <= vocab, "top is " + std::to_string(top) + ", wanted is 1 to vocab, " + std::to_string(vocab));
  Reader<ffi::RemainingArgs> arguments(check, given);
  Sampling call{};
  call.vocab = vocab;
  call.words = (vocab + 31) / 32;
  call.logits = arguments.next<float>("logits", {batch, vocab});
  call.slots = arguments.next<int32_t>("slots", {batch});
  call.allowed = arguments.next<uint32_t>("allowed", {batch, call.words});
  call.state = read_state(arguments, slots, vocab);
  Reader<ffi::RemainingRets> found(check, results);
  call.choices = read_choices(found, batch, top);
  check.that(found.next<int32_t>("counts", {slots, vocab}) == call.state.counts, "counts should be changed in place");
  check.that(found.next<int32_t>("step", {slots}) == call.state.step, "step should be changed in place");
  check.slots(call.slots, batch, slots);
  if (check.failed()) return check.error();
  parallel_for(pool, batch, [&](int64_t row) { choose(call, row); });
  // Rows may share a slot, so what they add is added when all have chosen.
  for (int64_t row = 0; row < batch; ++row) {
    if (call.slots[row] < 0) continue;
    ++call.state.counts[call.slots[row] * vocab + call.choices.token[row]];
    ++call.state.step[call.slots[row]];
  }
  return ffi::Error::Success();
}

}  // namespace kestrel
