// One collective as calls of a c10d backend for CPU tensors.
#pragma once

#include <functional>

#include "distributed/collective.h"
#include "distributed/host_windows.h"

namespace torch_tpu {

class HostCollective {
 public:
  // Takes hold of the tensors' memory: inputs have their values from here on, and nothing else may use the outputs
  // until `run` is over.
  HostCollective(Collective collective, HostWindows& windows, int rank, int size);

  const Collective& collective() const { return collective_; }

  // Carries it out. `wait` waits for a piece of the backend's work, within the time.
  using Wait = std::function<void(const c10::intrusive_ptr<c10d::Work>&, std::chrono::milliseconds)>;
  void run(c10d::Backend& host, std::chrono::milliseconds timeout, const Wait& wait);

 private:
  // An operand as the backend takes it: contiguous, and where the values do not matter, bytes.
  struct Operand {
    at::Tensor window, wire;
    bool written;
  };
  Operand input(const at::Tensor& tensor, HostWindows& windows, bool bytes);
  Operand output(const at::Tensor& tensor, HostWindows& windows, bool bytes, bool has_values);
  std::vector<at::Tensor> wires(const std::vector<Operand>& operands) const;

  void scale_before();
  void scale_after();
  void reduce_to(c10d::Backend& host, at::Tensor& wire, int64_t root, std::chrono::milliseconds timeout,
                 const Wait& wait);
  void all_gather(c10d::Backend& host, std::chrono::milliseconds timeout, const Wait& wait);
  void reduce_scatter(c10d::Backend& host, std::chrono::milliseconds timeout, const Wait& wait);
  void all_to_all(c10d::Backend& host, std::chrono::milliseconds timeout, const Wait& wait);

  Collective collective_;
  int rank_, size_;
  std::vector<Operand> inputs_, outputs_;
};

}  // namespace torch_tpu
