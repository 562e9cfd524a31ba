// Numbers that compete for being chosen, and who goes first.
#pragma once

#include <cstdint>

namespace kestrel {

struct Candidate {
  float value;  // never NaN: `better` would be no order
  int32_t id;
};

inline bool better(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

}  // namespace kestrel
