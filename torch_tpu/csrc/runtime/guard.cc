// c10's device guard: current device, streams and events. A device has one compute stream, in program order.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <condition_variable>
#include <memory>

#include "runtime/dtypes.h"
#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

using Clock = std::chrono::steady_clock;

// A point of the stream: done when all work enqueued before it is. The time is taken when the last of it finishes.
class StreamEvent {
 public:
  void record(DeviceState& device) {
    device.flush();
    state_ = std::make_shared<State>();
    auto events = device.outstanding.snapshot();
    state_->waiting = static_cast<int>(events.size()) + 1;
    for (auto& event : events) event->on_ready([state = state_](const std::string& error) { state->arrive(error); });
    state_->arrive({});
  }
  bool query() const { return !state_ || state_->done(); }
  void wait() const {
    if (!state_) return;
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->ready.wait(lock, [&] { return state_->waiting == 0; });
    TORCH_CHECK(state_->error.empty(), state_->error);
  }
  double milliseconds_since(const StreamEvent& start) const {
    TORCH_CHECK(state_ && start.state_, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(query() && start.query(), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(state_->time - start.state_->time).count();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable ready;
    int waiting = 0;
    Clock::time_point time;
    std::string error;
    bool done() {
      std::lock_guard<std::mutex> lock(mutex);
      return waiting == 0;
    }
    void arrive(const std::string& message) {
      std::lock_guard<std::mutex> lock(mutex);
      if (error.empty()) error = message;
      if (--waiting) return;
      time = Clock::now();
      ready.notify_all();
    }
  };
  std::shared_ptr<State> state_;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kTpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kTpu, Runtime::exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kTpu, Runtime::current_device()}; }
  void setDevice(c10::Device device) const override { Runtime::exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    try {
      Runtime::exchange_device(device.index());
    } catch (const std::exception&) {  // unchecked by contract: an unknown device leaves the current one
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(Runtime::device_count());
  }

#if __has_include(<c10/core/DeviceCapability.h>)  // torch 2.12 and newer
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits = 0;
#define SET_BIT(_, name)                                                                                    \
  capability.capability_data.capability_bits |= static_cast<uint64_t>(has_pjrt_type(c10::ScalarType::name)) \
                                                << c10::kIndex_##name;
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(SET_BIT)
#undef SET_BIT
    return capability;
  }
#endif

  c10::Stream getStream(c10::Device device) const override { return getDefaultStream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    if (device.index() < 0) device = getDevice();
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getDefaultStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getDefaultStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getDefaultStream(stream.device()); }
  bool queryStream(const c10::Stream& stream) const override {
    if (!Runtime::initialized()) return true;
    auto& device = Runtime::get().device(stream.device_index());
    device.flush();
    return device.outstanding.idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronizeDevice(stream.device_index()); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    if (Runtime::initialized()) Runtime::get().device(index).synchronize();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new StreamEvent;
    static_cast<StreamEvent*>(*event)->record(Runtime::get().device(stream.device_index()));
  }
  void block(void*, const c10::Stream&) const override {}  // one stream: later work is after the event already
  bool queryEvent(void* event) const override { return !event || static_cast<StreamEvent*>(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<StreamEvent*>(event)->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<StreamEvent*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time.");
    return static_cast<StreamEvent*>(end)->milliseconds_since(*static_cast<StreamEvent*>(start));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace torch_tpu
