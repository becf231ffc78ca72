// torch dtypes and PJRT element types are the same things under two names.
#pragma once

#include <c10/core/ScalarType.h>

#include "pjrt/buffer.h"

namespace torch_tpu {

// Throws TypeError for a dtype that has no PJRT element type (complex32, quantised and bits types).
pjrt::DType to_pjrt(c10::ScalarType dtype);
bool has_pjrt_type(c10::ScalarType dtype);
c10::ScalarType to_torch(pjrt::DType dtype);

// _(C++ type, ScalarType name) for the dtypes that a number can have on the host.
// clang-format off
#define TORCH_TPU_FORALL_HOST_DTYPES(_)                                                      \
  _(bool, Bool) _(uint8_t, Byte) _(int8_t, Char) _(int16_t, Short) _(int32_t, Int)           \
  _(int64_t, Long) _(uint16_t, UInt16) _(uint32_t, UInt32) _(uint64_t, UInt64)               \
  _(c10::Half, Half) _(c10::BFloat16, BFloat16) _(float, Float) _(double, Double)            \
  _(c10::complex<float>, ComplexFloat) _(c10::complex<double>, ComplexDouble)
// clang-format on

}  // namespace torch_tpu
