#pragma once

#include <c10/core/Storage.h>

namespace torch_tpu {

// Gives a device storage `bytes` bytes and keeps its contents up to the smaller size.
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace torch_tpu
