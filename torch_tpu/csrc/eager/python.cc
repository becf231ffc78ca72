#include "eager/python.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <unordered_map>

#include "eager/fuse.h"
#include "runtime/dtypes.h"

namespace py = pybind11;

namespace torch_tpu::python {
namespace {

// While Dynamo runs a compiled function it would compile the Python code here, too.
class OutsideOfDynamo {
 public:
  OutsideOfDynamo() {
    auto modules = py::reinterpret_borrow<py::dict>(PyImport_GetModuleDict());
    if (!modules.contains("torch._C._dynamo.eval_frame")) return;
    set_ = modules["torch._C._dynamo.eval_frame"].attr("set_eval_frame");
    previous_ = set_(py::none());
  }
  ~OutsideOfDynamo() {
    if (!set_) return;
    py::error_scope kept;
    set_(previous_);
  }

 private:
  py::object set_, previous_;
};

// Runs `body` with the GIL; a Python exception leaves as the C++ exception that PyTorch turns back into itself.
template <typename Body>
auto with_python(Body body) {
  py::gil_scoped_acquire gil;
  OutsideOfDynamo outside;
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error persisted;
    persisted.persist();
    throw persisted;
  }
}

py::tuple int_tuple(c10::IntArrayRef values) {
  py::tuple out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = values[i];
  return out;
}

py::object number(const c10::Scalar& value) {
  if (value.isBoolean()) return py::bool_(value.toBool());
  if (value.isComplex()) {
    const auto z = value.toComplexDouble();
    return py::reinterpret_steal<py::object>(PyComplex_FromDoubles(z.real(), z.imag()));
  }
  if (value.isFloatingPoint()) return py::float_(value.toDouble());
  return value.isUnsigned() ? py::object(py::int_(value.toUInt64())) : py::object(py::int_(value.toLong()));
}

py::object plain(const c10::IValue& value) {
  if (value.isNone() || value.isGenerator()) return py::none();
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isComplexDouble()) return number(value.toScalar());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isDevice()) return py::make_tuple("device", value.toDevice().str());
  if (value.isSymInt()) return py::int_(value.toSymInt().guard_int(__FILE__, __LINE__));
  py::list out;
  for (const auto& item : value.toList()) out.append(plain(c10::IValue(item)));
  return out;
}

// Walks the arguments in the order in which Call::read did and describes each.
class Describer {
 public:
  explicit Describer(const Call& call) : call_(call) {}

  py::object describe(const c10::IValue& value, const ArgumentSpec& spec) {
    switch (spec.kind) {
      case ArgumentSpec::kTensor: return tensor(value);
      case ArgumentSpec::kTensors: {
        if (value.isNone()) return py::none();
        py::list out;
        for (const auto& item : value.toListRef()) out.append(tensor(item));
        return out;
      }
      case ArgumentSpec::kScalar:
      case ArgumentSpec::kFloat: {
        if (numbers_ < call_.numbers.size() && is_operand(value, spec)) {
          const auto index = numbers_++;
          return py::make_tuple("number", index, number(call_.numbers[index]));
        }
        return plain(value);
      }
      case ArgumentSpec::kScalars: {
        if (spec.is_static || value.isNone()) return plain(value);
        py::list values;
        for (const auto& v : call_.number_lists[lists_]) values.append(number(v));
        return py::make_tuple("numbers", lists_++, values);
      }
      case ArgumentSpec::kGenerator: return py::none();
      case ArgumentSpec::kOther: return value.isList() && !value.isIntList() ? other_list(value) : plain(value);
    }
    return py::none();
  }

 private:
  static bool is_operand(const c10::IValue& value, const ArgumentSpec& spec) {
    return !value.isNone() && !spec.is_static && !(spec.default_value && same_number(*spec.default_value, value));
  }

  py::object other_list(const c10::IValue& value) {
    py::list out;
    for (const auto& item : value.toListRef()) out.append(item.isTensor() ? tensor(item) : plain(item));
    return out;
  }

  py::object tensor(const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return py::none();
    const auto* impl = value.toTensor().unsafeGetTensorImpl();
    const int dtype = static_cast<int>(impl->dtype().toScalarType());
    if (impl->device_type() != c10::DeviceType::PrivateUse1) {
      const auto index = numbers_++;
      return py::make_tuple("host", index, dtype, impl->is_wrapped_number(), number(call_.numbers[index]));
    }
    const auto position = positions_++;
    const auto& ref = call_.tensors[position];
    const ArrayType* type = ref.cell->type();
    py::object base = py::none();
    if (type) base = py::make_tuple(static_cast<int>(to_torch(type->dtype)), int_tuple(type->dims));
    return py::make_tuple("tensor", position, ref.slot, dtype, int_tuple(impl->sizes()), int_tuple(impl->strides()),
                          impl->storage_offset(), ref.fits, ref.cell->bytes(), base, impl->is_conj(), impl->is_neg());
  }

