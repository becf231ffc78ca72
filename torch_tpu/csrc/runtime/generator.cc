#include "runtime/generator.h"

#include <ATen/Functions.h>
#include <ATen/Utils.h>

#include <mutex>

#include "runtime/runtime.h"

namespace torch_tpu {

Generator::Generator(c10::DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(kTpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

std::pair<uint64_t, uint64_t> Generator::draw(uint64_t blocks) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto first = offset_;
  offset_ += blocks;
  return {seed_, first};
}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void Generator::set_offset(uint64_t offset) { offset_ = offset; }

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t), "RNG state of a tpu generator must have 16 bytes, got ",
              state.numel(), ".");
  uint64_t words[2];
  memcpy(words, state.data(), sizeof(words));
  seed_ = words[0];
  offset_ = words[1];
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  auto state = at::empty({2 * sizeof(uint64_t)}, at::TensorOptions(at::kByte).device(at::kCPU));
  const uint64_t words[2] = {seed_, offset_};
  memcpy(state.mutable_data_ptr(), words, sizeof(words));
  return state.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::mutex mutex;
  static auto* generators = new std::vector<at::Generator>;
  if (index < 0) index = Runtime::current_device();
  const int count = Runtime::device_count();
  TORCH_CHECK(index < count, "invalid device ordinal: tpu:", static_cast<int>(index), " of ", count, " tpu device(s).");
  std::lock_guard<std::mutex> lock(mutex);
  if (generators->empty()) generators->reserve(count);  // references stay valid
  while (generators->size() <= static_cast<size_t>(index))
    generators->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(generators->size())));
  return (*generators)[index];
}

}  // namespace torch_tpu
