// What the custom calls are given: checks of every argument, weights, activation rows, and memory for intermediate values.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "parallel.h"
#include "variant.h"
#include "xla/ffi/api/ffi.h"

namespace kestrel {

namespace ffi = xla::ffi;

inline std::string shown(ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "[";
  for (size_t i = 0; i < dimensions.size(); ++i) text += (i ? ", " : "") + std::to_string(dimensions[i]);
  return text + "]";
}

// What XLA and JAX call a type of numbers.
template <typename T>
struct Type;
template <>
struct Type<float> {
  static constexpr ffi::DataType code = ffi::F32;
  static constexpr const char* name = "float32";
};
template <>
struct Type<int32_t> {
  static constexpr ffi::DataType code = ffi::S32;
  static constexpr const char* name = "int32";
};
template <>
struct Type<uint32_t> {
  static constexpr ffi::DataType code = ffi::U32;
  static constexpr const char* name = "uint32";
};
template <>
struct Type<bool> {
  static constexpr ffi::DataType code = ffi::PRED;
  static constexpr const char* name = "bool";
};

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

  // The numbers of an argument; a fault if they are of another type, or not where such numbers can be read.
  template <typename T>
  T* numbers(const char* name, const ffi::AnyBuffer& buffer) {
    that(buffer.element_type() == Type<T>::code, std::string(name) + " should be " + Type<T>::name);
    aligned(name, buffer, alignof(T));
    return static_cast<T*>(buffer.untyped_data());
  }

  const float* floats(const char* name, const ffi::AnyBuffer& buffer) { return numbers<float>(name, buffer); }

  const int32_t* integers(const char* name, const ffi::AnyBuffer& buffer) { return numbers<int32_t>(name, buffer); }

  // The slots of rows; a negative one stands for none. This is asked in every call, so the words are made on a fault only.
  void slots(const int32_t* slots, int64_t rows, int64_t count) {
    for (int64_t row = 0; row < rows && !failed(); ++row)
      if (slots[row] >= count)
        fault = "slots: row " + std::to_string(row) + " wants slot " + std::to_string(slots[row]) + " of " +
                std::to_string(count);
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
inline Weight read_weight(Check& check, const std::string& name, const ffi::AnyBuffer& weight, const ffi::AnyBuffer& scale,
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

inline thread_local Scratch scratch;

// What is done to an activation row before it is multiplied: an RMS norm, unless `weight` is null.
struct Norm {
  const float* weight = nullptr;
  float eps = 0.0f;
};

// Checks the weight of a norm, which is empty where there is none.
inline Norm read_norm(Check& check, const char* name, const ffi::AnyBuffer& weight, float eps, int64_t size) {
  if (weight.element_count() == 0) return {};
  check.shape(name, weight, {size});
  return {check.floats(name, weight), eps};
}

// Activation rows: normed, and quantised if a quantised weight will read them. A row must be prepared before it is used.
class Activations {
 public:
  static size_t room(int64_t rows, int64_t inputs) {
    const int64_t groups = (inputs + kGroup - 1) / kGroup;
    return Scratch::room(rows * inputs * sizeof(float)) + Scratch::room(rows * groups * kGroup) +
           2 * Scratch::room(rows * groups * sizeof(float));
  }

  Activations(int64_t rows, int64_t inputs, const float* floats, Norm norm, bool quantised)
      : rows_(rows), inputs_(inputs), groups_((inputs + kGroup - 1) / kGroup), from_(floats), norm_(norm) {
    if (norm_.weight != nullptr) normed_ = scratch.take<float>(rows * inputs);
    if (!quantised) return;
    values_ = scratch.take<int8_t>(rows * groups_ * kGroup);
    scales_ = scratch.take<float>(rows * groups_);
    sums_ = scratch.take<int32_t>(rows * groups_);
  }

  Row row(int64_t index) const {
    const float* floats = (normed_ == nullptr ? from_ : normed_) + index * inputs_;
    if (values_ == nullptr) return {floats, nullptr, nullptr, nullptr};
    return {floats, values_ + index * groups_ * kGroup, scales_ + index * groups_, sums_ + index * groups_};
  }

  std::vector<Row> all_rows() const {
    std::vector<Row> found;
    for (int64_t index = 0; index < rows_; ++index) found.push_back(row(index));
    return found;
  }

  void prepare(int64_t index) const {
    if (normed_ != nullptr)
      variant().norm(from_ + index * inputs_, norm_.weight, inputs_, norm_.eps, normed_ + index * inputs_);
    if (values_ != nullptr) quantise(index);
  }

  void prepare_all(ffi::ThreadPool& pool) const {
    constexpr int64_t kRowsAtOnce = 4;
    if (normed_ == nullptr && values_ == nullptr) return;
    parallel_for(pool, (rows_ + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t piece) {
      for (int64_t i = piece * kRowsAtOnce; i < std::min(rows_, (piece + 1) * kRowsAtOnce); ++i) prepare(i);
    });
  }

 private:
  void quantise(int64_t index) const {
    const float* floats = row(index).floats;
    const int64_t whole = inputs_ / kGroup, first = index * groups_;
    variant().quantise(floats, whole, values_ + first * kGroup, scales_ + first, sums_ + first);
    if (whole == groups_) return;
    float rest[kGroup] = {};
    std::copy(floats + whole * kGroup, floats + inputs_, rest);
    const int64_t last = first + whole;
    variant().quantise(rest, 1, values_ + last * kGroup, scales_ + last, sums_ + last);
  }

  int64_t rows_, inputs_, groups_;
  const float* from_;
  Norm norm_;
  float* normed_ = nullptr;
  int8_t* values_ = nullptr;
  float* scales_ = nullptr;
  int32_t* sums_ = nullptr;
};

}  // namespace kestrel
