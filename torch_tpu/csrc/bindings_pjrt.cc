// PJRT without tensors: a small Python surface for tools and tests. Arrays are NumPy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "pjrt/client.h"
#include "pjrt/topology.h"

namespace py = pybind11;

namespace torch_tpu {
namespace {

using namespace torch_tpu::pjrt;

// ---- values
// ----------------------------------------------------------------------------------------------------------

OptionValue option_value(const std::string& name, py::handle value) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  throw py::type_error("Option '" + name + "' must be a str, int, bool or float, not " +
                       py::str(py::type::of(value).attr("__name__")).cast<std::string>() + ".");
}

Options to_options(const py::dict& dict) {
  Options options;
  for (auto [key, value] : dict) {
    auto name = key.cast<std::string>();
    options.emplace_back(name, option_value(name, value));
  }
  return options;
}

CompileOptions to_compile_options(const py::dict& flags, int64_t replicas, int64_t partitions, bool portable) {
  CompileOptions options;
  options.num_replicas = replicas;
  options.num_partitions = partitions;
  if (!portable) options.device = 0;
  for (const auto& [name, value] : to_options(flags))
    std::visit([&, &key = name](const auto& flag) { options.flags[key] = flag; }, value);
  return options;
}

// ---- dtypes
// ----------------------------------------------------------------------------------------------------------

struct HostType {
  DType dtype;
  const char* numpy;  // a NumPy or ml_dtypes name
  const char* raw;    // the NumPy integer that carries its bits where ml_dtypes is missing; null for NumPy's own types
};

constexpr HostType kHostTypes[] = {
    {PJRT_Buffer_Type_PRED, "bool", nullptr},
    {PJRT_Buffer_Type_S8, "int8", nullptr},
    {PJRT_Buffer_Type_S16, "int16", nullptr},
    {PJRT_Buffer_Type_S32, "int32", nullptr},
    {PJRT_Buffer_Type_S64, "int64", nullptr},
    {PJRT_Buffer_Type_U8, "uint8", nullptr},
    {PJRT_Buffer_Type_U16, "uint16", nullptr},
    {PJRT_Buffer_Type_U32, "uint32", nullptr},
    {PJRT_Buffer_Type_U64, "uint64", nullptr},
    {PJRT_Buffer_Type_F16, "float16", nullptr},
    {PJRT_Buffer_Type_F32, "float32", nullptr},
    {PJRT_Buffer_Type_F64, "float64", nullptr},
    {PJRT_Buffer_Type_C64, "complex64", nullptr},
    {PJRT_Buffer_Type_C128, "complex128", nullptr},
    {PJRT_Buffer_Type_BF16, "bfloat16", "uint16"},
    {PJRT_Buffer_Type_F8E5M2, "float8_e5m2", "uint8"},
    {PJRT_Buffer_Type_F8E4M3FN, "float8_e4m3fn", "uint8"},
    {PJRT_Buffer_Type_F8E4M3B11FNUZ, "float8_e4m3b11fnuz", "uint8"},
    {PJRT_Buffer_Type_F8E5M2FNUZ, "float8_e5m2fnuz", "uint8"},
    {PJRT_Buffer_Type_F8E4M3FNUZ, "float8_e4m3fnuz", "uint8"},
    {PJRT_Buffer_Type_F8E4M3, "float8_e4m3", "uint8"},
    {PJRT_Buffer_Type_F8E3M4, "float8_e3m4", "uint8"},
    {PJRT_Buffer_Type_F8E8M0FNU, "float8_e8m0fnu", "uint8"},
    {PJRT_Buffer_Type_S4, "int4", "int8"},
    {PJRT_Buffer_Type_U4, "uint4", "uint8"},
};

py::dtype numpy_dtype(DType dtype) {
  for (const HostType& type : kHostTypes) {
    if (type.dtype != dtype) continue;
    if (type.raw == nullptr) return py::dtype(type.numpy);
    try {
      return py::dtype::from_args(py::module_::import("ml_dtypes").attr(type.numpy));
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_ImportError) && !error.matches(PyExc_AttributeError)) throw;
      return py::dtype(type.raw);
    }
  }
  throw py::type_error(std::string("A program output has the element type ") + dtype_name(dtype) +
                       ", which has no NumPy dtype.");
}

DType pjrt_dtype(const py::array& array, size_t index) {
  auto name = py::str(array.dtype().attr("name")).cast<std::string>();
  if (!array.dtype().attr("isnative").cast<bool>())
    throw py::value_error("Argument " + std::to_string(index) +
                          " has the byte order of another machine: pass array.astype('" + name + "').");
  for (const HostType& type : kHostTypes)
    if (name == type.numpy) return type.dtype;
  throw py::type_error(
      "Argument " + std::to_string(index) + " has dtype " + name +
      ", which the device does not know; use bool, an integer, float or complex dtype, or an ml_dtypes one.");
}

