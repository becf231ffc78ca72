#include "compile/graph.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "eager/kernel.h"
#include "eager/launch.h"
#include "eager/python.h"
#include "runtime/runtime.h"

namespace py = pybind11;

namespace torch_tpu {
namespace {

c10::IValue value_of(PyObject* item) {
  if (THPVariable_Check(item)) return THPVariable_Unpack(item);
  if (item == Py_None) return {};
  if (PyBool_Check(item)) return item == Py_True;
  if (PyLong_Check(item)) return static_cast<int64_t>(PyLong_AsLongLong(item));
  if (PyFloat_Check(item)) return PyFloat_AsDouble(item);
  throw py::type_error("A compiled graph takes tensors, ints, floats and None, got " +
                       std::string(Py_TYPE(item)->tp_name) + ".");
}

py::object object_of(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined())
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  if (value.isInt()) return py::int_(value.toInt());
  return py::none();
}

ArgumentSpec spec_of(const c10::IValue& value, bool run_time_integers) {
  ArgumentSpec spec;
  if (value.isTensor())
    spec.kind = ArgumentSpec::kTensor;
  else if (value.isDouble())
    spec.kind = ArgumentSpec::kFloat;
  else if (value.isInt() && run_time_integers)
    spec.kind = ArgumentSpec::kScalar;
  return spec;
}

// Gives memory that nobody has written its zeros: a graph is compiled once for what it is called with from then on.
void materialize(const at::Tensor& tensor) {
  if (tensor.device().type() != kTpu || !tensor.has_storage()) return;
  const Cell* cell = Cell::of(tensor.storage().unsafeGetStorageImpl());
  if (C10_LIKELY(!cell->empty()) || cell->bytes() == 0) return;
  at::AutoDispatchBelowADInplaceOrView below;
  tensor.fill_(0);
}

}  // namespace

ProgramPtr CompiledGraph::program_for(Call& call, const std::vector<c10::IValue>& values,
                                      const std::vector<ArgumentSpec>& specs) {
  const auto precision = static_cast<uint64_t>(current_precision());
  call.key.push_back(uses_precision_.load(std::memory_order_relaxed) ? precision + 1 : 0);
  call.read(specs, values.data());
  if (ProgramPtr program = programs_.find(call.key, hash_key(call.key))) return program;
  Runtime::get();
  auto program = python::compile_graph(compile_, specs, call, values.data(), static_cast<int>(precision));
  if (program->uses_precision) {
    uses_precision_ = true;
    call.key[0] = precision + 1;
  }
  programs_.insert(call.key, hash_key(call.key), program);
  return program;
}

py::list CompiledGraph::operator()(py::list inputs) {
  HANDLE_TH_ERRORS
  std::vector<c10::IValue> values;
  std::vector<ArgumentSpec> specs;
  values.reserve(inputs.size());
  specs.reserve(inputs.size());
  for (py::handle item : inputs) {
    values.push_back(value_of(item.ptr()));
    specs.push_back(spec_of(values.back(), run_time_integers_));
  }
  inputs.attr("clear")();
  Results results;
  {
    py::gil_scoped_release unlocked;
    for (const auto& value : values)
      if (value.isTensor()) materialize(value.toTensor());
    Call call;
    launch(*program_for(call, values, specs), call, &results);
    values.clear();
  }
  py::list out(results.size());
  for (size_t i = 0; i < results.size(); ++i) out[i] = object_of(results[i]);
  return out;
  END_HANDLE_TH_ERRORS_PYBIND
}

py::list CompiledGraph::run_on_all(py::list inputs) {
  HANDLE_TH_ERRORS
  const size_t count = inputs.size();
  std::vector<std::vector<c10::IValue>> values(count);
  std::vector<ArgumentSpec> specs;
  for (size_t i = 0; i < count; ++i) {
    for (py::handle item : inputs[i]) {
      values[i].push_back(value_of(item.ptr()));
      if (i == 0) specs.push_back(spec_of(values[0].back(), run_time_integers_));
    }
    if (values[i].size() != specs.size())
      throw py::value_error("Device " + std::to_string(i) + " gets " + std::to_string(values[i].size()) +
                            " inputs and device 0 gets " + std::to_string(specs.size()) + ".");
  }
  std::vector<Results> results;
  {
    py::gil_scoped_release unlocked;
    std::vector<Call> calls(count);
    ProgramPtr program;
    for (size_t i = 0; i < count; ++i) {
      for (const auto& value : values[i])
        if (value.isTensor()) materialize(value.toTensor());
      if (i == 0) {
        program = program_for(calls[0], values[0], specs);
      } else {
        calls[i].key.push_back(calls[0].key[0]);
        calls[i].read(specs, values[i].data());
      }
      TORCH_CHECK_VALUE(calls[i].device == static_cast<int>(i), "The inputs of device ", i,
                        " are on tpu:", static_cast<int>(calls[i].device), "; move them to tpu:", i, ".");
      TORCH_CHECK_VALUE(calls[i].key == calls[0].key, "The inputs of tpu:", i,
                        " have other dtypes, sizes, strides or storages than those of tpu:0. A clone() of each gives "
                        "them storages of their own.");
    }
    launch_on_all(*program, calls, results);
    values.clear();
  }
  py::list out(count);
  for (size_t i = 0; i < count; ++i) {
    py::list mine(results[i].size());
    for (size_t k = 0; k < results[i].size(); ++k) mine[k] = object_of(results[i][k]);
    out[i] = mine;
  }
  return out;
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace torch_tpu
