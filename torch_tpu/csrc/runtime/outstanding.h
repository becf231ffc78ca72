// What a device still has to do: the one compute stream as synchronisation and events see it.
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include "runtime/array.h"

namespace torch_tpu {

// Arrays that may still be computed, plus the completion of those that were dropped before they were known to be ready.
class Outstanding {
 public:
  void add(Array* array);
  void remove(Array* array);  // from ~Array

  // Waits for a transfer too; `done` is called when it has finished.
  void adopt(pjrt::Event event, std::function<void()> done);

  // Waits for everything enqueued so far; throws the first error of that work.
  void wait();
  bool idle();
  // The events of everything enqueued so far and not yet ready.
  std::vector<pjrt::Event> snapshot();

 private:
  void unlink(Array* array);
  std::mutex mutex_;
  Array* head_ = nullptr;
  std::vector<pjrt::Event> dropped_;
};

}  // namespace torch_tpu
