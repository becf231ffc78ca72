#include "distributed/host_transport.h"

#include <ATen/Functions.h>

#include <chrono>
#include <cstring>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "distributed/host_collective.h"

namespace torch_tpu {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kRecord = 128;           // bytes of a description that ranks compare
constexpr milliseconds kLook = 500ms;     // how often a waiting rank looks whether another has failed
constexpr milliseconds kOthersFail = 3s;  // how long a failed rank waits for the others to say so too

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string one_decimal(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", value);
  return text;
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// The first line of an error, without the C++ stack that c10 appends.
std::string first_line(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = c10_error ? c10_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

// Work of this backend: the device tensors that it gives, and an end.
class HostWork final : public c10d::Work {
 public:
  HostWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, uint64_t number)
      : Work(rank, type),
        outputs_(std::move(outputs)),
        number_(number),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (timeout == kNoTimeout)
      cv_.wait(lock, [&] { return completed_; });
    else
      TORCH_CHECK_WITH(DistBackendError, cv_.wait_for(lock, timeout, [&] { return completed_; }),
                       "tpu_dist: wait() gave up after ", timeout.count(), " ms; the ", c10d::opTypeToString(opType_),
                       " (number ", number_, ") is still under way.");
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return number_; }

  void complete(std::exception_ptr error) {
    finish(error);
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(c10::IValue(outputs_));
  }

 private:
  std::vector<at::Tensor> outputs_;
  uint64_t number_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

struct HostTransport::Job {
  std::vector<HostCollective> steps;
  uint64_t number;
  c10::intrusive_ptr<HostWork> work;
};

// What is to be done. Outlives the transport, whose last owner may be the thread itself.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<void>> jobs;
  bool busy = false, stopped = false, has_thread = false;
  std::atomic<bool> aborted{false};
};

HostTransport::HostTransport(c10::intrusive_ptr<c10d::Backend> host, c10::intrusive_ptr<c10d::Store> store,
                             GroupNames names, milliseconds timeout)
    : host_(std::move(host)),
      store_(std::move(store)),
      names_(std::move(names)),
      timeout_(timeout),
      queue_(std::make_shared<Queue>()) {}

HostTransport::~HostTransport() {
  std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->stopped = true;
  queue_->changed.notify_all();
}

void HostTransport::abort() {
  queue_->aborted = true;
  std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->changed.notify_all();
}

// ---- order
// -----------------------------------------------------------------------------------------------------------------
Transport::WorkPtr HostTransport::start(std::vector<Collective> collectives, uint64_t number) {
  const auto type = collectives.size() == 1 ? collectives[0].type : c10d::OpType::COALESCED;
  const bool async = collectives[0].async;
  auto job = std::make_shared<Job>();
  std::vector<at::Tensor> outputs;
  for (auto& collective : collectives) {
    HostWindows windows;
    outputs.insert(outputs.end(), collective.outputs.begin(), collective.outputs.end());
    job->steps.emplace_back(std::move(collective), windows, names_.rank, names_.size);
  }
  job->number = number;
  job->work = c10::make_intrusive<HostWork>(names_.rank, type, std::move(outputs), number);
  auto work = job->work;
  {
    std::unique_lock<std::mutex> lock(queue_->mutex);
    TORCH_CHECK_WITH(DistBackendError, !queue_->aborted, "tpu_dist: group '", names_.name, "' was aborted.");
    const bool at_once = !async && !queue_->busy && queue_->jobs.empty();
    if (!at_once) {
      queue_->jobs.push_back(std::move(job));
      if (!queue_->has_thread) {
        queue_->has_thread = true;
        std::thread(&HostTransport::loop, weak_from_this(), queue_).detach();
      }
      queue_->changed.notify_all();
      return work;
    }
    queue_->busy = true;
  }
  run(job);  // the caller is about to wait anyway
  std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->busy = false;
  queue_->changed.notify_all();
  return work;
}

void HostTransport::loop(std::weak_ptr<HostTransport> weak, std::shared_ptr<Queue> queue) {
  for (;;) {
    JobPtr job;
    {
      std::unique_lock<std::mutex> lock(queue->mutex);
      queue->changed.wait(lock, [&] { return queue->stopped || (!queue->busy && !queue->jobs.empty()); });
      if (queue->jobs.empty()) return;
      if (queue->busy) continue;
      job = std::static_pointer_cast<Job>(queue->jobs.front());
      queue->jobs.pop_front();
      queue->busy = true;
    }
    if (const auto transport = weak.lock())
      transport->run(job);
    else
      job->work->complete(std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, "The process group is gone.")));
    job.reset();
    std::lock_guard<std::mutex> lock(queue->mutex);
    queue->busy = false;
    queue->changed.notify_all();
  }
}

