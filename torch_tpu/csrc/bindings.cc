// pybind11, nothing else: what the Python package calls.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "compile/graph.h"
#include "eager/graph.h"
#include "eager/kernel.h"
#include "eager/operands.h"
#include "eager/registration.h"
#include "runtime/cell.h"
#include "runtime/dtypes.h"
#include "runtime/generator.h"
#include "runtime/runtime.h"

namespace py = pybind11;

namespace torch_tpu {
void bind_pjrt(py::module_& m);
void bind_distributed(py::module_& m);

namespace {

using Flags = std::map<std::string, std::variant<bool, int64_t, double, std::string>>;
using Dims = std::vector<int64_t>;

const ArrayType* array_type(int dtype, const Dims& dims) {
  return ArrayType::get(to_pjrt(static_cast<c10::ScalarType>(dtype)), dims);
}

Result make_result(const py::handle& item) {
  Result result;
  if (item.is_none()) return result;
  if (py::isinstance<py::int_>(item)) {
    result.kind = Result::kInt;
    result.offset = item.cast<int64_t>();
    return result;
  }
  if (py::isinstance<py::list>(item)) {
    result.kind = Result::kList;
    for (auto inner : item) result.list.push_back(make_result(inner));
    return result;
  }
  const auto [kind, index, dtype, sizes, strides, offset] =
      item.cast<std::tuple<std::string, int32_t, int, Dims, Dims, int64_t>>();
  result.kind = kind == "output" ? Result::kOutput : kind == "argument" ? Result::kArgument : Result::kArgumentWindow;
  result.index = index;
  result.dtype = static_cast<c10::ScalarType>(dtype);
  result.sizes.assign(sizes.begin(), sizes.end());
  result.strides.assign(strides.begin(), strides.end());
  result.offset = offset;
  return result;
}

OperandKind operand_kind(const std::string& kind) {
  static const std::map<std::string, OperandKind> kinds{
      {"base", OperandKind::kBase},       {"offset", OperandKind::kOffset}, {"scalar", OperandKind::kScalar},
      {"scalars", OperandKind::kScalars}, {"rng", OperandKind::kRng},       {"flag", OperandKind::kFlag},
      {"code", OperandKind::kCode},       {"size", OperandKind::kSize}};
  return kinds.at(kind);
}

std::shared_ptr<Program> make_program(
    Compiled* compiled, const std::string& name, const std::vector<std::tuple<std::string, int32_t, int>>& operands,
    const std::vector<std::tuple<int32_t, int, Dims>>& outputs, const py::list& results,
    const std::vector<std::tuple<int32_t, Dims, Dims>>& resizes, std::vector<std::pair<int32_t, int32_t>> donations,
    uint64_t rng_blocks, bool uses_precision, bool brief,
    const std::vector<std::pair<std::string, std::string>>& faults, const py::bytes& plan, const std::string& line) {
  auto program = std::make_shared<Program>();
  program->name = name;
  if (compiled) {
    TORCH_INTERNAL_ASSERT(compiled->executable && compiled->executable->num_outputs() == outputs.size());
    program->executable = compiled->executable.release();
  }
  program->plan = plan;
  program->line = line;
  for (const auto& [kind, index, dtype] : operands)
    program->operands.push_back({operand_kind(kind), index, to_pjrt(static_cast<c10::ScalarType>(dtype))});
  for (const auto& [slot, dtype, dims] : outputs) {
    program->outputs.push_back({slot, array_type(dtype, dims)});
    if (slot == kFresh) program->fresh_bytes += program->outputs.back().type->bytes;
  }
  for (auto item : results) program->results.push_back(make_result(item));
  for (const auto& [position, sizes, strides] : resizes) program->resizes.push_back({position, sizes, strides});
  std::map<int32_t, int> windows;
  const std::function<void(const Result&)> count = [&](const Result& result) {
    if (result.kind == Result::kOutput) program->shared_outputs |= ++windows[result.index] > 1;
    for (const auto& inner : result.list) count(inner);
  };
  for (const auto& result : program->results) count(result);
  program->donations = std::move(donations);
  program->rng_blocks = rng_blocks;
  program->uses_precision = uses_precision;
  program->brief = brief;
  std::vector<Fault> checks;
  for (const auto& [error, text] : faults) checks.push_back({error, text});
  if (!checks.empty()) program->fault_code = Runtime::fault_code(name, checks);
  return program;
}

// A program with a calling convention of its own for the executable of another.
std::shared_ptr<Program> make_variant(const std::shared_ptr<Program>& padded, const std::shared_ptr<Variety>& variety,
                                      const std::vector<std::tuple<std::string, int32_t, int>>& operands,
                                      const std::vector<std::tuple<int32_t, int, Dims>>& outputs,
                                      const py::list& results,
                                      const std::vector<std::tuple<int32_t, Dims, Dims>>& resizes,
                                      const std::vector<std::tuple<int32_t, int, Dims>>& rooms) {
  auto program = make_program(nullptr, padded->name, operands, outputs, results, resizes, {}, 0, padded->uses_precision,
                              padded->brief, {}, py::bytes(), "");
  program->fault_code = padded->fault_code;
  for (const auto& [slot, dtype, dims] : rooms) program->rooms.emplace_back(slot, array_type(dtype, dims));
  program->padded = padded;
  program->variety = variety;
  ++variety->programs;
  return program;
}

// XLA's CPU client copies a program's options, flags and all, whenever it runs: 40 ns a flag. They have done their work
// when the program is compiled, so one that is loaded gets none.
std::unique_ptr<pjrt::Executable> loaded(std::string_view bytes) {
  static const pjrt::CompileOptions kNone;
  const auto& runtime = Runtime::get();
  return runtime.client().deserialize(bytes, runtime.platform().name == "cpu" ? &kNone : nullptr);
}

Compiled compile(const std::string& text, const Flags& flags, bool reload, int64_t partitions) {
  py::gil_scoped_release unlocked;
  pjrt::CompileOptions options;
  options.flags = flags;
  options.num_partitions = partitions;
  auto executable = Runtime::get().client().compile(text, options);
  if (!reload) return {std::move(executable), ""};
  std::string bytes = executable->serialize();
  return {loaded(bytes), std::move(bytes)};
}

Compiled load(const py::bytes& bytes) {
  const std::string_view view = bytes;
  py::gil_scoped_release unlocked;
  return {loaded(view), std::string(view)};
}

py::dict platform_info() {
  const auto& runtime = Runtime::get();
  py::dict out;
  out["name"] = runtime.platform().name;
  out["plugin"] = runtime.platform().plugin_path;
  out["platform"] = runtime.client().platform_name();
  out["version"] = runtime.client().platform_version();
  out["api"] = py::make_tuple(runtime.client().plugin().api_major(), runtime.client().plugin().api_minor());
  py::list kinds;
  for (const auto& device : runtime.client().devices()) kinds.append(device.kind());
  out["device_kinds"] = kinds;
  return out;
}

void bind_runtime(py::module_& m) {
  m.def("_set_platform_resolver", [](py::function resolve, py::function count) {
    // Leaked on purpose: the runtime may ask until the very end of the process.
    auto* functions = new std::pair<py::function, py::function>(std::move(resolve), std::move(count));
    Runtime::set_platform_resolver(
        [functions] {
          py::gil_scoped_acquire gil;
          auto answer =
              functions->first()
                  .cast<std::tuple<std::string, std::string, std::map<std::string, pjrt::OptionValue>, int64_t>>();
          Platform platform{std::get<0>(answer), std::get<1>(answer), {}, std::get<3>(answer)};
          for (auto& [key, value] : std::get<2>(answer)) platform.options.emplace_back(key, value);
          return platform;
        },
        [functions] {
          py::gil_scoped_acquire gil;
          return functions->second().cast<int>();
        });
  });
  m.def("_init", [] {
    py::gil_scoped_release unlocked;
    Runtime::get();
  });
  m.def("_is_initialized", &Runtime::initialized);
  m.def("_is_in_bad_fork", &Runtime::in_bad_fork);
  m.def("_shutdown", [] {
    py::gil_scoped_release unlocked;
    Runtime::shutdown();
  });
  m.def("_device_count", &Runtime::device_count);
  m.def("_current_device", [] { return static_cast<int>(Runtime::current_device()); });
  m.def("_exchange_device",
        [](int index) { return static_cast<int>(Runtime::exchange_device(static_cast<c10::DeviceIndex>(index))); });
  m.def("_synchronize", [](int index) {
    py::gil_scoped_release unlocked;
    if (Runtime::initialized()) Runtime::get().device(static_cast<c10::DeviceIndex>(index)).synchronize();
  });
  m.def("_default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("_platform_info", &platform_info);
  m.def("_capacity", [](int index) { return Runtime::get().device(static_cast<c10::DeviceIndex>(index)).capacity; });
}

void bind_programs(py::module_& m) {
  py::class_<Compiled>(m, "_Executable").def("serialize", [](const Compiled& e) { return py::bytes(e.serialize()); });
  py::class_<Program, std::shared_ptr<Program>>(m, "_Program").def_property_readonly("hits", [](const Program& p) {
    return p.hits;
  });
  py::class_<CompiledGraph>(m, "_Graph")
      .def(py::init<std::string, py::object, bool>(), py::arg("name"), py::arg("compile"),
           py::arg("run_time_integers") = false)
      .def("__call__", &CompiledGraph::operator())
      .def("run_on_all", &CompiledGraph::run_on_all)
      .def_property_readonly("name", &CompiledGraph::name);
  m.def("_compile", &compile, py::arg("text"), py::arg("flags"), py::arg("reload") = false, py::arg("partitions") = 1);
  m.def("_load", &load);
  m.def("_array_shape", [](const at::Tensor& tensor) -> std::optional<Dims> {
    const auto* type = Cell::of(tensor.storage().unsafeGetStorageImpl())->type();
    if (!type) return std::nullopt;
    return Dims(type->dims.begin(), type->dims.end());
  });
  m.def("_lengthen", [](const at::Tensor& tensor, int64_t count) {
    const auto* type = ArrayType::get(to_pjrt(tensor.scalar_type()), {count});
    auto& device = Runtime::get().device(tensor.device().index());
    py::gil_scoped_release unlocked;
    Cell& cell = *Cell::of(tensor.storage().unsafeGetStorageImpl());
    const auto array = cell.array();
    cell.exchange(array, lengthened(array, type, device));
  });
  m.def("_make_program", &make_program);
  py::class_<Variety, std::shared_ptr<Variety>>(m, "_Variety").def(py::init<>());
  m.def("_make_variant", &make_variant);
  m.def("_table_stats", [] {
    const auto stats = ProgramTable::stats();
    py::dict out;
    out["hits"] = stats.hits;
    out["misses"] = stats.misses;
    out["evictions"] = stats.evictions;
    out["programs"] = stats.programs;
    return out;
  });
  m.def("_reset_table_stats", &ProgramTable::reset_stats);
  m.def("_clear_table", &ProgramTable::clear_all);
  m.def("_set_table_capacity", &ProgramTable::set_capacity);
}

void bind_modes(py::module_& m) {
  m.def("_precision", &current_precision);
  m.def("_exchange_scoped_precision", &exchange_scoped_precision);
  m.def("_mode", [] { return static_cast<int>(current_mode()); });
  m.def("_set_mode", [](int mode) { set_mode(static_cast<Mode>(mode)); });
  m.def("_exchange_scoped_mode", &exchange_scoped_mode);
  m.def("_flush", [] {
    py::gil_scoped_release unlocked;
    if (!Runtime::usable()) return;
    for (int i = 0; i < Runtime::device_count(); ++i) Runtime::get().device(static_cast<c10::DeviceIndex>(i)).flush();
  });
  m.def("_set_fuse_limit", &set_graph_limit);
}

}  // namespace
}  // namespace torch_tpu

PYBIND11_MODULE(_C, m) {
  torch_tpu::bind_pjrt(m);
  torch_tpu::bind_runtime(m);
  torch_tpu::bind_programs(m);
  torch_tpu::bind_modes(m);
  torch_tpu::bind_distributed(m);
  m.def("_register_kernels", &torch_tpu::register_kernels);
}
