#include "runtime/runtime.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <complex>
#include <map>
#include <sstream>

#include "runtime/dtypes.h"
#include "runtime/startup.h"

namespace torch_tpu {
namespace {

std::mutex init_mutex;
std::atomic<Runtime*> instance{nullptr};
std::atomic<bool> closed{false};
std::atomic<bool> forked{false};
std::function<Platform()> resolve_platform;
std::function<int()> count_devices;
thread_local c10::DeviceIndex current = 0;

}  // namespace

std::string human_bytes(double bytes) {
  const char* units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) bytes /= 1024, ++unit;
  std::ostringstream out;
  out.precision(unit ? 2 : 0);
  out << std::fixed << bytes << ' ' << units[unit];
  return out.str();
}

void rethrow(const pjrt::Error& error) {
  TORCH_CHECK_WITH(OutOfMemoryError, !error.out_of_memory(), error.what());
  TORCH_CHECK_NOT_IMPLEMENTED(error.code() != PJRT_Error_Code_UNIMPLEMENTED, error.what());
  TORCH_CHECK(false, error.what());
}

// ---- memory
// -------------------------------------------------------------------------------------------------------------
void MemoryCounters::add(int64_t bytes) {
  const int64_t now =
      allocated.fetch_add(bytes, std::memory_order_relaxed) + bytes - freed.load(std::memory_order_relaxed);
  if (now > peak.load(std::memory_order_relaxed)) peak.store(now, std::memory_order_relaxed);
  const int64_t count = allocations.fetch_add(1, std::memory_order_relaxed) + 1 - frees.load(std::memory_order_relaxed);
  if (count > peak_live.load(std::memory_order_relaxed)) peak_live.store(count, std::memory_order_relaxed);
}

void MemoryCounters::remove(int64_t bytes) {
  freed.fetch_add(bytes, std::memory_order_relaxed);
  frees.fetch_add(1, std::memory_order_relaxed);
}

// ---- scalars
// ------------------------------------------------------------------------------------------------------------
namespace {
template <typename T>
void store(const c10::Scalar& value, void* out) {
  T converted;
  if constexpr (c10::is_complex<T>::value) {
    converted = value.isComplex() ? static_cast<T>(value.toComplexDouble()) : T(value.toDouble());
  } else if (value.isComplex()) {
    converted = static_cast<T>(value.toComplexDouble().real());
  } else if (value.isFloatingPoint()) {
    const double number = value.toDouble();
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
      converted =
          number >= 0 ? static_cast<T>(static_cast<uint64_t>(number)) : static_cast<T>(static_cast<int64_t>(number));
    else
      converted = static_cast<T>(number);
  } else if (value.isBoolean()) {
    converted = static_cast<T>(value.toBool());
  } else if (value.isUnsigned()) {
    converted = static_cast<T>(value.toUInt64());
  } else {
    converted = static_cast<T>(value.toLong());
  }
  memcpy(out, &converted, sizeof(T));
}

}  // namespace

ScalarBits encode(const c10::Scalar& value, pjrt::DType dtype) {
  ScalarBits bits;
  static_assert(sizeof(bits) == sizeof(c10::complex<double>));
  switch (to_torch(dtype)) {
#define CASE(type, name) \
  case c10::ScalarType::name: store<type>(value, &bits); break;
    TORCH_TPU_FORALL_HOST_DTYPES(CASE)
    CASE(c10::Float8_e5m2, Float8_e5m2)
    CASE(c10::Float8_e4m3fn, Float8_e4m3fn)
#undef CASE
    default: TORCH_CHECK_TYPE(false, "A scalar operand cannot have element type ", pjrt::dtype_name(dtype), ".");
  }
  return bits;
}

ArrayPtr ScalarCache::get(const c10::Scalar& value, pjrt::DType dtype, DeviceState& device) {
  return get(encode(value, dtype), dtype, device);
}

ArrayPtr ScalarCache::get(const ScalarBits& bits, pjrt::DType dtype, DeviceState& device) {
  const uint64_t hash = (bits.low ^ (bits.high * 31) ^ (static_cast<uint64_t>(dtype) << 56)) * 0x9E3779B97F4A7C15ull;
  std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.empty()) entries_.resize(kEntries);
  Entry& entry = entries_[hash >> 53];
  if (!entry.array || entry.bits.low != bits.low || entry.bits.high != bits.high || entry.dtype != dtype)
    entry = {bits, dtype, device.from_host(&bits, ArrayType::get(dtype, {}))};
  return entry.array;
}

