#include "distributed/collective.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>

namespace torch_tpu {
namespace {

const char* operation(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::BROADCAST: return "broadcast";
    case c10d::OpType::ALLREDUCE: return "all_reduce";
    case c10d::OpType::REDUCE: return "reduce";
    case c10d::OpType::ALLGATHER: return "all_gather";
    case c10d::OpType::_ALLGATHER_BASE: return "all_gather_into_tensor";
    case c10d::OpType::GATHER: return "gather";
    case c10d::OpType::SCATTER: return "scatter";
    case c10d::OpType::REDUCE_SCATTER: return "reduce_scatter";
    case c10d::OpType::_REDUCE_SCATTER_BASE: return "reduce_scatter_tensor";
    case c10d::OpType::ALLTOALL_BASE: return "all_to_all_single";
    case c10d::OpType::ALLTOALL: return "all_to_all";
    case c10d::OpType::BARRIER: return "barrier";
    default: return "collective";
  }
}

const char* reduction(c10d::ReduceOp::RedOpType op) {
  static constexpr const char* kNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  return op < std::size(kNames) ? kNames[op] : "unknown";
}

std::string elements(const at::Tensor& tensor) {
  return std::to_string(tensor.numel()) + " " + dtype_name(tensor.scalar_type()) + " elements";
}

// Sizes that all ranks know, in order.
std::string all_elements(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return "no elements";
  const auto same = [&](const auto& t) { return t.numel() == tensors[0].numel(); };
  if (std::all_of(tensors.begin(), tensors.end(), same)) return elements(tensors[0]);
  std::string sizes;
  for (const auto& tensor : tensors) sizes += (sizes.empty() ? "" : ", ") + std::to_string(tensor.numel());
  return sizes + " " + dtype_name(tensors[0].scalar_type()) + " elements";
}

}  // namespace

std::string dtype_name(c10::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

std::string describe(const Collective& c) {
  const std::string name = operation(c.type);
  const auto root = [&] { return " (root " + std::to_string(c.root) + ")"; };
  const auto reduced = [&] { return std::string(" (") + reduction(c.reduce.op_) + ")"; };
  switch (c.type) {
    case c10d::OpType::BROADCAST: return name + " of " + elements(c.outputs[0]) + root();
    case c10d::OpType::ALLREDUCE: return name + " of " + elements(c.outputs[0]) + reduced();
    case c10d::OpType::REDUCE:
      return name + " of " + elements(c.outputs[0]) + " (" + reduction(c.reduce.op_) + ", root " +
             std::to_string(c.root) + ")";
    case c10d::OpType::ALLGATHER: return name + " of " + all_elements(c.outputs);
    case c10d::OpType::_ALLGATHER_BASE: return name + " of " + elements(c.inputs[0]);
    case c10d::OpType::GATHER: return name + " of " + elements(c.inputs[0]) + root();
    case c10d::OpType::SCATTER: return name + " of " + elements(c.outputs[0]) + root();
    case c10d::OpType::REDUCE_SCATTER: return name + " of " + all_elements(c.inputs) + reduced();
    case c10d::OpType::_REDUCE_SCATTER_BASE: return name + " of " + elements(c.inputs[0]) + reduced();
    case c10d::OpType::ALLTOALL_BASE:
      if (c.input_splits.empty() && c.output_splits.empty()) return name + " of " + elements(c.inputs[0]);
      return name + " of " + dtype_name(c.inputs[0].scalar_type());
    case c10d::OpType::ALLTOALL: return name + " of " + dtype_name(c.inputs[0].scalar_type());
    default: return name;
  }
}

}  // namespace torch_tpu
