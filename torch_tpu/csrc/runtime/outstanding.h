// What a device still has to do: the one compute stream as synchronisation and events see it.
#pragma once

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

  // A transfer to be waited for too, and what it needs. That is let go later, by a thread of the program: what holds
  // Python objects must not be freed by a thread of the plugin, which may do so after the interpreter's end.
  void adopt(pjrt::Event event, std::shared_ptr<void> keep);

  // Arrays whose memory a program has taken over. XLA lets go of such a handle only when the program has run, and would
  // keep the caller waiting: the handles, which hold nothing, are kept for a while.
  void retire(std::vector<ArrayPtr> donated);
  void clear_retired();

  // Waits for everything enqueued so far; throws the first error of work that finished since the last call.
  void wait();
  bool idle() { return snapshot().empty(); }
  // The events of everything enqueued so far and not yet ready. They stay outstanding.
  std::vector<EventPtr> snapshot();

 private:
  void unlink(Array* array);
  bool finished(const pjrt::Event& event);  // notes the error of work that failed
  struct Dropped {
    EventPtr event;
    std::shared_ptr<void> keep;
  };
  // Takes what has finished out of `dropped_`; the caller frees it without the lock.
  std::vector<Dropped> prune();
  Spinlock mutex_;
  Array* head_ = nullptr;
  std::vector<Dropped> dropped_;
  std::optional<pjrt::Error> failure_;
  std::vector<ArrayPtr> retired_;  // a ring
  size_t next_retired_ = 0;
};

}  // namespace torch_tpu
