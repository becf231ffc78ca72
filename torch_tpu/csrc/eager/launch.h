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

// Runs a program of several partitions, which has a call on each of their devices.
void launch_on_all(const Program& program, std::vector<Call>& calls, std::vector<Results>& results);

}  // namespace torch_tpu
