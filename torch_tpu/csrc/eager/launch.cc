// Running a program for a call: operands in, execution, results out.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "eager/kernel.h"
#include "eager/tensor.h"
#include "runtime/allocator.h"
#include "runtime/dtypes.h"
#include "runtime/generator.h"
#include "runtime/hooks.h"
#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

// The arguments of one execution; they live until the program has been enqueued.
struct Operands {
  c10::SmallVector<PJRT_Buffer*, 16> handles;
  c10::SmallVector<ArrayPtr, 16> arrays;
  c10::SmallVector<int64_t, 4> keep;  // arguments that the program must not consume
  struct Claim {
    Cell* cell;
    int32_t operand, output;
  };
  c10::SmallVector<Claim, 2> claimed;  // cells whose contents it consumes, and the output that replaces them
  ArrayPtr fault_flag;

  Operands() = default;
  Operands(const Operands&) = delete;
  ~Operands() {
    for (auto& claim : claimed) claim.cell->give_up();
  }
  void add(ArrayPtr array) {
    handles.push_back(array->handle());
    arrays.push_back(std::move(array));
  }
  // Gives the claimed cells their new contents, and returns the arrays that are gone.
  std::vector<ArrayPtr> settle(c10::ArrayRef<ArrayPtr> outputs) {
    std::vector<ArrayPtr> donated;
    donated.reserve(claimed.size());
    for (auto& claim : claimed) {
      claim.cell->settle(outputs[claim.output]);
      donated.push_back(std::move(arrays[claim.operand]));
    }
    claimed.clear();
    return donated;
  }
};

ArrayPtr packed_numbers(const std::vector<c10::Scalar>& values, pjrt::DType dtype, DeviceState& device) {
  const auto n = static_cast<int64_t>(values.size());
  const auto* type = ArrayType::get(dtype, {n});
  if (dtype == PJRT_Buffer_Type_C128) {
    std::vector<c10::complex<double>> data;
    for (const auto& v : values) data.push_back(v.toComplexDouble());
    return device.from_host(data.data(), type);
  }
  if (dtype == PJRT_Buffer_Type_S64) {
    std::vector<int64_t> data;
    for (const auto& v : values) data.push_back(v.toLong());
    return device.from_host(data.data(), type);
  }
  TORCH_INTERNAL_ASSERT(dtype == PJRT_Buffer_Type_F64);
  std::vector<double> data;
  for (const auto& v : values) data.push_back(v.toDouble());
  return device.from_host(data.data(), type);
}

ArrayPtr random_state(const Program& program, const Call& call, DeviceState& device) {
  const auto& chosen = call.generator && call.generator->defined() ? *call.generator : default_generator(device.index);
  TORCH_CHECK(chosen.device().type() == kTpu, "Expected a 'tpu' device type for generator but found '",
              chosen.device().type(), "'");
  const auto [seed, offset] = at::check_generator<Generator>(chosen)->draw(program.rng_blocks);
  const uint64_t state[2] = {seed, offset};
  return device.from_host(state, ArrayType::get(PJRT_Buffer_Type_U64, {2}));
}

void gather_operands(const Program& program, const Call& call, DeviceState& device, Operands& out) {
  for (const auto& operand : program.operands) {
    switch (operand.kind) {
      case OperandKind::kBase: out.add(call.slots[operand.index]->array()); break;
      case OperandKind::kOffset:
        out.add(device.scalars.get(call.tensors[operand.index].tensor->storage_offset(), operand.dtype, device));
        break;
      case OperandKind::kScalar: out.add(device.scalars.get(call.numbers[operand.index], operand.dtype, device)); break;
      case OperandKind::kScalars:
        out.add(packed_numbers(call.number_lists[operand.index], operand.dtype, device));
        break;
      case OperandKind::kRng: out.add(random_state(program, call, device)); break;
      case OperandKind::kFlag: out.add(out.fault_flag = device.fault_flag()); break;
      case OperandKind::kCode:
        out.add(device.scalars.get(static_cast<int64_t>(program.fault_code), operand.dtype, device));
        break;
    }
  }
  for (const auto& [operand, output] : program.donations) {
    const auto& o = program.operands[operand];
    if (o.kind == OperandKind::kBase && call.slots[o.index]->claim(out.arrays[operand]))
      out.claimed.push_back({call.slots[o.index], operand, output});
    else
      out.keep.push_back(operand);
  }
}

