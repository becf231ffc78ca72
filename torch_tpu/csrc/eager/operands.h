// Operands of a program that come from the call's numbers and from the device's state.
#pragma once

#include "eager/call.h"
#include "runtime/runtime.h"

namespace torch_tpu {

// A list of numbers as one array.
ArrayPtr packed_numbers(const std::vector<c10::Scalar>& values, pjrt::DType dtype, DeviceState& device);
// Gives a cell's array another type, with the elements that both have at the beginning.
void lengthen(Cell& cell, const ArrayType* type, DeviceState& device);
// Gives the arrays that a program for changing sizes reads the length of its bounds, for good.
void make_room(const Program& program, const Call& call, DeviceState& device);
// Seed and offset of the call's generator, which moves on.
ScalarBits draw_random(const Program& program, const Call& call, const DeviceState& device);
// The value of an operand that is a number.
ScalarBits number_of(const Operand& operand, const Program& program, const Call& call, const DeviceState& device);
// That as an array.
ArrayPtr number_array(const ScalarBits& bits, const Operand& operand, DeviceState& device);

}  // namespace torch_tpu
