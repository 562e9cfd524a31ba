// Shares work between the calling thread and XLA's own thread pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace kestrel {

struct SharedWork {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
};

// Calls `item(i)` once for every i in [0, count), on the calling thread and up to num_threads - 1 threads of the pool, and
// returns when all calls have. Which thread takes which item is left to chance, so an item's result must not depend on it.
template <typename Item>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const Item& item) {
  const int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, count - 1);
  auto work = std::make_shared<SharedWork>();
  // A helper that starts after the last item was taken returns without touching `item`, which is gone by then.
  auto take = [work, count, &item] {
    for (int64_t i; (i = work->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      item(i);
      work->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t helper = 0; helper < helpers; ++helper) pool.Schedule([take]() mutable { take(); });
  take();
  for (int64_t spins = 0; work->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 2000) std::this_thread::yield();
  }
}

}  // namespace kestrel
