// torch dtypes and PJRT element types are the same things under two names.
#pragma once

#include <c10/core/ScalarType.h>

#include "pjrt/buffer.h"

namespace torch_tpu {

// Throws TypeError for a dtype that has no PJRT element type (complex32, quantised and bits types).
pjrt::DType to_pjrt(c10::ScalarType dtype);
c10::ScalarType to_torch(pjrt::DType dtype);

}  // namespace torch_tpu
