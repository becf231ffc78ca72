#include "eager/graph.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "eager/operands.h"
#include "eager/python.h"
#include "eager/tensor.h"
#include "runtime/allocator.h"

namespace torch_tpu {
namespace {
std::atomic<size_t> graph_limit{512};
constexpr size_t kLarge = 1 << 20;
constexpr size_t kUsual = 32;          // operators
constexpr int64_t kShareOfDevice = 8;  // of a device's memory, that leaves of a graph may hold

uint64_t next_serial() {
  static std::atomic<uint64_t> serial{0};
  return ++serial;
}
}  // namespace

void set_graph_limit(size_t operators) { graph_limit = std::max<size_t>(operators, 1); }

// ---- nodes
// --------------------------------------------------------------------------------------------------------------
void Node::flush() {
  if (state_.load(std::memory_order_acquire) == State::kWaiting) graph_.flush();
  if (const auto failed = failure()) failed->raise();
  TORCH_CHECK(state_.load(std::memory_order_acquire) == State::kDone, program->name,
              " was read while Fused eager mode was preparing it.");
}

ArrayPtr Node::result(int output) {
  std::lock_guard<Spinlock> lock(mutex_);
  TORCH_INTERNAL_ASSERT(slots_[output].array, program->name, " has lost output ", output);
  return slots_[output].array;
}

void Node::hold(int output) {
  std::lock_guard<Spinlock> lock(mutex_);
  ++slots_[output].holders;
}

void Node::release(int output) noexcept {
  ArrayPtr array;  // goes after the lock
  std::lock_guard<Spinlock> lock(mutex_);
  if (--slots_[output].holders == 0) array.swap(slots_[output].array);
}

bool Node::held(int output) {
  std::lock_guard<Spinlock> lock(mutex_);
  return slots_[output].holders > 0;
}

void Node::fulfil(int output, const ArrayPtr& array) {
  std::lock_guard<Spinlock> lock(mutex_);
  if (slots_[output].holders > 0) slots_[output].array = array;
}

bool Node::complete() {
  std::lock_guard<Spinlock> lock(mutex_);
  return std::all_of(slots_.begin(), slots_.end(), [](auto& slot) { return slot.holders == 0 || slot.array; });
}

void Node::fail(std::shared_ptr<const Failure> failure) {
  failure_ = std::move(failure);
  state_.store(State::kFailed, std::memory_order_release);
}

// ---- recording
// ----------------------------------------------------------------------------------------------------------
Graph::Graph(DeviceState& device) : device_(device) { renew(); }

Graph& Graph::of(DeviceState& device) {
  if (auto* known = device.deferred.load(std::memory_order_acquire)) return static_cast<Graph&>(*known);
  static std::mutex making;
  std::lock_guard<std::mutex> lock(making);
  if (!device.deferred) device.deferred = new Graph(device);
  return static_cast<Graph&>(*device.deferred);
}

void Graph::renew() {
  batch_ = Batch{};
  batch_.serial = next_serial();
  batch_.nodes.reserve(kUsual);
  batch_.sources.reserve(2 * kUsual);
}

Source Graph::leaf(ArrayPtr array) {
  if (array->graph != batch_.serial) {
    array->graph = batch_.serial;
    array->place = static_cast<int32_t>(batch_.leaves.size());
    batch_.leaf_bytes += array->type()->bytes;
    batch_.leaves.push_back(array);
  }
  return {Source::kLeaf, array->place};
}

Cell* Graph::find_bases(const Program& program, const Call& call, Bases& out) {
  out.clear();
  for (const auto& operand : program.operands) {
    if (operand.kind != OperandKind::kBase) continue;
    Cell* cell = call.slots[operand.index];
    auto contents = cell->contents();
    const auto* room = program.rooms.empty() ? nullptr : room_for(program, operand.index);
    if (C10_UNLIKELY(room != nullptr)) {
      auto longer = contents.array ? contents.array->longer(room) : ArrayPtr();
      if (!longer) return cell;
      out.push_back(leaf(std::move(longer)));
      continue;
    }
    if (!contents.work) {
      out.push_back(leaf(std::move(contents.array)));
      continue;
    }
    const auto& node = static_cast<const Node&>(*contents.work);
    if (node.batch != batch_.serial) return cell;
    out.push_back({Source::kNode, node.index, contents.output});
  }
  return nullptr;
}

bool Graph::append(const ProgramPtr& program, Call& call, const Bases& bases, c10::ArrayRef<ArrayPtr> lists,
                   const ArrayPtr& flag, Results* results) {
  const auto index = static_cast<int32_t>(batch_.nodes.size());
  auto node = c10::make_intrusive<Node>(*this, program, batch_.serial, index, batch_.sources.size());
  size_t base = 0, list = 0;
  for (const auto& operand : program->operands) {
    switch (operand.kind) {
      case OperandKind::kBase: batch_.sources.push_back(bases[base++]); break;
      case OperandKind::kScalars: batch_.sources.push_back(leaf(lists[list++])); break;
      case OperandKind::kFlag:
        if (!batch_.flag_before) batch_.flag = leaf(batch_.flag_before = flag);
        batch_.sources.push_back(batch_.flag);
        break;
      default:
        batch_.sources.push_back({Source::kNumber, static_cast<int32_t>(batch_.numbers.size())});
        batch_.numbers.push_back(number_of(operand, *program, call, device_));
    }
  }
  resize_arguments(*program, call);
  if (results)
    *results = make_results(*program, call, [&](int32_t output) { return make_storage(node, output, device_.index); });
  for (size_t i = 0; i < program->outputs.size(); ++i) {
    const auto slot = program->outputs[i].slot;
    const auto output = static_cast<int32_t>(i);
    if (slot >= 0)
      call.slots[slot]->defer(node, output);
    else if (slot == kFaultFlag)
      batch_.flag = {Source::kNode, index, output};
  }
  batch_.nodes.push_back(std::move(node));
  unfinished_.fetch_add(1, std::memory_order_release);
  const bool heavy = device_.capacity && static_cast<int64_t>(batch_.leaf_bytes) > device_.capacity / kShareOfDevice;
  return boundary_.ends_after(reinterpret_cast<uint64_t>(&program->code()), batch_.nodes.size(), graph_limit, heavy);
}

void Graph::record(const ProgramPtr& program, Call& call, Results* results) {
  if (program->fresh_bytes >= kLarge) Allocator::get().check_fits(program->fresh_bytes, device_.index);
  c10::SmallVector<ArrayPtr, 1> lists;
  ArrayPtr flag;
  for (const auto& operand : program->operands) {
    if (operand.kind == OperandKind::kScalars)
      lists.push_back(packed_numbers(call.number_lists[operand.index], operand.dtype, device_));
    else if (operand.kind == OperandKind::kFlag)
      flag = device_.fault_flag();
  }
  Bases bases;
  for (;;) {
    Cell* unfinished;
    bool full = false;
    {
      std::lock_guard<Spinlock> lock(mutex_);
      unfinished = find_bases(*program, call, bases);
      if (!unfinished) full = append(program, call, bases, lists, flag, results);
    }
    if (full) flush();
    if (!unfinished) return flush_after_backward();
    const auto array = unfinished->array();
    for (const auto& [slot, type] : program->rooms)
      if (call.slots[slot] == unfinished) lengthened(array, type, device_);
  }
}

// The device begins while the optimizer is still being recorded.
void Graph::flush_after_backward() {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (C10_LIKELY(pass < 0) || backward_.exchange(pass, std::memory_order_relaxed) == pass) return;
  torch::autograd::Engine::get_default_engine().queue_callback([this] { flush(); });
}

void Graph::flush() {
  if (unfinished_.load(std::memory_order_acquire) == 0) return;
  Runtime::get();  // refuses in a forked child
  python::without_gil([&] {
    std::lock_guard<std::recursive_mutex> flushing(flushing_);
    Batch batch;
    {
      std::lock_guard<Spinlock> lock(mutex_);
      if (batch_.nodes.empty()) return;
      batch = std::move(batch_);
      renew();
    }
    struct Count {
      std::atomic<size_t>& unfinished;
      const size_t operators;
      ~Count() { unfinished.fetch_sub(operators, std::memory_order_release); }
    } count{unfinished_, batch.nodes.size()};
    run_batch(batch, device_);
  });
}

}  // namespace torch_tpu
