// The way from C++ to Python: only on a program miss. Everything here takes the GIL itself.
#pragma once

#include <pybind11/pybind11.h>

#include "eager/kernel.h"

namespace torch_tpu::python {

OperatorSpec operator_spec(const std::string& name);

// Describes the call to torch_tpu.programs.eager.compile_call and returns its program. Python errors pass through
// unchanged.
ProgramPtr compile_program(const std::string& name, const c10::FunctionSchema& schema,
                           const std::vector<ArgumentSpec>& specs, const Call& call, const c10::IValue* arguments,
                           int precision);

// Calls `compile`(described arguments, precision) for a graph of operators.
ProgramPtr compile_graph(const pybind11::object& compile, const std::vector<ArgumentSpec>& specs, const Call& call,
                         const c10::IValue* arguments, int precision);

// Calls the Python function that `module`.composite(name) gives for an operator on the arguments on the stack.
void run_composite(const char* module, const std::string& name, const c10::FunctionSchema& schema,
                   torch::jit::Stack* stack);

}  // namespace torch_tpu::python
