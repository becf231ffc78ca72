// Arrays on a device: an interned type, and a reference-counted immutable PJRT buffer.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include "pjrt/buffer.h"
#include "runtime/spinlock.h"

namespace torch_tpu {

// Shape and element type. Interned: equal types are one object, which lives for ever, so a key holds just its address.
struct ArrayType {
  pjrt::DType dtype;
  c10::SmallVector<int64_t, 6> dims;
  int64_t numel;
  size_t bytes;

  static const ArrayType* get(pjrt::DType dtype, c10::IntArrayRef dims);
};

// Whether synchronisation waits for an array: also when it was dropped before anyone knew it ready, which costs an
// event; only while it exists, for microseconds of work that nobody has a use for; or not at all, because another array
// tells.
enum class Watch : uint8_t { kAlways, kWhileHeld, kNever };

// An immutable array. Several cells may hold one (clone() costs nothing); a program may consume it when only one does.
class Array;
using ArrayPtr = c10::intrusive_ptr<Array>;
class Array final : public c10::intrusive_ptr_target {
 public:
  Array(PJRT_Buffer* handle, const ArrayType* type, c10::DeviceIndex device, Watch watch = Watch::kAlways);
  ~Array() override;

  PJRT_Buffer* handle() const { return buffer_.get(); }
  const pjrt::Buffer& buffer() const { return buffer_; }
  const ArrayType* type() const { return type_; }
  c10::DeviceIndex device() const { return device_; }

  // The same elements at the beginning of a longer array, once a program for changing sizes has needed that.
  ArrayPtr longer(const ArrayType* type) const;
  void set_longer(ArrayPtr array);

  // Its place among the operands of the graph that is being recorded; see eager/graph.h, whose lock guards it.
  uint64_t graph = 0;
  int32_t place = 0;

 private:
  friend class Outstanding;
  pjrt::Buffer buffer_;
  const ArrayType* type_;
  c10::DeviceIndex device_;
  Watch watch_;
  mutable Spinlock mutex_;  // of what follows
  ArrayPtr longer_;
  // Links of the device's list of arrays not yet known to be ready; see outstanding.h.
  Array* previous_ = nullptr;
  Array* next_ = nullptr;
};

}  // namespace torch_tpu
