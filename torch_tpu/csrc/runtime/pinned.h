// Page-aligned host memory that transfers may use without a copy.
#pragma once

#include <c10/core/Allocator.h>

namespace torch_tpu {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

}  // namespace torch_tpu