// The dtype by StableHLO name, for raw arrays (uint16 holding bf16): it must be as wide as the array's own.
DType reinterpreted(const std::string& name, const py::array& array, size_t index) {
  for (const HostType& type : kHostTypes) {
    if (name != dtype_name(type.dtype)) continue;
    if (static_cast<size_t>(array.itemsize()) == dtype_size(type.dtype)) return type.dtype;
    throw py::value_error("Argument " + std::to_string(index) + " has " + std::to_string(array.itemsize()) +
                          " bytes to an element, and " + name + " has " + std::to_string(dtype_size(type.dtype)) + ".");
  }
  throw py::value_error("'" + name + "' is not a StableHLO element type that a host array can hold.");
}

// ---- arrays and buffers
// ----------------------------------------------------------------------------------------------

struct HostArray {
  py::array array;  // row-major
  DType dtype;
  std::vector<int64_t> dims;
};

using DTypeNames = std::optional<std::vector<std::string>>;

std::vector<HostArray> host_arrays(const py::sequence& values, const DTypeNames& dtypes) {
  if (dtypes && dtypes->size() != values.size())
    throw py::value_error("dtypes has " + std::to_string(dtypes->size()) + " entries for " +
                          std::to_string(values.size()) + " arguments.");
  std::vector<HostArray> result;
  for (size_t i = 0; i < values.size(); ++i) {
    py::object value = values[i];
    if (!py::isinstance<py::array>(value))
      throw py::type_error("Argument " + std::to_string(i) + " must be a numpy.ndarray, not " +
                           py::str(py::type::of(value).attr("__name__")).cast<std::string>() + ".");
    auto array = py::array::ensure(value, py::array::c_style);
    if (!array) throw py::error_already_set();
    DType dtype = dtypes ? reinterpreted((*dtypes)[i], array, i) : pjrt_dtype(array, i);
    result.push_back({array, dtype, {array.shape(), array.shape() + array.ndim()}});
  }
  return result;
}

using Buffers = std::vector<std::unique_ptr<Buffer>>;

std::vector<PJRT_Buffer*> handles(const Buffers& buffers) {
  std::vector<PJRT_Buffer*> result;
  for (const auto& buffer : buffers) result.push_back(buffer->get());
  return result;
}

Buffers adopt(const Client& client, const std::vector<PJRT_Buffer*>& raw) {
  Buffers buffers;
  for (PJRT_Buffer* handle : raw) buffers.push_back(std::make_unique<Buffer>(&client.plugin(), handle));
  return buffers;
}

Buffers upload(const Client& client, const std::vector<HostArray>& arrays, const Device& device) {
  py::gil_scoped_release release;
  Buffers buffers;
  for (const HostArray& host : arrays)
    buffers.push_back(std::make_unique<Buffer>(
        &client.plugin(), client.from_host(host.array.data(), host.dtype, host.dims.data(), host.dims.size(), device)));
  return buffers;
}

std::vector<py::array> download(const Buffers& buffers) {
  std::vector<py::array> arrays;
  std::vector<Event> copies;
  try {
    for (const auto& buffer : buffers) {
      // Bounded dimensions have their true size only once the program has run.
      {
        py::gil_scoped_release release;
        buffer->ready_event().wait();
      }
      py::array array(numpy_dtype(buffer->dtype()), buffer->unpadded_dims());
      arrays.push_back(array);
      copies.push_back(buffer->to_host(array.mutable_data(), array.nbytes()));
    }
  } catch (...) {
    py::gil_scoped_release release;
    for (const Event& copy : copies) {
      try {
        copy.wait();  // it writes into an array that is about to go
      } catch (const Error&) {
      }
    }
    throw;
  }
  py::gil_scoped_release release;
  for (const Event& copy : copies) copy.wait();
  return arrays;
}

// ---- classes
// ---------------------------------------------------------------------------------------------------------

py::dict memory_dict(const MemoryStats& stats) {
  using namespace py::literals;
  return py::dict("code"_a = stats.code, "arguments"_a = stats.arguments, "outputs"_a = stats.outputs,
                  "aliased"_a = stats.aliased, "temporaries"_a = stats.temporaries, "peak"_a = stats.peak);
}

py::dict attribute_dict(const Plugin& plugin) {
  py::dict result;
  for (const auto& [name, value] : plugin.attributes()) result[py::str(name)] = value;
  return result;
}

// A client and a program made by it; the program keeps the client alive.
using ClientPtr = std::shared_ptr<Client>;

