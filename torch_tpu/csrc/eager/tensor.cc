#include "eager/tensor.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <numeric>

#include "runtime/allocator.h"
#include "runtime/runtime.h"

namespace torch_tpu {

namespace {
c10::Storage storage_of(c10::DataPtr pointer, size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                            c10::SymInt(static_cast<int64_t>(bytes)),
                                                            std::move(pointer), &Allocator::get(), true));
}
}  // namespace

c10::Storage make_storage(const ArrayPtr& array) {
  const size_t bytes = array->type()->bytes;
  auto pointer = Allocator::get().allocate_on(bytes, array->device());
  static_cast<Cell*>(pointer.get())->set(array);
  return storage_of(std::move(pointer), bytes);
}

c10::Storage make_storage(const PendingPtr& work, int output, c10::DeviceIndex device) {
  const size_t bytes = work->type(output)->bytes;
  auto pointer = Allocator::get().allocate_on(bytes, device);
  static_cast<Cell*>(pointer.get())->defer(work, output);
  return storage_of(std::move(pointer), bytes);
}

at::Tensor window_tensor(c10::Storage storage, c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
  auto* impl = tensor.unsafeGetTensorImpl();
  if (sizes.size() != 1 || sizes[0] != 0) impl->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor array_tensor(const ArrayPtr& array, c10::ScalarType dtype, c10::IntArrayRef sizes) {
  c10::SmallVector<int64_t, 6> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return window_tensor(make_storage(array), dtype, sizes, strides, 0);
}

void set_out_shape(at::TensorImpl* tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  tensor->set_sizes_and_strides(sizes, strides);
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, tensor->itemsize(), tensor->storage_offset());
  const auto& storage = tensor->unsafe_storage();
  if (storage.nbytes() == bytes) return;
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(Allocator::get().allocate_on(bytes, tensor->device().index()));
  impl->set_nbytes(bytes);
}

bool covers_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         static_cast<size_t>(tensor.numel()) * tensor.itemsize() == tensor.storage().nbytes();
}

c10::SmallVector<int64_t, 6> memory_dims(const at::Tensor& tensor) {
  c10::SmallVector<int64_t, 6> dims;
  if (tensor.is_contiguous()) {
    dims.append(tensor.sizes().begin(), tensor.sizes().end());
    return dims;
  }
  c10::SmallVector<int64_t, 6> order(tensor.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return tensor.size(a) != 1 && (tensor.size(b) == 1 || tensor.stride(a) > tensor.stride(b));
  });
  for (int64_t i : order) dims.push_back(tensor.size(i));
  return dims;
}

}  // namespace torch_tpu
