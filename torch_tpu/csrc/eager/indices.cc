#include "eager/indices.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_unsafe_index.h>
#include <ATen/ops/nonzero.h>

namespace torch_tpu {
namespace {

bool is_mask(const at::Tensor& index) { return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte; }

void check_mask(const at::Tensor& self, const at::Tensor& mask, int64_t dim) {
  for (int64_t i = 0; i < mask.dim(); ++i)
    TORCH_CHECK_INDEX(dim + i < self.dim() && mask.size(i) == self.size(dim + i), "The shape of the mask ",
                      mask.sizes(), " at index ", i, " does not match the shape of the indexed tensor ", self.sizes(),
                      " at index ", dim + i);
}

}  // namespace

void prepare_indices(torch::jit::Stack* stack, size_t count, size_t which, bool expand_masks) {
  auto& slot = *(stack->end() - static_cast<std::ptrdiff_t>(count) + static_cast<std::ptrdiff_t>(which));
  const auto self = (stack->end() - static_cast<std::ptrdiff_t>(count))->toTensor();
  bool changed = false;
  c10::List<std::optional<at::Tensor>> out;
  int64_t dim = 0;
  for (const auto& item : slot.toListRef()) {
    if (!item.isTensor() || !item.toTensor().defined()) {
      out.push_back(std::nullopt);
      ++dim;
      continue;
    }
    auto index = item.toTensor();
    if (index.device() != self.device()) {
      TORCH_CHECK(index.device().is_cpu(),
                  "indices should be either on cpu or on the same device as the indexed tensor (", self.device(), ")");
      index = index.to(self.device());
      changed = true;
    }
    if (!is_mask(index) || !expand_masks) {
      out.push_back(index);
      dim += is_mask(index) ? index.dim() : 1;
      continue;
    }
    check_mask(self, index, dim);
    dim += index.dim();
    changed = true;
    const auto positions = at::nonzero(index);
    for (int64_t i = 0; i < index.dim(); ++i) out.push_back(positions.select(1, i));
  }
  if (changed) slot = c10::IValue(std::move(out));
}

bool read_by_mask(torch::jit::Stack* stack) {
  const auto self = torch::jit::peek(stack, 0, 2).toTensor();
  const auto list = torch::jit::peek(stack, 1, 2).toListRef();
  if (list.empty() || !list[0].isTensor() || !list[0].toTensor().defined() || !is_mask(list[0].toTensor()))
    return false;
  for (size_t i = 1; i < list.size(); ++i)
    if (list[i].isTensor() && list[i].toTensor().defined()) return false;
  const auto mask = list[0].toTensor();
  if (mask.device() != self.device() || mask.dim() == 0) return false;
  check_mask(self, mask, 0);
  // A view of positions that go on, out of range: the unsafe read takes any for them.
  const auto positions = at::nonzero(mask.reshape({-1}));
  const int64_t count = positions.size(0);
  const auto room = static_cast<int64_t>(positions.storage().nbytes() / positions.itemsize());
  int64_t bucket = 1;
  while (bucket < count) bucket *= 2;
  c10::List<std::optional<at::Tensor>> index;
  index.push_back(positions.as_strided({count == 0 ? 0 : std::min(bucket, room)}, {1}, 0));
  const auto result = at::_unsafe_index(self.flatten(0, mask.dim() - 1), index).narrow(0, 0, count);
  torch::jit::drop(stack, 2);
  torch::jit::push(stack, result);
  return true;
}

}  // namespace torch_tpu
