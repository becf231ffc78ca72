#include "executable.h"

#include <cstring>
#include <string_view>

namespace torch_tpu::pjrt {
namespace {

// The protobuf wire format, as far as CompileOptionsProto needs it.
class ProtoWriter {
 public:
  void integer(int field, int64_t value) {
    tag(field, 0);
    varint(static_cast<uint64_t>(value));  // negative values take ten bytes, as int64 fields do
  }
  void real(int field, double value) {
    tag(field, 1);
    char bytes[sizeof(value)];
    std::memcpy(bytes, &value, sizeof(value));
    bytes_.append(bytes, sizeof(value));
  }
  void bytes(int field, std::string_view value) {
    tag(field, 2);
    varint(value.size());
    bytes_.append(value);
  }
  void message(int field, const ProtoWriter& value) { bytes(field, value.bytes_); }
  std::string take() { return std::move(bytes_); }

 private:
  void tag(int field, int wire_type) { varint(static_cast<uint64_t>(field) << 3 | wire_type); }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }
  std::string bytes_;
};

// DeviceAssignmentProto of a program on one device.
ProtoWriter single_device(int64_t device) {
  ProtoWriter computation;
  computation.integer(1, device);  // replica_device_ids
  ProtoWriter assignment;
  assignment.integer(1, 1);  // replica_count
  assignment.integer(2, 1);  // computation_count
  assignment.message(3, computation);
  return assignment;
}

ProtoWriter option_override(const std::variant<bool, int64_t, double, std::string>& value) {
  ProtoWriter result;  // OptionOverrideProto
  if (auto* text = std::get_if<std::string>(&value)) result.bytes(1, *text);
  if (auto* flag = std::get_if<bool>(&value)) result.integer(2, *flag);
  if (auto* number = std::get_if<int64_t>(&value)) result.integer(3, *number);
  if (auto* number = std::get_if<double>(&value)) result.real(4, *number);
  return result;
}

PJRT_Executable* get_executable(const Plugin& plugin, PJRT_LoadedExecutable* loaded) {
  TORCH_TPU_PJRT_ARGS(PJRT_LoadedExecutable_GetExecutable, args);
  args.loaded_executable = loaded;
  TORCH_TPU_PJRT_CALL(plugin, PJRT_LoadedExecutable_GetExecutable, args, "Opening a compiled program");
  return args.executable;
}

size_t count_outputs(const Plugin& plugin, PJRT_Executable* executable) {
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_NumOutputs, args);
  args.executable = executable;
  TORCH_TPU_PJRT_CALL(plugin, PJRT_Executable_NumOutputs, args, "Counting the outputs of a program");
  return args.num_outputs;
}

void destroy(const Plugin& plugin, PJRT_LoadedExecutable* loaded, PJRT_Executable* executable) noexcept {
  if (executable != nullptr) {
    TORCH_TPU_PJRT_ARGS(PJRT_Executable_Destroy, args);
    args.executable = executable;
    plugin.discard(plugin.api()->PJRT_Executable_Destroy(&args));
  }
  if (loaded != nullptr) {
    TORCH_TPU_PJRT_ARGS(PJRT_LoadedExecutable_Destroy, args);
    args.executable = loaded;
    plugin.discard(plugin.api()->PJRT_LoadedExecutable_Destroy(&args));
  }
}

PJRT_ExecuteOptions execute_options() { return make_args<PJRT_ExecuteOptions, PJRT_ExecuteOptions_STRUCT_SIZE>(); }

}  // namespace

std::string CompileOptions::serialize() const {
  const bool one_device = num_replicas * num_partitions == 1;
  ProtoWriter build;         // ExecutableBuildOptionsProto
  build.integer(1, device);  // device_ordinal; absent would mean 0, not unset
  build.integer(4, num_replicas);
  build.integer(5, num_partitions);
  if (num_partitions > 1) build.integer(6, 1);  // use_spmd_partitioning
  if (one_device && device >= 0) build.message(9, single_device(device));

  ProtoWriter options;  // CompileOptionsProto
  options.message(3, build);
  if (one_device && device < 0) options.integer(4, 1);  // compile_portable_executable
  for (const auto& [name, value] : flags) {
    ProtoWriter entry;
    entry.bytes(1, name);
    entry.message(2, option_override(value));
    options.message(7, entry);  // env_option_overrides
  }
  return options.take();
}

std::string serialize(const Plugin& plugin, const PJRT_Executable* executable) {
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_Serialize, args);
  args.executable = executable;
  TORCH_TPU_PJRT_CALL(plugin, PJRT_Executable_Serialize, args, "Serialising a compiled program");
  struct Backing {
    PJRT_Executable_Serialize_Args& args;
    ~Backing() {
      if (args.serialized_executable_deleter) args.serialized_executable_deleter(args.serialized_executable);
    }
  } backing{args};
  return std::string(args.serialized_bytes, args.serialized_bytes_size);
}

