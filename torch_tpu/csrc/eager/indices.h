#pragma once

#include <ATen/core/stack.h>

namespace torch_tpu {

// Replaces, in the index list at `which` of the `count` arguments on the stack, boolean masks by the positions of their true
// elements (a host synchronisation: their number is data) and CPU index tensors by copies on the device.
void prepare_indices(torch::jit::Stack* stack, size_t count, size_t which);

}  // namespace torch_tpu
