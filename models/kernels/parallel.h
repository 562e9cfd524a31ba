// Shares work between the calling thread and XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace kestrel {

// Calls numbered from 0, shared out as one stretch of numbers per thread: neighbours read neighbouring memory, which goes
// faster in long stretches. Who is done with his own takes from the others'.
class SharedWork {
 public:
  SharedWork(int64_t count, int64_t threads, void (*call)(const void*, int64_t), const void* item)
      : count_(count), stretches_(threads), call_(call), item_(item) {
    for (int64_t i = 0; i < threads; ++i) {
      stretches_[i].next.store(count * i / threads, std::memory_order_relaxed);
      stretches_[i].end = count * (i + 1) / threads;
    }
  }

  // Takes calls until none is left. A thread that comes after the last one was taken does not touch `item`, which may be
  // gone by then.
  void take_part() {
    const auto threads = static_cast<int64_t>(stretches_.size());
    const int64_t own = joined_.fetch_add(1, std::memory_order_relaxed);
    for (int64_t other = 0; other < threads; ++other) take_stretch(stretches_[(own + other) % threads]);
  }

  bool all_done() const { return done_.load(std::memory_order_acquire) == count_; }

 private:
  struct alignas(64) Stretch {  // a cache line each, because every thread writes its own
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void take_stretch(Stretch& stretch) {
    for (int64_t i; (i = stretch.next.fetch_add(1, std::memory_order_relaxed)) < stretch.end;) {
      call_(item_, i);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  const int64_t count_;
  std::vector<Stretch> stretches_;
  std::atomic<int64_t> joined_{0}, done_{0};
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
  const auto work = std::make_shared<SharedWork>(count, wanted + 1, +call, &item);
  helpers().offer(pool, work, wanted);
  work->take_part();
  for (int64_t spins = 0; !work->all_done(); ++spins) spins < 2000 ? rest() : std::this_thread::yield();
  helpers().withdraw(work);
}

}  // namespace kestrel
