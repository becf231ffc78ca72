// Random numbers are a counter: a generator is (seed, offset), and both are operands of the programs that draw.
#pragma once

#include <ATen/core/Generator.h>

namespace torch_tpu {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }
  // Takes `blocks` 128-bit blocks: returns (seed, offset of the first).
  std::pair<uint64_t, uint64_t> draw(uint64_t blocks);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  // The state is 16 bytes: seed and offset, little-endian.
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  Generator* clone_impl() const override;
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

// The generator that a device uses by default; made on first use, without initialising the device.
const at::Generator& default_generator(c10::DeviceIndex index);

}  // namespace torch_tpu
