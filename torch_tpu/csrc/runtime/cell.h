// The contents of a storage. A device tensor's data pointer is the address of its cell.
#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <mutex>

#include "runtime/array.h"
#include "runtime/spinlock.h"

namespace torch_tpu {

// Work whose results some cells are waiting for: a node of a deferred graph. `flush` runs it and fills those cells.
class Pending : public c10::intrusive_ptr_target {
 public:
  virtual void flush() = 0;
  // The type of the array that the cell at `output` will hold.
  virtual const ArrayType* type(int output) const = 0;
};

// empty: never written. ready: an immutable array, row-major, that covers the storage. pending: an output of work not
// yet run. A write replaces the array; every alias of the storage sees the new one. Threads may read and write one cell
// at a time: who reads has the old or the new array.
class Cell {
 public:
  Cell(size_t bytes, c10::DeviceIndex device) : bytes_(bytes), device_(device) {}
  Cell(const Cell&) = delete;
  Cell& operator=(const Cell&) = delete;

  size_t bytes() const { return bytes_; }
  c10::DeviceIndex device() const { return device_; }
  bool empty() const { return !type(); }

  // The type of the contents, or null when empty. Never runs anything.
  const ArrayType* type() const { return type_.load(std::memory_order_acquire); }
  // The contents; runs pending work first. Null when empty.
  ArrayPtr array() {
    if (C10_UNLIKELY(pending_.defined())) flush();
    std::lock_guard<Spinlock> lock(mutex_);
    return array_;
  }
  void set(ArrayPtr array) {
    std::lock_guard<Spinlock> lock(mutex_);
    replace(array);  // the old array goes with the argument, after the lock
  }
  void defer(c10::intrusive_ptr<Pending> work, int output) {
    set({});
    type_.store(work->type(output), std::memory_order_release);
    pending_ = std::move(work);
    output_ = output;
  }
  // True if a program may consume `held`, the caller's copy of the contents: nobody else has one. Other threads then
  // wait for the contents until the caller gives the cell new ones, or gives up.
  bool claim(const ArrayPtr& held) {
    if (!mutex_.try_lock()) return false;
    if (array_ == held && held.use_count() == 2) return true;
    mutex_.unlock();
    return false;
  }
  void settle(ArrayPtr array) {
    replace(array);
    mutex_.unlock();
  }
  void give_up() { mutex_.unlock(); }
  void resize(size_t bytes) { bytes_ = bytes; }

  static Cell* of(const c10::StorageImpl* storage) { return static_cast<Cell*>(const_cast<void*>(storage->data())); }

 private:
  void flush();
  void replace(ArrayPtr& array) {
    type_.store(array ? array->type() : nullptr, std::memory_order_release);
    array_.swap(array);
    pending_.reset();
  }
  std::atomic<const ArrayType*> type_{nullptr};
  ArrayPtr array_;
  c10::intrusive_ptr<Pending> pending_;
  int output_ = 0;
  size_t bytes_;
  c10::DeviceIndex device_;
  Spinlock mutex_;
};

}  // namespace torch_tpu
