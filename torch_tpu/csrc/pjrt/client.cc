#include "client.h"

#include <algorithm>
#include <cctype>

#include "named_values.h"

namespace torch_tpu::pjrt {
namespace {

PJRT_DeviceDescription* describe(const Plugin& plugin, PJRT_Device* device) {
  TORCH_TPU_PJRT_ARGS(PJRT_Device_GetDescription, args);
  args.device = device;
  TORCH_TPU_PJRT_CALL(plugin, PJRT_Device_GetDescription, args, "Describing a device");
  return args.device_description;
}

bool says_busy(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* sign : {"already in use", "libtpu_lockfile", "device or resource busy"})
    if (text.find(sign) != std::string::npos) return true;
  return false;
}

PJRT_Client* create(const Plugin& plugin, const Options& options) {
  const NamedValues values(options);
  TORCH_TPU_PJRT_ARGS(PJRT_Client_Create, args);
  args.create_options = values.data();
  args.num_options = values.size();
  try {
    TORCH_TPU_PJRT_CALL(plugin, PJRT_Client_Create, args, "Opening the device");
  } catch (const Error& error) {
    if (!says_busy(error.what())) throw;
    throw Error(
        error.code(),
        std::string("The TPU is in use by another process, and only one process at a time can open it: end that "
                    "process, or give each process its own chips. The plugin said: ") +
            error.what());
  }
  return args.client;
}

void destroy(const Plugin& plugin, PJRT_Client* client) noexcept {
  TORCH_TPU_PJRT_ARGS(PJRT_Client_Destroy, args);
  args.client = client;
  plugin.discard(plugin.api()->PJRT_Client_Destroy(&args));
}

std::vector<Device> addressable_devices(const Plugin& plugin, PJRT_Client* client) {
  TORCH_TPU_PJRT_ARGS(PJRT_Client_AddressableDevices, args);
  args.client = client;
  TORCH_TPU_PJRT_CALL(plugin, PJRT_Client_AddressableDevices, args, "Listing the devices");
  std::vector<Device> devices;
  for (size_t i = 0; i < args.num_addressable_devices; ++i) devices.emplace_back(&plugin, args.addressable_devices[i]);
  std::stable_sort(devices.begin(), devices.end(), [](const Device& a, const Device& b) { return a.id() < b.id(); });
  return devices;
}

}  // namespace

Device::Device(const Plugin* plugin, PJRT_Device* device) : plugin_(plugin), device_(device) {
  PJRT_DeviceDescription* description = describe(*plugin, device);
  TORCH_TPU_PJRT_ARGS(PJRT_DeviceDescription_Id, id);
  id.device_description = description;
  TORCH_TPU_PJRT_CALL(*plugin, PJRT_DeviceDescription_Id, id, "Reading the id of a device");
  id_ = id.id;
  TORCH_TPU_PJRT_ARGS(PJRT_DeviceDescription_Kind, kind);
  kind.device_description = description;
  TORCH_TPU_PJRT_CALL(*plugin, PJRT_DeviceDescription_Kind, kind, "Reading the kind of a device");
  kind_.assign(kind.device_kind, kind.device_kind_size);
}

std::string Device::debug_string() const {
  TORCH_TPU_PJRT_ARGS(PJRT_DeviceDescription_DebugString, args);
  args.device_description = describe(*plugin_, device_);
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_DeviceDescription_DebugString, args, "Describing a device");
  return std::string(args.debug_string, args.debug_string_size);
}

std::optional<DeviceMemory> Device::memory() const {
  if (!plugin_->has(offsetof(PJRT_Api, PJRT_Device_MemoryStats))) return std::nullopt;
  TORCH_TPU_PJRT_ARGS(PJRT_Device_MemoryStats, args);
  args.device = device_;
  try {
    TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Device_MemoryStats, args, "Reading the memory statistics of a device");
  } catch (const Error& error) {
    if (error.code() == PJRT_Error_Code_UNIMPLEMENTED) return std::nullopt;
    throw;
  }
  DeviceMemory memory;
  memory.bytes_in_use = args.bytes_in_use;
  if (args.peak_bytes_in_use_is_set) memory.peak_bytes_in_use = args.peak_bytes_in_use;
  if (args.bytes_limit_is_set) memory.bytes_limit = args.bytes_limit;
  return memory;
}

