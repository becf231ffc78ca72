#include "distributed/process_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

using c10d::OpType;

// Several pieces of work as one.
class WorkList final : public c10d::Work {
 public:
  WorkList(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts)
      : Work(rank, OpType::COALESCED), parts_(std::move(parts)) {}
  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& part : parts_) part->wait(timeout);
    return true;
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& part : parts_)
      for (const auto& tensor : part->result()) all.push_back(tensor);
    return all;
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

void check_dense(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kTpu, name, ": tpu_dist moves tensors on 'tpu', and this one is on ",
              tensor.device(), ". Move it, or make the group with backend 'cpu:gloo,tpu:tpu_dist'.");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, name,
                              ": tpu_dist moves dense tensors; call to_dense() first.");
}

const at::Tensor& single(const char* name, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, name, " takes one tensor for each process, got ", tensors.size(), ".");
  check_dense(name, tensors[0]);
  return tensors[0];
}

const std::vector<at::Tensor>& list(const char* name, const std::vector<std::vector<at::Tensor>>& lists, size_t size,
                                    const at::Tensor& like) {
  TORCH_CHECK_VALUE(lists.size() == 1 && lists[0].size() == size, name, " needs a list of ", size,
                    " tensors, one for each rank, got ", lists.empty() ? 0 : lists[0].size(), ".");
  for (const auto& tensor : lists[0]) {
    check_dense(name, tensor);
    TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name, ": all tensors must have one dtype, found ",
                     dtype_name(tensor.scalar_type()), " and ", dtype_name(like.scalar_type()), ".");
  }
  return lists[0];
}

void check_parts(const char* name, const at::Tensor& whole, const at::Tensor& part, int size) {
  check_dense(name, whole);
  check_dense(name, part);
  TORCH_CHECK_TYPE(whole.scalar_type() == part.scalar_type(), name, ": input and output must have one dtype, found ",
                   dtype_name(whole.scalar_type()), " and ", dtype_name(part.scalar_type()), ".");
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, name, ": the tensor for all ", size, " ranks must have ",
                    size, " times the elements of the one for each (", part.numel(), "), and has ", whole.numel(), ".");
}

template <typename Options>
Collective collective(OpType type, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                      const Options& options) {
  Collective result{type, std::move(inputs), std::move(outputs)};
  result.timeout = options.timeout;
  if constexpr (requires { options.asyncOp; }) result.async = options.asyncOp;
  if constexpr (requires { options.reduceOp; }) result.reduce = options.reduceOp;
  if constexpr (requires { options.rootRank; }) result.root = options.rootRank;
  return result;
}

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<Transport> transport, int rank, int size)
    : Backend(rank, size), transport_(std::move(transport)) {}

ProcessGroup::WorkPtr ProcessGroup::start(std::vector<Collective> collectives) {
  for (const auto& c : collectives)
    TORCH_CHECK_VALUE(c.root >= 0 && c.root < getSize(), "The root must be a rank of the group, 0 to ", getSize() - 1,
                      ", got ", c.root, ".");
  const auto first = number_ + 1;
  number_ += collectives.size();
  auto work = transport_->start(std::move(collectives), first);
  return transfer(std::move(work));
}

ProcessGroup::WorkPtr ProcessGroup::start(Collective collective) {
  std::vector<Collective> one;
  one.push_back(std::move(collective));
  return start(std::move(one));
}

// What begins inside of a coalescing block ends with it.
ProcessGroup::WorkPtr ProcessGroup::transfer(WorkPtr work) {
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

void ProcessGroup::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
}

ProcessGroup::WorkPtr ProcessGroup::endCoalescing() {
  coalescing_ = false;
  return c10::make_intrusive<WorkList>(getRank(), std::exchange(coalesced_, {}));
}

ProcessGroup::WorkPtr ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return start(collective(OpType::BROADCAST, {}, {single("broadcast", tensors)}, options));
}

ProcessGroup::WorkPtr ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return start(collective(OpType::ALLREDUCE, {}, {single("all_reduce", tensors)}, options));
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Collective> all;
  for (const auto& tensor : tensors) {
    check_dense("all_reduce_coalesced", tensor);
    all.push_back(collective(OpType::ALLREDUCE, {}, {tensor}, options));
  }
  return start(std::move(all));
}

ProcessGroup::WorkPtr ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return start(collective(OpType::REDUCE, {}, {single("reduce", tensors)}, options));
}

ProcessGroup::WorkPtr ProcessGroup::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto& input = single("all_gather", inputs);
  return start(collective(OpType::ALLGATHER, {input}, list("all_gather", outputs, getSize(), input), options));
}

ProcessGroup::WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  check_parts("all_gather_into_tensor", output, input, getSize());
  return start(collective(OpType::_ALLGATHER_BASE, {input}, {output}, options));
}

