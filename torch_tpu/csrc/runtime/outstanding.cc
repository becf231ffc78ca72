#include "runtime/outstanding.h"

#include <algorithm>
#include <iterator>
#include <mutex>

namespace torch_tpu {
namespace {
constexpr size_t kDroppedBeforePruning = 64;
constexpr size_t kRetired = 1024;
}  // namespace

void Outstanding::add(Array* array) {
  std::lock_guard<Spinlock> lock(mutex_);
  array->next_ = head_;
  array->previous_ = nullptr;
  if (head_) head_->previous_ = array;
  head_ = array;
}

void Outstanding::unlink(Array* array) {
  if (array->previous_) array->previous_->next_ = array->next_;
  if (array->next_) array->next_->previous_ = array->previous_;
  if (head_ == array) head_ = array->next_;
  array->previous_ = array->next_ = nullptr;
}

bool Outstanding::finished(const pjrt::Event& event) {
  if (!event.ready()) return false;
  try {
    event.wait();  // returns at once
  } catch (const pjrt::Error& error) {
    if (!failure_) failure_ = error;
  }
  return true;
}

std::vector<Outstanding::Dropped> Outstanding::prune() {
  const auto done = std::partition(dropped_.begin(), dropped_.end(), [&](auto& d) { return !finished(*d.event); });
  std::vector<Dropped> out(std::make_move_iterator(done), std::make_move_iterator(dropped_.end()));
  dropped_.erase(done, dropped_.end());
  return out;
}

void Outstanding::remove(Array* array) {
  {
    std::lock_guard<Spinlock> lock(mutex_);
    const bool listed = head_ == array || array->previous_ || array->next_;
    if (!listed) return;
    unlink(array);
  }
  if (array->watch_ == Watch::kWhileHeld || array->buffer().deleted()) return;
  auto event = array->buffer().ready_event();
  if (event.ready()) return;
  std::vector<Dropped> free;  // after the lock
  std::lock_guard<Spinlock> lock(mutex_);
  if (dropped_.size() >= kDroppedBeforePruning) free = prune();
  dropped_.push_back({std::make_shared<pjrt::Event>(std::move(event)), nullptr});
}

void Outstanding::adopt(pjrt::Event event, std::shared_ptr<void> keep) {
  std::vector<Dropped> free;
  std::lock_guard<Spinlock> lock(mutex_);
  free = prune();
  dropped_.push_back({std::make_shared<pjrt::Event>(std::move(event)), std::move(keep)});
}

void Outstanding::retire(std::vector<ArrayPtr> donated) {
  {
    std::lock_guard<Spinlock> lock(mutex_);
    if (retired_.empty()) retired_.resize(kRetired);
    for (auto& array : donated) {
      retired_[next_retired_].swap(array);
      next_retired_ = (next_retired_ + 1) % kRetired;
    }
  }
  donated.clear();  // what left the ring, after the lock: ~Array takes it
}

void Outstanding::clear_retired() {
  std::vector<ArrayPtr> retired;
  std::lock_guard<Spinlock> lock(mutex_);
  retired.swap(retired_);
  next_retired_ = 0;
}

std::vector<Outstanding::EventPtr> Outstanding::snapshot() {
  std::vector<Dropped> free;
  std::lock_guard<Spinlock> lock(mutex_);
  std::vector<EventPtr> events;
  for (Array* array = head_; array;) {
    Array* next = array->next_;
    auto event =
        std::make_shared<pjrt::Event>(array->buffer().deleted() ? pjrt::Event() : array->buffer().ready_event());
    if (finished(*event))
      unlink(array);  // known to be ready from now on
    else
      events.push_back(std::move(event));
    array = next;
  }
  free = prune();
  for (auto& dropped : dropped_) events.push_back(dropped.event);
  return events;
}

void Outstanding::wait() {
  for (auto& event : snapshot()) {
    try {
      event->wait();
    } catch (const pjrt::Error&) {  // `finished` notes it below, and the rest is waited for as well
    }
  }
  snapshot();
  std::optional<pjrt::Error> failure;
  {
    std::lock_guard<Spinlock> lock(mutex_);
    failure.swap(failure_);
  }
  if (failure) throw *failure;
}

}  // namespace torch_tpu