std::string optimized_program(const Plugin& plugin, PJRT_Executable* executable) {
  auto program = make_args<PJRT_Program, PJRT_Program_STRUCT_SIZE>();
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_OptimizedProgram, args);
  args.executable = executable;
  args.program = &program;
  TORCH_TPU_PJRT_CALL(plugin, PJRT_Executable_OptimizedProgram, args, "Measuring an optimised program");
  std::string code(program.code_size, '\0');
  program.code = code.data();
  TORCH_TPU_PJRT_CALL(plugin, PJRT_Executable_OptimizedProgram, args, "Reading an optimised program");
  return code;
}

std::map<std::string, double> cost_analysis(const Plugin& plugin, PJRT_Executable* executable) {
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_GetCostAnalysis, args);
  args.executable = executable;
  TORCH_TPU_PJRT_CALL(plugin, PJRT_Executable_GetCostAnalysis, args, "Analysing the cost of a program");
  std::map<std::string, double> result;
  for (size_t i = 0; i < args.num_properties; ++i) {
    const PJRT_NamedValue& property = args.properties[i];
    std::string name(property.name, property.name_size);
    if (property.type == PJRT_NamedValue_kFloat) result[name] = property.float_value;
    if (property.type == PJRT_NamedValue_kInt64) result[name] = static_cast<double>(property.int64_value);
    if (property.type == PJRT_NamedValue_kBool) result[name] = property.bool_value;
  }
  return result;
}

MemoryStats memory_stats(const Plugin& plugin, PJRT_Executable* executable) {
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_GetCompiledMemoryStats, args);
  args.executable = executable;
  TORCH_TPU_PJRT_CALL(plugin, PJRT_Executable_GetCompiledMemoryStats, args, "Reading the memory needs of a program");
  return {args.generated_code_size_in_bytes, args.argument_size_in_bytes, args.output_size_in_bytes,
          args.alias_size_in_bytes,          args.temp_size_in_bytes,     args.peak_memory_in_bytes};
}

Executable::Executable(const Plugin* plugin, PJRT_LoadedExecutable* loaded)
    : plugin_(plugin), loaded_(loaded), executable_(nullptr), num_outputs_(0) {
  try {
    executable_ = get_executable(*plugin_, loaded_);
    num_outputs_ = count_outputs(*plugin_, executable_);
  } catch (...) {
    destroy(*plugin_, loaded_, executable_);
    throw;
  }
}

Executable::~Executable() { destroy(*plugin_, loaded_, executable_); }

void Executable::execute(PJRT_Buffer* const* args, size_t num_args, PJRT_Buffer** outputs, PJRT_Device* device,
                         const int64_t* keep, size_t num_keep, Event* done) const {
  PJRT_ExecuteOptions options = execute_options();
  options.non_donatable_input_indices = keep;
  options.num_non_donatable_input_indices = num_keep;
  PJRT_Event* event = nullptr;
  TORCH_TPU_PJRT_ARGS(PJRT_LoadedExecutable_Execute, call);
  call.executable = loaded_;
  call.options = &options;
  call.argument_lists = &args;
  call.num_devices = 1;
  call.num_args = num_args;
  call.output_lists = &outputs;
  call.execute_device = device;
  if (done != nullptr) call.device_complete_events = &event;
  plugin_->check(plugin_->api()->PJRT_LoadedExecutable_Execute(&call), "Running a program");
  if (done != nullptr) *done = Event(plugin_, event);
}

void Executable::execute_on_all(PJRT_Buffer* const* const* args, size_t num_devices, size_t num_args,
                                PJRT_Buffer** const* outputs, const int64_t* keep, size_t num_keep) const {
  PJRT_ExecuteOptions options = execute_options();
  options.non_donatable_input_indices = keep;
  options.num_non_donatable_input_indices = num_keep;
  TORCH_TPU_PJRT_ARGS(PJRT_LoadedExecutable_Execute, call);
  call.executable = loaded_;
  call.options = &options;
  call.argument_lists = args;
  call.num_devices = num_devices;
  call.num_args = num_args;
  call.output_lists = outputs;
  plugin_->check(plugin_->api()->PJRT_LoadedExecutable_Execute(&call), "Running a program on several devices");
}

std::string Executable::serialize() const { return pjrt::serialize(*plugin_, executable_); }
std::string Executable::optimized_program() const { return pjrt::optimized_program(*plugin_, executable_); }
std::map<std::string, double> Executable::cost_analysis() const { return pjrt::cost_analysis(*plugin_, executable_); }
MemoryStats Executable::memory_stats() const { return pjrt::memory_stats(*plugin_, executable_); }

std::string Executable::fingerprint() const {
  if (!plugin_->has(offsetof(PJRT_Api, PJRT_Executable_Fingerprint))) return "";
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_Fingerprint, args);
  args.executable = executable_;
  try {
    TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Executable_Fingerprint, args, "Reading the fingerprint of a program");
  } catch (const Error& error) {
    if (error.code() == PJRT_Error_Code_UNIMPLEMENTED) return "";
    throw;
  }
  return std::string(args.executable_fingerprint, args.executable_fingerprint_size);
}

}  // namespace torch_tpu::pjrt
