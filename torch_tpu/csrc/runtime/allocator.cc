#include "runtime/allocator.h"

#include <algorithm>

#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

constexpr size_t kLarge = 1 << 20;

void release(void* pointer) {
  auto* cell = static_cast<Cell*>(pointer);
  if (Runtime::usable()) {
    auto& device = Runtime::get().device(cell->device());
    device.memory.remove(static_cast<int64_t>(cell->bytes()));
    if (cell->bytes() >= kLarge) device.untrack(cell);
  }
  delete cell;
}

}  // namespace

Allocator& Allocator::get() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void Allocator::check_fits(size_t bytes, c10::DeviceIndex index) {
  auto& device = Runtime::get().device(index);
  const auto live = static_cast<size_t>(device.memory.current());
  if (C10_UNLIKELY(device.capacity && live + bytes > static_cast<size_t>(device.capacity))) {
    device.memory.out_of_memory++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "tpu:", static_cast<int>(device.index),
                     " is out of memory. Tried to allocate ", human_bytes(bytes), ". The device has ",
                     human_bytes(device.capacity), ", of which ", human_bytes(live), " are held by ",
                     device.memory.live(), " live storages; the largest are: ", device.largest_holders(),
                     ". Free tensors, use a smaller batch, or a device with more memory.");
  }
}

c10::DataPtr Allocator::allocate_on(size_t bytes, c10::DeviceIndex index) {
  auto& device = Runtime::get().device(index);
  check_fits(bytes, device.index);
  auto* cell = new Cell(bytes, device.index);
  device.memory.add(static_cast<int64_t>(bytes));
  if (bytes >= kLarge) device.track(cell);
  return {cell, cell, &release, c10::Device(kTpu, device.index)};
}

void Allocator::copy_data(void*, const void*, size_t) const {
  TORCH_CHECK(false, "tpu storages cannot be copied as raw bytes; copy tensors instead.");
}

bool Allocator::initialized() { return Runtime::initialized(); }

void Allocator::emptyCache(c10::MempoolId_t) {
  if (!Runtime::usable()) return;
  for (int i = 0; i < Runtime::device_count(); ++i)
    Runtime::get().device(static_cast<c10::DeviceIndex>(i)).scalars.clear();
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex index) {
  c10::CachingDeviceAllocator::DeviceStats stats;
  if (!Runtime::usable()) return stats;
  auto& memory = Runtime::get().device(index).memory;
  c10::CachingAllocator::Stat bytes, count;
  bytes.current = memory.current();
  bytes.peak = memory.peak;
  bytes.allocated = memory.allocated;
  bytes.freed = memory.freed;
  count.current = memory.live();
  count.peak = memory.peak_live;
  count.allocated = memory.allocations;
  count.freed = memory.frees;
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  stats.allocated_bytes[all] = stats.reserved_bytes[all] = stats.active_bytes[all] = stats.requested_bytes[all] = bytes;
  stats.allocation[all] = stats.active[all] = count;
  stats.num_ooms = memory.out_of_memory;
  return stats;
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex index) {
  auto& memory = Runtime::get().device(index).memory;
  memory.allocated = memory.current();
  memory.allocations = memory.live();
  memory.freed = memory.frees = memory.out_of_memory = 0;
}

void Allocator::resetPeakStats(c10::DeviceIndex index) {
  auto& memory = Runtime::get().device(index).memory;
  memory.peak = memory.current();
  memory.peak_live = memory.live();
}

std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex index) {
  auto& device = Runtime::get().device(index);
  const auto total = static_cast<size_t>(device.capacity);
  return {total - std::min(total, static_cast<size_t>(device.memory.current())), total};
}

REGISTER_ALLOCATOR(kTpu, &Allocator::get())

}  // namespace torch_tpu
