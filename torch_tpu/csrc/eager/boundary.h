// Where a graph that nobody reads is cut.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_set>

namespace torch_tpu {

// A loop without any point where results are needed has to be cut somewhere, and at the same place of its body each
// time: else every cut makes another graph to compile. So where the limit forced a cut, the operators just before it
// are remembered, and a graph that is long enough ends wherever they come again.
class Boundary {
 public:
  // Called with each recorded operator, the `size`th of its graph. True if the graph ends here; `full` forces it.
  bool ends_after(uint64_t id, size_t size, size_t limit, bool full) {
    hash_ = (hash_ + mix(id)) * kFactor - recent_[next_] * oldest_;
    recent_[next_] = mix(id);
    next_ = (next_ + 1) % kWindow;
    if (full || size >= limit) {
      if (known_.size() < kMost) known_.insert(hash_);
      return true;
    }
    return size >= limit / 4 && known_.count(hash_);
  }

 private:
  static constexpr size_t kWindow = 32, kMost = 4096;
  static constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull;
  static uint64_t collected() {  // the factor that the oldest one has collected by now
    uint64_t factor = 1;
    for (size_t i = 0; i <= kWindow; ++i) factor *= kFactor;
    return factor;
  }
  static uint64_t mix(uint64_t id) { return (id ^ id >> 29) * 0xFF51AFD7ED558CCDull; }

  std::array<uint64_t, kWindow> recent_{};
  size_t next_ = 0;
  uint64_t hash_ = 0;
  const uint64_t oldest_ = collected();
  std::unordered_set<uint64_t> known_;
};

}  // namespace torch_tpu
