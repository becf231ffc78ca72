// Operators that move or describe memory rather than compute: allocation, views, copies between devices, reading a
// number.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/InferSize.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "eager/kernel.h"
#include "eager/tensor.h"
#include "runtime/allocator.h"
#include "runtime/dtypes.h"
#include "runtime/hooks.h"
#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// The boxed kernel of `name`, called with `arguments`; for what these functions leave to a program.
template <typename... Arguments>
at::Tensor run_boxed(const char* name, const char* overload, Arguments&&... arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Arguments>(arguments)...);
  Kernel::of(op).call(&stack);
  return stack.back().toTensor();
}

// ---- allocation
// ---------------------------------------------------------------------------------------------------------
void check_new(c10::ScalarType dtype, std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == c10::kStrided, "tpu has only strided tensors, not ",
                              layout.value_or(c10::kStrided), ".");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  to_pjrt(dtype);
}

c10::DeviceIndex device_index(std::optional<at::Device> device) {
  return device && device->has_index() ? device->index() : Runtime::current_device();
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype_opt, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> format) {
  const auto dtype = c10::dtype_or_default(dtype_opt);
  check_new(dtype, layout, pin_memory);
  Runtime::get().device(device_index(device));
  const c10::OptionalDeviceGuard guard(c10::Device(kTpu, device_index(device)));
  return at::detail::empty_generic(sizes, &Allocator::get(), kKeys, dtype, format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype_opt,
                         std::optional<at::Layout> layout, std::optional<at::Device> device,
                         std::optional<bool> pin_memory) {
  const auto dtype = c10::dtype_or_default(dtype_opt);
  check_new(dtype, layout, pin_memory);
  Runtime::get().device(device_index(device));
  const c10::OptionalDeviceGuard guard(c10::Device(kTpu, device_index(device)));
  return at::detail::empty_strided_generic(sizes, strides, &Allocator::get(), kKeys, dtype);
}

// ---- storages
// -----------------------------------------------------------------------------------------------------------
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    const auto old_bytes = self.storage().nbytes();
    impl->set_sizes_contiguous(sizes);
    const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
    if (bytes > old_bytes) resize_storage(self.storage(), bytes);
  }
  if (format) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "Unsupported memory format", *format);
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  at::native::checkSetStorage(self, source, offset, sizes, strides);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  c10::SmallVector<int64_t, 6> contiguous;
  if (strides.data() == nullptr || strides.size() != sizes.size()) {
    contiguous.resize(sizes.size());
    int64_t step = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      contiguous[i] = step;
      step *= std::max<int64_t>(sizes[i], 1);
    }
    strides = contiguous;
  }
  impl->set_sizes_and_strides(sizes, strides, offset);
  const auto needed = at::detail::computeStorageNbytes(sizes, strides, self.itemsize(), offset);
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto storage = at::Storage(at::Storage::use_byte_size_t(), 0, Allocator::get().allocate_on(0, self.device().index()),
                             &Allocator::get(), true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

// CPU and device tensors are plain TensorImpls, so `tensor.data = other` may change the device: modules move in place,
// and an optimizer made before the move keeps its parameters.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_plain_tensor = [](const at::Tensor& t) {
    return (t.is_cpu() || t.device().type() == kTpu) && t.layout() == c10::kStrided && !t.is_nested() &&
           !t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched}));
  };
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set()) ||
         (is_plain_tensor(self) && is_plain_tensor(from));
}

void record_stream(at::Tensor&, at::Stream) {}  // one stream: a storage is never reused before its work is done

// ---- copies
// -------------------------------------------------------------------------------------------------------------
DeviceState& state_of(const at::Tensor& tensor) { return Runtime::get().device(tensor.device().index()); }
Cell& cell_of(const at::Tensor& tensor) { return *Cell::of(tensor.storage().unsafeGetStorageImpl()); }

