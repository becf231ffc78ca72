#include "buffer.h"

#include <cstring>

namespace torch_tpu::pjrt {
namespace {

// kDescending + (kMaxRank - rank) is the minor-to-major order of a row-major array of that rank.
constexpr int64_t kMaxRank = 64;
struct Descending {
  int64_t values[kMaxRank];
  constexpr Descending() : values() {
    for (int64_t i = 0; i < kMaxRank; ++i) values[i] = kMaxRank - 1 - i;
  }
};
constexpr Descending kDescending;

}  // namespace

size_t dtype_size(DType dtype) {
  switch (dtype) {
    case PJRT_Buffer_Type_S16:
    case PJRT_Buffer_Type_U16:
    case PJRT_Buffer_Type_F16:
    case PJRT_Buffer_Type_BF16: return 2;
    case PJRT_Buffer_Type_S32:
    case PJRT_Buffer_Type_U32:
    case PJRT_Buffer_Type_F32: return 4;
    case PJRT_Buffer_Type_S64:
    case PJRT_Buffer_Type_U64:
    case PJRT_Buffer_Type_F64:
    case PJRT_Buffer_Type_C64: return 8;
    case PJRT_Buffer_Type_C128: return 16;
    case PJRT_Buffer_Type_INVALID:
    case PJRT_Buffer_Type_TOKEN: return 0;
    default: return 1;  // bool, 8-bit types, and the narrower ones, which host arrays hold one to a byte
  }
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case PJRT_Buffer_Type_INVALID: return "invalid";
    case PJRT_Buffer_Type_PRED: return "i1";
    case PJRT_Buffer_Type_S8: return "i8";
    case PJRT_Buffer_Type_S16: return "i16";
    case PJRT_Buffer_Type_S32: return "i32";
    case PJRT_Buffer_Type_S64: return "i64";
    case PJRT_Buffer_Type_U8: return "ui8";
    case PJRT_Buffer_Type_U16: return "ui16";
    case PJRT_Buffer_Type_U32: return "ui32";
    case PJRT_Buffer_Type_U64: return "ui64";
    case PJRT_Buffer_Type_F16: return "f16";
    case PJRT_Buffer_Type_F32: return "f32";
    case PJRT_Buffer_Type_F64: return "f64";
    case PJRT_Buffer_Type_BF16: return "bf16";
    case PJRT_Buffer_Type_C64: return "complex<f32>";
    case PJRT_Buffer_Type_C128: return "complex<f64>";
    case PJRT_Buffer_Type_F8E5M2: return "f8E5M2";
    case PJRT_Buffer_Type_F8E4M3FN: return "f8E4M3FN";
    case PJRT_Buffer_Type_F8E4M3B11FNUZ: return "f8E4M3B11FNUZ";
    case PJRT_Buffer_Type_F8E5M2FNUZ: return "f8E5M2FNUZ";
    case PJRT_Buffer_Type_F8E4M3FNUZ: return "f8E4M3FNUZ";
    case PJRT_Buffer_Type_S4: return "i4";
    case PJRT_Buffer_Type_U4: return "ui4";
    case PJRT_Buffer_Type_TOKEN: return "token";
    case PJRT_Buffer_Type_S2: return "i2";
    case PJRT_Buffer_Type_U2: return "ui2";
    case PJRT_Buffer_Type_F8E4M3: return "f8E4M3";
    case PJRT_Buffer_Type_F8E3M4: return "f8E3M4";
    case PJRT_Buffer_Type_F8E8M0FNU: return "f8E8M0FNU";
    case PJRT_Buffer_Type_F4E2M1FN: return "f4E2M1FN";
  }
  return "unknown";  // a plugin newer than this header
}

Buffer::~Buffer() {
  if (buffer_ == nullptr) return;
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_Destroy, args);
  args.buffer = buffer_;
  plugin_->discard(plugin_->api()->PJRT_Buffer_Destroy(&args));
}

