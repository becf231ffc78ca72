// Work that has been put off, as the runtime sees it; csrc/eager/graph.h does the work.
#pragma once

#include "runtime/array.h"

namespace torch_tpu {

// Work whose results some cells are waiting for: a node of a deferred graph.
class Pending : public c10::intrusive_ptr_target {
 public:
  // Runs it, and waits if another thread does. Throws what went wrong, each time it is called.
  virtual void flush() = 0;
  // The type of the array that `output` will be. Never runs anything.
  virtual const ArrayType* type(int output) const = 0;
  // The array itself, after `flush`.
  virtual ArrayPtr result(int output) = 0;
  // One cell more, or less, that waits for `output`: what nobody waits for is not computed.
  virtual void hold(int output) = 0;
  virtual void release(int output) noexcept = 0;
};
using PendingPtr = c10::intrusive_ptr<Pending>;

// What a device still has to be given: synchronisation runs it first.
class Deferred {
 public:
  virtual ~Deferred() = default;
  virtual void flush() = 0;
};

}  // namespace torch_tpu
