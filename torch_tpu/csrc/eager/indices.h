#pragma once

#include <ATen/core/stack.h>

namespace torch_tpu {

// What reading and writing through index tensors need: the index list stands at `which` of the `count` arguments on the
// stack. CPU index tensors become copies on the device. With `expand_masks`, boolean masks become the positions of
// their true elements: a host synchronisation, for their number is data. Writes do without.
void prepare_indices(torch::jit::Stack* stack, size_t count, size_t which, bool expand_masks);

// x[mask] with one mask that leads: (self, indices) on the stack become the result, which is a view of the first rows
// of one that is a power of two long, so that few counts are a new program. False, with the stack unchanged, for other
// indices.
bool read_by_mask(torch::jit::Stack* stack);

}  // namespace torch_tpu
