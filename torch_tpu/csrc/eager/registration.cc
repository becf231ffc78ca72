// Which operators the boxed kernel takes: the dispatcher's own table decides, by the rules below.
#include "eager/registration.h"

#include <torch/library.h>

#include <unordered_set>

#include "eager/indices.h"
#include "eager/kernel.h"
#include "eager/typed.h"

namespace torch_tpu {
namespace {

// The dispatcher's functor.
class Entry final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    kernel_.get(op).call(stack);
  }

 private:
  LazyKernel kernel_;
};

// As Entry, for operators that take index tensors: CPU indices move to the device, and for reads masks become
// positions.
template <bool kExpandMasks>
class IndexingEntry final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (kExpandMasks && op.schema().arguments().size() == 2 && read_by_mask(stack)) return;
    prepare_indices(stack, op.schema().arguments().size(), 1, kExpandMasks);
    Kernel::of(op).call(stack);
  }
};

// Operators of other namespaces (torchvision, custom ones) without a kernel of their own.
class Fallback final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    Kernel::of(op).call(stack);
  }
};

template <typename Functor>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(std::make_unique<Functor>()));
}

bool returns_view(const c10::FunctionSchema& schema) {
  bool writes = false, aliases = false;
  for (const auto& a : schema.arguments()) writes |= a.alias_info() && a.alias_info()->isWrite();
  for (const auto& r : schema.returns()) aliases |= r.alias_info() != nullptr;
  return aliases && !writes;
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& a : schema.arguments())
    if (a.type()->str().find("Tensor") != std::string::npos) return true;
  return false;
}

// Composite kernels that do the right thing on the device as they are: they move data between devices, or allocate.
const std::unordered_set<std::string>& left_to_composites() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::_to_copy",
      "aten::empty_like",
      "aten::new_empty",
      "aten::new_empty_strided",
      "aten::lift",
      "aten::lift_fresh",
      "aten::resize_as_",
      "aten::is_pinned",
      "aten::_pin_memory",
      "aten::to_sparse",
      "aten::new_zeros",
      "aten::new_ones",
      "aten::new_full",
      "aten::zeros_like",
      "aten::ones_like",
      "aten::full_like",
      "aten::rand_like",
      "aten::randn_like",
      "aten::randint_like",
      "aten::embedding_renorm",
      "aten::is_same_size",
      "aten::_resize_output",
      "aten::_nested_tensor_from_tensor_list",
      "aten::block_diag",
      "aten::_has_same_storage_numel",
      "aten::sym_size",
      "aten::sym_stride",
      "aten::sym_numel",
      "aten::sym_storage_offset",
      "aten::size",
      "aten::stride",
      "aten::dim",
      "aten::numel",
      "aten::detach",
      "aten::_fw_primal",
      "aten::_sparse_coo_tensor_unsafe",
      "aten::is_coalesced",
      "aten::dense_dim",
      "aten::sparse_dim",
      "aten::_lazy_clone",
      "aten::allclose",
      "aten::_linalg_check_errors",
      "aten::_pack_padded_sequence",
      "aten::repeat_interleave",
      "aten::sym_is_contiguous",
      "aten::is_contiguous",
      "aten::_values",
      "aten::values",
      "aten::_unsafe_view",
      "aten::unsafe_split",
      "aten::unsafe_split_with_sizes",
      "aten::as_strided_",  // windows, not copies
  };
  return *names;
}

bool wants_boxed(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (left_to_composites().count(schema.name())) return false;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return false;  // native.cc
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  if (returns_view(schema)) return false;
  const bool has_rule =
      schema.name().rfind("aten::kaiser_window", 0) == 0;  // its composite needs a kernel that only CPU and CUDA have
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) && !takes_tensors(schema))
    return has_rule;
  return true;
}

}  // namespace

void register_kernels() {
  static auto* aten =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static auto* rest = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const char* name : {"index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor"})
    aten->impl(name, boxed<IndexingEntry<true>>());
  for (const char* name :
       {"index_put", "index_put_", "index_put.out", "_index_put_impl_", "_index_put_impl", "_unsafe_index_put"})
    aten->impl(name, boxed<IndexingEntry<false>>());
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !wants_boxed(*op)) continue;
    auto typed = typed_entry(*op);
    aten->impl((name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
               typed ? std::move(*typed) : boxed<Entry>());
  }
  rest->fallback(boxed<Fallback>());
  register_sparse_kernels();
}

}  // namespace torch_tpu
