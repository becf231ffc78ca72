// What a device still has to do: the one compute stream as synchronisation and events see it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "pjrt/plugin.h"
#include "runtime/array.h"
#include "runtime/spinlock.h"

namespace torch_tpu {

// Arrays that may still be computed, plus the completion of those that were dropped before they were known to be ready.
class Outstanding {
 public:
  using EventPtr = std::shared_ptr<pjrt::Event>;

  void add(Array* array);
  void remove(Array* array);  // from ~Array

  // Waits for a transfer too; `done` is called when it has finished.
  void adopt(pjrt::Event event, std::function<void()> done);

  // Waits for everything enqueued so far; throws the first error of work that finished since the last call.
  void wait();
  bool idle() { return snapshot().empty(); }
  // The events of everything enqueued so far and not yet ready. They stay outstanding.
  std::vector<EventPtr> snapshot();

 private:
  void unlink(Array* array);
  void keep(pjrt::Event event);
  void prune();
  bool finished(const pjrt::Event& event);  // notes the error of work that failed
  Spinlock mutex_;
  Array* head_ = nullptr;
  std::vector<EventPtr> dropped_;
  std::optional<pjrt::Error> failure_;
};

}  // namespace torch_tpu
