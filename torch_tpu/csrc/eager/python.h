// The way from C++ to Python: only on a program miss. Everything here takes the GIL itself.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>

#include "eager/kernel.h"

namespace torch_tpu {
class Fusion;
}

namespace torch_tpu::python {

OperatorSpec operator_spec(const std::string& name);

// Describes the call to torch_tpu.programs.eager.compile_call and returns its program. Python errors pass through
// unchanged. `record`: without XLA, for a program that is to be a part of others. `exact`: for these sizes alone.
ProgramPtr compile_program(const std::string& name, const c10::FunctionSchema& schema,
                           const std::vector<ArgumentSpec>& specs, const Call& call, const c10::IValue* arguments,
                           int precision, bool record, bool exact);

// Compiles a program that has only been recorded.
void compile_plan(const Program& program);

// Compiles the parts of a fused program as one; null if the plugin refuses, after a warning.
std::unique_ptr<pjrt::Executable> compile_fusion(const Fusion& fusion);

// Calls `compile`(described arguments, precision) for a graph of operators.
ProgramPtr compile_graph(const pybind11::object& compile, const std::vector<ArgumentSpec>& specs, const Call& call,
                         const c10::IValue* arguments, int precision);

// Calls the Python function that `module`.composite(name) gives for an operator on the arguments on the stack.
void run_composite(const char* module, const std::string& name, const c10::FunctionSchema& schema,
                   torch::jit::Stack* stack);

// Runs `body` without the GIL, whether the thread has it or not: it may wait for a thread that needs it.
void without_gil(const std::function<void()>& body);

}  // namespace torch_tpu::python