void HostTransport::run(const JobPtr& job) {
  std::exception_ptr error;
  uint64_t number = job->number;
  for (auto& step : job->steps) {
    const auto start = Clock::now();
    const auto& collective = step.collective();
    try {
      const auto timeout = collective.timeout == c10d::kUnsetTimeout ? timeout_.load() : collective.timeout;
      if (!collective.monitored) agree(collective, number, timeout);
      step.run(*host_, timeout, [&](const WorkPtr& work, milliseconds limit) { wait(work, limit); });
    } catch (const std::exception& reason) {
      try {
        fail(describe(collective), number, first_line(reason), since(start));
      } catch (...) {
        error = std::current_exception();
      }
      break;
    }
    ++number;
  }
  job->steps.clear();  // lets go of the tensors' memory before anyone learns of the end
  job->work->complete(error);
}

void HostTransport::wait(const WorkPtr& work, milliseconds timeout) {
  const auto start = Clock::now();
  struct End {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
  };
  const auto end = std::make_shared<End>();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work->getFuture();
  } catch (const c10::Error&) {  // not all of Gloo's work has one
    work->wait(timeout);
    return;
  }
  future->addCallback([end](c10::ivalue::Future&) {
    std::lock_guard<std::mutex> lock(end->mutex);
    end->reached = true;
    end->changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(end->mutex);
  while (!end->changed.wait_for(lock, kLook, [&] { return end->reached; })) {
    TORCH_CHECK(!queue_->aborted, "the group was aborted");
    TORCH_CHECK(Clock::now() - start < timeout + 2 * kOthersFail, "no end after the timeout of ", timeout.count(),
                " ms");
    TORCH_CHECK(!store_->check({"failed"}), "another rank has failed");
  }
  if (future->hasError()) std::rethrow_exception(future->exception_ptr());
}

// ---- agreement and failure
// --------------------------------------------------------------------------------------------------
void HostTransport::agree(const Collective& collective, uint64_t number, milliseconds timeout) {
  if (names_.size == 1) return;
  const std::string mine = describe(collective) + ", number " + std::to_string(number);
  auto record = at::zeros({kRecord}, at::kByte);
  std::memcpy(record.data_ptr(), mine.data(), std::min(mine.size(), kRecord - 1));
  auto all = at::empty({names_.size * static_cast<int64_t>(kRecord)}, at::kByte);
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  wait(host_->_allgather_base(all, record, options), timeout);
  for (int rank = 0; rank < names_.size; ++rank) {
    const char* theirs = static_cast<const char*>(all.data_ptr()) + rank * kRecord;
    if (std::memcmp(theirs, record.data_ptr(), kRecord) == 0) continue;
    TORCH_CHECK(false, "the ranks do not agree: rank ", names_.global_ranks[names_.rank], " calls ", mine, ", rank ",
                names_.global_ranks[rank], " calls ", theirs,
                ". Each rank of a group must make the same calls in the same order");
  }
}

// Says on the store that this rank has failed, and learns which others have: those that stay silent are the cause.
std::string HostTransport::absentees(uint64_t number) {
  try {
    const auto key = [](int rank) { return "failed/" + std::to_string(rank); };
    store_->set(key(names_.rank), bytes_of(std::to_string(number)));
    store_->set("failed", bytes_of("1"));
    std::string silent, elsewhere;
    const auto deadline = Clock::now() + kOthersFail;
    for (int rank = 0; rank < names_.size; ++rank) {
      while (!store_->check({key(rank)}) && Clock::now() < deadline) std::this_thread::sleep_for(20ms);
      const auto name = std::to_string(names_.global_ranks[rank]);
      if (!store_->check({key(rank)}))
        silent += (silent.empty() ? "" : ", ") + name;
      else if (const auto theirs = text_of(store_->get(key(rank))); theirs != std::to_string(number))
        elsewhere += (elsewhere.empty() ? "" : ", ") + name + " (in number " + theirs + ")";
    }
    std::string text;
    if (!silent.empty())
      text += " Missing: rank " + silent + ", which has died or is not in a collective of this group.";
    if (!elsewhere.empty()) text += " Elsewhere: rank " + elsewhere + ".";
    return text;
  } catch (const std::exception& error) {
    return " The store does not answer either, so its process has probably died (" + first_line(error) + ").";
  }
}

void HostTransport::fail(const std::string& operation, uint64_t number, const std::string& reason, double seconds) {
  const bool disagreement = reason.find("the ranks do not agree") != std::string::npos;
  const std::string missing = disagreement ? "" : absentees(number);
  C10_THROW_ERROR(DistBackendError, c10::str("tpu_dist: ", operation, ", number ", number, " of group '", names_.name,
                                             "', failed on rank ", names_.global_ranks[names_.rank], " after ",
                                             one_decimal(seconds), " s: ", reason, ".", missing));
}

// ---- between two ranks
// --------------------------------------------------------------------------------------------------------
namespace {

// A transfer ends where its owner waits for it: it needs no thread.
class TransferWork final : public c10d::Work {
 public:
  TransferWork(int rank, c10d::OpType type, c10::intrusive_ptr<c10d::Work> host, at::Tensor device, at::Tensor window,
               at::Tensor wire, std::function<void(const std::exception&)> fail, milliseconds timeout)
      : Work(rank, type),
        host_(std::move(host)),
        device_(std::move(device)),
        window_(std::move(window)),
        wire_(std::move(wire)),
        fail_(std::move(fail)),
        timeout_(timeout) {}

  bool isCompleted() override { return done_ || host_->isCompleted(); }
  bool wait(milliseconds timeout) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_) return true;
    try {
      host_->wait(timeout == kNoTimeout ? timeout_ : timeout);
    } catch (const std::exception& error) {
      fail_(error);
    }
    if (opType_ != c10d::OpType::SEND && wire_.data_ptr() != window_.data_ptr())
      window_.copy_(wire_.view(window_.scalar_type()).view(window_.sizes()));
    window_ = wire_ = at::Tensor();
    done_ = true;
    return true;
  }
  std::vector<at::Tensor> result() override { return {device_}; }
  int sourceRank() const override { return host_->sourceRank(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    wait(kNoTimeout);
    future->markCompleted(c10::IValue(result()));
    return future;
  }

 private:
  c10::intrusive_ptr<c10d::Work> host_;
  at::Tensor device_, window_, wire_;
  std::function<void(const std::exception&)> fail_;
  milliseconds timeout_;
  bool done_ = false;
};

}  // namespace