// A tensor over a program output. Results that are windows on one output share its storage.
at::Tensor fresh_tensor(const Program& program, const Result& result, const ArrayPtr& array,
                        c10::SmallVectorImpl<c10::Storage>& storages, c10::SmallVectorImpl<int32_t>& owners) {
  if (C10_LIKELY(!program.shared_outputs))
    return window_tensor(make_storage(array), result.dtype, result.sizes, result.strides, result.offset);
  for (size_t i = 0; i < owners.size(); ++i)
    if (owners[i] == result.index)
      return window_tensor(storages[i], result.dtype, result.sizes, result.strides, result.offset);
  auto storage = make_storage(array);
  auto tensor = window_tensor(storage, result.dtype, result.sizes, result.strides, result.offset);
  owners.push_back(result.index);
  storages.push_back(std::move(storage));
  return tensor;
}

// What the operator returns.
Results returned(const Program& program, const Call& call, c10::ArrayRef<ArrayPtr> arrays) {
  c10::SmallVector<c10::Storage, 4> storages;
  c10::SmallVector<int32_t, 4> owners;
  auto tensor_of = [&](const Result& result) -> at::Tensor {
    switch (result.kind) {
      case Result::kOutput: return fresh_tensor(program, result, arrays[result.index], storages, owners);
      case Result::kArgument: {
        auto* impl = const_cast<at::TensorImpl*>(call.tensors[result.index].tensor);
        return at::Tensor(c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
      }
      case Result::kArgumentWindow: {
        const auto* impl = call.tensors[result.index].tensor;
        return window_tensor(impl->storage(), result.dtype, result.sizes, result.strides,
                             impl->storage_offset() + result.offset);
      }
      default: return at::Tensor();
    }
  };
  Results out;
  for (const auto& result : program.results) {
    if (result.kind == Result::kList) {
      c10::List<at::Tensor> list;
      list.reserve(result.list.size());
      for (const auto& item : result.list) list.push_back(tensor_of(item));
      out.emplace_back(std::move(list));
    } else if (result.kind == Result::kInt) {
      out.emplace_back(result.offset);
    } else {
      out.emplace_back(tensor_of(result));
    }
  }
  return out;
}

}  // namespace

void launch(const Program& program, Call& call, Results* results) {
  auto& device = Runtime::get().device(call.device);
  constexpr size_t kLarge = 1 << 20;
  if (program.fresh_bytes >= kLarge) Allocator::get().check_fits(program.fresh_bytes, device.index);
  Operands operands;
  gather_operands(program, call, device, operands);

  const size_t num_outputs = program.outputs.size();
  c10::SmallVector<PJRT_Buffer*, 8> raw(num_outputs);
  try {
    program.executable->execute(operands.handles.data(), operands.handles.size(), raw.data(), device.device.get(),
                                operands.keep.data(), operands.keep.size());
  } catch (const pjrt::Error& error) {
    rethrow(error);
  }
  // The results of one execution are ready together: one of them tells.
  const auto first = program.brief ? Watch::kWhileHeld : Watch::kAlways;
  c10::SmallVector<ArrayPtr, 8> arrays;
  for (size_t i = 0; i < num_outputs; ++i)
    arrays.push_back(
        c10::make_intrusive<Array>(raw[i], program.outputs[i].type, device.index, i == 0 ? first : Watch::kNever));
  auto donated = operands.settle(arrays);
  if (!donated.empty() && !program.brief) device.outstanding.retire(std::move(donated));

  for (const auto& resize : program.resizes) {
    auto* tensor = const_cast<at::TensorImpl*>(call.tensors[resize.position].tensor);
    set_out_shape(tensor, resize.sizes, resize.strides);
    call.tensors[resize.position].cell = Cell::of(tensor->unsafe_storage().unsafeGetStorageImpl());
    call.slots[call.tensors[resize.position].slot] = call.tensors[resize.position].cell;
  }
  for (size_t i = 0; i < num_outputs; ++i) {
    const auto slot = program.outputs[i].slot;
    if (slot >= 0)
      call.slots[slot]->set(arrays[i]);
    else if (slot == kFaultFlag)
      device.set_fault_flag(arrays[i], operands.fault_flag);
  }

  if (results) *results = returned(program, call, arrays);
  if (C10_UNLIKELY(current_mode() == Mode::kDebug)) device.synchronize();
}

}  // namespace torch_tpu
