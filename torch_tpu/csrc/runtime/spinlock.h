// A lock for a few instructions: held for nanoseconds, seldom contended.
#pragma once

#include <atomic>
#include <thread>

namespace torch_tpu {

class Spinlock {
 public:
  void lock() {
    while (held_.exchange(true, std::memory_order_acquire))
      for (int i = 0; held_.load(std::memory_order_relaxed); ++i)
        if (i > 64) std::this_thread::yield();
  }
  bool try_lock() { return !held_.exchange(true, std::memory_order_acquire); }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_{false};
};

}  // namespace torch_tpu
