// A compiled program with its calling convention, and the table that finds it by key.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pjrt/executable.h"
#include "runtime/array.h"
#include "runtime/spinlock.h"

namespace torch_tpu {

// What a call looks like to the program table: everything that changes the program, as words. See Call for the
// encoding.
using Key = c10::SmallVector<uint64_t, 64>;
uint64_t hash_key(const Key& key);

// Where a program argument comes from. `index` counts storage slots (base), tensor positions (offset) or numbers
// (scalar); of a size it is the size itself.
enum class OperandKind : uint8_t { kBase, kOffset, kScalar, kScalars, kRng, kFlag, kCode, kSize };
struct Operand {
  OperandKind kind;
  int32_t index;
  pjrt::DType dtype;
};

// The kinds that are a value of the call, not an array.
constexpr bool is_number(OperandKind kind) {
  return kind == OperandKind::kOffset || kind == OperandKind::kScalar || kind == OperandKind::kRng ||
         kind == OperandKind::kCode || kind == OperandKind::kSize;
}

// Where a program result goes: the storage slot it replaces, a fresh storage, or the device's index flag.
constexpr int32_t kFresh = -1, kFaultFlag = -2;
struct Output {
  int32_t slot;
  const ArrayType* type;
};

// One returned value: a window on a program output or on an argument, that argument itself, nothing, a number, or a
// list.
struct Result {
  enum Kind : uint8_t { kNone, kOutput, kArgument, kArgumentWindow, kInt, kList } kind = kNone;
  int32_t index = 0;  // of the output or the argument
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;  // or the number
  std::vector<Result> list;
};

// An `out=` argument whose shape the operator sets.
struct Resize {
  int32_t position;
  std::vector<int64_t> sizes, strides;
};

// What Python compiled, on its way to a program.
struct Compiled {
  std::unique_ptr<pjrt::Executable> executable;
  std::string bytes;  // its serialised form, where known: XLA's CPU client cannot serialise what it has loaded

  std::string serialize() const { return bytes.empty() ? executable->serialize() : bytes; }
};

// The programs of one operator whose sizes change, all of which run the same few executables.
struct Variety {
  std::atomic<uint64_t> programs{0};
  std::atomic<const void*> last{nullptr};  // the program that was used last
};

struct Program {
  Program() = default;
  Program(const Program&) = delete;
  ~Program() { delete executable.load(); }

  std::string name;  // the operator
  // Null while the program has only been recorded, as a part of others: python::compile_plan makes it. Owned.
  mutable std::atomic<pjrt::Executable*> executable{nullptr};
  std::string plan;  // for Python: torch_tpu/programs/eager.py; empty if Fused mode has not met the program
  std::string line;  // of the user's program where Fused mode met it first
  std::vector<Operand> operands;
  std::vector<Output> outputs;
  std::vector<Result> results;
  std::vector<Resize> resizes;
  std::vector<std::pair<int32_t, int32_t>> donations;  // (operand, output)
  uint64_t rng_blocks = 0;
  size_t fresh_bytes = 0;  // of results that need storages of their own
  int32_t fault_code = 0;
  bool uses_precision = false;
  bool brief = false;                                 // takes microseconds
  bool shared_outputs = false;                        // some output has several windows among the results
  std::vector<std::shared_ptr<const Program>> parts;  // of a fused program: their addresses are in its key

  // A program for one choice of sizes (torch_tpu/bounded/eager.py) has only the calling convention of its own. What is
  // compiled, recorded and fused is `padded`, the same one for all sizes up to its bounds; the arrays of some slots
  // have to be made as long as that takes them.
  std::shared_ptr<const Program> padded;
  std::vector<std::pair<int32_t, const ArrayType*>> rooms;
  std::shared_ptr<Variety> variety;
  mutable std::atomic<uint32_t> returns{0};  // uses after another program of its variety
  const Program& code() const { return padded ? *padded : *this; }
  // True when few sizes have come again and again: then they deserve programs of their own.
  bool settled() const;

  // Kept by the table, under its lock.
  mutable uint64_t hits = 0;
  mutable uint64_t last_used = 0;
};
using ProgramPtr = std::shared_ptr<const Program>;

struct TableStats {
  uint64_t hits, misses, evictions, programs;
};

// The programs of one operator. Tables share a bound on their total size; the least recently used program leaves first.
class ProgramTable {
 public:
  ProgramTable();
  ProgramPtr find(const Key& key, uint64_t hash);
  void insert(const Key& key, uint64_t hash, ProgramPtr program);

  static TableStats stats();
  static void reset_stats();
  static void clear_all();
  static void set_capacity(size_t programs);

 private:
  struct Entry {
    uint64_t hash = 0;
    Key key;
    ProgramPtr program;  // null: free
  };
  static void evict_oldest();
  void grow();
  Entry* slot(const Key& key, uint64_t hash);  // the entry of `key`, or the free one where it belongs
  Spinlock mutex_;
  std::vector<Entry> entries_;  // open addressing, a power of two
  size_t used_ = 0;
};

}  // namespace torch_tpu
