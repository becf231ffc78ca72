#pragma once

#include <cstdint>
#include <vector>

#include "event.h"

namespace torch_tpu::pjrt {

using DType = PJRT_Buffer_Type;

// Bytes of one element of `dtype`; 4-bit types count as one byte.
size_t dtype_size(DType dtype);
// "f32", "i64", "bf16", ...: the StableHLO element type.
const char* dtype_name(DType dtype);

// Owner of one PJRT_Buffer, an immutable array on one device. Not copyable; runtime/ shares it by reference count.
class Buffer {
 public:
  Buffer(const Plugin* plugin, PJRT_Buffer* buffer) : plugin_(plugin), buffer_(buffer) {}
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  PJRT_Buffer* get() const { return buffer_; }
  // Gives the handle up without destroying it: at process exit the plugin may already be gone.
  void release() { buffer_ = nullptr; }
  DType dtype() const;
  std::vector<int64_t> dims() const;
  std::vector<int64_t> unpadded_dims() const;  // the true sizes of a buffer with bounded dimensions
  size_t device_bytes() const;
  Event ready_event() const;
  bool deleted() const;  // true after donation
  // Starts a copy into `dst` (row-major, `bytes` long); `dst` must stay alive until the event is ready.
  Event to_host(void* dst, size_t bytes) const;
  // Copies into `dst` at once if the buffer lies in host memory (XLA's CPU backend), waiting for it to be ready: 100
  // times cheaper than a transfer for a few bytes. Returns false, having done nothing, if it does not.
  bool read_host_memory(void* dst, size_t bytes) const;
  bool on_host() const;  // whether it lies in host memory
  // A copy on another device of the same client.
  PJRT_Buffer* copy_to_device(PJRT_Device* device) const;

 private:
  friend class HostMemoryHold;
  const Plugin* plugin_;
  PJRT_Buffer* buffer_;
};

// Access to the memory of a buffer in host memory (XLA's CPU backend): waits for the buffer to be ready, and keeps the
// memory while it exists, whatever happens to the buffer.
class HostMemoryHold {
 public:
  // Throws Error if the buffer does not lie in host memory.
  explicit HostMemoryHold(const Buffer& buffer);
  ~HostMemoryHold();
  HostMemoryHold(const HostMemoryHold&) = delete;
  HostMemoryHold& operator=(const HostMemoryHold&) = delete;
  void* data() const { return data_; }

 private:
  void let_go();
  const Plugin* plugin_;
  PJRT_Buffer* buffer_;
  void* data_;
};

}  // namespace torch_tpu::pjrt
