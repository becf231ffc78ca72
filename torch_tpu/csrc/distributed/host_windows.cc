#include "distributed/host_windows.h"

#include <ATen/Functions.h>

#include <cstring>
#include <optional>

#include "eager/tensor.h"
#include "runtime/dtypes.h"
#include "runtime/runtime.h"

namespace torch_tpu {

struct HostWindows::Hold {
  explicit Hold(ArrayPtr held) : array(std::move(held)), memory(array->buffer()) {}
  ArrayPtr array;
  pjrt::HostMemoryHold memory;
};

namespace {

DeviceState& state_of(const Cell& cell) { return Runtime::get().device(cell.device()); }
Cell& cell_of(const at::Tensor& tensor) { return *Cell::of(tensor.storage().unsafeGetStorageImpl()); }

template <typename Owner>
at::Tensor window(const at::Tensor& tensor, void* base, std::shared_ptr<Owner> owner) {
  auto* first = static_cast<char*>(base) + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(
      first, tensor.sizes(), tensor.strides(), [owner = std::move(owner)](void*) {}, tensor.options().device(at::kCPU));
}

// Memory for a storage, with what it holds so far.
ArrayPtr copy_of(const Cell& cell, const ArrayPtr& contents, const at::Tensor& tensor) {
  auto& device = state_of(cell);
  const auto* type = contents ? contents->type() : nullptr;
  if (!type || type->bytes < cell.bytes()) {
    if (!contents && covers_storage(tensor))
      type = ArrayType::get(to_pjrt(tensor.scalar_type()), memory_dims(tensor));
    else
      type = ArrayType::get(to_pjrt(tensor.scalar_type()), {static_cast<int64_t>(cell.bytes() / tensor.itemsize())});
  }
  auto* handle = device.client.uninitialized(type->dtype, type->dims.data(), type->dims.size(), device.device);
  auto copy = c10::make_intrusive<Array>(handle, type, cell.device());
  const pjrt::HostMemoryHold target(copy->buffer());
  size_t copied = 0;
  if (contents) {
    const pjrt::HostMemoryHold source(contents->buffer());
    copied = std::min(contents->type()->bytes, type->bytes);
    std::memcpy(target.data(), source.data(), copied);
  }
  if (copied < type->bytes && (contents || !covers_storage(tensor)))  // what nobody has written reads as zeros
    std::memset(static_cast<char*>(target.data()) + copied, 0, type->bytes - copied);
  return copy;
}

}  // namespace

at::Tensor HostWindows::read(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  auto& cell = cell_of(tensor);
  if (const auto found = held_.find(&cell); found != held_.end())
    return window(tensor, found->second->memory.data(), found->second);
  auto array = cell.array();
  if (!array) return at::zeros(tensor.sizes(), tensor.options().device(at::kCPU));
  if (array->type()->bytes < cell.bytes()) cell.exchange(array, copy_of(cell, array, tensor)), array = cell.array();
  const auto hold = std::make_shared<Hold>(std::move(array));
  return window(tensor, hold->memory.data(), hold);
}

std::shared_ptr<HostWindows::Hold> HostWindows::writable(Cell& cell, const at::Tensor& tensor) {
  auto& device = state_of(cell);
  device.check_faults();
  // Programs that still read the array must have done so before it changes.
  for (const auto& event : device.outstanding.snapshot()) {
    try {
      event->wait();
    } catch (const pjrt::Error&) {  // of other work: synchronize() raises it
    }
  }
  auto array = cell.array();
  const bool sole = array && array->type()->bytes >= cell.bytes() && cell.claim(array);
  if (sole) {
    cell.give_up();
    array->set_longer({});
  } else {
    array = copy_of(cell, array, tensor);
    cell.set(array);
  }
  return std::make_shared<Hold>(std::move(array));
}

at::Tensor HostWindows::write(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(),
              "A tensor with a pending conjugation or negation cannot receive the result of a collective: call "
              "resolve_conj() or resolve_neg() first.");
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  auto& cell = cell_of(tensor);
  auto& hold = held_[&cell];
  if (!hold) hold = writable(cell, tensor);
  return window(tensor, hold->memory.data(), hold);
}

}  // namespace torch_tpu
