// The process group for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "distributed/process_group.h"

namespace py = pybind11;

namespace torch_tpu {

void bind_distributed(py::module_& m) {
  m.def(
      "_host_process_group",
      [](c10::intrusive_ptr<c10d::Backend> host, c10::intrusive_ptr<c10d::Store> store, std::string name,
         std::vector<int64_t> global_ranks, int rank, int size, double timeout) {
        const std::chrono::milliseconds limit(static_cast<int64_t>(timeout * 1000));
        auto transport = std::make_shared<HostTransport>(
            std::move(host), std::move(store), GroupNames{std::move(name), std::move(global_ranks), rank, size}, limit);
        return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<ProcessGroup>(std::move(transport), rank, size));
      },
      py::arg("host"), py::arg("store"), py::arg("name"), py::arg("global_ranks"), py::arg("rank"), py::arg("size"),
      py::arg("timeout"));
}

}  // namespace torch_tpu
