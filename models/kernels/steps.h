// Rounding numbers to whole multiples of a step, in the same arithmetic for every instruction set.
#pragma once

#include "lanes.h"

namespace {

// Numbers in steps of `size`; if one of them is not finite, `size` is NaN. Where the largest number is so small that the
// number of steps in 1 would near float32's largest, and where there is none, both are 0, and every number counts as 0.
struct Steps {
  float size;
  float per_one;
};

// Such that the largest number is `limit` steps.
inline Steps steps_of(const float* from, int64_t count, float limit) {
  Lanes most = all(0.0f), finite = all(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = some<Lanes>(from, i, count);
    most = larger(most, larger(v, -v));
    finite += v * all(0.0f);  // not a number if v is infinite or not a number
  }
  const float amount = largest(most), per_one = limit / amount, check = sum(finite);
  if (check != 0.0f) return {check, 0.0f};
  return per_one < 1.058e38f ? Steps{amount / limit, per_one} : Steps{0.0f, 0.0f};
}

// How many steps each number is, rounded, ties to even.
inline IntLanes counted(Lanes numbers, const Steps& steps) {
  return __builtin_convertvector(steps.per_one == 0.0f ? all(0.0f) : rounded(numbers * all(steps.per_one)), IntLanes);
}

}  // namespace
