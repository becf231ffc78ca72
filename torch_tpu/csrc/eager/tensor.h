// Making device tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/cell.h"

namespace torch_tpu {

// A storage that holds `array`.
c10::Storage make_storage(const ArrayPtr& array);
// A storage that waits for an output of `work` on a device.
c10::Storage make_storage(const PendingPtr& work, int output, c10::DeviceIndex device);
// A tensor over `storage`.
at::Tensor window_tensor(c10::Storage storage, c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         int64_t offset);
// A row-major tensor that holds `array`.
at::Tensor array_tensor(const ArrayPtr& array, c10::ScalarType dtype, c10::IntArrayRef sizes);
// Gives an `out=` argument its shape and a storage of exactly that size; the contents are about to be replaced.
void set_out_shape(at::TensorImpl* tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides);
// True if the tensor covers its storage exactly once, in some order of its dimensions.
bool covers_storage(const at::Tensor& tensor);
// The dimensions of the row-major array that such a tensor has in memory.
c10::SmallVector<int64_t, 6> memory_dims(const at::Tensor& tensor);

}  // namespace torch_tpu
