// The process's one client of the device platform, made on first use, and what it keeps for each device.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Scalar.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "pjrt/client.h"
#include "runtime/cell.h"
#include "runtime/outstanding.h"

namespace torch_tpu {

constexpr c10::DeviceType kTpu = c10::DeviceType::PrivateUse1;

// Bytes of live storages on one device, as torch.accelerator.memory_stats reports them.
struct MemoryCounters {
  std::atomic<int64_t> allocated{0}, freed{0}, allocations{0}, frees{0}, peak{0}, peak_live{0}, out_of_memory{0};
  int64_t current() const { return allocated.load(std::memory_order_relaxed) - freed.load(std::memory_order_relaxed); }
  int64_t live() const { return allocations.load(std::memory_order_relaxed) - frees.load(std::memory_order_relaxed); }
  void add(int64_t bytes);
  void remove(int64_t bytes);
};

// A number in its element type, from the lowest byte on.
struct ScalarBits {
  uint64_t low = 0, high = 0;
};
// With C conversions.
ScalarBits encode(const c10::Scalar& value, pjrt::DType dtype);

// Numbers as 0-d arrays on the device, by value: the second `x + 3` transfers nothing.
class ScalarCache {
 public:
  ArrayPtr get(const c10::Scalar& value, pjrt::DType dtype, class DeviceState& device);
  ArrayPtr get(const ScalarBits& bits, pjrt::DType dtype, class DeviceState& device);
  // Several numbers as one array: loops mostly repeat theirs.
  ArrayPtr get_packed(std::string_view bytes, const ArrayType* type, class DeviceState& device);
  void clear();

 private:
  struct Entry {
    ScalarBits bits;
    pjrt::DType dtype = PJRT_Buffer_Type_INVALID;
    ArrayPtr array;
  };
  struct Packed {
    std::string bytes;
    ArrayPtr array;
  };
  static constexpr size_t kEntries = 2048, kPacked = 256;
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<Packed> packed_;
};

// What a program can find wrong in its data.
struct Fault {
  std::string error;  // IndexError, or else RuntimeError
  std::string text;
  auto operator<=>(const Fault&) const = default;
};

class DeviceState {
 public:
  DeviceState(const pjrt::Client& client, c10::DeviceIndex index);

  const c10::DeviceIndex index;
  const pjrt::Client& client;
  const pjrt::Device& device;
  Outstanding outstanding;
  MemoryCounters memory;
  ScalarCache scalars;
  int64_t capacity = 0;                      // bytes that storages may occupy together; 0 if unknown
  std::atomic<Deferred*> deferred{nullptr};  // null before anything was put off

  // Gives the device all work that was put off.
  void flush() {
    if (auto* work = deferred.load(std::memory_order_acquire)) work->flush();
  }

  // Copies a host array (row-major) and returns at once when `keep` allows it.
  ArrayPtr from_host(const void* data, const ArrayType* type, std::shared_ptr<void> keep = nullptr);

  // What programs find wrong in their data, such as an index out of range: those that check write the fault's code
  // here; 0 means none so far.
  ArrayPtr fault_flag();
  // The flag after a checked program that started from `previous`.
  void set_fault_flag(ArrayPtr flag, const ArrayPtr& previous);
  // Runs what was put off, and raises the error of a fault that a checked program met since the last call, with the
  // operator's name.
  void check_faults();

  // Waits for all work, then raises what went wrong in it.
  void synchronize();

  // Large live storages, for the out-of-memory message.
  void track(Cell* cell);
  void untrack(Cell* cell);
  std::string largest_holders();

 private:
  std::mutex mutex_;
  ArrayPtr fault_flag_;
  std::vector<ArrayPtr> stray_flags_;  // of programs that ran at the same time on another thread
  bool fault_flag_dirty_ = false;
  std::unordered_set<Cell*> large_;
};

// Where the platform comes from; filled in by Python (torch_tpu/platform.py), which knows the environment.
struct Platform {
  std::string name;  // "cpu", "tpu" or the plugin's path
  std::string plugin_path;
  pjrt::Options options;
  int64_t capacity = 0;  // bytes per device where the plugin does not say
};

class Runtime {
 public:
  // The runtime, made on first use. Throws with a sentence if the platform cannot be used, or in a forked child.
  static Runtime& get();
  static bool initialized();
  // Initialised, not shut down, and not in a forked child: the plugin may be called.
  static bool usable();
  // After fork, in the child of a process that had initialised: the device cannot be used.
  static bool in_bad_fork();
  // Called once, from Python, before first use.
  static void set_platform_resolver(std::function<Platform()> resolver, std::function<int()> count);
  // Devices, without initialising anything; 0 if there is no usable platform.
  static int device_count() noexcept;
  // Drops device state at interpreter exit, while the plugin still works.
  static void shutdown();

  const Platform& platform() const { return platform_; }
  const pjrt::Client& client() const { return *client_; }
  DeviceState& device(c10::DeviceIndex index);
  // Index of the calling thread's current device.
  static c10::DeviceIndex current_device();
  static c10::DeviceIndex exchange_device(c10::DeviceIndex index);

  // Process-wide codes for what an operator's program checks: that of the first check, the others follow.
  static int32_t fault_code(const std::string& op, const std::vector<Fault>& checks);
  // The operator and the fault of a code.
  static std::pair<std::string, Fault> fault(int32_t code);

 private:
  explicit Runtime(Platform platform);
  Platform platform_;
  std::unique_ptr<pjrt::Client> client_;
  std::vector<std::unique_ptr<DeviceState>> devices_;
};

// "1.50 MiB".
std::string human_bytes(double bytes);

// Makes a pjrt::Error the exception PyTorch users know: OutOfMemoryError, NotImplementedError or RuntimeError.
[[noreturn]] void rethrow(const pjrt::Error& error);

}  // namespace torch_tpu