class PyExecutable {
 public:
  PyExecutable(ClientPtr client, std::unique_ptr<Executable> executable)
      : client_(std::move(client)), executable_(std::move(executable)) {}

  const Executable& get() const { return *executable_; }

  std::vector<py::array> run(const py::sequence& values, size_t device, const DTypeNames& dtypes) const {
    const Device& target = device_at(device);
    Buffers inputs = upload(*client_, host_arrays(values, dtypes), target);
    std::vector<PJRT_Buffer*> args = handles(inputs), outputs(executable_->num_outputs());
    {
      py::gil_scoped_release release;
      executable_->execute(args.data(), args.size(), outputs.data(), target.get());
    }
    return download(adopt(*client_, outputs));
  }

  // Seconds for each of `count` executions followed by the destruction of their results: the floor for one eager
  // operator.
  std::vector<double> time(const py::sequence& values, size_t count, size_t device) const {
    const Device& target = device_at(device);
    Buffers inputs = upload(*client_, host_arrays(values, std::nullopt), target);
    std::vector<PJRT_Buffer*> args = handles(inputs), outputs(executable_->num_outputs());
    std::vector<double> seconds;
    py::gil_scoped_release release;
    for (size_t i = 0; i < count; ++i) {
      const auto start = std::chrono::steady_clock::now();
      executable_->execute(args.data(), args.size(), outputs.data(), target.get());
      adopt(*client_, outputs).clear();
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
  }

  std::vector<std::vector<py::array>> run_on_all(const std::vector<py::sequence>& values,
                                                 const DTypeNames& dtypes) const {
    if (values.empty()) throw py::value_error("run_on_all needs one list of arguments for each device.");
    std::vector<Buffers> inputs;
    std::vector<std::vector<PJRT_Buffer*>> args, outputs;
    std::vector<PJRT_Buffer* const*> arg_lists;
    std::vector<PJRT_Buffer**> output_lists;
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].size() != values[0].size())
        throw py::value_error("run_on_all needs the same number of arguments for each device.");
      inputs.push_back(upload(*client_, host_arrays(values[i], dtypes), device_at(i)));
      args.push_back(handles(inputs.back()));
      outputs.emplace_back(executable_->num_outputs());
    }
    for (const auto& list : args) arg_lists.push_back(list.data());
    for (auto& list : outputs) output_lists.push_back(list.data());
    {
      py::gil_scoped_release release;
      executable_->execute_on_all(arg_lists.data(), values.size(), args[0].size(), output_lists.data());
    }
    std::vector<Buffers> owned;
    for (const auto& list : outputs) owned.push_back(adopt(*client_, list));
    std::vector<std::vector<py::array>> results;
    for (const Buffers& buffers : owned) results.push_back(download(buffers));
    return results;
  }

 private:
  const Device& device_at(size_t index) const {
    if (index < client_->devices().size()) return client_->devices()[index];
    throw py::value_error("There is no device " + std::to_string(index) + ": this client has " +
                          std::to_string(client_->devices().size()) + ".");
  }

  ClientPtr client_;
  std::unique_ptr<Executable> executable_;
};

// bytes and str alike.
std::string program_text(const py::object& text) {
  if (py::isinstance<py::str>(text) || py::isinstance<py::bytes>(text)) return text.cast<std::string>();
  throw py::type_error("The program must be StableHLO text (str) or a portable artifact (bytes), not " +
                       py::str(py::type::of(text).attr("__name__")).cast<std::string>() + ".");
}

std::unique_ptr<PyExecutable> compile(const ClientPtr& client, const py::object& text, const py::dict& flags,
                                      int64_t num_replicas, int64_t num_partitions, bool portable) {
  std::string program = program_text(text);
  CompileOptions options = to_compile_options(flags, num_replicas, num_partitions, portable);
  py::gil_scoped_release release;
  return std::make_unique<PyExecutable>(client, client->compile(program, options));
}

std::unique_ptr<Topology::Compiled> compile_ahead(const Topology& topology, const py::object& text,
                                                  const py::dict& flags, int64_t num_replicas, int64_t num_partitions) {
  std::string program = program_text(text);
  CompileOptions options = to_compile_options(flags, num_replicas, num_partitions, /*portable=*/true);
  py::gil_scoped_release release;
  return topology.compile(program, options);
}

