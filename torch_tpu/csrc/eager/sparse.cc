// Sparse tensors: PyTorch's own kernels where they only arrange index and value tensors, Python (torch_tpu/sparse) for
// the rest.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_to_sparse_bsc_native.h>
#include <ATen/ops/_to_sparse_bsr_native.h>
#include <ATen/ops/_to_sparse_csc_native.h>
#include <ATen/ops/_to_sparse_csr_native.h>
#include <ATen/ops/_to_sparse_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/ccol_indices_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/col_indices_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/crow_indices_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/is_pinned_native.h>
#include <ATen/ops/permute_native.h>
#include <ATen/ops/resize_as_sparse_native.h>
#include <ATen/ops/row_indices_native.h>
#include <ATen/ops/select_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/unsqueeze_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zero_native.h>
#include <torch/library.h>

#include "eager/python.h"
#include "eager/registration.h"

namespace torch_tpu {
namespace {

namespace native = at::native;
using DimOverload = at::Tensor (*)(const at::Tensor&, int64_t);
using LayoutOverload = at::Tensor (*)(const at::Tensor&, std::optional<at::Layout>, at::OptionalIntArrayRef,
                                      std::optional<int64_t>);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_to_sparse.sparse_dim", static_cast<DimOverload>(native::dense_to_sparse));
  m.impl("_to_sparse", static_cast<LayoutOverload>(native::dense_to_sparse));
  m.impl("_to_sparse_csr", TORCH_FN(native::dense_to_sparse_csr));
  m.impl("_to_sparse_csc", TORCH_FN(native::dense_to_sparse_csc));
  m.impl("_to_sparse_bsr", TORCH_FN(native::dense_to_sparse_bsr));
  m.impl("_to_sparse_bsc", TORCH_FN(native::dense_to_sparse_bsc));
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(native::empty_sparse));
  m.impl("empty_like", TORCH_FN(native::empty_like_sparse_coo));
  m.impl("_sparse_coo_tensor_with_dims", TORCH_FN(native::new_with_dims_sparse));
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(native::new_with_dims_and_tensor_sparse_symint));
  m.impl("_indices", TORCH_FN(native::_indices_sparse));
  m.impl("_values", TORCH_FN(native::_values_sparse));
  m.impl("indices", TORCH_FN(native::indices_sparse));
  m.impl("values", TORCH_FN(native::values_sparse));
  m.impl("_nnz", TORCH_FN(native::_nnz_sparse));
  m.impl("sparse_dim", TORCH_FN(native::sparse_dim_sparse));
  m.impl("dense_dim", TORCH_FN(native::dense_dim_sparse));
  m.impl("_dimI", TORCH_FN(native::sparse_dim_sparse));
  m.impl("_dimV", TORCH_FN(native::dense_dim_sparse));
  m.impl("is_coalesced", TORCH_FN(native::is_coalesced_sparse));
  m.impl("_coalesced_", TORCH_FN(native::_coalesced_sparse_));
  m.impl("is_pinned", TORCH_FN(native::is_pinned_sparse_coo));
  m.impl("sparse_resize_", TORCH_FN(native::sparse_resize_));
  m.impl("sparse_resize_and_clear_", TORCH_FN(native::sparse_resize_and_clear_));
  m.impl("resize_as_sparse_", TORCH_FN(native::resize_as_sparse_));
  m.impl("clone", TORCH_FN(native::clone_sparse));
  m.impl("copy_", TORCH_FN(native::copy_sparse_wrapper_));
  m.impl("copy_sparse_to_sparse_", TORCH_FN(native::copy_sparse_));
  m.impl("zero_", TORCH_FN(native::zero_sparse_));
  m.impl("permute", TORCH_FN(native::permute_sparse_coo));
  m.impl("unsqueeze", TORCH_FN(native::unsqueeze_sparse));
  m.impl("_to_sparse.sparse_dim", static_cast<DimOverload>(native::sparse_coo_to_sparse));
  m.impl("_to_sparse", static_cast<LayoutOverload>(native::sparse_coo_to_sparse));
  m.impl("_to_sparse_csr", TORCH_FN(native::coo_to_sparse_csr));
  m.impl("_to_sparse_csc", TORCH_FN(native::coo_to_sparse_csc));
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(native::empty_sparse_compressed));
  m.impl("empty_like", TORCH_FN(native::empty_like_sparse_csr));
  m.impl("crow_indices", TORCH_FN(native::crow_indices_sparse_csr));
  m.impl("col_indices", TORCH_FN(native::col_indices_sparse_csr));
  m.impl("ccol_indices", TORCH_FN(native::ccol_indices_sparse_csr));
  m.impl("row_indices", TORCH_FN(native::row_indices_sparse_csr));
  m.impl("values", TORCH_FN(native::values_sparse_csr));
  m.impl("_nnz", TORCH_FN(native::_nnz_sparse_csr));
  m.impl("sparse_dim", TORCH_FN(native::sparse_dim_sparse_csr));
  m.impl("dense_dim", TORCH_FN(native::dense_dim_sparse_csr));
  m.impl("is_pinned", TORCH_FN(native::is_pinned_sparse_compressed));
  m.impl("resize_as_sparse_", TORCH_FN(native::resize_as_sparse_compressed_));
  m.impl("clone", TORCH_FN(native::clone_sparse_compressed));
  m.impl("copy_", TORCH_FN(native::copy_sparse_compressed_));
  m.impl("zero_", TORCH_FN(native::zero_sparse_csr_));
  m.impl("_to_sparse.sparse_dim", static_cast<DimOverload>(native::sparse_compressed_to_sparse));
  m.impl("_to_sparse", static_cast<LayoutOverload>(native::sparse_compressed_to_sparse));
  m.impl("_to_sparse_csr", TORCH_FN(native::sparse_compressed_to_sparse_csr));
  m.impl("_to_sparse_csc", TORCH_FN(native::sparse_compressed_to_sparse_csc));
  m.impl("select.int", TORCH_FN(native::select_sparse_csr));
}

// An operator that computes: torch_tpu.sparse writes it with dense operators, or says that there is none.
class SparseEntry final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    auto name = op.schema().name();
    if (!op.schema().overload_name().empty()) name += "." + op.schema().overload_name();
    python::run_composite("torch_tpu.sparse", name, op.schema(), stack);
  }
};

torch::CppFunction sparse_entry() {
  return torch::CppFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(std::make_unique<SparseEntry>()));
}

}  // namespace

// PyTorch's dispatcher prefers a composite kernel to a fallback: what the CPU has sparse kernels for is registered by
// name.
void register_sparse_kernels() {
  constexpr std::pair<c10::DispatchKey, c10::DispatchKey> keys[] = {
      {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCPU},
      {c10::DispatchKey::SparseCsrPrivateUse1, c10::DispatchKey::SparseCsrCPU}};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& [key, cpu_key] : keys) {
    auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);  // leaked: for the process
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.getNamespace() != "aten") continue;
      const auto op = dispatcher.findSchema(name);
      if (!op || !op->hasKernelForDispatchKey(cpu_key) || op->hasKernelForDispatchKey(key)) continue;
      aten->impl((name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
                 sparse_entry());
    }
    (new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__))->fallback(sparse_entry());
  }
}

}  // namespace torch_tpu
