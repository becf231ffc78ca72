// Nested tensors of strided layout: what PyTorch asks of any nested tensor, even to report an error, and a refusal for
// the rest. Those of jagged layout are Python and need nothing here.
#include <ATen/ops/_nested_tensor_size_native.h>
#include <ATen/ops/_nested_tensor_storage_offsets_native.h>
#include <ATen/ops/_nested_tensor_strides_native.h>
#include <torch/library.h>

namespace torch_tpu {
namespace {

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "The operator '", op.schema().operator_name(),
                              "' does not support nested tensors of strided layout on tpu. ",
                              "Make them with layout=torch.jagged.");
}

// Asked by nn.TransformerEncoder before it packs a padded batch into a strided nested tensor: it goes on with the
// padded one.
bool cannot_pack(const at::Tensor&, const at::Tensor&) { return false; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_nested_tensor_from_mask_left_aligned", TORCH_FN(cannot_pack)); }

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_nested_tensor_size", TORCH_FN(at::native::_nested_tensor_size));
  m.impl("_nested_tensor_strides", TORCH_FN(at::native::_nested_tensor_strides));
  m.impl("_nested_tensor_storage_offsets", TORCH_FN(at::native::_nested_tensor_storage_offsets));
}

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>()); }

}  // namespace
}  // namespace torch_tpu
