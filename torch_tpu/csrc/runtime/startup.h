// Why a platform could not be started, as one sentence that says what to do.
#pragma once

#include "pjrt/plugin.h"

namespace torch_tpu {

// `error` in the words of this package where it is one of the plugins' known refusals: a TPU that another process
// holds, or no TPU.
pjrt::Error explain_startup(const pjrt::Error& error);

}  // namespace torch_tpu