// The calls that analyse a compiled program, on whichever class holds it. `get` gives the C++ object.
template <typename Class, typename Get>
void bind_analysis(Class& cls, Get get) {
  using Self = typename Class::type;
  cls.def(
         "serialize",
         [get](const Self& self) {
           std::string bytes;
           {
             py::gil_scoped_release release;
             bytes = get(self).serialize();
           }
           return py::bytes(bytes);
         },
         "The program in the plugin's own format, as bytes.")
      .def(
          "optimized_program", [get](const Self& self) { return py::bytes(get(self).optimized_program()); },
          "The optimised module, a serialised HloModuleProtoWithConfig, as bytes.")
      .def(
          "cost_analysis", [get](const Self& self) { return get(self).cost_analysis(); },
          "The plugin's own estimates by name: 'flops', 'bytes accessed', ...")
      .def(
          "memory_stats", [get](const Self& self) { return memory_dict(get(self).memory_stats()); },
          "Bytes by use: code, arguments, outputs, aliased, temporaries, peak.");
}

void bind_client(py::module_& m) {
  using namespace py::literals;
  py::class_<Client, ClientPtr>(m, "PjrtClient", "The devices of one PJRT plugin.")
      .def(py::init([](const std::string& path, const py::dict& dict) {
             Options options = to_options(dict);
             py::gil_scoped_release release;
             return std::make_shared<Client>(Plugin::load(path), options);
           }),
           "path"_a, "options"_a = py::dict())
      .def_property_readonly("devices",
                             [](const Client& client) {
                               std::vector<std::string> kinds;
                               for (const Device& device : client.devices()) kinds.push_back(device.kind());
                               return kinds;
                             })
      .def_property_readonly("platform_name", &Client::platform_name)
      .def_property_readonly("platform_version", &Client::platform_version)
      .def_property_readonly(
          "api_version",
          [](const Client& client) { return py::make_tuple(client.plugin().api_major(), client.plugin().api_minor()); })
      .def("attributes", [](const Client& client) { return attribute_dict(client.plugin()); })
      .def("compile", &compile, "text"_a, "flags"_a = py::dict(), "num_replicas"_a = 1, "num_partitions"_a = 1,
           "portable"_a = true)
      .def(
          "deserialize",
          [](const ClientPtr& client, const py::bytes& bytes) {
            std::string_view view = bytes;
            py::gil_scoped_release release;
            return std::make_unique<PyExecutable>(client, client->deserialize(view));
          },
          "bytes"_a);
}

void bind_executable(py::module_& m) {
  using namespace py::literals;
  py::class_<PyExecutable> cls(m, "PjrtExecutable", "A compiled program on the devices of its client.");
  cls.def_property_readonly("num_outputs", [](const PyExecutable& self) { return self.get().num_outputs(); })
      .def_property_readonly("fingerprint",
                             [](const PyExecutable& self) { return py::bytes(self.get().fingerprint()); })
      .def("run", &PyExecutable::run, "arrays"_a, "device"_a = 0, "dtypes"_a = py::none(),
           "Copies NumPy arrays to `device`, runs, and copies the results back. `dtypes` names the StableHLO element "
           "types "
           "of the arguments, for raw arrays such as uint16 holding bf16.")
      .def("time", &PyExecutable::time, "arrays"_a, "count"_a, "device"_a = 0,
           "Seconds of each of `count` executions, destruction of the results included.")
      .def("run_on_all", &PyExecutable::run_on_all, "arrays"_a, "dtypes"_a = py::none(),
           "Runs a program of several replicas or partitions: one list of arrays for each device, in and out.");
  bind_analysis(cls, [](const PyExecutable& self) -> const Executable& { return self.get(); });
}

void bind_topology(py::module_& m) {
  using namespace py::literals;
  py::class_<Topology::Compiled> compiled(m, "PjrtCompiled", "A program compiled ahead of time, for analysis.");
  bind_analysis(compiled, [](const Topology::Compiled& self) -> const Topology::Compiled& { return self; });
  py::class_<Topology>(m, "PjrtTopology", "Devices that need not be present, by name.")
      .def(py::init([](const std::string& path, const std::string& name, const py::dict& dict) {
             Options options = to_options(dict);
             py::gil_scoped_release release;
             return std::make_unique<Topology>(Plugin::load(path), name, options);
           }),
           "path"_a, "name"_a, "options"_a = py::dict())
      .def("device_kinds", &Topology::device_kinds)
      .def_property_readonly("platform_name", &Topology::platform_name)
      .def_property_readonly("platform_version", &Topology::platform_version)
      .def("compile", &compile_ahead, "text"_a, "flags"_a = py::dict(), "num_replicas"_a = 1, "num_partitions"_a = 1);
}

}  // namespace

void bind_pjrt(py::module_& m) {
  py::register_exception<Error>(m, "PjrtError", PyExc_RuntimeError);
  bind_executable(m);
  bind_topology(m);
  bind_client(m);
}

}  // namespace torch_tpu
