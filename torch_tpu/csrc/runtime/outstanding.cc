#include "runtime/outstanding.h"

namespace torch_tpu {
namespace {
// A dropped array smaller than this was made by a program that XLA runs at once.
constexpr size_t kWorthWaitingFor = 16 << 10;
constexpr size_t kDroppedBeforePruning = 64;
}  // namespace

void Outstanding::add(Array* array) {
  std::lock_guard<std::mutex> lock(mutex_);
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

void Outstanding::remove(Array* array) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool listed = head_ == array || array->previous_ || array->next_;
  if (!listed) return;
  unlink(array);
  if (array->type()->bytes < kWorthWaitingFor || array->buffer().deleted()) return;
  auto event = array->buffer().ready_event();
  if (event.ready()) return;
  if (dropped_.size() >= kDroppedBeforePruning) {
    std::vector<pjrt::Event> late;
    for (auto& e : dropped_)
      if (!e.ready()) late.push_back(std::move(e));
    dropped_ = std::move(late);
  }
  dropped_.push_back(std::move(event));
}

void Outstanding::adopt(pjrt::Event event, std::function<void()> done) {
  event.on_ready([done = std::move(done)](const std::string&) { done(); });
  std::lock_guard<std::mutex> lock(mutex_);
  dropped_.push_back(std::move(event));
}

std::vector<pjrt::Event> Outstanding::snapshot() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<pjrt::Event> events;
  for (Array* array = head_; array;) {
    Array* next = array->next_;
    auto event = array->buffer().deleted() ? pjrt::Event() : array->buffer().ready_event();
    if (event.ready())
      unlink(array);  // known to be ready from now on
    else
      events.push_back(std::move(event));
    array = next;
  }
  for (auto& event : dropped_) events.push_back(std::move(event));
  dropped_.clear();
  return events;
}

void Outstanding::wait() {
  for (auto& event : snapshot()) event.wait();
}

bool Outstanding::idle() {
  auto events = snapshot();
  std::lock_guard<std::mutex> lock(mutex_);
  bool idle = true;
  for (auto& event : events)
    if (!event.ready()) {
      idle = false;
      dropped_.push_back(std::move(event));
    }
  return idle;
}

}  // namespace torch_tpu
