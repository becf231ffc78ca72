#include "eager/results.h"

#include "eager/tensor.h"

namespace torch_tpu {
namespace {

// A tensor over a program output. Results that are windows on one output share its storage.
at::Tensor fresh_tensor(const Program& program, const Result& result, StorageOf storage_of,
                        c10::SmallVectorImpl<c10::Storage>& storages, c10::SmallVectorImpl<int32_t>& owners) {
  if (C10_LIKELY(!program.shared_outputs))
    return window_tensor(storage_of(result.index), result.dtype, result.sizes, result.strides, result.offset);
  for (size_t i = 0; i < owners.size(); ++i)
    if (owners[i] == result.index)
      return window_tensor(storages[i], result.dtype, result.sizes, result.strides, result.offset);
  auto storage = storage_of(result.index);
  auto tensor = window_tensor(storage, result.dtype, result.sizes, result.strides, result.offset);
  owners.push_back(result.index);
  storages.push_back(std::move(storage));
  return tensor;
}

}  // namespace

Results make_results(const Program& program, const Call& call, StorageOf storage_of) {
  c10::SmallVector<c10::Storage, 4> storages;
  c10::SmallVector<int32_t, 4> owners;
  auto tensor_of = [&](const Result& result) -> at::Tensor {
    switch (result.kind) {
      case Result::kOutput: return fresh_tensor(program, result, storage_of, storages, owners);
      case Result::kArgument: {
        auto* impl = const_cast<at::TensorImpl*>(call.tensors[result.index].tensor);
        return at::Tensor(c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
      }
      case Result::kArgumentWindow: {
        const auto* impl = call.tensors[result.index].tensor;
        return window_tensor(impl->storage(), result.dtype, result.sizes, result.strides,
                             impl->storage_offset() + result.offset);
      }
      default: return at::Tensor();
    }
  };
  Results out;
  for (const auto& result : program.results) {
    if (result.kind == Result::kList) {
      c10::List<at::Tensor> list;
      list.reserve(result.list.size());
      for (const auto& item : result.list) list.push_back(tensor_of(item));
      out.emplace_back(std::move(list));
    } else if (result.kind == Result::kInt) {
      out.emplace_back(result.offset);
    } else {
      out.emplace_back(tensor_of(result));
    }
  }
  return out;
}

void resize_arguments(const Program& program, Call& call) {
  for (const auto& resize : program.resizes) {
    auto* tensor = const_cast<at::TensorImpl*>(call.tensors[resize.position].tensor);
    set_out_shape(tensor, resize.sizes, resize.strides);
    call.tensors[resize.position].cell = Cell::of(tensor->unsafe_storage().unsafeGetStorageImpl());
    call.slots[call.tensors[resize.position].slot] = call.tensors[resize.position].cell;
  }
}

}  // namespace torch_tpu
