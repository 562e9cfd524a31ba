// The kernels as XLA custom calls, and the choice of the instruction-set variant. The arithmetic is in variant.cc.

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "attention.h"
#include "products.h"
#include "routing.h"
#include "sampling.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
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

#if defined(__x86_64__)

// What the processor has, and the system saves the registers of. Asked of the processor itself: the library that zig links
// answers no to every __builtin_cpu_supports.
struct Features {
  bool avx2 = false, avx512vnni = false;

  Features() {
    constexpr unsigned kFirst = bit_AVX | bit_FMA | bit_F16C | bit_OSXSAVE;
    constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kFirst) != kFirst) return;
    unsigned saved, unused;
    __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    constexpr unsigned kYmm = 0x06, kZmm = 0xe6;
    if ((saved & kYmm) != kYmm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = b & bit_AVX2;
    avx512vnni = avx2 && (saved & kZmm) == kZmm && (b & kAvx512) == kAvx512 && (c & bit_AVX512VNNI);
  }
};

#endif

std::vector<const Variant*> runnable_variants() {
  std::vector<const Variant*> found;
#if defined(__x86_64__)
  const Features features;
  if (features.avx512vnni) found.push_back(&variant_avx512vnni);
  if (features.avx2) found.push_back(&variant_avx2);
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
  if (getauxval(AT_HWCAP) & kDotProduct) found.push_back(&variant_dotprod);
#endif
  found.push_back(&variant_portable);
  return found;
}

std::atomic<const Variant*> chosen{nullptr};

}  // namespace

const Variant& variant() { return *chosen.load(std::memory_order_relaxed); }

}  // namespace kestrel

#define KESTREL_EXPORT extern "C" __attribute__((visibility("default")))

// The version of this interface; models/kernels/loader.py refuses another.
KESTREL_EXPORT int kestrel_version() { return 4; }

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

// A binding that takes so many arrays more. Of which dtype each is to be is checked where they are read, by name.
namespace kestrel {

template <size_t count, typename Binding>
auto arrays(Binding&& binding) {
  if constexpr (count == 1) {
    return std::move(binding).template Arg<ffi::AnyBuffer>();
  } else {
    return arrays<count - 1>(std::move(binding).template Arg<ffi::AnyBuffer>());
  }
}

}  // namespace kestrel

#define KESTREL_HANDLER(name, function, binding) \
  KESTREL_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { \
    static auto* handler = (binding).To(function).release(); \
    return handler->Call(frame); \
  }

KESTREL_HANDLER(kestrel_matmul, kestrel::matmul,
                kestrel::arrays<2>(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                    .RemainingArgs()
                    .RemainingRets()
                    .Attr<float>("eps"))

KESTREL_HANDLER(kestrel_gated_mlp, kestrel::gated_mlp,
                kestrel::arrays<8>(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                    .Ret<ffi::Buffer<ffi::F32>>()
                    .Attr<int64_t>("intermediate")
                    .Attr<float>("eps"))

KESTREL_HANDLER(kestrel_experts, kestrel::experts,
                kestrel::arrays<8>(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                    .Ret<ffi::Buffer<ffi::F32>>()
                    .Attr<int64_t>("intermediate")
                    .Attr<float>("eps"))

KESTREL_HANDLER(kestrel_choose_experts, kestrel::choose_experts,
                ffi::Ffi::Bind()
                    .Ctx<ffi::ThreadPool>()
                    .Arg<ffi::AnyBuffer>()
                    .Ret<ffi::AnyBuffer>()
                    .Ret<ffi::AnyBuffer>()
                    .Attr<bool>("normalise"))

KESTREL_HANDLER(kestrel_attention, kestrel::attention,
                kestrel::arrays<9>(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                    .RemainingArgs()
                    .Ret<ffi::Buffer<ffi::F32>>()
                    .RemainingRets()
                    .Attr<float>("scale")
                    .Attr<float>("eps"))

KESTREL_HANDLER(kestrel_unwritten, kestrel::unwritten, ffi::Ffi::Bind().RemainingArgs().RemainingRets())

KESTREL_HANDLER(kestrel_sample, kestrel::sample,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>("top"))
