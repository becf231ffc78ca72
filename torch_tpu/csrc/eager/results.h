// What an operator returns, built from its program's description of it.
#pragma once

#include <c10/util/FunctionRef.h>

#include "eager/call.h"

namespace torch_tpu {

using Results = c10::SmallVector<c10::IValue, 4>;

// Makes a storage for an output of the program.
using StorageOf = c10::function_ref<c10::Storage(int32_t output)>;

Results make_results(const Program& program, const Call& call, StorageOf storage_of);

// Gives `out=` arguments the shapes that the operator sets; their storages may be new ones.
void resize_arguments(const Program& program, Call& call);

}  // namespace torch_tpu