  const Call& call_;
  size_t positions_ = 0, numbers_ = 0, lists_ = 0;
};

py::list describe(const std::vector<ArgumentSpec>& specs, const Call& call, const c10::IValue* arguments) {
  Describer describer(call);
  py::list described;
  for (size_t i = 0; i < specs.size(); ++i) described.append(describer.describe(arguments[i], specs[i]));
  return described;
}

constexpr const char* kEager = "torch_tpu.programs.eager";

}  // namespace

OperatorSpec operator_spec(const std::string& name) {
  return with_python([&] {
    const py::object answer = py::module_::import(kEager).attr("operator_spec")(name);
    OperatorSpec spec;
    spec.static_arguments = answer.attr("static").cast<std::vector<std::string>>();
    spec.run_time_integers = answer.attr("run_time_integers").cast<std::vector<std::string>>();
    spec.all_static = answer.attr("all_static").cast<bool>();
    spec.checks_numbers = answer.attr("checks_numbers").cast<bool>();
    spec.allows_overlap = answer.attr("allows_overlap").cast<bool>();
    spec.elementwise = answer.attr("elementwise").cast<bool>();
    spec.composite = answer.attr("composite").cast<bool>();
    return spec;
  });
}

void run_composite(const char* module, const std::string& name, const c10::FunctionSchema& schema,
                   torch::jit::Stack* stack) {
  with_python([&] {
    const auto& specs = schema.arguments();
    const size_t first = stack->size() - specs.size();
    py::list positional;
    py::dict keywords;
    for (size_t i = 0; i < specs.size(); ++i) {
      auto value = torch::jit::toPyObject((*stack)[first + i]);
      if (specs[i].kwarg_only())
        keywords[specs[i].name().c_str()] = value;
      else
        positional.append(value);
    }
    torch::jit::drop(*stack, specs.size());
    py::object results = py::module_::import(module).attr("composite")(name)(*positional, **keywords);
    const auto& returns = schema.returns();
    if (returns.size() == 1) {
      stack->push_back(torch::jit::toIValue(results, returns[0].type()));
      return 0;
    }
    auto tuple = results.cast<py::tuple>();
    for (size_t i = 0; i < returns.size(); ++i) stack->push_back(torch::jit::toIValue(tuple[i], returns[i].type()));
    return 0;
  });
}

ProgramPtr compile_program(const std::string& name, const c10::FunctionSchema& schema,
                           const std::vector<ArgumentSpec>& specs, const Call& call, const c10::IValue* arguments,
                           int precision, bool record, bool exact) {
  return with_python([&] {
    return py::module_::import(kEager)
        .attr("compile_call")(name, describe(specs, call, arguments), precision, record, exact)
        .cast<std::shared_ptr<Program>>();
  });
}

ProgramPtr compile_graph(const py::object& compile, const std::vector<ArgumentSpec>& specs, const Call& call,
                         const c10::IValue* arguments, int precision) {
  return with_python(
      [&] { return compile(describe(specs, call, arguments), precision).cast<std::shared_ptr<Program>>(); });
}

void compile_plan(const Program& program) {
  with_python([&] {
    auto compiled = py::module_::import(kEager).attr("compile_plan")(py::bytes(program.plan));
    auto* fresh = compiled.cast<Compiled&>().executable.release();
    pjrt::Executable* none = nullptr;
    if (!program.executable.compare_exchange_strong(none, fresh)) delete fresh;  // another thread was quicker
    return 0;
  });
}

std::unique_ptr<pjrt::Executable> compile_fusion(const Fusion& fusion) {
  return with_python([&]() -> std::unique_ptr<pjrt::Executable> {
    std::unordered_map<const Program*, size_t> places;
    py::list plans, nodes, live, donations;
    for (size_t i = 0; i < fusion.nodes().size(); ++i) {
      const auto* program = &fusion.nodes()[i]->program->code();
      const auto [place, fresh] = places.emplace(program, places.size());
      if (fresh) plans.append(py::bytes(program->plan));
      py::list sources;
      for (size_t s = 0; s < program->operands.size(); ++s) {
        const Source& source = fusion.sources(i)[s];
        sources.append(py::make_tuple(static_cast<int>(source.kind), source.index, source.output));
      }
      nodes.append(py::make_tuple(place->second, sources));
    }
    for (const auto& [node, output] : fusion.live()) live.append(py::make_tuple(node, output));
    for (const auto& [leaf, place] : fusion.donations()) donations.append(py::make_tuple(leaf, place));
    const py::object compiled =
        py::module_::import("torch_tpu.programs.fused").attr("compile_graph")(plans, nodes, live, donations);
    if (compiled.is_none()) return nullptr;
    return std::move(compiled.cast<Compiled&>().executable);
  });
}

void without_gil(const std::function<void()>& body) {
  if (!PyGILState_Check()) return body();
  py::gil_scoped_release unlocked;
  body();
}

}  // namespace torch_tpu::python
