// The contents of a storage. A device tensor's data pointer is the address of its cell.
#pragma once

#include <c10/core/Storage.h>

#include "runtime/array.h"

namespace torch_tpu {

// Work whose results some cells are waiting for: a node of a deferred graph. `flush` runs it and fills those cells.
class Pending : public c10::intrusive_ptr_target {
 public:
  virtual void flush() = 0;
  // The type of the array that the cell at `output` will hold.
  virtual const ArrayType* type(int output) const = 0;
};

// empty: never written. ready: an immutable array, row-major, that covers the storage. pending: an output of work not yet run.
// A write replaces the array; every alias of the storage sees the new one.
class Cell {
 public:
  Cell(size_t bytes, c10::DeviceIndex device) : bytes_(bytes), device_(device) {}
  Cell(const Cell&) = delete;
  Cell& operator=(const Cell&) = delete;

  size_t bytes() const { return bytes_; }
  c10::DeviceIndex device() const { return device_; }
  bool empty() const { return !array_ && !pending_; }

  // The type of the contents, or null when empty. Never runs anything.
  const ArrayType* type() const { return array_ ? array_->type() : pending_ ? pending_->type(output_) : nullptr; }
  // The contents; runs pending work first. Null when empty.
  const ArrayPtr& array() {
    if (C10_UNLIKELY(pending_.defined())) flush();
    return array_;
  }
  void set(ArrayPtr array) {
    array_ = std::move(array);
    pending_.reset();
  }
  void defer(c10::intrusive_ptr<Pending> work, int output) {
    array_.reset();
    pending_ = std::move(work);
    output_ = output;
  }
  // True if a program may consume the array: no other cell and no reader holds it.
  bool exclusive() const { return array_ && array_.use_count() == 1; }
  void resize(size_t bytes) { bytes_ = bytes; }

  static Cell* of(const c10::StorageImpl* storage) { return static_cast<Cell*>(const_cast<void*>(storage->data())); }

 private:
  void flush();
  ArrayPtr array_;
  c10::intrusive_ptr<Pending> pending_;
  int output_ = 0;
  size_t bytes_;
  c10::DeviceIndex device_;
};

}  // namespace torch_tpu