// The array of a tensor that covers its storage; zeros if nobody has written it.
ArrayPtr array_of(const at::Tensor& tensor) {
  auto& cell = cell_of(tensor);
  if (cell.empty()) {
    const auto* type = ArrayType::get(to_pjrt(tensor.scalar_type()), memory_dims(tensor));
    const std::vector<char> zeros(type->bytes);
    cell.set(state_of(tensor).from_host(zeros.data(), type));
  }
  return cell.array();
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

// True if the tensor's own dtype and memory order are those of its storage's array.
bool is_plain(const at::Tensor& tensor) {
  if (!covers_storage(tensor)) return false;
  const auto* type = cell_of(tensor).type();
  return !type || (type->dtype == to_pjrt(tensor.scalar_type()) && type->numel == tensor.numel());
}

// True if the tensor's array is all that it means, whatever dtype the array has: a copy may share it.
bool is_whole(const at::Tensor& tensor) {
  const auto* type = cell_of(tensor).type();
  return covers_storage(tensor) && !tensor.is_conj() && !tensor.is_neg() &&
         (!type || type->bytes == tensor.storage().nbytes());
}

void copy_on_device(at::Tensor& self, const at::Tensor& source) {
  if (self.scalar_type() == source.scalar_type() && same_layout(self, source) && covers_storage(self) &&
      is_whole(source) && !self.is_conj() && !self.is_neg()) {
    if (cell_of(source).empty()) array_of(source);
    cell_of(self).share(cell_of(source));
    return;
  }
  run_boxed("aten::copy_", "", self, source, false);
}

void copy_between_devices(at::Tensor& self, const at::Tensor& source) {
  auto from = is_plain(source) ? source : source.clone(at::MemoryFormat::Contiguous);
  auto& target = state_of(self);
  const auto& array = array_of(from);
  auto moved =
      c10::make_intrusive<Array>(array->buffer().copy_to_device(target.device.get()), array->type(), target.index);
  auto arrived = window_tensor(make_storage(moved), from.scalar_type(), from.sizes(), from.strides(), 0);
  copy_on_device(self, arrived);
}

void copy_from_host(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  auto& device = state_of(self);
  if (!covers_storage(self) || self.is_conj() || self.is_neg()) {
    auto staged = at::empty(source.sizes(), self.options());
    copy_from_host(staged, source, non_blocking);
    run_boxed("aten::copy_", "", self, staged, false);
    return;
  }
  at::Tensor host = source;
  const bool ready =
      source.scalar_type() == self.scalar_type() && same_layout(source, self) && !source.is_conj() && !source.is_neg();
  if (!ready) {
    host = at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kCPU));
    host.copy_(source);
  }
  const auto* type = ArrayType::get(to_pjrt(self.scalar_type()), memory_dims(self));
  std::shared_ptr<void> keep;
  if (!ready || (non_blocking && source.is_pinned())) keep = std::make_shared<at::Tensor>(host);
  cell_of(self).set(device.from_host(host.const_data_ptr(), type, std::move(keep)));
}

// A run of a storage's elements that is at least a quarter of them, or of a small storage, is read with the rest and
// cut out on the host: results whose size depends on data, or changes, are such runs, and each size would be another
// program on the device.
constexpr size_t kSmall = 1 << 16;
bool copy_run_to_host(at::Tensor& self, const at::Tensor& source) {
  const auto* type = cell_of(source).type();
  const size_t bytes = source.storage().nbytes();
  if (!type || type->dtype != to_pjrt(source.scalar_type()) || type->bytes < bytes || !source.is_contiguous() ||
      source.is_conj() || source.is_neg() || source.numel() == 0 ||
      (type->bytes > kSmall && 4 * static_cast<size_t>(source.numel()) * source.itemsize() < type->bytes))
    return false;
  state_of(source).check_faults();
  auto all = at::empty({type->numel}, source.options().device(at::kCPU));
  cell_of(source).array()->buffer().to_host(all.mutable_data_ptr(), type->bytes).wait();
  self.copy_(all.narrow(0, source.storage_offset(), source.numel()).view(source.sizes()));
  return true;
}

