// A PJRT C API plugin: the shared library, its function table, and the one place where its errors become exceptions.
// Nothing in this folder includes a torch header.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pjrt_c_api.h"

namespace torch_tpu::pjrt {

// An error reported by a plugin, or found while loading one. `what()` is a whole sentence.
class Error : public std::runtime_error {
 public:
  Error(PJRT_Error_Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  PJRT_Error_Code code() const { return code_; }
  bool out_of_memory() const { return code_ == PJRT_Error_Code_RESOURCE_EXHAUSTED; }

 private:
  PJRT_Error_Code code_;
};

// A loaded plugin. A plugin cannot be unloaded safely (it owns threads), so it lives until the process ends.
class Plugin {
 public:
  // Loads the library at `path` once per process, checks the API major version and initialises it.
  // Throws Error with a sentence that names the path when the file is missing, is not a plugin, or has another major
  // version.
  static Plugin& load(const std::string& path);

  const PJRT_Api* api() const { return api_; }
  const std::string& path() const { return path_; }
  int api_major() const { return api_->pjrt_api_version.major_version; }
  int api_minor() const { return api_->pjrt_api_version.minor_version; }
  // Plugin attributes ("xla_version", "stablehlo_current_version", ...) rendered as text.
  std::vector<std::pair<std::string, std::string>> attributes() const;

  // Throws Error("<doing>: <plugin's message>") if `error` is set; frees it.
  void check(PJRT_Error* error, const char* doing) const;

  // Frees `error` without raising it: for destructors.
  void discard(PJRT_Error* error) const noexcept;

  // True if the plugin's table is long enough to hold the member at `offset` and the pointer is set.
  bool has(size_t offset) const {
    return offset + sizeof(void*) <= api_->struct_size &&
           *reinterpret_cast<void* const*>(reinterpret_cast<const char*>(api_) + offset) != nullptr;
  }

 private:
  Plugin(std::string path, const PJRT_Api* api) : path_(std::move(path)), api_(api) {}
  std::string path_;
  const PJRT_Api* api_;
};

// A PJRT argument struct, zeroed and with its size set.
template <typename Args, size_t kSize>
Args make_args() {
  Args args{};
  args.struct_size = kSize;
  return args;
}
#define TORCH_TPU_PJRT_ARGS(Name, var) auto var = ::torch_tpu::pjrt::make_args<Name##_Args, Name##_Args_STRUCT_SIZE>()
// Calls api()->Name after checking that this plugin has it.
#define TORCH_TPU_PJRT_CALL(plugin, Name, args, doing)                                                               \
  do {                                                                                                               \
    if (!(plugin).has(offsetof(PJRT_Api, Name)))                                                                     \
      throw ::torch_tpu::pjrt::Error(PJRT_Error_Code_UNIMPLEMENTED,                                                  \
                                     std::string(doing) + ": the plugin " + (plugin).path() + " has no " #Name "."); \
    (plugin).check((plugin).api()->Name(&(args)), doing);                                                            \
  } while (0)

}  // namespace torch_tpu::pjrt