ArrayPtr ScalarCache::get_packed(std::string_view bytes, const ArrayType* type, DeviceState& device) {
  const size_t hash = (std::hash<std::string_view>{}(bytes) ^ reinterpret_cast<size_t>(type)) * 0x9E3779B97F4A7C15ull;
  std::lock_guard<std::mutex> lock(mutex_);
  if (packed_.empty()) packed_.resize(kPacked);
  Packed& entry = packed_[hash >> 56];
  if (!entry.array || entry.array->type() != type || entry.bytes != bytes)
    entry = {std::string(bytes), device.from_host(bytes.data(), type)};
  return entry.array;
}

void ScalarCache::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_.clear();
  packed_.clear();
}

// ---- devices
// ------------------------------------------------------------------------------------------------------------
DeviceState::DeviceState(const pjrt::Client& client, c10::DeviceIndex index)
    : index(index), client(client), device(client.devices()[index]) {}

ArrayPtr DeviceState::from_host(const void* data, const ArrayType* type, std::shared_ptr<void> keep) {
  pjrt::Event done;
  auto* handle = client.from_host(data, type->dtype, type->dims.data(), type->dims.size(), device,
                                  keep ? pjrt::HostMemory::kHeldUntilDone : pjrt::HostMemory::kCopiedAtOnce, &done);
  if (keep) outstanding.adopt(std::move(done), std::move(keep));
  return c10::make_intrusive<Array>(handle, type, index);
}

ArrayPtr DeviceState::fault_flag() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!fault_flag_) {
    const int32_t zero = 0;
    fault_flag_ = from_host(&zero, ArrayType::get(PJRT_Buffer_Type_S32, {}));
  }
  return fault_flag_;
}

namespace {
constexpr size_t kStrayFlags = 256;

int32_t read_flag(const ArrayPtr& flag) {
  int32_t code = 0;
  try {
    if (!flag->buffer().read_host_memory(&code, sizeof(code))) flag->buffer().to_host(&code, sizeof(code)).wait();
  } catch (const pjrt::Error& error) {
    rethrow(error);
  }
  return code;
}
}  // namespace

void DeviceState::set_fault_flag(ArrayPtr flag, const ArrayPtr& previous) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (fault_flag_ && fault_flag_ != previous) {
    stray_flags_.push_back(std::move(fault_flag_));
    if (stray_flags_.size() > kStrayFlags)
      stray_flags_.erase(
          std::remove_if(stray_flags_.begin(), stray_flags_.end(), [](auto& f) { return read_flag(f) == 0; }),
          stray_flags_.end());
  }
  fault_flag_ = std::move(flag);
  fault_flag_dirty_ = true;
}

void DeviceState::check_faults() {
  flush();
  std::vector<ArrayPtr> flags;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!fault_flag_dirty_) return;
    fault_flag_dirty_ = false;
    flags.swap(stray_flags_);
    flags.push_back(fault_flag_);
  }
  int32_t code = 0;
  for (const auto& flag : flags)
    if (code == 0) code = read_flag(flag);
  if (code == 0) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fault_flag_.reset();
  }
  const auto [op, fault] = Runtime::fault(code);
  const auto sentence =
      c10::str(fault.text, " in ", op, " on tpu:", static_cast<int>(index),
               ". Debug mode (TORCH_TPU_LAUNCH_BLOCKING=1) finds this at the line of the operator, other modes "
               "at the next synchronisation.");
  TORCH_CHECK_INDEX(fault.error != "IndexError", sentence);
  TORCH_CHECK(false, sentence);
}

void DeviceState::synchronize() {
  flush();
  try {
    outstanding.wait();
  } catch (const pjrt::Error& error) {
    rethrow(error);
  }
  check_faults();
}

void DeviceState::track(Cell* cell) {
  std::lock_guard<std::mutex> lock(mutex_);
  large_.insert(cell);
}

void DeviceState::untrack(Cell* cell) {
  std::lock_guard<std::mutex> lock(mutex_);
  large_.erase(cell);
}

std::string DeviceState::largest_holders() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Cell*> cells(large_.begin(), large_.end());
  std::sort(cells.begin(), cells.end(), [](Cell* a, Cell* b) { return a->bytes() > b->bytes(); });
  std::ostringstream out;
  for (size_t i = 0; i < std::min<size_t>(cells.size(), 5); ++i) {
    out << (i ? ", " : "") << human_bytes(static_cast<double>(cells[i]->bytes()));
    if (const ArrayType* type = cells[i]->type()) {
      out << " (" << pjrt::dtype_name(type->dtype) << '[';
      for (size_t d = 0; d < type->dims.size(); ++d) out << (d ? ", " : "") << type->dims[d];
      out << "])";
    }
  }
  return cells.empty() ? "none above 1 MiB" : out.str();
}

