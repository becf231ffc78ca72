#include "eager/call.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "runtime/dtypes.h"
#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

// The first word of each entry of a key. The rest depends on the tag.
enum Tag : uint64_t {
  kAbsent = 1,
  kWhole,
  kWindow,
  kHost,
  kRunTime,
  kList,
  kInt,
  kDouble,
  kBool,
  kComplex,
  kString,
  kInts,
  kDevice,
  kSeed
};

uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

uint64_t scalar_kind(const c10::Scalar& value) {
  return value.isBoolean() ? 0 : value.isIntegral(false) ? 1 : value.isFloatingPoint() ? 2 : 3;
}

}  // namespace

bool same_number(const c10::IValue& a, const c10::IValue& b) {
  if (a.isInt() && b.isInt()) return a.toInt() == b.toInt();
  if (a.isDouble() && b.isDouble()) return bits_of(a.toDouble()) == bits_of(b.toDouble());
  if (a.isBool() && b.isBool()) return a.toBool() == b.toBool();
  return a.isNone() && b.isNone();
}

bool window_fits(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dims;  // (stride, size) by falling stride
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return false;
    if (sizes[i] != 1 && strides[i] != 0) dims.emplace_back(strides[i], sizes[i]);
  }
  std::stable_sort(dims.begin(), dims.end(), [](auto& a, auto& b) { return a.first > b.first; });
  int64_t reach = 1;  // of the dimensions inside the one at hand
  for (const auto& [stride, size] : dims) reach += (size - 1) * stride;
  for (size_t i = 0; i + 1 < dims.size(); ++i) {
    const auto [stride, size] = dims[i];
    reach -= (size - 1) * stride;
    offset %= stride;
    if (offset + reach > stride) return false;
  }
  return true;
}

c10::Scalar host_scalar(const at::TensorImpl* tensor) {
  const void* data = static_cast<const char*>(tensor->storage().data()) + tensor->storage_offset() * tensor->itemsize();
  switch (tensor->dtype().toScalarType()) {
#define CASE(type, name) \
  case c10::ScalarType::name: return c10::Scalar(*static_cast<const type*>(data));
    TORCH_TPU_FORALL_HOST_DTYPES(CASE)
#undef CASE
    default: TORCH_CHECK_TYPE(false, "A CPU scalar of dtype ", tensor->dtype(), " cannot be mixed with tpu tensors.");
  }
}

void Call::set_device(c10::DeviceIndex index) {
  if (device < 0) device = index;
  TORCH_CHECK(device == index, "Expected all tensors to be on the same device, but found at least two devices, tpu:",
              static_cast<int>(device), " and tpu:", static_cast<int>(index), "!");
}

int32_t Call::slot_of(Cell* cell) {
  constexpr size_t kFew = 16;
  if (slots.size() < kFew) {
    for (size_t i = 0; i < slots.size(); ++i)
      if (slots[i] == cell) return static_cast<int32_t>(i);
  } else {  // the long lists of foreach operators
    if (!slot_index_) {
      slot_index_ = std::make_unique<ska::flat_hash_map<Cell*, int32_t>>();
      for (size_t i = 0; i < slots.size(); ++i) slot_index_->emplace(slots[i], static_cast<int32_t>(i));
    }
    const auto [known, fresh] = slot_index_->emplace(cell, static_cast<int32_t>(slots.size()));
    if (!fresh) return known->second;
  }
  slots.push_back(cell);
  return static_cast<int32_t>(slots.size() - 1);
}

