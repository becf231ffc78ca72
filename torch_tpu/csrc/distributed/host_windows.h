// Device tensors as CPU tensors on the same memory, on a platform whose device memory is the host's.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_map>

#include "runtime/cell.h"

namespace torch_tpu {

// The windows of one operation that reads and writes device memory outside of programs. A window keeps its array alive
// and undonated; it needs no lock, for other work on a tensor that is being written is a race of the user's.
class HostWindows {
 public:
  // A CPU tensor that sees the elements of `tensor` once all work on it is done. Must not be written.
  at::Tensor read(const at::Tensor& tensor);
  // A CPU tensor whose elements are those of `tensor`: every alias sees what is written to it. The memory is that of
  // the tensor's array if nobody else holds that, else of a copy, which the storage gets.
  at::Tensor write(const at::Tensor& tensor);

 private:
  struct Hold;
  std::shared_ptr<Hold> writable(Cell& cell, const at::Tensor& tensor);
  std::unordered_map<Cell*, std::shared_ptr<Hold>> held_;  // to be written
};

}  // namespace torch_tpu
