// Running a program: at once for a call, or for whoever has the operands.
#pragma once

#include "eager/results.h"
#include "runtime/runtime.h"

namespace torch_tpu {

// Runs a program for a call; `results`, unless null, receives what the operator returns.
void launch(const Program& program, Call& call, Results* results);

// Enqueues a compiled program and returns its outputs. `keep` lists operands that it must not
// consume.
c10::SmallVector<ArrayPtr, 8> execute(const Program& program, c10::ArrayRef<PJRT_Buffer*> operands,
                                      c10::ArrayRef<int64_t> keep, DeviceState& device);

}  // namespace torch_tpu
