// The boxed kernel: one object per ATen overload, one path for its functional, in-place, out= and foreach forms.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "eager/call.h"
#include "eager/results.h"

namespace torch_tpu {

// What Python says of an operator before its first call: torch_tpu/programs/eager.py has the same names, and what they
// mean.
struct OperatorSpec {
  std::vector<std::string> static_arguments, run_time_integers;
  bool all_static = false, checks_numbers = false, allows_overlap = false, elementwise = false, composite = false;
};

class Kernel final {
 public:
  explicit Kernel(const c10::OperatorHandle& op);

  // Takes the arguments off the stack and leaves the results, as the dispatcher's boxed kernels do.
  void call(torch::jit::Stack* stack);
  // Runs the operator on `arguments`, in schema order; `results`, unless null, receives what it returns.
  void run(const c10::IValue* arguments, Results* results);

  static Kernel& of(const c10::OperatorHandle& op);

 private:
  void prepare();  // asks Python for the operator's spec, once
  // `record`: without XLA, for a program that is to be a part of others. `exact`: for these sizes alone.
  ProgramPtr compile(Call& call, const c10::IValue* arguments, bool record, bool exact);
  // PyTorch's errors for writes whose result would depend on the order of elements.
  void check_internal_overlap(const c10::IValue* arguments) const;
  void check_partial_overlap(const c10::IValue* arguments) const;

  const c10::OperatorHandle op_;
  std::string name_;
  std::vector<ArgumentSpec> arguments_;
  std::mutex preparing_;
  std::atomic<bool> prepared_{false};
  ProgramTable programs_;
  std::atomic<bool> uses_precision_{false};
  bool is_foreach_ = false;      // in place, on lists
  std::vector<size_t> written_;  // arguments that are written, lists left out
  OperatorSpec spec_;
};

// Float32 precision of matrix products: 0 medium, 1 high, 2 highest. A thread's scoped value beats the process's, which
// is PyTorch's own setting; medium where nobody has set it.
int current_precision();
int exchange_scoped_precision(int level);  // -1: none

// Eager modes, with the same rule.
enum class Mode : int { kStrict = 0, kDebug = 1, kFused = 2 };
Mode current_mode();
void set_mode(Mode mode);
int exchange_scoped_mode(int mode);  // -1: none

}  // namespace torch_tpu
