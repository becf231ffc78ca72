#pragma once

namespace torch_tpu {

// Registers the boxed kernel for every ATen operator that a backend implements, and the fallback for other namespaces.
void register_kernels();

// Registers what sparse tensors need of ATen (sparse.cc).
void register_sparse_kernels();

}  // namespace torch_tpu
