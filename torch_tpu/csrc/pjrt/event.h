#pragma once

#include <functional>

#include "plugin.h"

namespace torch_tpu::pjrt {

// Something that will have happened: a transfer, an execution, a buffer becoming ready. Move-only owner of a
// PJRT_Event.
class Event {
 public:
  Event() = default;
  Event(const Plugin* plugin, PJRT_Event* event) : plugin_(plugin), event_(event) {}
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();

  explicit operator bool() const { return event_ != nullptr; }
  bool ready() const;  // true for an empty event
  void wait() const;   // blocks; throws the error of the work, if it failed
  // Calls `callback` once, on any thread (possibly this one), when the work is done. The argument is the error text,
  // empty on success.
  void on_ready(std::function<void(std::string)> callback) const;

 private:
  const Plugin* plugin_ = nullptr;
  PJRT_Event* event_ = nullptr;
};

}  // namespace torch_tpu::pjrt
