// Fused eager mode: the operators of a device are recorded, and run together when somebody asks for a result.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "eager/boundary.h"
#include "eager/results.h"
#include "runtime/runtime.h"

namespace torch_tpu {

class Graph;

// Why a recorded operator has no results.
struct Failure {
  enum Kind { kRuntime, kOutOfMemory, kNotImplemented } kind = kRuntime;
  std::string text;
  bool named = false;  // the text says which operator
  [[noreturn]] void raise() const;
  // Of the exception that is being handled.
  static Failure current();
};

// One recorded operator. Cells wait for its outputs.
class Node final : public Pending {
 public:
  Node(Graph& graph, ProgramPtr program, uint64_t batch, int32_t index, size_t first_source)
      : program(std::move(program)), batch(batch), index(index), first_source(first_source), graph_(graph) {
    slots_.resize(this->program->outputs.size());
  }

  void flush() override;
  const ArrayType* type(int output) const override { return program->outputs[output].type; }
  ArrayPtr result(int output) override;
  void hold(int output) override;
  void release(int output) noexcept override;

  bool held(int output);
  // Gives the array to the cells that wait for it, if there are any left.
  void fulfil(int output, const ArrayPtr& array);
  void finish() { state_.store(State::kDone, std::memory_order_release); }
  void fail(std::shared_ptr<const Failure> failure);
  // Null unless it failed.
  std::shared_ptr<const Failure> failure() const {
    return state_.load(std::memory_order_acquire) == State::kFailed ? failure_ : nullptr;
  }
  // True if every output that somebody waits for is there.
  bool complete();

  const ProgramPtr program;
  const uint64_t batch;  // serial number of its batch, and its place there
  const int32_t index;
  const size_t first_source;  // among the batch's, one for each operand of the program

 private:
  enum class State : uint8_t { kWaiting, kDone, kFailed };
  struct Slot {
    int32_t holders = 0;
    ArrayPtr array;
  };
  Graph& graph_;
  std::atomic<State> state_{State::kWaiting};
  std::shared_ptr<const Failure> failure_;
  Spinlock mutex_;  // of the slots
  c10::SmallVector<Slot, 1> slots_;
};
using NodePtr = c10::intrusive_ptr<Node>;

// Where an operand of a node comes from: an array from outside, an output of an earlier node, or a number.
struct Source {
  enum Kind : uint8_t { kLeaf, kNode, kNumber } kind;
  int32_t index;
  int32_t output = 0;
};

// What was recorded between two flushes. Flat: recording an operator should cost little.
struct Batch {
  uint64_t serial = 0;
  std::vector<NodePtr> nodes;
  std::vector<Source> sources;
  std::vector<ArrayPtr> leaves;  // distinct
  std::vector<ScalarBits> numbers;
  Source flag{Source::kLeaf, -1};  // the fault flag after the last operator that checks its data
  ArrayPtr flag_before;            // and before the first one; null if none checks
  size_t leaf_bytes = 0;
};

// The recorded operators of one device. Lives for ever.
class Graph final : public Deferred {
 public:
  static Graph& of(DeviceState& device);

  // Records a call; `results`, unless null, receives tensors that wait for it.
  void record(const ProgramPtr& program, Call& call, Results* results);
  // Runs what was recorded, and waits for a thread that is at it. Throws the first error that nobody was told yet.
  void flush() override;

 private:
  explicit Graph(DeviceState& device);
  using Bases = c10::SmallVector<Source, 8>;
  // Where the call's arrays come from; returns a cell that waits for an earlier batch, if there is one.
  Cell* find_bases(const Program& program, const Call& call, Bases& out);
  // Returns true if the graph should be run now.
  bool append(const ProgramPtr& program, Call& call, const Bases& bases, c10::ArrayRef<ArrayPtr> lists,
              const ArrayPtr& flag, Results* results);
  Source leaf(ArrayPtr array);
  void renew();
  // In a backward pass: runs the graph when the pass has ended.
  void flush_after_backward();

  DeviceState& device_;
  std::atomic<size_t> unfinished_{0};  // operators recorded and not yet run
  std::atomic<int> backward_{-1};      // the newest backward pass that will run it
  Spinlock mutex_;                     // of what follows; held for no longer than it takes to record an operator
  Batch batch_;
  Boundary boundary_;
  std::recursive_mutex flushing_;  // held while a batch is compiled and enqueued
};

// The most operators in one fused program.
void set_graph_limit(size_t operators);

// Runs a batch. Its nodes are finished or failed afterwards.
void run_batch(Batch& batch, DeviceState& device);

}  // namespace torch_tpu
