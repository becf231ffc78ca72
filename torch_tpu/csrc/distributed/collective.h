// What a process group asks of a transport: one collective on device tensors.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace torch_tpu {

struct Collective {
  c10d::OpType type;
  std::vector<at::Tensor> inputs, outputs;  // an operand that is both stands among the outputs
  c10d::ReduceOp reduce = c10d::ReduceOp::SUM;
  int64_t root = 0;
  std::vector<int64_t> input_splits, output_splits;  // rows for each rank; empty: even
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  bool async = true;
  bool monitored = false, wait_all_ranks = false;  // of a barrier
};

// What all ranks must agree on, as a user reads it: "all_reduce of 12 float32 elements (sum)".
std::string describe(const Collective& collective);
// "float32".
std::string dtype_name(c10::ScalarType dtype);

// Carries collectives out. All ranks of a group give theirs the same collectives in the same order.
class Transport {
 public:
  virtual ~Transport() = default;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Starts collectives, which count as one piece of work. `number` is that of the first in the group.
  virtual WorkPtr start(std::vector<Collective> collectives, uint64_t number) = 0;
  virtual WorkPtr send(const at::Tensor& tensor, int to, int tag) = 0;
  virtual WorkPtr receive(const at::Tensor& tensor, int from, int tag) = 0;  // from -1: any rank
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  // Ends what is under way with an error.
  virtual void abort() = 0;
};

}  // namespace torch_tpu