void Call::read_tensor(const at::Tensor& tensor, bool is_written) {
  if (!tensor.defined()) {
    key.push_back(kAbsent);
    return;
  }
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto dtype = static_cast<uint64_t>(impl->dtype().toScalarType());
  if (C10_UNLIKELY(impl->device_type() != kTpu)) {
    TORCH_CHECK(impl->device_type() == c10::DeviceType::CPU && impl->dim() == 0 && !is_written &&
                    impl->layout() == c10::kStrided,
                "Expected all tensors to be on the same device, but found at least two devices, tpu:",
                static_cast<int>(device < 0 ? Runtime::current_device() : device), " and ", impl->device(), "!");
    key.push_back(kHost | dtype << 8 | static_cast<uint64_t>(impl->is_wrapped_number()) << 16);
    numbers.push_back(host_scalar(impl));
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(impl->layout() == c10::kStrided && impl->has_storage(),
                              "tpu has no sparse tensors; call to_dense() first.");
  set_device(impl->device().index());
  Cell* cell = Cell::of(impl->unsafe_storage().unsafeGetStorageImpl());
  const ArrayType* type = cell->type();
  const auto sizes = impl->sizes();
  const auto slot = slot_of(cell);
  const uint64_t lazy = static_cast<uint64_t>(impl->is_conj()) << 17 | static_cast<uint64_t>(impl->is_neg()) << 18;
  const uint64_t head = dtype << 8 | lazy | static_cast<uint64_t>(slot) << 32;
  if (C10_LIKELY(type && impl->is_contiguous() && sizes == c10::IntArrayRef(type->dims) &&
                 to_pjrt(impl->dtype().toScalarType()) == type->dtype)) {
    key.push_back(kWhole | head);
    key.push_back(reinterpret_cast<uint64_t>(type));
    tensors.push_back({impl, cell, slot, true});
    return;
  }
  const auto strides = impl->strides();
  const bool fits = window_fits(sizes, strides, impl->storage_offset());
  key.push_back(kWindow | head | static_cast<uint64_t>(fits) << 16 | sizes.size() << 20);
  key.push_back(reinterpret_cast<uint64_t>(type));
  key.push_back(cell->bytes());
  for (size_t i = 0; i < sizes.size(); ++i) {
    key.push_back(static_cast<uint64_t>(sizes[i]));
    key.push_back(static_cast<uint64_t>(strides[i]));
  }
  tensors.push_back({impl, cell, slot, fits});
}

void Call::read_number(const c10::IValue& value, const ArgumentSpec& spec) {
  const bool operand =
      !value.isNone() && !spec.is_static && !(spec.default_value && same_number(*spec.default_value, value));
  if (!operand) return read_static(value);
  numbers.push_back(value.toScalar());
  key.push_back(kRunTime | scalar_kind(numbers.back()) << 8);
}

void Call::read_static(const c10::IValue& value) {
  if (value.isNone()) {
    key.push_back(kAbsent);
  } else if (value.isBool()) {
    key.push_back(kBool | static_cast<uint64_t>(value.toBool()) << 8);
  } else if (value.isInt()) {
    key.push_back(kInt);
    key.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isDouble()) {
    key.push_back(kDouble);
    key.push_back(bits_of(value.toDouble()));
  } else if (value.isComplexDouble()) {
    key.push_back(kComplex);
    key.push_back(bits_of(value.toComplexDouble().real()));
    key.push_back(bits_of(value.toComplexDouble().imag()));
  } else if (value.isDevice()) {
    key.push_back(kDevice | static_cast<uint64_t>(value.toDevice().type()) << 8);
    if (value.toDevice().type() == kTpu && value.toDevice().has_index()) set_device(value.toDevice().index());
  } else if (value.isString()) {
    const auto& text = value.toStringRef();
    key.push_back(kString | text.size() << 8);
    for (size_t i = 0; i < text.size(); i += 8) {
      uint64_t word = 0;
      memcpy(&word, text.data() + i, std::min<size_t>(8, text.size() - i));
      key.push_back(word);
    }
  } else if (value.isIntList()) {
    auto list = value.toIntVector();
    key.push_back(kInts | list.size() << 8);
    for (int64_t i : list) key.push_back(static_cast<uint64_t>(i));
  } else if (value.isList()) {
    auto list = value.toListRef();
    key.push_back(kList | list.size() << 8);
    for (const auto& item : list) item.isTensor() ? read_tensor(item.toTensor()) : read_static(item);
  } else if (value.isSymInt()) {
    key.push_back(kInt);
    key.push_back(static_cast<uint64_t>(value.toSymInt().guard_int(__FILE__, __LINE__)));
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "tpu operators cannot take an argument of type ", value.tagKind(), ".");
  }
}

