#include "runtime/cell.h"

#include <utility>

namespace torch_tpu {

void Cell::replace(Contents contents) {
  {
    std::lock_guard<Spinlock> lock(mutex_);
    const auto* type = contents.array  ? contents.array->type()
                       : contents.work ? contents.work->type(contents.output)
                                       : nullptr;
    type_.store(type, std::memory_order_release);
    array_.swap(contents.array);
    work_.swap(contents.work);
    std::swap(output_, contents.output);
  }
  if (contents.work) contents.work->release(contents.output);
}

void Cell::exchange(const ArrayPtr& held, ArrayPtr array) {
  std::lock_guard<Spinlock> lock(mutex_);
  if (array_ != held) return;
  type_.store(array->type(), std::memory_order_release);
  array_.swap(array);
}

void Cell::share(Cell& other) {
  Contents contents;
  {
    std::lock_guard<Spinlock> lock(other.mutex_);
    contents = {other.array_, other.work_, other.output_};
    if (contents.work) contents.work->hold(contents.output);  // while the other cell still does
  }
  replace(std::move(contents));
}

ArrayPtr Cell::finish() {
  for (;;) {
    Contents waiting = contents();
    if (!waiting.work) return waiting.array;
    waiting.work->flush();
    ArrayPtr result;
    {
      std::lock_guard<Spinlock> lock(mutex_);
      if (work_ != waiting.work || output_ != waiting.output) continue;  // another thread wrote the cell meanwhile
      result = array_ = work_->result(output_);
      work_.reset();
    }
    waiting.work->release(waiting.output);
    return result;
  }
}

}  // namespace torch_tpu
