// One operator call as the eager kernel sees it: its device operands, and the key that finds its program.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
#include <optional>

#include "eager/program.h"
#include "runtime/cell.h"

namespace torch_tpu {

// What the kernel needs to know of a schema argument, read once per operator.
struct ArgumentSpec {
  enum Kind : uint8_t { kTensor, kTensors, kScalar, kScalars, kFloat, kGenerator, kOther } kind = kOther;
  bool is_written = false;
  bool is_static = false;  // Scalars, floats, run-time integers: part of the program
  std::optional<c10::IValue> default_value;
};

struct TensorRef {
  const at::TensorImpl* tensor;
  Cell* cell;
  int32_t slot;
  bool fits;  // see torch_tpu/lowering/view.py
};

// Filled by `read`: the call's tensors by position, storages by slot, numbers by index, and its key.
class Call {
 public:
  // Throws for tensors on other devices. `arguments` are the top of the stack, in schema order.
  void read(const std::vector<ArgumentSpec>& specs, const c10::IValue* arguments);
  // Adds to the key the sign of each number, its order to 1 and to the number before: for operators that refuse some
  // numbers. A number of another kind is another key, so the operator's own check runs when its program is built.
  void read_number_classes();

  // For lists of `n` tensors each, of which the first is written item by item: whether an item overlaps the memory of
  // another item that is written, so that the order of the items counts.
  bool items_overlap(size_t n) const;

  Key key;
  c10::SmallVector<TensorRef, 8> tensors;
  c10::SmallVector<Cell*, 8> slots;
  c10::SmallVector<c10::Scalar, 4> numbers;
  c10::SmallVector<std::vector<c10::Scalar>, 1> number_lists;
  std::optional<at::Generator> generator;
  c10::DeviceIndex device = -1;

 private:
  void read_tensor(const at::Tensor& tensor, bool is_written = false);
  void read_number(const c10::IValue& value, const ArgumentSpec& spec);
  void read_static(const c10::IValue& value);
  int32_t slot_of(Cell* cell);
  std::unique_ptr<ska::flat_hash_map<Cell*, int32_t>> slot_index_;  // only for many slots
  void set_device(c10::DeviceIndex index);
};

// Equality of two numbers of one type; cheaper than IValue's.
bool same_number(const c10::IValue& a, const c10::IValue& b);

// The value of a 0-d CPU tensor.
c10::Scalar host_scalar(const at::TensorImpl* tensor);

// True if the dimensions of a window lie inside one another at its offset (torch_tpu/lowering/view.py: Chain.fits).
bool window_fits(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset);

}  // namespace torch_tpu
