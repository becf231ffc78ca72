// The contents of a storage. A device tensor's data pointer is the address of its cell.
#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <mutex>

#include "runtime/pending.h"
#include "runtime/spinlock.h"

namespace torch_tpu {

// empty: never written. ready: an immutable array, row-major, that covers the storage. pending: an output of work not
// yet run. A write replaces the array; every alias of the storage sees the new one. Threads may read and write one cell
// at a time: who reads has the old or the new array.
class Cell {
 public:
  Cell(size_t bytes, c10::DeviceIndex device) : bytes_(bytes), device_(device) {}
  Cell(const Cell&) = delete;
  Cell& operator=(const Cell&) = delete;
  ~Cell() {
    if (work_) work_->release(output_);
  }

  size_t bytes() const { return bytes_; }
  c10::DeviceIndex device() const { return device_; }
  bool empty() const { return !type(); }

  // The type of the contents, or null when empty. Never runs anything.
  const ArrayType* type() const { return type_.load(std::memory_order_acquire); }
  // The contents; runs pending work first. Null when empty.
  ArrayPtr array() {
    {
      std::lock_guard<Spinlock> lock(mutex_);
      if (C10_LIKELY(!work_)) return array_;
    }
    return finish();
  }
  // The contents as they are. Never runs anything.
  struct Contents {
    ArrayPtr array;
    PendingPtr work;
    int output = 0;
  };
  Contents contents() {
    std::lock_guard<Spinlock> lock(mutex_);
    return {array_, work_, output_};
  }
  void set(ArrayPtr array) { replace({std::move(array), {}, 0}); }
  // Replaces `held` by another array, unless somebody else has written the cell.
  void exchange(const ArrayPtr& held, ArrayPtr array);
  void defer(PendingPtr work, int output) {
    work->hold(output);
    replace({{}, std::move(work), output});
  }
  // Takes the contents of another cell over, be they ready or pending.
  void share(Cell& other);
  // True if a program may consume `held`, the caller's copy of the contents: nobody else has one. Other threads then
  // wait for the contents until the caller gives the cell new ones, or gives up.
  bool claim(const ArrayPtr& held) {
    if (!mutex_.try_lock()) return false;
    if (array_ == held && held.use_count() == 2) return true;
    mutex_.unlock();
    return false;
  }
  void settle(ArrayPtr array) {
    type_.store(array->type(), std::memory_order_release);
    array_.swap(array);
    mutex_.unlock();
  }
  void give_up() { mutex_.unlock(); }
  void resize(size_t bytes) { bytes_ = bytes; }

  static Cell* of(const c10::StorageImpl* storage) { return static_cast<Cell*>(const_cast<void*>(storage->data())); }

 private:
  ArrayPtr finish();
  void replace(Contents contents);  // what was there goes after the lock: its end may take others
  std::atomic<const ArrayType*> type_{nullptr};
  ArrayPtr array_;
  PendingPtr work_;
  int output_ = 0;
  size_t bytes_;
  c10::DeviceIndex device_;
  Spinlock mutex_;
};

}  // namespace torch_tpu
