// Which form of scaled_dot_product_attention a call takes: one fused program, or the composite of products and a
// softmax.
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>

namespace torch_tpu {
namespace {

// The fused program is what a user of torch.nn.attention.sdpa_kernel means by any of the fused kernels' names.
bool fused_enabled(const at::Context& context) {
  return context.userEnabledFlashSDP() || context.userEnabledMemEfficientSDP() || context.userEnabledCuDNNSDP() ||
         (context.userEnabledOverrideableSDP() && !context.userEnabledMathSDP());
}

// Sizes that a compiled function leaves open are not zero.
bool has_elements(const at::Tensor& tensor) { return TORCH_GUARD_OR_TRUE(tensor.sym_numel().sym_gt(0)); }

int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double> scale,
               bool enable_gqa) {
  const bool dense = !query.is_nested() && !key.is_nested() && !value.is_nested() && query.dim() == 4 &&
                     key.dim() == 4 && value.dim() == 4;
  const bool floating =
      query.is_floating_point() && query.scalar_type() == key.scalar_type() && key.scalar_type() == value.scalar_type();
  const bool both_masks = is_causal && mask && mask->defined();  // the composite raises PyTorch's error
  const bool fused =
      dense && floating && !both_masks && has_elements(query) && has_elements(key) && has_elements(value);
  const auto& context = at::globalContext();
  if (fused && fused_enabled(context)) return static_cast<int64_t>(at::SDPBackend::overrideable);
  TORCH_CHECK(context.userEnabledMathSDP(), "No viable backend for scaled_dot_product_attention was found. ",
              "The fused form on tpu takes dense floating tensors of four dimensions; the math form is disabled.");
  return static_cast<int64_t>(at::SDPBackend::math);
}

}  // namespace
}  // namespace torch_tpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &torch_tpu::choose);
}  // namespace at::native