DType Buffer::dtype() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_ElementType, args);
  args.buffer = buffer_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_ElementType, args, "Reading the dtype of a buffer");
  return args.type;
}

std::vector<int64_t> Buffer::dims() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_Dimensions, args);
  args.buffer = buffer_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_Dimensions, args, "Reading the shape of a buffer");
  return {args.dims, args.dims + args.num_dims};
}

std::vector<int64_t> Buffer::unpadded_dims() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_UnpaddedDimensions, args);
  args.buffer = buffer_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_UnpaddedDimensions, args, "Reading the true shape of a buffer");
  return {args.unpadded_dims, args.unpadded_dims + args.num_dims};
}

size_t Buffer::device_bytes() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_OnDeviceSizeInBytes, args);
  args.buffer = buffer_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_OnDeviceSizeInBytes, args, "Reading the size of a buffer");
  return args.on_device_size_in_bytes;
}

Event Buffer::ready_event() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_ReadyEvent, args);
  args.buffer = buffer_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_ReadyEvent, args, "Watching a buffer");
  return Event(plugin_, args.event);
}

bool Buffer::deleted() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_IsDeleted, args);
  args.buffer = buffer_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_IsDeleted, args, "Asking whether a buffer was donated");
  return args.is_deleted;
}

Event Buffer::to_host(void* dst, size_t bytes) const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_Dimensions, shape);
  shape.buffer = buffer_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_Dimensions, shape, "Reading the shape of a buffer");

  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_ToHostBuffer, args);
  args.src = buffer_;
  args.dst = dst;
  args.dst_size = bytes;
  // Without a layout the plugin copies in the device's order, which on a TPU need not be row-major.
  PJRT_Buffer_MemoryLayout layout{};
  if (shape.num_dims > 1 && shape.num_dims <= static_cast<size_t>(kMaxRank)) {
    layout.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE;
    layout.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
    layout.tiled.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE;
    layout.tiled.minor_to_major = kDescending.values + (kMaxRank - shape.num_dims);
    layout.tiled.minor_to_major_size = shape.num_dims;
    args.host_layout = &layout;
  }
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_ToHostBuffer, args, "Copying a buffer to the host");
  return Event(plugin_, args.event);
}

bool Buffer::on_host() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_IsOnCpu, args);
  args.buffer = buffer_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_IsOnCpu, args, "Asking where a buffer lies");
  return args.is_on_cpu;
}

bool Buffer::read_host_memory(void* dst, size_t bytes) const {
  if (!on_host()) return false;
  std::memcpy(dst, HostMemoryHold(*this).data(), bytes);
  return true;
}

HostMemoryHold::HostMemoryHold(const Buffer& buffer) : plugin_(buffer.plugin_), buffer_(buffer.buffer_) {
  buffer.ready_event().wait();
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_IncreaseExternalReferenceCount, hold);
  hold.buffer = buffer_;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_IncreaseExternalReferenceCount, hold, "Holding a buffer");
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_OpaqueDeviceMemoryDataPointer, address);
  address.buffer = buffer_;
  try {
    TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_OpaqueDeviceMemoryDataPointer, address, "Reading a buffer");
  } catch (...) {
    let_go();
    throw;
  }
  data_ = address.device_memory_ptr;
}

HostMemoryHold::~HostMemoryHold() { let_go(); }

void HostMemoryHold::let_go() {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_DecreaseExternalReferenceCount, args);
  args.buffer = buffer_;
  plugin_->discard(plugin_->api()->PJRT_Buffer_DecreaseExternalReferenceCount(&args));
}

PJRT_Buffer* Buffer::copy_to_device(PJRT_Device* device) const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_CopyToDevice, args);
  args.buffer = buffer_;
  args.dst_device = device;
  TORCH_TPU_PJRT_CALL(*plugin_, PJRT_Buffer_CopyToDevice, args, "Copying a buffer to another device");
  return args.dst_buffer;
}

}  // namespace torch_tpu::pjrt
