#include "distributed/host_collective.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace torch_tpu {
namespace {

using c10d::OpType;
using Op = c10d::ReduceOp;

bool reduces(OpType type) {
  return type == OpType::ALLREDUCE || type == OpType::REDUCE || type == OpType::REDUCE_SCATTER ||
         type == OpType::_REDUCE_SCATTER_BASE;
}

bool same_sizes(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const auto& t) { return t.numel() == tensors[0].numel(); });
}

// What the backend computes: averages and scaled sums are sums with a step before or after.
Op backend_op(const Op& op) { return op.op_ == Op::AVG || op.op_ == Op::PREMUL_SUM ? Op(Op::SUM) : op; }

// The elements in memory order, as they are or as bytes.
at::Tensor flat(const at::Tensor& tensor, bool bytes) {
  const auto elements = tensor.reshape({-1});
  return bytes ? elements.view(at::kByte) : elements;
}

}  // namespace

HostCollective::HostCollective(Collective collective, HostWindows& windows, int rank, int size)
    : collective_(std::move(collective)), rank_(rank), size_(size) {
  const auto type = collective_.type;
  const bool bytes = !reduces(type);
  const bool root = collective_.root == rank;
  // Where the operand is in place, its values count: everywhere in a reduction, at the root in a broadcast.
  const bool in_place = type == OpType::ALLREDUCE || type == OpType::REDUCE || type == OpType::BROADCAST;
  const bool only_read = (type == OpType::BROADCAST && root) || (type == OpType::REDUCE && !root);
  for (const auto& tensor : collective_.outputs)
    outputs_.push_back(only_read ? input(tensor, windows, bytes) : output(tensor, windows, bytes, in_place));
  for (const auto& tensor : collective_.inputs) inputs_.push_back(input(tensor, windows, bytes));
  if (reduces(type)) scale_before();
}

HostCollective::Operand HostCollective::input(const at::Tensor& tensor, HostWindows& windows, bool bytes) {
  const auto window = windows.read(tensor.resolve_conj().resolve_neg());
  const auto wire = window.contiguous();
  return {window, flat(wire, bytes), false};
}

HostCollective::Operand HostCollective::output(const at::Tensor& tensor, HostWindows& windows, bool bytes,
                                               bool has_values) {
  const auto window = windows.write(tensor);
  at::Tensor wire = window;
  if (!window.is_contiguous()) wire = has_values ? window.contiguous() : at::empty(window.sizes(), window.options());
  return {window, flat(wire, bytes), true};
}

std::vector<at::Tensor> HostCollective::wires(const std::vector<Operand>& operands) const {
  std::vector<at::Tensor> result;
  for (const auto& operand : operands) result.push_back(operand.wire);
  return result;
}

// premul_sum: each rank's contribution times a number of its own. The tensor itself is scaled only where it is to be
// replaced by the result.
void HostCollective::scale_before() {
  if (collective_.reduce.op_ != Op::PREMUL_SUM) return;
  const auto supplement =
      c10::dynamic_intrusive_pointer_cast<c10d::PreMulSumSupplement>(collective_.reduce.supplement_);
  TORCH_CHECK(supplement, "A premul_sum needs its factor: make the op with torch.distributed._make_nccl_premul_sum.");
  const auto& factor = supplement->tensor_factor;
  const auto scaled = [&](const at::Tensor& wire) {
    return factor.defined() ? wire * factor.to(at::kCPU, wire.scalar_type()) : wire * supplement->double_factor;
  };
  if (collective_.inputs.empty())
    for (auto& operand : outputs_) operand.wire = scaled(operand.wire).to(operand.wire.scalar_type());
  for (auto& operand : inputs_) operand.wire = scaled(operand.wire).to(operand.wire.scalar_type());
}

void HostCollective::scale_after() {
  if (collective_.reduce.op_ != Op::AVG || (collective_.type == OpType::REDUCE && collective_.root != rank_)) return;
  for (auto& [window, wire, written] : outputs_) {
    if (at::isIntegralType(wire.scalar_type(), false))
      wire.div_(size_, "trunc");  // as NCCL does
    else
      wire.div_(size_);
  }
}

void HostCollective::reduce_to(c10d::Backend& host, at::Tensor& wire, int64_t root, std::chrono::milliseconds timeout,
                               const Wait& wait) {
  c10d::ReduceOptions options;
  options.reduceOp = backend_op(collective_.reduce);
  options.rootRank = root;
  options.timeout = timeout;
  // The backend may use the memory of ranks that get no result.
  std::vector<at::Tensor> operands{root == rank_ ? wire : wire.clone()};
  wait(host.reduce(operands, options), timeout);
}

void HostCollective::all_gather(c10d::Backend& host, std::chrono::milliseconds timeout, const Wait& wait) {
  auto outputs = wires(outputs_), inputs = wires(inputs_);
  TORCH_CHECK(inputs[0].numel() == outputs[rank_].numel(), "all_gather: rank ", rank_, " gives ",
              collective_.inputs[0].sizes(), " and its own place in the output list has ",
              collective_.outputs[rank_].sizes(), ".");
  if (same_sizes(outputs)) {
    std::vector<std::vector<at::Tensor>> lists{outputs};
    c10d::AllgatherOptions options;
    options.timeout = timeout;
    return wait(host.allgather(lists, inputs, options), timeout);
  }
  for (int root = 0; root < size_; ++root) {
    if (root == rank_) outputs[root].copy_(inputs[0]);
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = timeout;
    std::vector<at::Tensor> operands{outputs[root]};
    wait(host.broadcast(operands, options), timeout);
  }
}