ProcessGroup::WorkPtr ProcessGroup::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == getSize(),
                    "all_gather_coalesced needs a list of outputs for each of ", getSize(), " ranks, got ",
                    outputs.size(), ".");
  std::vector<Collective> all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Lists column(1);
    for (const auto& row : outputs) column[0].push_back(row.at(i));
    check_dense("all_gather_coalesced", inputs[i]);
    all.push_back(collective(OpType::ALLGATHER, {inputs[i]}, list("all_gather_coalesced", column, getSize(), inputs[i]),
                             options));
  }
  return start(std::move(all));
}

ProcessGroup::WorkPtr ProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  std::vector<Collective> all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_parts("all_gather_into_tensor", outputs.at(i), inputs[i], getSize());
    all.push_back(collective(OpType::_ALLGATHER_BASE, {inputs[i]}, {outputs[i]}, options));
  }
  return start(std::move(all));
}

ProcessGroup::WorkPtr ProcessGroup::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto& input = single("gather", inputs);
  Tensors targets;
  if (options.rootRank == getRank()) targets = list("gather", outputs, getSize(), input);
  for (const auto& target : targets)
    TORCH_CHECK_VALUE(target.numel() == input.numel(), "gather: the outputs must have the ", input.numel(),
                      " elements of the input, and one has ", target.numel(), ".");
  return start(collective(OpType::GATHER, {input}, std::move(targets), options));
}

ProcessGroup::WorkPtr ProcessGroup::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  const auto& output = single("scatter", outputs);
  Tensors sources;
  if (options.rootRank == getRank()) sources = list("scatter", inputs, getSize(), output);
  for (const auto& source : sources)
    TORCH_CHECK_VALUE(source.numel() == output.numel(), "scatter: the inputs must have the ", output.numel(),
                      " elements of the output, and one has ", source.numel(), ".");
  return start(collective(OpType::SCATTER, std::move(sources), {output}, options));
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  const auto& output = single("reduce_scatter", outputs);
  return start(
      collective(OpType::REDUCE_SCATTER, list("reduce_scatter", inputs, getSize(), output), {output}, options));
}

ProcessGroup::WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::ReduceScatterOptions& options) {
  check_parts("reduce_scatter_tensor", input, output, getSize());
  return start(collective(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, options));
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::ReduceScatterOptions& options) {
  std::vector<Collective> all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_parts("reduce_scatter_tensor", inputs[i], outputs.at(i), getSize());
    all.push_back(collective(OpType::_REDUCE_SCATTER_BASE, {inputs[i]}, {outputs[i]}, options));
  }
  return start(std::move(all));
}

ProcessGroup::WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  const auto check = [&](const char* what, const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    check_dense("all_to_all_single", tensor);
    const int64_t rows = tensor.dim() ? tensor.size(0) : 0;
    if (splits.empty()) {
      TORCH_CHECK_VALUE(rows % getSize() == 0, "all_to_all_single: the ", rows, " rows of the ", what,
                        " do not divide among ", getSize(), " ranks; give split sizes.");
    } else {
      TORCH_CHECK_VALUE(static_cast<int>(splits.size()) == getSize() &&
                            std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
                        "all_to_all_single: the ", what, " split sizes must be ", getSize(), " numbers with the sum ",
                        rows, ".");
    }
  };
  check("input", input, input_splits);
  check("output", output, output_splits);
  TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(),
                   "all_to_all_single: input and output must have one dtype, found ", dtype_name(input.scalar_type()),
                   " and ", dtype_name(output.scalar_type()), ".");
  auto request = collective(OpType::ALLTOALL_BASE, {input}, {output}, options);
  request.input_splits = input_splits;
  request.output_splits = output_splits;
  // Both even and uneven ranks may take part in one exchange; all of them must then give their splits.
  if (input_splits.empty() != output_splits.empty()) {
    auto& splits = input_splits.empty() ? request.input_splits : request.output_splits;
    splits.assign(getSize(), (input_splits.empty() ? input : output).size(0) / getSize());
  }
  return start(std::move(request));
}

ProcessGroup::WorkPtr ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Lists sources{inputs}, targets{outputs};
  TORCH_CHECK_VALUE(!inputs.empty(), "all_to_all needs one input for each rank.");
  list("all_to_all", sources, getSize(), inputs[0]);
  list("all_to_all", targets, getSize(), inputs[0]);
  return start(collective(OpType::ALLTOALL, inputs, outputs, options));
}

ProcessGroup::WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  if (Runtime::initialized()) Runtime::get().device(Runtime::current_device()).synchronize();
  return start(collective(OpType::BARRIER, {}, {}, options));
}

void ProcessGroup::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  auto request = collective(OpType::BARRIER, {}, {}, options);
  request.monitored = true;
  request.wait_all_ranks = wait_all_ranks;
  request.async = false;
  start(std::move(request))->wait();
}

ProcessGroup::WorkPtr ProcessGroup::send(Tensors& tensors, int to, int tag) {
  return transfer(transport_->send(single("send", tensors), to, tag));
}

ProcessGroup::WorkPtr ProcessGroup::recv(Tensors& tensors, int from, int tag) {
  return transfer(transport_->receive(single("recv", tensors), from, tag));
}

ProcessGroup::WorkPtr ProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  return transfer(transport_->receive(single("recv", tensors), -1, tag));
}

}  // namespace torch_tpu
