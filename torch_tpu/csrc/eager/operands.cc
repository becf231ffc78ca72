#include "eager/operands.h"

#include "runtime/generator.h"

namespace torch_tpu {

ArrayPtr packed_numbers(const std::vector<c10::Scalar>& values, pjrt::DType dtype, DeviceState& device) {
  const auto n = static_cast<int64_t>(values.size());
  const auto* type = ArrayType::get(dtype, {n});
  if (dtype == PJRT_Buffer_Type_C128) {
    std::vector<c10::complex<double>> data;
    for (const auto& v : values) data.push_back(v.toComplexDouble());
    return device.from_host(data.data(), type);
  }
  if (dtype == PJRT_Buffer_Type_S64) {
    std::vector<int64_t> data;
    for (const auto& v : values) data.push_back(v.toLong());
    return device.from_host(data.data(), type);
  }
  TORCH_INTERNAL_ASSERT(dtype == PJRT_Buffer_Type_F64);
  std::vector<double> data;
  for (const auto& v : values) data.push_back(v.toDouble());
  return device.from_host(data.data(), type);
}

ArrayPtr lengthened(const ArrayPtr& array, const ArrayType* type, DeviceState& device) {
  if (array->type() == type) return array;
  if (auto known = array->longer(type)) return known;
  std::vector<char> host(std::max(type->bytes, array->type()->bytes));
  if (!array->buffer().read_host_memory(host.data(), array->type()->bytes))
    array->buffer().to_host(host.data(), array->type()->bytes).wait();
  auto made = device.from_host(host.data(), type);
  array->set_longer(made);
  return made;
}

const ArrayType* room_for(const Program& program, int32_t slot) {
  for (const auto& [of, type] : program.rooms)
    if (of == slot) return type;
  return nullptr;
}

ScalarBits draw_random(const Program& program, const Call& call, const DeviceState& device) {
  const auto& chosen = call.generator && call.generator->defined() ? *call.generator : default_generator(device.index);
  TORCH_CHECK(chosen.device().type() == kTpu, "Expected a 'tpu' device type for generator but found '",
              chosen.device().type(), "'");
  const auto [seed, offset] = at::check_generator<Generator>(chosen)->draw(program.rng_blocks);
  return {seed, offset};
}

ScalarBits number_of(const Operand& operand, const Program& program, const Call& call, const DeviceState& device) {
  switch (operand.kind) {
    case OperandKind::kOffset: return encode(call.tensors[operand.index].tensor->storage_offset(), operand.dtype);
    case OperandKind::kScalar: return encode(call.numbers[operand.index], operand.dtype);
    case OperandKind::kSize: return encode(static_cast<int64_t>(operand.index), operand.dtype);
    case OperandKind::kRng: return draw_random(program, call, device);
    default: return encode(static_cast<int64_t>(program.fault_code), operand.dtype);
  }
}

ArrayPtr number_array(const ScalarBits& bits, const Operand& operand, DeviceState& device) {
  if (operand.kind == OperandKind::kRng) return device.from_host(&bits, ArrayType::get(PJRT_Buffer_Type_U64, {2}));
  return device.scalars.get(bits, operand.dtype, device);
}

}  // namespace torch_tpu
