// Shares work between the calling thread and XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace kestrel {

// Calls numbered from 0, of which every thread takes the next one.
class SharedWork {
 public:
  SharedWork(int64_t count, void (*call)(const void*, int64_t), const void* item)
      : count_(count), call_(call), item_(item) {}

  // Takes calls until none is left. A thread that comes after the last one was taken does not touch `item`, which may be
  // gone by then.
  void take_part() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      call_(item_, i);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  bool all_done() const { return done_.load(std::memory_order_acquire) == count_; }

 private:
  std::atomic<int64_t> next_{0}, done_{0};
  const int64_t count_;
  void (*const call_)(const void*, int64_t);
  const void* const item_;
};

inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The pool's threads that help. To wake one takes longer than most of a decode step's operations do, so a helper that has
// nothing left waits a moment for the next operation, which is usually there at once.
class Helpers {
 public:
  // Offers work to up to `wanted` helpers: to those that wait, and for the others to the pool.
  void offer(xla::ffi::ThreadPool& pool, const std::shared_ptr<SharedWork>& work, int64_t wanted) {
    int64_t waiting;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      work_ = work;
      waiting = waiting_;
      offers_.fetch_add(1, std::memory_order_release);
    }
    for (int64_t helper = waiting; helper < wanted; ++helper)
      pool.Schedule([this, work]() mutable { help(std::move(work)); });
  }

  // Lets go of work that is done, so that nothing outlives its call for long.
  void withdraw(const std::shared_ptr<SharedWork>& work) {
    const std::lock_guard<std::mutex> hold(mutex_);
    if (work_ == work) work_.reset();
  }

 private:
  static constexpr std::chrono::microseconds kPatience{50};
  static constexpr int kLooks = 64;  // between two looks at the clock

  void help(std::shared_ptr<SharedWork> work) {
    while (work != nullptr) {
      work->take_part();
      work = next_work();
    }
  }

  // The work that is offered next, or none if that takes longer than a helper's patience.
  std::shared_ptr<SharedWork> next_work() {
    uint64_t seen;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      seen = offers_.load(std::memory_order_relaxed);
      ++waiting_;
    }
    const auto until = std::chrono::steady_clock::now() + kPatience;
    do {
      for (int look = 0; look < kLooks && offers_.load(std::memory_order_acquire) == seen; ++look) rest();
    } while (offers_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until);
    const std::lock_guard<std::mutex> hold(mutex_);
    --waiting_;
    return offers_.load(std::memory_order_relaxed) == seen ? nullptr : work_;
  }

  std::mutex mutex_;
  std::shared_ptr<SharedWork> work_;
  int64_t waiting_ = 0;
  std::atomic<uint64_t> offers_{0};
};

inline Helpers& helpers() {
  static Helpers& all = *new Helpers;  // never destroyed: the pool's threads may outlive this library's statics
  return all;
}

// Calls `item(i)` once for every i in [0, count), on the calling thread and up to num_threads - 1 threads of the pool, and
// returns when all calls have. Which thread takes which item is left to chance, so an item's result must not depend on it.
template <typename Item>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const Item& item) {
  const int64_t wanted = std::min<int64_t>(pool.num_threads() - 1, count - 1);
  if (wanted < 1) {
    for (int64_t i = 0; i < count; ++i) item(i);
    return;
  }
  const auto call = [](const void* item, int64_t i) { (*static_cast<const Item*>(item))(i); };
  const auto work = std::make_shared<SharedWork>(count, +call, &item);
  helpers().offer(pool, work, wanted);
  work->take_part();
  for (int64_t spins = 0; !work->all_done(); ++spins) spins < 2000 ? rest() : std::this_thread::yield();
  helpers().withdraw(work);
}

}  // namespace kestrel
