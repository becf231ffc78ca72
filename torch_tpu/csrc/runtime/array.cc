#include "runtime/array.h"

#include <deque>
#include <mutex>
#include <unordered_map>

#include "runtime/runtime.h"

namespace torch_tpu {
namespace {
struct TypeTable {
  std::mutex mutex;
  std::deque<ArrayType> types;
  std::unordered_multimap<size_t, const ArrayType*> index;
};
TypeTable& table() {
  static auto* instance = new TypeTable;  // leaked: types live for ever
  return *instance;
}
}  // namespace

const ArrayType* ArrayType::get(pjrt::DType dtype, c10::IntArrayRef dims) {
  size_t hash = static_cast<size_t>(dtype) * 0x9E3779B97F4A7C15ull;
  for (int64_t d : dims) hash = (hash ^ static_cast<size_t>(d)) * 0x9E3779B97F4A7C15ull;
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto [begin, end] = t.index.equal_range(hash);
  for (auto it = begin; it != end; ++it)
    if (it->second->dtype == dtype && c10::IntArrayRef(it->second->dims) == dims) return it->second;
  int64_t numel = 1;
  for (int64_t d : dims) numel *= d;
  t.types.push_back({dtype, {dims.begin(), dims.end()}, numel, static_cast<size_t>(numel) * pjrt::dtype_size(dtype)});
  t.index.emplace(hash, &t.types.back());
  return &t.types.back();
}

Array::Array(PJRT_Buffer* handle, const ArrayType* type, c10::DeviceIndex device, Watch watch)
    : buffer_(&Runtime::get().client().plugin(), handle), type_(type), device_(device), watch_(watch) {
  if (watch != Watch::kNever) Runtime::get().device(device).outstanding.add(this);
}

ArrayPtr Array::longer(const ArrayType* type) const {
  std::lock_guard<Spinlock> lock(mutex_);
  return longer_ && longer_->type() == type ? longer_ : ArrayPtr();
}

void Array::set_longer(ArrayPtr array) {  // what was there goes after the lock
  std::lock_guard<Spinlock> lock(mutex_);
  longer_.swap(array);
}

Array::~Array() {
  if (!Runtime::usable())
    buffer_.release();
  else if (watch_ != Watch::kNever)
    Runtime::get().device(device_).outstanding.remove(this);
}

}  // namespace torch_tpu
