#include "eager/kernel.h"

#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "eager/graph.h"
#include "eager/launch.h"
#include "eager/python.h"
#include "eager/scoped.h"
#include "runtime/runtime.h"

namespace torch_tpu {
namespace {

// Leaked on purpose: threads may still ask while the process ends.
Scoped& scoped_precision = *new Scoped("torch_tpu.precision", 3);
Scoped& scoped_mode = *new Scoped("torch_tpu.eager_mode", 3);
std::atomic<int> process_mode{0};

ArgumentSpec::Kind kind_of(const c10::Argument& argument) {
  const std::string type = argument.type()->str();
  if (type == "Tensor" || type == "Tensor?") return ArgumentSpec::kTensor;
  if (type == "Tensor[]" || type == "Tensor?[]" || type == "Tensor[]?") return ArgumentSpec::kTensors;
  if (type == "Scalar" || type == "Scalar?") return ArgumentSpec::kScalar;
  if (type == "Scalar[]") return ArgumentSpec::kScalars;
  if (type == "float" || type == "float?") return ArgumentSpec::kFloat;
  if (type == "Generator" || type == "Generator?") return ArgumentSpec::kGenerator;
  return ArgumentSpec::kOther;
}

}  // namespace

int current_precision() {
  if (const int scoped = scoped_precision.get(); scoped >= 0) return scoped;
  // Where torch.set_float32_matmul_precision and torch.backends.fp32_precision end for the CPU. Unlike the former's
  // getter it tells an explicit "highest" from the default.
  switch (at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL)) {
    case at::Float32Precision::IEEE: return 2;
    case at::Float32Precision::TF32: return 1;
    default: return 0;
  }
}
int exchange_scoped_precision(int level) { return scoped_precision.exchange(level); }
Mode current_mode() {
  const int scoped = scoped_mode.get();
  return static_cast<Mode>(scoped >= 0 ? scoped : process_mode.load(std::memory_order_relaxed));
}
void set_mode(Mode mode) { process_mode = static_cast<int>(mode); }
int exchange_scoped_mode(int mode) { return scoped_mode.exchange(mode); }

Kernel::Kernel(const c10::OperatorHandle& op) : op_(op) {
  name_ = op.schema().name();
  if (!op.schema().overload_name().empty()) name_ += "." + op.schema().overload_name();
}

void Kernel::prepare() {
  // The lock is not held while Python runs: another thread may hold the GIL and wait for it.
  OperatorSpec spec = python::operator_spec(name_);
  std::lock_guard<std::mutex> lock(preparing_);
  if (prepared_) return;
  for (const auto& argument : op_.schema().arguments()) {
    ArgumentSpec out;
    const auto named_in = [&](const std::vector<std::string>& names) {
      return std::find(names.begin(), names.end(), argument.name()) != names.end();
    };
    out.kind = named_in(spec.run_time_integers) ? ArgumentSpec::kScalar : kind_of(argument);
    out.is_written = argument.alias_info() && argument.alias_info()->isWrite();
    out.is_static = spec.all_static || named_in(spec.static_arguments);
    if (argument.default_value()) out.default_value = *argument.default_value();
    if (out.kind == ArgumentSpec::kTensor && out.is_written) written_.push_back(arguments_.size());
    arguments_.push_back(std::move(out));
  }
  is_foreach_ = name_.rfind("aten::_foreach_", 0) == 0 && arguments_[0].is_written &&
                op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  spec_ = std::move(spec);
  prepared_.store(true, std::memory_order_release);
}

ProgramPtr Kernel::compile(Call& call, const c10::IValue* arguments, bool record, bool exact) {
  Runtime::get();
  check_internal_overlap(arguments);
  const auto precision = static_cast<uint64_t>(current_precision());
  auto program = python::compile_program(name_, op_.schema(), arguments_, call, arguments, static_cast<int>(precision),
                                         record, exact);
  if (program->uses_precision) {
    uses_precision_ = true;
    call.key[0] = precision + 1;
  }
  programs_.insert(call.key, hash_key(call.key), program);
  return program;
}

void Kernel::check_internal_overlap(const c10::IValue* arguments) const {
  if (spec_.allows_overlap) return;
  for (size_t i : written_)
    if (arguments[i].isTensor() && arguments[i].toTensor().defined())
      at::assert_no_internal_overlap(arguments[i].toTensor());
}

void Kernel::check_partial_overlap(const c10::IValue* arguments) const {
  for (size_t w : written_) {
    if (!arguments[w].isTensor() || !arguments[w].toTensor().defined()) continue;
    const auto& out = arguments[w].toTensor();
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (arguments[i].isTensor() && arguments[i].toTensor().defined() && !arguments[i].toTensor().is_same(out))
        at::assert_no_partial_overlap(out, arguments[i].toTensor());
  }
}

void Kernel::call(torch::jit::Stack* stack) {
  const size_t count = op_.schema().arguments().size();
  Results results;
  run(stack->data() + stack->size() - count, &results);
  torch::jit::drop(*stack, count);
  for (auto& value : results) stack->push_back(std::move(value));
}

void Kernel::run(const c10::IValue* arguments, Results* results) {
  if (C10_UNLIKELY(!prepared_.load(std::memory_order_acquire))) prepare();
  if (C10_UNLIKELY(spec_.composite)) {
    torch::jit::Stack stack(arguments, arguments + arguments_.size());
    python::run_composite("torch_tpu.programs.eager", name_, op_.schema(), &stack);
    if (results) results->append(std::make_move_iterator(stack.begin()), std::make_move_iterator(stack.end()));
    return;
  }
  Call call;
  call.key.push_back(uses_precision_.load(std::memory_order_relaxed) ? static_cast<uint64_t>(current_precision()) + 1
                                                                     : 0);
  call.read(arguments_, arguments);
  if (C10_UNLIKELY(spec_.checks_numbers)) call.read_number_classes();
  // Only a storage that is named twice can overlap itself.
  if (C10_UNLIKELY(spec_.elementwise && call.tensors.size() > call.slots.size())) check_partial_overlap(arguments);
  if (C10_UNLIKELY(is_foreach_ && call.tensors.size() > call.slots.size()) &&
      call.items_overlap(arguments[0].toListRef().size())) {
    torch::jit::Stack stack(arguments, arguments + arguments_.size());  // one operator an item, in order
    return op_.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, stack);
  }
  const uint64_t hash = hash_key(call.key);
  ProgramPtr program = programs_.find(call.key, hash);
  const Mode mode = current_mode();
  if (C10_UNLIKELY(program && program->variety && program->settled()))
    program = compile(call, arguments, mode == Mode::kFused, true);
  if (mode == Mode::kFused) {
    if (C10_UNLIKELY(!program || program->code().plan.empty())) program = compile(call, arguments, true, false);
    return Graph::of(Runtime::get().device(call.device)).record(program, call, results);
  }
  if (C10_UNLIKELY(!program)) program = compile(call, arguments, false, false);
  launch(*program, call, results);
  if (C10_UNLIKELY(mode == Mode::kDebug)) Runtime::get().device(call.device).synchronize();
}

Kernel& Kernel::of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* kernels = new std::unordered_map<std::string, std::unique_ptr<Kernel>>;
  const auto& name = op.operator_name();
  std::string full = name.name + "." + name.overload_name;
  std::lock_guard<std::mutex> lock(mutex);
  auto& kernel = (*kernels)[full];
  if (!kernel) kernel = std::make_unique<Kernel>(op);
  return *kernel;
}

}  // namespace torch_tpu