void copy_to_host(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  auto& device = state_of(source);
  if (!is_plain(source) && copy_run_to_host(self, source)) return;
  auto from =
      is_plain(source) && !source.is_conj() && !source.is_neg() ? source : source.clone(at::MemoryFormat::Contiguous);
  if (!is_plain(from))
    from = run_boxed("aten::clone", "", from, c10::IValue(static_cast<int64_t>(at::MemoryFormat::Contiguous)));
  device.check_faults();                      // runs what was put off, too
  if (!is_plain(from) && from.numel() > 0) {  // the beginning of an array that is longer: torch_tpu/bounded/eager.py
    const auto array = array_of(from);
    auto all = at::empty({array->type()->numel}, from.options().device(at::kCPU));
    array->buffer().to_host(all.mutable_data_ptr(), array->type()->bytes).wait();
    self.copy_(all.narrow(0, 0, from.numel()).view(from.sizes()));
    return;
  }
  const bool direct = self.scalar_type() == from.scalar_type() && same_layout(self, from) &&
                      self.is_non_overlapping_and_dense() && !self.is_neg() && !self.is_conj();
  at::Tensor host = direct ? self : at::empty_strided(from.sizes(), from.strides(), from.options().device(at::kCPU));
  if (from.numel() > 0) {
    const auto array = array_of(from);
    const bool later = direct && non_blocking && self.is_pinned();
    if (!later && array->buffer().read_host_memory(host.mutable_data_ptr(), array->type()->bytes)) {
      if (!direct) self.copy_(host);
      return;
    }
    auto done = array->buffer().to_host(host.mutable_data_ptr(), array->type()->bytes);
    if (later) {
      device.outstanding.adopt(std::move(done), std::make_shared<std::pair<ArrayPtr, at::Tensor>>(array, host));
      return;
    }
    done.wait();
  }
  if (!direct) self.copy_(host);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source_in, bool non_blocking) {
  if (self.is_same(source_in)) return self;
  TORCH_CHECK(source_in.defined() && self.defined(), "copy_ needs two defined tensors.");
  if (source_in.sizes() != self.sizes()) {
    const auto shape = at::infer_size_dimvector(self.sizes(), source_in.sizes());
    TORCH_CHECK(at::IntArrayRef(shape) == self.sizes(), "output with shape ", self.sizes(),
                " doesn't match the broadcast shape ", at::IntArrayRef(shape));
  }
  const auto source = source_in.sizes() == self.sizes() ? source_in : source_in.expand(self.sizes());
  if (self.numel() == 0) return self;
  at::assert_no_internal_overlap(self);
  if (self.device() == source.device()) at::assert_no_partial_overlap(self, source);
  const bool from_tpu = source.device().type() == kTpu, to_tpu = self.device().type() == kTpu;
  try {
    if (from_tpu && to_tpu)
      self.device() == source.device() ? copy_on_device(self, source) : copy_between_devices(self, source);
    else if (to_tpu) {
      TORCH_CHECK(source.device().is_cpu(), "Cannot copy from ", source.device(), " to ", self.device(),
                  "; copy to the CPU first.");
      copy_from_host(self, source, non_blocking);
    } else {
      TORCH_CHECK(self.device().is_cpu(), "Cannot copy from ", source.device(), " to ", self.device(),
                  "; copy to the CPU first.");
      copy_to_host(self, source, non_blocking);
    }
  } catch (const pjrt::Error& error) {
    rethrow(error);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto self = target;
  return copy_(self, source, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor clone(const at::Tensor& self, std::optional<at::MemoryFormat> format_opt) {
  const auto format = format_opt.value_or(at::MemoryFormat::Preserve);
  const bool keeps = format == at::MemoryFormat::Preserve || self.is_contiguous(format);
  at::Tensor result;
  if (format == at::MemoryFormat::Preserve && self.is_non_overlapping_and_dense())
    result = at::empty_strided(self.sizes(), self.strides(), self.options());
  else
    result = at::empty_like(self, self.options(), format);
  if (keeps && is_whole(self) && same_layout(self, result)) {
    if (!cell_of(self).empty()) cell_of(result).share(cell_of(self));
    return result;
  }
  return copy_(result, self, false);
}

// ---- reading
// ------------------------------------------------------------------------------------------------------------
at::Scalar local_scalar_dense(const at::Tensor& self) {
  TORCH_CHECK(self.numel() == 1, "a Tensor with ", self.numel(), " elements cannot be converted to Scalar");
  auto& device = state_of(self);
  device.check_faults();
  const auto* type = cell_of(self).type();
  if (!type || type->numel != 1 || type->dtype != to_pjrt(self.scalar_type())) {
    auto host = at::empty({}, self.options().device(at::kCPU));
    host.copy_(self.reshape({}));
    return host.item();
  }
  alignas(16) char bytes[16];
  try {
    const auto array = cell_of(self).array();
    const auto& buffer = array->buffer();
    if (!buffer.read_host_memory(bytes, type->bytes)) buffer.to_host(bytes, type->bytes).wait();
  } catch (const pjrt::Error& error) {
    rethrow(error);
  }
  auto host = at::from_blob(bytes, {}, self.options().device(at::kCPU));
  if (c10::isFloat8Type(self.scalar_type())) return host.item();
  return host_scalar(host.unsafeGetTensorImpl());
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  TORCH_CHECK(self.device() == other.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", self.device(), " and ",
              other.device(), "!");
  if (self.sizes() != other.sizes()) return false;
  TORCH_CHECK(self.dtype() == other.dtype(), "Expected object of data type ", self.dtype(), " but got data type ",
              other.dtype(), " for argument 'other' in call to equal");
  return self.numel() == 0 || at::eq(self, other).all().item<bool>();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("clone", TORCH_FN(clone));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("equal", TORCH_FN(equal));
}

}  // namespace torch_tpu
