// Operands of a program that come from the call's numbers and from the device's state.
#pragma once

#include "eager/call.h"
#include "runtime/runtime.h"

namespace torch_tpu {

// A list of numbers as one array.
ArrayPtr packed_numbers(const std::vector<c10::Scalar>& values, pjrt::DType dtype, DeviceState& device);
// An array's elements as another type, which is longer or shorter; by way of the host, once for each array.
ArrayPtr lengthened(const ArrayPtr& array, const ArrayType* type, DeviceState& device);
// The type that a program for changing sizes takes the array of a slot as, or null: as it is.
const ArrayType* room_for(const Program& program, int32_t slot);
// Seed and offset of the call's generator, which moves on.
ScalarBits draw_random(const Program& program, const Call& call, const DeviceState& device);
// The value of an operand that is a number.
ScalarBits number_of(const Operand& operand, const Program& program, const Call& call, const DeviceState& device);
// That as an array.
ArrayPtr number_array(const ScalarBits& bits, const Operand& operand, DeviceState& device);

}  // namespace torch_tpu
