// A compiled function: one graph of operators, and its programs by the geometry of the inputs. What Kernel is to an
// operator, CompiledGraph is to the code that torch.compile hands over.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "eager/call.h"
#include "eager/program.h"

namespace torch_tpu {

class CompiledGraph {
 public:
  // `compile(arguments, precision)` gives the program for inputs described as python::describe does.
  // Integers are part of a program, unless `run_time_integers`: then they are operands.
  CompiledGraph(std::string name, pybind11::object compile, bool run_time_integers)
      : name_(std::move(name)), compile_(std::move(compile)), run_time_integers_(run_time_integers) {}

  // Takes tensors, ints, floats and None out of `inputs`, which is empty afterwards: inputs that nobody else holds die
  // with the call. Returns the graph's outputs.
  pybind11::list operator()(pybind11::list inputs);

  // The same for a program that runs on several devices together: a list of inputs for each, of one geometry.
  pybind11::list run_on_all(pybind11::list inputs);

  const std::string& name() const { return name_; }

 private:
  ProgramPtr program_for(Call& call, const std::vector<c10::IValue>& values, const std::vector<ArgumentSpec>& specs);

  const std::string name_;
  const pybind11::object compile_;
  const bool run_time_integers_;
  ProgramTable programs_;
  std::atomic<bool> uses_precision_{false};
};

}  // namespace torch_tpu
