#include "plugin.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <climits>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

namespace torch_tpu::pjrt {
namespace {

using GetPjrtApi = const PJRT_Api* (*)();

std::string real_path(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0)
    throw Error(
        PJRT_Error_Code_NOT_FOUND,
        "The PJRT plugin " + path + " does not exist: install the package that contains it, or correct the path.");
  if (!S_ISREG(info.st_mode))
    throw Error(PJRT_Error_Code_INVALID_ARGUMENT,
                "The PJRT plugin path " + path + " is not a file: give the path of the plugin's shared library.");
  char resolved[PATH_MAX];
  return realpath(path.c_str(), resolved) ? resolved : path;
}

GetPjrtApi find_entry(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw Error(PJRT_Error_Code_INVALID_ARGUMENT,
                "The PJRT plugin " + path + " cannot be loaded as a shared library (" +
                    (reason ? reason : "no reason given") +
                    "): install a plugin built for this machine, or correct the path.");
  }
  auto entry = reinterpret_cast<GetPjrtApi>(dlsym(library, "GetPjrtApi"));
  if (entry == nullptr) {
    dlclose(library);
    throw Error(PJRT_Error_Code_INVALID_ARGUMENT,
                "The shared library " + path +
                    " has no function GetPjrtApi, so it is not a PJRT plugin: give the path of "
                    "a PJRT plugin such as libtpu.so.");
  }
  return entry;
}

std::string version_text(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }

// The members that are called without a check because nothing works without them.
struct Required {
  size_t offset;
  const char* name;
};
#define REQUIRED(Name) {offsetof(PJRT_Api, Name), #Name}
constexpr Required kRequired[] = {
    REQUIRED(PJRT_Error_Destroy),
    REQUIRED(PJRT_Error_Message),
    REQUIRED(PJRT_Error_GetCode),
    REQUIRED(PJRT_Event_Destroy),
    REQUIRED(PJRT_Event_IsReady),
    REQUIRED(PJRT_Client_Destroy),
    REQUIRED(PJRT_Buffer_Destroy),
    REQUIRED(PJRT_LoadedExecutable_Destroy),
    REQUIRED(PJRT_LoadedExecutable_Execute),
    REQUIRED(PJRT_Executable_Destroy),
};
#undef REQUIRED

const PJRT_Api* checked_api(const std::string& path, GetPjrtApi entry) {
  const PJRT_Api* api = entry();
  if (api == nullptr)
    throw Error(
        PJRT_Error_Code_FAILED_PRECONDITION,
        "The PJRT plugin " + path + " gave no function table (GetPjrtApi returned null): install another build of it.");
  const PJRT_Api_Version& version = api->pjrt_api_version;
  if (version.major_version != PJRT_API_MAJOR)
    throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
                "The PJRT plugin " + path + " speaks PJRT C API " +
                    version_text(version.major_version, version.minor_version) + ", and torch_tpu was built for " +
                    version_text(PJRT_API_MAJOR, PJRT_API_MINOR) + ": install a plugin with API major version " +
                    std::to_string(PJRT_API_MAJOR) + ", or a torch_tpu built for this plugin.");
  return api;
}

std::string render(const PJRT_NamedValue& value) {
  switch (value.type) {
    case PJRT_NamedValue_kString: return std::string(value.string_value, value.value_size);
    case PJRT_NamedValue_kInt64: return std::to_string(value.int64_value);
    case PJRT_NamedValue_kFloat: return std::to_string(value.float_value);
    case PJRT_NamedValue_kBool: return value.bool_value ? "true" : "false";
    case PJRT_NamedValue_kInt64List: {
      std::string text;
      for (size_t i = 0; i < value.value_size; ++i) text += (i ? "." : "") + std::to_string(value.int64_array_value[i]);
      return text;
    }
  }
  return "";
}

}  // namespace

Plugin& Plugin::load(const std::string& path) {
  static std::mutex mutex;
  // Leaked on purpose: plugins own threads that outlive static destruction.
  static auto& loaded = *new std::map<std::string, std::unique_ptr<Plugin>>;
  const std::string resolved = real_path(path);
  std::lock_guard<std::mutex> lock(mutex);
  auto found = loaded.find(resolved);
  if (found != loaded.end()) return *found->second;

  std::unique_ptr<Plugin> plugin(new Plugin(resolved, checked_api(resolved, find_entry(resolved))));
  for (const Required& member : kRequired)
    if (!plugin->has(member.offset))
      throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
                  "The PJRT plugin " + resolved + " has no " + member.name + ": install a complete build of it.");
  TORCH_TPU_PJRT_ARGS(PJRT_Plugin_Initialize, args);
  TORCH_TPU_PJRT_CALL(*plugin, PJRT_Plugin_Initialize, args, ("Initialising the PJRT plugin " + resolved).c_str());
  return *loaded.emplace(resolved, std::move(plugin)).first->second;
}

std::vector<std::pair<std::string, std::string>> Plugin::attributes() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Plugin_Attributes, args);
  TORCH_TPU_PJRT_CALL(*this, PJRT_Plugin_Attributes, args, "Reading the plugin's attributes");
  std::vector<std::pair<std::string, std::string>> result;
  for (size_t i = 0; i < args.num_attributes; ++i) {
    const PJRT_NamedValue& value = args.attributes[i];
    result.emplace_back(std::string(value.name, value.name_size), render(value));
  }
  return result;
}

void Plugin::check(PJRT_Error* error, const char* doing) const {
  if (__builtin_expect(error == nullptr, 1)) return;
  TORCH_TPU_PJRT_ARGS(PJRT_Error_GetCode, code);
  code.error = error;
  PJRT_Error* nested = api_->PJRT_Error_GetCode(&code);
  if (nested != nullptr) {
    discard(nested);
    code.code = PJRT_Error_Code_UNKNOWN;
  }
  TORCH_TPU_PJRT_ARGS(PJRT_Error_Message, message);
  message.error = error;
  api_->PJRT_Error_Message(&message);
  std::string text = std::string(doing) + ": " + std::string(message.message, message.message_size);
  discard(error);
  throw Error(code.code, text);
}

void Plugin::discard(PJRT_Error* error) const noexcept {
  if (error == nullptr) return;
  TORCH_TPU_PJRT_ARGS(PJRT_Error_Destroy, args);
  args.error = error;
  api_->PJRT_Error_Destroy(&args);
}

}  // namespace torch_tpu::pjrt
