// Collectives through host memory: a c10d backend for CPU tensors (Gloo) works on the device's memory itself.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "distributed/collective.h"

namespace torch_tpu {

// Where a group's failures are told, so that each rank's error names the ranks that were missing.
struct GroupNames {
  std::string name;
  std::vector<int64_t> global_ranks;  // by rank in the group
  int rank, size;
};

// A thread carries collectives out in order. Before each the ranks compare what they are about to do: Gloo would mix up
// the bytes of different collectives in silence.
class HostTransport final : public Transport, public std::enable_shared_from_this<HostTransport> {
 public:
  HostTransport(c10::intrusive_ptr<c10d::Backend> host, c10::intrusive_ptr<c10d::Store> store, GroupNames names,
                std::chrono::milliseconds timeout);
  ~HostTransport() override;

  WorkPtr start(std::vector<Collective> collectives, uint64_t number) override;
  WorkPtr send(const at::Tensor& tensor, int to, int tag) override;
  WorkPtr receive(const at::Tensor& tensor, int from, int tag) override;
  void set_timeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void abort() override;

 private:
  struct Job;
  using JobPtr = std::shared_ptr<Job>;
  static void loop(std::weak_ptr<HostTransport> weak, std::shared_ptr<struct Queue> queue);
  void run(const JobPtr& job);
  void agree(const Collective& collective, uint64_t number, std::chrono::milliseconds timeout);
  void wait(const WorkPtr& work, std::chrono::milliseconds timeout);
  [[noreturn]] void fail(const std::string& operation, uint64_t number, const std::string& reason, double seconds);
  std::string absentees(uint64_t number);

  c10::intrusive_ptr<c10d::Backend> host_;
  c10::intrusive_ptr<c10d::Store> store_;
  GroupNames names_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::shared_ptr<Queue> queue_;
  std::atomic<uint64_t> transfers_{0};
};

}  // namespace torch_tpu