Client::Client(const Plugin& plugin, const Options& options) : plugin_(plugin), client_(create(plugin, options)) {
  try {
    devices_ = addressable_devices(plugin_, client_);
    TORCH_TPU_PJRT_ARGS(PJRT_Client_PlatformName, name);
    name.client = client_;
    TORCH_TPU_PJRT_CALL(plugin_, PJRT_Client_PlatformName, name, "Reading the platform's name");
    platform_name_.assign(name.platform_name, name.platform_name_size);
    TORCH_TPU_PJRT_ARGS(PJRT_Client_PlatformVersion, version);
    version.client = client_;
    TORCH_TPU_PJRT_CALL(plugin_, PJRT_Client_PlatformVersion, version, "Reading the platform's version");
    platform_version_.assign(version.platform_version, version.platform_version_size);
  } catch (...) {
    destroy(plugin_, client_);
    throw;
  }
}

Client::~Client() { destroy(plugin_, client_); }

PJRT_Buffer* Client::from_host(const void* data, DType dtype, const int64_t* dims, size_t num_dims,
                               const Device& device, HostMemory memory, Event* done) const {
  TORCH_TPU_PJRT_ARGS(PJRT_Client_BufferFromHostBuffer, args);
  args.client = client_;
  args.data = data;
  args.type = dtype;
  args.dims = dims;
  args.num_dims = num_dims;
  args.device = device.get();
  args.host_buffer_semantics = memory == HostMemory::kCopiedAtOnce
                                   ? PJRT_HostBufferSemantics_kImmutableOnlyDuringCall
                                   : PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes;
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_Client_BufferFromHostBuffer, args, "Copying an array to the device");
  Event finished(&plugin_, args.done_with_host_buffer);
  if (done) *done = std::move(finished);
  return args.buffer;
}

PJRT_Buffer* Client::uninitialized(DType dtype, const int64_t* dims, size_t num_dims, const Device& device) const {
  TORCH_TPU_PJRT_ARGS(PJRT_Client_CreateUninitializedBuffer, args);
  args.client = client_;
  args.shape_dims = dims;
  args.shape_num_dims = num_dims;
  args.shape_element_type = dtype;
  args.device = device.get();
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_Client_CreateUninitializedBuffer, args, "Allocating an array on the device");
  return args.buffer;
}

std::unique_ptr<Executable> Client::compile(std::string_view stablehlo, const CompileOptions& options) const {
  static constexpr std::string_view kFormat = "mlir";
  auto program = make_args<PJRT_Program, PJRT_Program_STRUCT_SIZE>();
  program.code = const_cast<char*>(stablehlo.data());  // input only, although the field is also used for output
  program.code_size = stablehlo.size();
  program.format = kFormat.data();
  program.format_size = kFormat.size();
  const std::string encoded = options.serialize();
  TORCH_TPU_PJRT_ARGS(PJRT_Client_Compile, args);
  args.client = client_;
  args.program = &program;
  args.compile_options = encoded.data();
  args.compile_options_size = encoded.size();
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_Client_Compile, args, "Compiling a program");
  return std::make_unique<Executable>(&plugin_, args.executable);
}

std::unique_ptr<Executable> Client::deserialize(std::string_view bytes, const CompileOptions* options) const {
  const std::string encoded = options ? options->serialize() : "";
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_DeserializeAndLoad, args);
  args.client = client_;
  args.serialized_executable = bytes.data();
  args.serialized_executable_size = bytes.size();
  if (options) {
    args.overridden_serialized_compile_options = encoded.data();
    args.overridden_serialized_compile_options_size = encoded.size();
  }
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_Executable_DeserializeAndLoad, args, "Loading a serialised program");
  return std::make_unique<Executable>(&plugin_, args.loaded_executable);
}

bool Client::dma_map(void* data, size_t bytes) const {
  if (!plugin_.has(offsetof(PJRT_Api, PJRT_Client_DmaMap))) return false;
  TORCH_TPU_PJRT_ARGS(PJRT_Client_DmaMap, args);
  args.client = client_;
  args.data = data;
  args.size = bytes;
  try {
    TORCH_TPU_PJRT_CALL(plugin_, PJRT_Client_DmaMap, args, "Registering host memory with the device");
  } catch (const Error& error) {
    if (error.code() == PJRT_Error_Code_UNIMPLEMENTED) return false;
    throw;
  }
  return true;
}

void Client::dma_unmap(void* data) const {
  TORCH_TPU_PJRT_ARGS(PJRT_Client_DmaUnmap, args);
  args.client = client_;
  args.data = data;
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_Client_DmaUnmap, args, "Releasing host memory from the device");
}

}  // namespace torch_tpu::pjrt
