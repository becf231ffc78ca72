// c10's allocator of device storages: it makes cells, and counts them.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace torch_tpu {

class Allocator final : public c10::DeviceAllocator {
 public:
  static Allocator& get();

  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, -1); }
  // On tpu:`index`; -1 is the current device. Throws OutOfMemoryError when the storages would not fit together.
  c10::DataPtr allocate_on(size_t bytes, c10::DeviceIndex index);
  // Throws OutOfMemoryError if `bytes` more would not fit on the device.
  void check_fits(size_t bytes, c10::DeviceIndex index);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* destination, const void* source, size_t count) const override;

  bool initialized() override;
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {}  // one stream: nothing to order
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override;
  void resetAccumulatedStats(c10::DeviceIndex index) override;
  void resetPeakStats(c10::DeviceIndex index) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override;
};

}  // namespace torch_tpu
