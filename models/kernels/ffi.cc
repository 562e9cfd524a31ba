// The kernels as XLA custom calls, and the choice of the instruction-set variant. The arithmetic is in variant.cc.

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "attention.h"
#include "products.h"

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

}  // namespace

const Variant& variant() { return *chosen.load(std::memory_order_relaxed); }

}  // namespace kestrel

#define KESTREL_EXPORT extern "C" __attribute__((visibility("default")))

// The version of this interface; models/kernels/loader.py refuses another.
KESTREL_EXPORT int kestrel_version() { return 3; }

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
                ffi::Ffi::Bind()
                    .Ctx<ffi::ThreadPool>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .RemainingArgs()
                    .RemainingRets()
                    .Attr<float>("eps"))

KESTREL_HANDLER(kestrel_gated_mlp, kestrel::gated_mlp,
                ffi::Ffi::Bind()
                    .Ctx<ffi::ThreadPool>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>()
                    .Ret<ffi::Buffer<ffi::F32>>()
                    .Attr<int64_t>("intermediate")
                    .Attr<float>("eps"))

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
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::Buffer<ffi::F32>>()
                    .Arg<ffi::Buffer<ffi::S32>>()
                    .Arg<ffi::Buffer<ffi::S32>>()
                    .RemainingArgs()
                    .Ret<ffi::Buffer<ffi::F32>>()
                    .RemainingRets()
                    .Attr<float>("scale")
                    .Attr<float>("eps"))

KESTREL_HANDLER(kestrel_unwritten, kestrel::unwritten, ffi::Ffi::Bind().RemainingArgs().RemainingRets())
