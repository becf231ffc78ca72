#include "runtime/startup.h"

#include <fcntl.h>
#include <unistd.h>

#include <cctype>
#include <string>

namespace torch_tpu {
namespace {

constexpr const char* kLock = "/tmp/libtpu_lockfile";  // libtpu's own: a TPU serves one process

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// The digits after "pid " in libtpu's message, else the process that holds the lock; empty if neither is known.
std::string holder(const std::string& message) {
  const auto at = message.find("pid ");
  if (at != std::string::npos) {
    std::string digits;
    for (size_t i = at + 4; i < message.size() && std::isdigit(static_cast<unsigned char>(message[i])); ++i)
      digits += message[i];
    if (!digits.empty()) return digits;
  }
  const int file = ::open(kLock, O_RDONLY | O_CLOEXEC);
  if (file < 0) return "";
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  const bool held = ::fcntl(file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  ::close(file);
  return held && lock.l_pid > 0 ? std::to_string(lock.l_pid) : "";
}

// The plugin's message without the source locations that libtpu appends.
std::string first_lines(const std::string& message) {
  std::string text = message.substr(0, message.find("\n=== Source Location Trace"));
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  return text;
}

}  // namespace

pjrt::Error explain_startup(const pjrt::Error& error) {
  const std::string message = first_lines(error.what());
  if (contains(message, "TPU is already in use") || contains(message, "libtpu multi-process lockfile")) {
    const std::string pid = holder(message);
    return {error.code(), "The TPU of this machine is in use by another process" +
                              (pid.empty() ? "" : " (pid " + pid + ")") +
                              ": wait for it or end it. If there is no such process, remove " + kLock + "."};
  }
  if (contains(message, "No jellyfish device found") || contains(message, "No TPU devices found"))
    return {error.code(),
            "libtpu found no TPU on this machine: run on a machine with a TPU, or set TORCH_TPU_PLATFORM=cpu to use "
            "XLA's CPU "
            "backend. (libtpu said: " +
                message + ")"};
  return {error.code(), message};
}

}  // namespace torch_tpu