void HostCollective::reduce_scatter(c10d::Backend& host, std::chrono::milliseconds timeout, const Wait& wait) {
  auto inputs = wires(inputs_), outputs = wires(outputs_);
  TORCH_CHECK(inputs[rank_].numel() == outputs[0].numel(), "reduce_scatter: rank ", rank_, " gets ",
              collective_.outputs[0].sizes(), " and its own place in the input list has ",
              collective_.inputs[rank_].sizes(), ".");
  if (same_sizes(inputs)) {
    std::vector<std::vector<at::Tensor>> lists{inputs};
    c10d::ReduceScatterOptions options;
    options.reduceOp = backend_op(collective_.reduce);
    options.timeout = timeout;
    return wait(host.reduce_scatter(outputs, lists, options), timeout);
  }
  for (int root = 0; root < size_; ++root) {
    auto part = inputs[root].clone();
    reduce_to(host, part, root, timeout, wait);
    if (root == rank_) outputs[0].copy_(part.view_as(outputs[0]));
  }
}

// Lists, and rows of any number for each rank, as one exchange of bytes.
void HostCollective::all_to_all(c10d::Backend& host, std::chrono::milliseconds timeout, const Wait& wait) {
  auto inputs = wires(inputs_), outputs = wires(outputs_);
  const auto counts = [&](const std::vector<at::Tensor>& list, const at::Tensor& original, std::vector<int64_t> rows) {
    if (list.size() > 1 || collective_.type == OpType::ALLTOALL) {
      rows.clear();
      for (const auto& tensor : list) rows.push_back(tensor.numel());
    } else if (!rows.empty()) {
      const int64_t row = original.numel() ? list[0].numel() / original.size(0) : 0;
      for (auto& count : rows) count *= row;
    }
    return rows;
  };
  auto sent = counts(inputs, collective_.inputs[0], collective_.input_splits);
  auto received = counts(outputs, collective_.outputs[0], collective_.output_splits);
  auto input = inputs.size() == 1 ? inputs[0] : at::cat(inputs);
  auto output = outputs.size() == 1 ? outputs[0] : at::empty({0}, input.options());
  if (outputs.size() > 1) {
    int64_t total = 0;
    for (const auto& tensor : outputs) total += tensor.numel();
    output.resize_({total});
  }
  c10d::AllToAllOptions options;
  options.timeout = timeout;
  wait(host.alltoall_base(output, input, received, sent, options), timeout);
  if (outputs.size() == 1) return;
  int64_t start = 0;
  for (auto& tensor : outputs) {
    tensor.copy_(output.narrow(0, start, tensor.numel()));
    start += tensor.numel();
  }
}

void HostCollective::run(c10d::Backend& host, std::chrono::milliseconds timeout, const Wait& wait) {
  auto inputs = wires(inputs_), outputs = wires(outputs_);
  const bool root = collective_.root == rank_;
  switch (collective_.type) {
    case OpType::BROADCAST: {
      c10d::BroadcastOptions options;
      options.rootRank = collective_.root;
      options.timeout = timeout;
      wait(host.broadcast(outputs, options), timeout);
      break;
    }
    case OpType::ALLREDUCE: {
      c10d::AllreduceOptions options;
      options.reduceOp = backend_op(collective_.reduce);
      options.timeout = timeout;
      wait(host.allreduce(outputs, options), timeout);
      break;
    }
    case OpType::REDUCE: reduce_to(host, outputs[0], collective_.root, timeout, wait); break;
    case OpType::ALLGATHER: all_gather(host, timeout, wait); break;
    case OpType::_ALLGATHER_BASE: {
      c10d::AllgatherOptions options;
      options.timeout = timeout;
      wait(host._allgather_base(outputs[0], inputs[0], options), timeout);
      break;
    }
    case OpType::GATHER: {
      c10d::GatherOptions options;
      options.rootRank = collective_.root;
      options.timeout = timeout;
      std::vector<std::vector<at::Tensor>> lists;
      if (root) lists.push_back(outputs);
      wait(host.gather(lists, inputs, options), timeout);
      break;
    }
    case OpType::SCATTER: {
      c10d::ScatterOptions options;
      options.rootRank = collective_.root;
      options.timeout = timeout;
      std::vector<std::vector<at::Tensor>> lists;
      if (root) lists.push_back(inputs);
      wait(host.scatter(outputs, lists, options), timeout);
      break;
    }
    case OpType::REDUCE_SCATTER: reduce_scatter(host, timeout, wait); break;
    case OpType::_REDUCE_SCATTER_BASE: {
      c10d::ReduceScatterOptions options;
      options.reduceOp = backend_op(collective_.reduce);
      options.timeout = timeout;
      wait(host._reduce_scatter_base(outputs[0], inputs[0], options), timeout);
      break;
    }
    case OpType::ALLTOALL_BASE:
    case OpType::ALLTOALL: all_to_all(host, timeout, wait); break;
    case OpType::BARRIER: {
      c10d::BarrierOptions options;
      options.timeout = timeout;
      if (collective_.monitored)
        host.monitoredBarrier(options, collective_.wait_all_ranks);
      else
        wait(host.barrier(options), timeout);
      break;
    }
    default: TORCH_CHECK_NOT_IMPLEMENTED(false, "tpu_dist has no ", c10d::opTypeToString(collective_.type), ".");
  }
  if (reduces(collective_.type)) scale_after();
  for (auto& [window, wire, written] : outputs_) {
    if (!written || wire.numel() == 0 || wire.data_ptr() == window.data_ptr()) continue;
    window.copy_(wire.scalar_type() == window.scalar_type() ? wire.view(window.sizes())
                                                            : wire.view(window.scalar_type()).view(window.sizes()));
  }
}

}  // namespace torch_tpu