Transport::WorkPtr HostTransport::send(const at::Tensor& tensor, int to, int tag) {
  HostWindows windows;
  const auto window = windows.read(tensor.resolve_conj().resolve_neg());
  std::vector<at::Tensor> wire{window.contiguous().reshape({-1}).view(at::kByte)};
  const uint64_t number = ++transfers_;
  const auto fail_here = [self = shared_from_this(), number, to](const std::exception& error) {
    self->fail("send to rank " + std::to_string(self->names_.global_ranks[to]), number, first_line(error), 0);
  };
  return c10::make_intrusive<TransferWork>(names_.rank, c10d::OpType::SEND, host_->send(wire, to, tag), tensor, window,
                                           wire[0], fail_here, timeout_.load());
}

Transport::WorkPtr HostTransport::receive(const at::Tensor& tensor, int from, int tag) {
  HostWindows windows;
  const auto window = windows.write(tensor);
  std::vector<at::Tensor> wire{
      (window.is_contiguous() ? window : at::empty(window.sizes(), window.options())).reshape({-1}).view(at::kByte)};
  const uint64_t number = ++transfers_;
  const auto fail_here = [self = shared_from_this(), number, from](const std::exception& error) {
    const auto source = from < 0 ? "any rank" : "rank " + std::to_string(self->names_.global_ranks[from]);
    self->fail("receive from " + source, number, first_line(error), 0);
  };
  auto host = from < 0 ? host_->recvAnysource(wire, tag) : host_->recv(wire, from, tag);
  return c10::make_intrusive<TransferWork>(names_.rank, from < 0 ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV,
                                           std::move(host), tensor, window, wire[0], fail_here, timeout_.load());
}

}  // namespace torch_tpu
