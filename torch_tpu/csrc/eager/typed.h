// Unboxed entries of the boxed kernel, for the signatures of most small calls.
//
// The dispatcher boxes by copying tensors to a stack. A tensor that only Python owns is then owned twice for a while,
// which PyTorch settles with the GIL, twice an argument. These entries lend the kernel what the caller holds anyway.
#pragma once

#include <torch/library.h>

#include <array>
#include <optional>
#include <string>

#include "eager/kernel.h"

namespace torch_tpu {

// The kernel of an operator, made on the first call: most programs use few operators.
class LazyKernel {
 public:
  Kernel& get(const c10::OperatorHandle& op) const {
    auto* kernel = kernel_.load(std::memory_order_acquire);
    if (C10_UNLIKELY(!kernel)) kernel_.store(kernel = &Kernel::of(op), std::memory_order_release);
    return *kernel;
  }

 private:
  mutable std::atomic<Kernel*> kernel_{nullptr};
};

// Arguments on loan: their tensors' reference counts do not change.
template <size_t N>
class Borrowed {
 public:
  template <typename... Args>
  explicit Borrowed(const Args&... arguments) : values_{lend(arguments)...} {}
  Borrowed(const Borrowed&) = delete;
  ~Borrowed() {
    for (auto& value : values_)
      if (value.isTensor()) c10::MaybeOwnedTraits<c10::IValue>::destroyBorrow(value);
  }
  const c10::IValue* data() const { return values_.data(); }

 private:
  static c10::IValue lend(const at::Tensor& tensor) { return c10::MaybeOwnedTraits<at::Tensor>::createBorrow(tensor); }
  static c10::IValue lend(const at::Scalar& scalar) { return scalar; }
  std::array<c10::IValue, N> values_;
};

template <typename... Rest>
torch::CppFunction functional_entry(const c10::OperatorHandle& op) {
  return torch::CppFunction(
      [op, kernel = std::make_shared<LazyKernel>()](const at::Tensor& self, Rest... rest) -> at::Tensor {
        Results results;
        kernel->get(op).run(Borrowed<1 + sizeof...(Rest)>(self, rest...).data(), &results);
        return std::move(results[0]).toTensor();
      });
}

template <typename... Rest>
torch::CppFunction inplace_entry(const c10::OperatorHandle& op) {
  return torch::CppFunction(
      [op, kernel = std::make_shared<LazyKernel>()](at::Tensor& self, Rest... rest) -> at::Tensor& {
        kernel->get(op).run(Borrowed<1 + sizeof...(Rest)>(self, rest...).data(), nullptr);
        return self;
      });
}

// The entry for an operator's schema, if its signature is one of these.
inline std::optional<torch::CppFunction> typed_entry(const c10::OperatorHandle& op) {
  using T = const at::Tensor&;
  using S = const at::Scalar&;
  const auto& schema = op.schema();
  if (schema.name().rfind("aten::resize_as", 0) == 0) return std::nullopt;  // writes to a const Tensor&
  if (schema.returns().size() != 1 || schema.returns()[0].type()->str() != "Tensor") return std::nullopt;
  std::string signature;
  for (const auto& argument : schema.arguments()) {
    const std::string type = argument.type()->str();
    if (type != "Tensor" && type != "Scalar") return std::nullopt;
    if (argument.alias_info() && !signature.empty()) return std::nullopt;
    signature += type[0];
  }
  const bool writes = !signature.empty() && schema.arguments()[0].alias_info() != nullptr;
  if (writes != (schema.returns()[0].alias_info() != nullptr)) return std::nullopt;
#define TYPED_ENTRY(text, ...) \
  if (signature == text) return writes ? inplace_entry<__VA_ARGS__>(op) : functional_entry<__VA_ARGS__>(op);
  if (signature == "T") return writes ? inplace_entry<>(op) : functional_entry<>(op);
  TYPED_ENTRY("TT", T)
  TYPED_ENTRY("TS", S)
  TYPED_ENTRY("TTS", T, S)
  TYPED_ENTRY("TTT", T, T)
  TYPED_ENTRY("TTTS", T, T, S)
  TYPED_ENTRY("TTTSS", T, T, S, S)
#undef TYPED_ENTRY
  return std::nullopt;
}

}  // namespace torch_tpu
