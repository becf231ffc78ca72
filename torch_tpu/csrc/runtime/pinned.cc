#include "runtime/pinned.h"

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

constexpr size_t kPage = 4096;

struct Block {
  size_t bytes;
  bool mapped;  // registered with the device, where the platform knows of such a thing
};
struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, Block> by_address;
};
Blocks& blocks() {
  static auto* instance = new Blocks;
  return *instance;
}

void release(void* pointer) {
  bool mapped = false;
  {
    auto& b = blocks();
    std::lock_guard<std::mutex> lock(b.mutex);
    const auto block = b.by_address.find(reinterpret_cast<uintptr_t>(pointer));
    if (block != b.by_address.end()) {
      mapped = block->second.mapped;
      b.by_address.erase(block);
    }
  }
  try {
    if (mapped && Runtime::usable()) Runtime::get().client().dma_unmap(pointer);
  } catch (const pjrt::Error& error) {  // a deleter must not throw
    TORCH_WARN("Pinned host memory could not be released from the device: ", error.what());
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
    c10::DataPtr owner(pointer, pointer, &release, c10::Device(c10::kCPU));
    bool mapped = false;
    try {
      // A program that has not used the device does not start it here: its DataLoader may pin memory for nobody.
      mapped = Runtime::usable() && Runtime::get().client().dma_map(pointer, rounded);
    } catch (const pjrt::Error& error) {
      rethrow(error);
    }
    auto& b = blocks();
    std::lock_guard<std::mutex> lock(b.mutex);
    b.by_address[reinterpret_cast<uintptr_t>(pointer)] = {rounded, mapped};
    return owner;
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
  auto block = b.by_address.upper_bound(address);
  return block != b.by_address.begin() && address < std::prev(block)->first + std::prev(block)->second.bytes;
}

}  // namespace torch_tpu