// ---- runtime
// ------------------------------------------------------------------------------------------------------------
Runtime::Runtime(Platform platform) : platform_(std::move(platform)) {
  client_ = std::make_unique<pjrt::Client>(pjrt::Plugin::load(platform_.plugin_path), platform_.options);
  const auto count = client_->devices().size();
  TORCH_CHECK(count > 0, "The plugin ", platform_.plugin_path, " has no device that this process can address.");
  for (size_t i = 0; i < count; ++i) {
    devices_.push_back(std::make_unique<DeviceState>(*client_, static_cast<c10::DeviceIndex>(i)));
    const auto memory = devices_.back()->device.memory();
    devices_.back()->capacity = memory && memory->bytes_limit ? *memory->bytes_limit : platform_.capacity;
  }
}

Runtime& Runtime::get() {
  Runtime* runtime = instance.load(std::memory_order_acquire);
  if (C10_LIKELY(runtime && !forked.load(std::memory_order_relaxed))) return *runtime;
  TORCH_CHECK(
      !forked,
      "Cannot re-initialize tpu in forked subprocess. To use tpu with multiprocessing, you must use the 'spawn' "
      "start method (torch.multiprocessing.set_start_method('spawn')).");
  std::lock_guard<std::mutex> lock(init_mutex);
  if ((runtime = instance.load())) return *runtime;
  TORCH_CHECK(resolve_platform, "torch_tpu is not loaded: import torch_tpu first.");
  try {
    runtime = new Runtime(resolve_platform());
  } catch (const pjrt::Error& error) {
    rethrow(explain_startup(error));
  }
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  instance.store(runtime, std::memory_order_release);
  return *runtime;
}

bool Runtime::initialized() { return instance.load(std::memory_order_acquire) != nullptr; }
bool Runtime::usable() { return initialized() && !closed && !forked; }
bool Runtime::in_bad_fork() { return forked; }

void Runtime::set_platform_resolver(std::function<Platform()> resolver, std::function<int()> count) {
  resolve_platform = std::move(resolver);
  count_devices = std::move(count);
}

int Runtime::device_count() noexcept {
  try {
    if (initialized()) return static_cast<int>(instance.load()->devices_.size());
    return count_devices ? count_devices() : 0;
  } catch (...) {  // the interface promises 0 for a platform that cannot be used; the first use says why
    return 0;
  }
}

void Runtime::shutdown() {
  if (!usable()) return;
  for (auto& device : instance.load()->devices_) {
    device->deferred = nullptr;  // nobody can read its results any more
    try {
      device->synchronize();
    } catch (const c10::Error& error) {
      TORCH_WARN("Work on tpu:", static_cast<int>(device->index),
                 " had failed before the interpreter exited: ", error.what_without_backtrace());
    }
    device->scalars.clear();
    device->outstanding.clear_retired();
  }
  closed = true;
}

DeviceState& Runtime::device(c10::DeviceIndex index) {
  if (C10_UNLIKELY(index < 0)) index = current;
  TORCH_CHECK(static_cast<size_t>(index) < devices_.size(), "invalid device ordinal: tpu:", static_cast<int>(index),
              " of ", devices_.size(), " tpu device(s).");
  return *devices_[index];
}

c10::DeviceIndex Runtime::current_device() { return current; }

c10::DeviceIndex Runtime::exchange_device(c10::DeviceIndex index) {
  const auto previous = current;
  if (index >= 0 && index != current) {
    const int count = device_count();
    TORCH_CHECK(index < count, "invalid device ordinal: tpu:", static_cast<int>(index), " of ", count,
                " tpu device(s).");
    current = index;
  }
  return previous;
}

namespace {
struct Faults {
  std::mutex mutex;
  std::map<std::pair<std::string, std::vector<Fault>>, int32_t> first;
  std::vector<std::pair<std::string, Fault>> by_code{{"an operator", {"RuntimeError", "a check failed"}}};
};
Faults& faults() {
  static auto* table = new Faults;
  return *table;
}
}  // namespace

int32_t Runtime::fault_code(const std::string& op, const std::vector<Fault>& checks) {
  auto& table = faults();
  std::lock_guard<std::mutex> lock(table.mutex);
  auto [entry, fresh] = table.first.emplace(std::pair(op, checks), static_cast<int32_t>(table.by_code.size()));
  if (fresh)
    for (const auto& check : checks) table.by_code.emplace_back(op, check);
  return entry->second;
}

std::pair<std::string, Fault> Runtime::fault(int32_t code) {
  auto& table = faults();
  std::lock_guard<std::mutex> lock(table.mutex);
  return table.by_code.at(code > 0 && static_cast<size_t>(code) < table.by_code.size() ? code : 0);
}

}  // namespace torch_tpu
