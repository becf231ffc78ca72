#include <pybind11/pybind11.h>

namespace torch_tpu {
void bind_pjrt(pybind11::module_& m);
}

PYBIND11_MODULE(_C, m) { torch_tpu::bind_pjrt(m); }
