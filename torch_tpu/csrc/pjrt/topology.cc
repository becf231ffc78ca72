#include "topology.h"

#include "named_values.h"

namespace torch_tpu::pjrt {

Topology::Topology(const Plugin& plugin, const std::string& name, const Options& options)
    : plugin_(plugin), topology_(nullptr) {
  const NamedValues values(options);
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_Create, args);
  args.topology_name = name.data();
  args.topology_name_size = name.size();
  args.create_options = values.data();
  args.num_options = values.size();
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_TopologyDescription_Create, args,
                      ("Describing the topology '" + name + "'").c_str());
  topology_ = args.topology;
}

Topology::~Topology() {
  if (topology_ == nullptr || !plugin_.has(offsetof(PJRT_Api, PJRT_TopologyDescription_Destroy))) return;
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_Destroy, args);
  args.topology = topology_;
  plugin_.discard(plugin_.api()->PJRT_TopologyDescription_Destroy(&args));
}

std::string Topology::platform_name() const {
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_PlatformName, args);
  args.topology = topology_;
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_TopologyDescription_PlatformName, args, "Reading the platform's name");
  return std::string(args.platform_name, args.platform_name_size);
}

std::string Topology::platform_version() const {
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_PlatformVersion, args);
  args.topology = topology_;
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_TopologyDescription_PlatformVersion, args, "Reading the platform's version");
  return std::string(args.platform_version, args.platform_version_size);
}

std::vector<std::string> Topology::device_kinds() const {
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_GetDeviceDescriptions, args);
  args.topology = topology_;
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_TopologyDescription_GetDeviceDescriptions, args,
                      "Listing the devices of a topology");
  std::vector<std::string> kinds;
  for (size_t i = 0; i < args.num_descriptions; ++i) {
    TORCH_TPU_PJRT_ARGS(PJRT_DeviceDescription_Kind, kind);
    kind.device_description = args.descriptions[i];
    TORCH_TPU_PJRT_CALL(plugin_, PJRT_DeviceDescription_Kind, kind, "Reading the kind of a device");
    kinds.emplace_back(kind.device_kind, kind.device_kind_size);
  }
  return kinds;
}

std::unique_ptr<Topology::Compiled> Topology::compile(std::string_view stablehlo, const CompileOptions& options) const {
  static constexpr std::string_view kFormat = "mlir";
  auto program = make_args<PJRT_Program, PJRT_Program_STRUCT_SIZE>();
  program.code = const_cast<char*>(stablehlo.data());  // input only, although the field is also used for output
  program.code_size = stablehlo.size();
  program.format = kFormat.data();
  program.format_size = kFormat.size();
  const std::string encoded = options.serialize();
  TORCH_TPU_PJRT_ARGS(PJRT_Compile, args);
  args.topology = topology_;
  args.program = &program;
  args.compile_options = encoded.data();
  args.compile_options_size = encoded.size();
  TORCH_TPU_PJRT_CALL(plugin_, PJRT_Compile, args, "Compiling a program ahead of time");
  return std::make_unique<Compiled>(&plugin_, args.executable);
}

Topology::Compiled::~Compiled() {
  if (executable_ == nullptr) return;
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_Destroy, args);
  args.executable = executable_;
  plugin_->discard(plugin_->api()->PJRT_Executable_Destroy(&args));
}

std::string Topology::Compiled::serialize() const { return pjrt::serialize(*plugin_, executable_); }
std::string Topology::Compiled::optimized_program() const { return pjrt::optimized_program(*plugin_, executable_); }
std::map<std::string, double> Topology::Compiled::cost_analysis() const {
  return pjrt::cost_analysis(*plugin_, executable_);
}
MemoryStats Topology::Compiled::memory_stats() const { return pjrt::memory_stats(*plugin_, executable_); }

}  // namespace torch_tpu::pjrt
