#include "event.h"

#include <memory>
#include <utility>

namespace torch_tpu::pjrt {
namespace {

struct Waiter {
  const Plugin* plugin;
  std::function<void(std::string)> callback;
};

void notify(PJRT_Error* error, void* user_arg) {
  std::unique_ptr<Waiter> waiter(static_cast<Waiter*>(user_arg));
  std::string text;
  try {
    waiter->plugin->check(error, "Running on the device");
  } catch (const Error& failure) {
    text = failure.what();
  }
  waiter->callback(std::move(text));
}

}  // namespace

Event::Event(Event&& other) noexcept : plugin_(other.plugin_), event_(std::exchange(other.event_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(plugin_, other.plugin_);
  std::swap(event_, other.event_);
  return *this;
}

Event::~Event() {
  if (event_ == nullptr) return;
  TORCH_TPU_PJRT_ARGS(PJRT_Event_Destroy, args);
  args.event = event_;
  plugin_->discard(plugin_->api()->PJRT_Event_Destroy(&args));
}

bool Event::ready() const {
  if (event_ == nullptr) return true;
  TORCH_TPU_PJRT_ARGS(PJRT_Event_IsReady, args);
  args.event = event_;
  plugin_->check(plugin_->api()->PJRT_Event_IsReady(&args), "Asking whether the device has finished");
  return args.is_ready;
}

void Event::wait() const {
  if (event_ == nullptr) return;
  TORCH_TPU_PJRT_ARGS(PJRT_Event_Await, args);
  args.event = event_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Event_Await, args, "Running on the device");
}

void Event::on_ready(std::function<void(std::string)> callback) const {
  if (event_ == nullptr) return callback("");
  auto waiter = std::make_unique<Waiter>(Waiter{plugin_, std::move(callback)});
  TORCH_TPU_PJRT_ARGS(PJRT_Event_OnReady, args);
  args.event = event_;
  args.callback = notify;
  args.user_arg = waiter.get();
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Event_OnReady, args, "Waiting for the device");
  waiter.release();  // notify() owns it now, and may have freed it already
}

}  // namespace torch_tpu::pjrt
