#include "runtime/pinned.h"

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

constexpr size_t kPage = 4096;

struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, size_t> sizes;  // by first address
};
Blocks& blocks() {
  static auto* instance = new Blocks;
  return *instance;
}

void release(void* pointer) {
  if (Runtime::usable()) Runtime::get().client().dma_unmap(pointer);
  {
    auto& b = blocks();
    std::lock_guard<std::mutex> lock(b.mutex);
    b.sizes.erase(reinterpret_cast<uintptr_t>(pointer));
  }
  std::free(pointer);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    void* pointer = std::aligned_alloc(kPage, rounded);
    TORCH_CHECK_WITH(OutOfMemoryError, pointer, "Could not allocate ", bytes, " bytes of pinned host memory.");
    Runtime::get().client().dma_map(pointer, rounded);
    auto& b = blocks();
    std::lock_guard<std::mutex> lock(b.mutex);
    b.sizes.emplace(reinterpret_cast<uintptr_t>(pointer), rounded);
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* pointer) {
  auto& b = blocks();
  std::lock_guard<std::mutex> lock(b.mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto block = b.sizes.upper_bound(address);
  return block != b.sizes.begin() && address < std::prev(block)->first + std::prev(block)->second;
}

}  // namespace torch_tpu
