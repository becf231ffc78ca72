#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "buffer.h"

namespace torch_tpu::pjrt {

// What CompileOptionsProto carries for us, encoded by hand (xla/pjrt/proto/compile_options.proto).
struct CompileOptions {
  int64_t num_replicas = 1;
  int64_t num_partitions = 1;
  // Device id to bind the program to; -1 compiles a portable program whose device is chosen by `execute`. A program for
  // several replicas or partitions takes the plugin's default assignment.
  int64_t device = -1;
  // XLA flags for this program only (env_option_overrides), by flag name without dashes.
  std::map<std::string, std::variant<bool, int64_t, double, std::string>> flags;

  std::string serialize() const;
};

struct MemoryStats {
  int64_t code, arguments, outputs, aliased, temporaries, peak;  // bytes
};

// What a plugin tells about a compiled program, loaded on a device or not.
std::string serialize(const Plugin& plugin, const PJRT_Executable* executable);
std::string optimized_program(const Plugin& plugin, PJRT_Executable* executable);
std::map<std::string, double> cost_analysis(const Plugin& plugin, PJRT_Executable* executable);
MemoryStats memory_stats(const Plugin& plugin, PJRT_Executable* executable);

// A compiled program. Does not own a device: with a portable program `execute` names one.
class Executable {
 public:
  Executable(const Plugin* plugin, PJRT_LoadedExecutable* loaded);
  ~Executable();
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  size_t num_outputs() const { return num_outputs_; }

  // Enqueues the program on one device. `outputs` has room for num_outputs() handles, which the caller then owns.
  // `keep` lists the arguments that the program would donate but the caller still needs. `device` may be null when the
  // program is bound to a device. If `done` is given it receives the completion event.
  void execute(PJRT_Buffer* const* args, size_t num_args, PJRT_Buffer** outputs, PJRT_Device* device,
               const int64_t* keep = nullptr, size_t num_keep = 0, Event* done = nullptr) const;

  // Enqueues a program of several replicas or partitions on all its devices: `args[i]` and `outputs[i]` belong to
  // device i. `keep` as in `execute`, for all of them.
  void execute_on_all(PJRT_Buffer* const* const* args, size_t num_devices, size_t num_args,
                      PJRT_Buffer** const* outputs, const int64_t* keep = nullptr, size_t num_keep = 0) const;

  std::string serialize() const;
  std::string fingerprint() const;        // empty if the plugin has none
  std::string optimized_program() const;  // the plugin's optimised module ("hlo_with_config" bytes or text)
  std::map<std::string, double> cost_analysis() const;
  MemoryStats memory_stats() const;
  PJRT_LoadedExecutable* get() const { return loaded_; }

 private:
  const Plugin* plugin_;
  PJRT_LoadedExecutable* loaded_;
  PJRT_Executable* executable_;
  size_t num_outputs_;
};

}  // namespace torch_tpu::pjrt
