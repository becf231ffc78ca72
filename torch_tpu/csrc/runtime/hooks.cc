// ATen's accelerator hooks: what generic code asks about the device.
#include "runtime/hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>

#include "eager/tensor.h"
#include "runtime/allocator.h"
#include "runtime/dtypes.h"
#include "runtime/generator.h"
#include "runtime/pinned.h"
#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Runtime::device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return Runtime::initialized(); }
  void init() const override {}  // what needs the platform starts it: generators and pinned memory do not
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(Runtime::device_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Runtime::exchange_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return Runtime::current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return Runtime::exchange_device(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return Runtime::exchange_device(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? Runtime::current_device() : index);
  }
  at::Device getDeviceFromPtr(void* data) const override { return {kTpu, static_cast<Cell*>(data)->device()}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

struct Register {
  Register() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} register_hooks;

}  // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  auto* old = Cell::of(impl);
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable.");
  auto pointer = Allocator::get().allocate_on(bytes, storage.device().index());
  auto* cell = static_cast<Cell*>(pointer.get());
  if (old && !old->empty() && bytes > 0) {
    const auto& array = old->array();
    const auto item = static_cast<int64_t>(pjrt::dtype_size(array->type()->dtype));
    const auto count = (static_cast<int64_t>(bytes) + item - 1) / item;
    auto resized = at::constant_pad_nd(array_tensor(array, to_torch(array->type()->dtype), {array->type()->numel}),
                                       {0, count - array->type()->numel});
    cell->set(Cell::of(resized.storage().unsafeGetStorageImpl())->array());
  }
  impl->set_data_ptr_noswap(std::move(pointer));
  impl->set_nbytes(bytes);
}

}  // namespace torch_tpu