bool Call::items_overlap(size_t n) const {
  struct Range {
    int32_t slot;
    int64_t low, high;  // bytes, both inside
    size_t item;
    bool is_written;
    auto key() const { return std::tie(slot, low, high, item); }
  };
  if (tensors.size() % n) return true;  // a number among the items hides which tensor belongs to which
  std::vector<Range> ranges;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto* impl = tensors[i].tensor;
    if (impl->numel() == 0) continue;
    const auto itemsize = static_cast<int64_t>(impl->itemsize());
    int64_t reach = 0;
    for (int64_t d = 0; d < impl->dim(); ++d) reach += (impl->size(d) - 1) * impl->stride(d);
    const int64_t low = impl->storage_offset() * itemsize;
    ranges.push_back({tensors[i].slot, low, low + (reach + 1) * itemsize - 1, i % n, i < n});
  }
  std::sort(ranges.begin(), ranges.end(), [](auto& a, auto& b) { return a.key() < b.key(); });
  int64_t read = -1, written = -1;  // the last byte so far
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Range& range = ranges[i];
    const Range* before = i ? &ranges[i - 1] : nullptr;
    if (!before || before->slot != range.slot) read = written = -1;
    const bool same = before && before->key() == range.key();  // an item that reads what it writes
    if (!same && (range.low <= written || (range.is_written && range.low <= read))) return true;
    read = std::max(read, range.high);
    if (range.is_written) written = std::max(written, range.high);
  }
  return false;
}

void Call::read_number_classes() {
  uint64_t classes = 1;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto value = [&](size_t j) { return numbers[j].isComplex() ? 0.0 : numbers[j].to<double>(); };
    const double x = value(i);
    const uint64_t size = x != x ? 0 : x < 0 ? 1 : x == 0 ? 2 : x < 1 ? 3 : x == 1 ? 4 : 5;
    const uint64_t order = i == 0 ? 0 : value(i - 1) < x ? 1 : value(i - 1) == x ? 2 : 3;
    classes = classes << 5 | order << 3 | size;
  }
  key.push_back(classes);
}

void Call::read(const std::vector<ArgumentSpec>& specs, const c10::IValue* arguments) {
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto& spec = specs[i];
    const auto& value = arguments[i];
    switch (spec.kind) {
      case ArgumentSpec::kTensor:
        if (value.isTensor())
          read_tensor(value.toTensor(), spec.is_written);
        else
          key.push_back(kAbsent);
        break;
      case ArgumentSpec::kTensors: {
        if (value.isNone()) {
          key.push_back(kAbsent);
          break;
        }
        auto list = value.toListRef();
        key.push_back(kList | list.size() << 8);
        for (const auto& item : list)
          if (item.isTensor())
            read_tensor(item.toTensor(), spec.is_written);
          else
            key.push_back(kAbsent);
        break;
      }
      case ArgumentSpec::kScalar:
      case ArgumentSpec::kFloat: read_number(value, spec); break;
      case ArgumentSpec::kScalars: {
        if (spec.is_static || value.isNone()) {
          read_static(value);
          break;
        }
        auto list = value.toListRef();
        number_lists.emplace_back();
        key.push_back(kRunTime | list.size() << 8);
        uint64_t kinds = 0;  // two bits for each number, 32 to a word
        for (size_t i = 0; i < list.size(); ++i) {
          number_lists.back().push_back(list[i].toScalar());
          kinds |= scalar_kind(number_lists.back().back()) << (2 * (i % 32));
          if (i % 32 == 31 || i + 1 == list.size()) key.push_back(std::exchange(kinds, 0));
        }
        break;
      }
      case ArgumentSpec::kGenerator:
        key.push_back(kSeed);
        if (value.isGenerator()) generator = value.toGenerator();
        break;
      case ArgumentSpec::kOther: read_static(value); break;
    }
  }
  if (device < 0) device = Runtime::current_device();
}

}  // namespace torch_tpu
