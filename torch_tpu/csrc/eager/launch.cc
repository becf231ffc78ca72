// Running a program for a call: operands in, execution, results out.
#include "eager/launch.h"

#include <set>

#include "eager/operands.h"
#include "eager/python.h"
#include "eager/tensor.h"
#include "runtime/allocator.h"

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
  // Gives up the claims on operands that are kept after all.
  void unclaim(const std::set<int64_t>& kept) {
    c10::SmallVector<Claim, 2> rest;
    for (auto& claim : claimed) {
      if (kept.count(claim.operand))
        claim.cell->give_up();
      else
        rest.push_back(claim);
    }
    claimed.swap(rest);
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

void gather_operands(const Program& program, const Call& call, DeviceState& device, Operands& out) {
  for (const auto& operand : program.operands) {
    switch (operand.kind) {
      case OperandKind::kBase: {
        const auto* room = program.rooms.empty() ? nullptr : room_for(program, operand.index);
        auto array = call.slots[operand.index]->array();
        out.add(C10_UNLIKELY(room != nullptr) ? lengthened(array, room, device) : std::move(array));
        break;
      }
      case OperandKind::kScalars:
        out.add(packed_numbers(call.number_lists[operand.index], operand.dtype, device));
        break;
      case OperandKind::kFlag: out.add(out.fault_flag = device.fault_flag()); break;
      default: out.add(number_array(number_of(operand, program, call, device), operand, device));
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

// The arrays of one execution's results, which are ready together: one of them tells.
c10::SmallVector<ArrayPtr, 8> arrays_of(const Program& program, c10::ArrayRef<PJRT_Buffer*> raw, DeviceState& device) {
  const auto first = program.brief ? Watch::kWhileHeld : Watch::kAlways;
  c10::SmallVector<ArrayPtr, 8> arrays;
  for (size_t i = 0; i < raw.size(); ++i)
    arrays.push_back(
        c10::make_intrusive<Array>(raw[i], program.outputs[i].type, device.index, i == 0 ? first : Watch::kNever));
  return arrays;
}

// Puts the results of an execution where they belong.
void settle(const Program& program, Call& call, DeviceState& device, Operands& operands, c10::ArrayRef<ArrayPtr> arrays,
            Results* results) {
  auto donated = operands.settle(arrays);
  if (!donated.empty() && !program.brief) device.outstanding.retire(std::move(donated));

  resize_arguments(program, call);
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto slot = program.outputs[i].slot;
    if (slot >= 0)
      call.slots[slot]->set(arrays[i]);
    else if (slot == kFaultFlag)
      device.set_fault_flag(arrays[i], operands.fault_flag);
  }

  if (results) *results = make_results(program, call, [&](int32_t output) { return make_storage(arrays[output]); });
}

}  // namespace

c10::SmallVector<ArrayPtr, 8> execute(const Program& program, c10::ArrayRef<PJRT_Buffer*> operands,
                                      c10::ArrayRef<int64_t> keep, DeviceState& device) {
  const auto* executable = program.code().executable.load(std::memory_order_acquire);
  const size_t count = program.outputs.size();
  c10::SmallVector<PJRT_Buffer*, 8> raw(count);
  try {
    executable->execute(operands.data(), operands.size(), raw.data(), device.device.get(), keep.data(), keep.size());
  } catch (const pjrt::Error& error) {
    rethrow(error);
  }
  return arrays_of(program, raw, device);
}

void launch(const Program& program, Call& call, Results* results) {
  auto& device = Runtime::get().device(call.device);
  constexpr size_t kLarge = 1 << 20;
  if (program.fresh_bytes >= kLarge) Allocator::get().check_fits(program.fresh_bytes, device.index);
  if (C10_UNLIKELY(!program.code().executable.load(std::memory_order_acquire))) python::compile_plan(program.code());
  Operands operands;
  gather_operands(program, call, device, operands);

  const auto arrays = execute(program, operands.handles, operands.keep, device);
  settle(program, call, device, operands, arrays, results);
}

void launch_on_all(const Program& program, std::vector<Call>& calls, std::vector<Results>& results) {
  std::vector<Operands> operands(calls.size());
  std::set<int64_t> kept;  // by any device: donation is one for all
  for (size_t i = 0; i < calls.size(); ++i) {
    gather_operands(program, calls[i], Runtime::get().device(calls[i].device), operands[i]);
    kept.insert(operands[i].keep.begin(), operands[i].keep.end());
  }
  std::vector<std::vector<PJRT_Buffer*>> raw(calls.size(), std::vector<PJRT_Buffer*>(program.outputs.size()));
  std::vector<PJRT_Buffer* const*> arguments;
  std::vector<PJRT_Buffer**> outputs;
  for (size_t i = 0; i < calls.size(); ++i) {
    operands[i].unclaim(kept);
    arguments.push_back(operands[i].handles.data());
    outputs.push_back(raw[i].data());
  }
  const std::vector<int64_t> keep(kept.begin(), kept.end());
  try {
    program.executable.load(std::memory_order_acquire)
        ->execute_on_all(arguments.data(), calls.size(), program.operands.size(), outputs.data(), keep.data(),
                         keep.size());
  } catch (const pjrt::Error& error) {
    rethrow(error);
  }
  results.resize(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    auto& device = Runtime::get().device(calls[i].device);
    settle(program, calls[i], device, operands[i], arrays_of(program, raw[i], device), &results[i]);
  }
}

}  // namespace torch_tpu
