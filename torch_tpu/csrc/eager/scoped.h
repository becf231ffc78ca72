// A setting that a `with` block makes for its thread, and for the autograd threads that work for it.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace torch_tpu {

// PyTorch hands a thread's Python objects on to the threads that run its backward pass (at::ThreadLocalState), so the
// setting is which of `levels` keys holds an object there. Costs nothing while no block is open anywhere.
class Scoped {
 public:
  Scoped(const std::string& name, int levels) {
    for (int i = 0; i < levels; ++i) keys_.push_back(name + "." + std::to_string(i));
  }

  // -1: no block is open on this thread.
  int get() const {
    if (C10_LIKELY(open_.load(std::memory_order_relaxed) == 0)) return -1;
    for (size_t i = 0; i < keys_.size(); ++i)
      if (Objects::contains(keys_[i]) && Objects::get(keys_[i]) != nullptr) return static_cast<int>(i);
    return -1;
  }

  // Returns the level before. To be called on the thread of the block.
  int exchange(int level) {
    const int previous = get();
    if (previous >= 0) Objects::set(keys_[previous], nullptr);  // keys can be erased from torch 2.13 on only
    if (level >= 0) Objects::set(keys_.at(level), std::make_shared<c10::SafePyObject>(nullptr, nullptr));
    open_ += (level >= 0) - (previous >= 0);
    return previous;
  }

 private:
  using Objects = at::impl::ThreadLocalPythonObjects;

  std::vector<std::string> keys_;
  std::atomic<int> open_{0};
};

}  // namespace torch_tpu
