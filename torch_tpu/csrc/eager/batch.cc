// Running a batch of recorded operators: as one program, or where that cannot be had, one by one.
#include <c10/util/Exception.h>

#include "eager/fuse.h"
#include "eager/launch.h"
#include "eager/operands.h"
#include "eager/python.h"

namespace torch_tpu {
namespace {

constexpr size_t kBriefParts = 32;

ProgramTable& fused_programs() {
  static auto* table = new ProgramTable;
  return *table;
}

class BatchRun {
 public:
  BatchRun(Batch& batch, DeviceState& device) : batch_(batch), device_(device), fusion_(batch) {}

  void run() {
    if (fusion_.nodes().size() == 1) return one_by_one();
    if (fusion_.nodes().empty()) return;
    const auto program = find();
    if (!program->executable.load(std::memory_order_acquire)) return one_by_one();
    std::vector<ArrayPtr> numbers = Numbers(fusion_, batch_).arrays(device_);
    c10::SmallVector<PJRT_Buffer*, 32> handles;
    for (int32_t leaf : fusion_.leaves()) handles.push_back(batch_.leaves[leaf]->handle());
    for (const auto& array : numbers) handles.push_back(array->handle());
    const auto zero = device_.scalars.get(c10::Scalar(0), PJRT_Buffer_Type_S32, device_);
    const auto one = device_.scalars.get(c10::Scalar(1.0), PJRT_Buffer_Type_F32, device_);
    handles.push_back(zero->handle());
    handles.push_back(one->handle());
    const auto outputs = execute(*program, handles, {}, device_);
    for (size_t k = 0; k < outputs.size(); ++k) settle(fusion_.live()[k].node, fusion_.live()[k].output, outputs[k]);
    std::vector<ArrayPtr> donated;
    for (const auto& donation : fusion_.donations())
      donated.push_back(std::move(batch_.leaves[fusion_.leaves()[donation.leaf]]));
    if (!donated.empty()) device_.outstanding.retire(std::move(donated));
  }

 private:
  ProgramPtr find() {
    const Key key = fusion_.key();
    const uint64_t hash = hash_key(key);
    if (auto known = fused_programs().find(key, hash)) return known;
    auto program = std::make_shared<Program>();
    program->name = "fused";
    program->brief = fusion_.nodes().size() <= kBriefParts;
    for (const auto* node : fusion_.nodes()) {
      program->brief &= node->program->brief;
      program->parts.push_back(node->program);
    }
    for (const auto& [node, output] : fusion_.live())
      program->outputs.push_back({kFresh, fusion_.nodes()[node]->program->outputs[output].type});
    program->executable = python::compile_fusion(fusion_).release();  // null: its operators run one by one
    fused_programs().insert(key, hash, program);
    return program;
  }

  void settle(int32_t node, int32_t output, const ArrayPtr& array) {
    const_cast<Node*>(fusion_.nodes()[node])->fulfil(output, array);
    const auto& flag = batch_.flag;
    if (flag.kind == Source::kNode && flag.index == fusion_.nodes()[node]->index && flag.output == output)
      device_.set_fault_flag(array, batch_.flag_before);
  }

  // Every operator as its own program, as in Strict mode. What does not depend on one that fails gets its results.
  void one_by_one() {
    const size_t count = fusion_.nodes().size();
    std::vector<c10::SmallVector<ArrayPtr, 8>> values(count);
    std::shared_ptr<const Failure> first;
    for (size_t i = 0; i < count; ++i) {
      auto& node = const_cast<Node&>(*fusion_.nodes()[i]);
      try {
        values[i] = run_alone(i, values);
        for (size_t o = 0; o < values[i].size(); ++o)
          settle(static_cast<int32_t>(i), static_cast<int32_t>(o), values[i][o]);
      } catch (...) {
        node.fail(std::make_shared<const Failure>(named(Failure::current(), *node.program)));
        if (!first) first = node.failure();
      }
    }
    if (first) first->raise();
  }

  // With the operator and its line. An operator whose operand failed repeats that failure.
  static Failure named(Failure failure, const Program& program) {
    if (failure.named) return failure;
    const auto& known = program.code().line;
    const auto line = known.empty() ? "" : c10::str(" (", known, ")");
    return {failure.kind, c10::str(program.name, line, " failed: ", failure.text), true};
  }

  c10::SmallVector<ArrayPtr, 8> run_alone(size_t i, const std::vector<c10::SmallVector<ArrayPtr, 8>>& values) {
    const auto& program = *fusion_.nodes()[i]->program;
    if (!program.code().executable.load(std::memory_order_acquire)) python::compile_plan(program.code());
    std::vector<ArrayPtr> arrays;
    for (size_t s = 0; s < program.operands.size(); ++s) {
      const Source& source = fusion_.sources(i)[s];
      if (source.kind == Source::kNumber) {
        arrays.push_back(number_array(batch_.numbers[source.index], program.operands[s], device_));
      } else if (source.kind == Source::kLeaf) {
        arrays.push_back(batch_.leaves[fusion_.leaves()[source.index]]);
      } else {
        if (const auto failure = fusion_.nodes()[source.index]->failure()) throw *failure;
        arrays.push_back(values[source.index][source.output]);
      }
    }
    c10::SmallVector<PJRT_Buffer*, 16> handles;
    for (const auto& array : arrays) handles.push_back(array->handle());
    c10::SmallVector<int64_t, 4> keep;
    std::vector<ArrayPtr> donated;
    for (const auto& [operand, output] : program.donations) {
      const Source& source = fusion_.sources(i)[operand];
      // Two references: the batch's, and the one above.
      const bool ours = fusion_.nodes().size() == 1 && source.kind == Source::kLeaf && arrays[operand].use_count() == 2;
      if (ours)
        donated.push_back(arrays[operand]);
      else
        keep.push_back(operand);
    }
    auto outputs = execute(program, handles, keep, device_);
    if (!donated.empty()) device_.outstanding.retire(std::move(donated));
    return outputs;
  }

  Batch& batch_;
  DeviceState& device_;
  Fusion fusion_;
};

}  // namespace

void Failure::raise() const {
  TORCH_CHECK_WITH(OutOfMemoryError, kind != kOutOfMemory, text);
  TORCH_CHECK_NOT_IMPLEMENTED(kind != kNotImplemented, text);
  TORCH_CHECK(false, text);
}

Failure Failure::current() {
  try {
    throw;
  } catch (const Failure& failure) {
    return failure;
  } catch (const c10::OutOfMemoryError& error) {
    return {kOutOfMemory, error.what_without_backtrace()};
  } catch (const c10::NotImplementedError& error) {
    return {kNotImplemented, error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    return {kRuntime, error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {kRuntime, error.what()};
  } catch (...) {
    return {kRuntime, "an unknown error"};
  }
}

void run_batch(Batch& batch, DeviceState& device) {
  try {
    BatchRun(batch, device).run();
  } catch (...) {
    const auto failure = std::make_shared<const Failure>(Failure::current());
    for (auto& node : batch.nodes)
      if (!node->complete() && !node->failure()) node->fail(failure);
    for (auto& node : batch.nodes)
      if (!node->failure()) node->finish();
    throw;
  }
  for (auto& node : batch.nodes) node->finish();
}

}  // namespace torch_tpu
