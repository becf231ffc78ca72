#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "executable.h"

namespace torch_tpu::pjrt {

using OptionValue = std::variant<std::string, int64_t, bool, double>;
using Options = std::vector<std::pair<std::string, OptionValue>>;

struct DeviceMemory {
  int64_t bytes_in_use = 0;
  std::optional<int64_t> peak_bytes_in_use;
  std::optional<int64_t> bytes_limit;
};

// One addressable device of a client. A plain handle: the client owns it.
class Device {
 public:
  Device(const Plugin* plugin, PJRT_Device* device);
  PJRT_Device* get() const { return device_; }
  int id() const { return id_; }
  const std::string& kind() const { return kind_; }  // "cpu", "TPU v6 lite", ...
  std::string debug_string() const;
  // nullopt where the plugin keeps no statistics (XLA CPU).
  std::optional<DeviceMemory> memory() const;

 private:
  const Plugin* plugin_;
  PJRT_Device* device_;
  int id_;
  std::string kind_;
};

// Whether the host memory of a transfer may be reused as soon as `from_host` returns (the plugin copies at once), or
// only when its `done` event is ready.
enum class HostMemory { kCopiedAtOnce, kHeldUntilDone };

class Client {
 public:
  Client(const Plugin& plugin, const Options& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const Plugin& plugin() const { return plugin_; }
  const std::vector<Device>& devices() const { return devices_; }  // addressable ones, in ordinal order
  const std::string& platform_name() const { return platform_name_; }
  const std::string& platform_version() const { return platform_version_; }

  // Copies a row-major host array to `device`. The caller owns the handle. `done` (required with kHeldUntilDone)
  // becomes ready when the plugin no longer needs `data`.
  PJRT_Buffer* from_host(const void* data, DType dtype, const int64_t* dims, size_t num_dims, const Device& device,
                         HostMemory memory = HostMemory::kCopiedAtOnce, Event* done = nullptr) const;

  // A row-major array whose elements nobody has written yet; for who writes its memory outside of programs.
  PJRT_Buffer* uninitialized(DType dtype, const int64_t* dims, size_t num_dims, const Device& device) const;

  // Compiles StableHLO (text or portable bytes). Long; takes no lock: call it without the GIL.
  std::unique_ptr<Executable> compile(std::string_view stablehlo, const CompileOptions& options) const;
  // `options`, if given, replace those that the program was compiled with.
  std::unique_ptr<Executable> deserialize(std::string_view bytes, const CompileOptions* options = nullptr) const;

  // Registers host memory for direct transfers where the plugin supports it; returns false where it does not.
  bool dma_map(void* data, size_t bytes) const;
  void dma_unmap(void* data) const;

 private:
  const Plugin& plugin_;
  PJRT_Client* client_;
  std::vector<Device> devices_;
  std::string platform_name_, platform_version_;
};

}  // namespace torch_tpu::pjrt
