#pragma once

#include <ATen/core/stack.h>

namespace torch_tpu {

// What reading and writing through index tensors need: the index list stands at `which` of the `count` arguments on the stack.
// CPU index tensors become copies on the device. With `expand_masks`, boolean masks become the positions of their true elements:
// a host synchronisation, for their number is data. Writes do without.
void prepare_indices(torch::jit::Stack* stack, size_t count, size_t which, bool expand_masks);

}  // namespace torch_tpu
