#include "runtime/dtypes.h"

#include <c10/util/Exception.h>

#include <array>
#include <utility>

namespace torch_tpu {
namespace {
using c10::ScalarType;
constexpr std::array<std::pair<ScalarType, PJRT_Buffer_Type>, 21> kTable{{
    {ScalarType::Bool, PJRT_Buffer_Type_PRED},
    {ScalarType::Char, PJRT_Buffer_Type_S8},
    {ScalarType::Short, PJRT_Buffer_Type_S16},
    {ScalarType::Int, PJRT_Buffer_Type_S32},
    {ScalarType::Long, PJRT_Buffer_Type_S64},
    {ScalarType::Byte, PJRT_Buffer_Type_U8},
    {ScalarType::UInt16, PJRT_Buffer_Type_U16},
    {ScalarType::UInt32, PJRT_Buffer_Type_U32},
    {ScalarType::UInt64, PJRT_Buffer_Type_U64},
    {ScalarType::Half, PJRT_Buffer_Type_F16},
    {ScalarType::BFloat16, PJRT_Buffer_Type_BF16},
    {ScalarType::Float, PJRT_Buffer_Type_F32},
    {ScalarType::Double, PJRT_Buffer_Type_F64},
    {ScalarType::ComplexFloat, PJRT_Buffer_Type_C64},
    {ScalarType::ComplexDouble, PJRT_Buffer_Type_C128},
    {ScalarType::Float8_e5m2, PJRT_Buffer_Type_F8E5M2},
    {ScalarType::Float8_e4m3fn, PJRT_Buffer_Type_F8E4M3FN},
    {ScalarType::Float8_e5m2fnuz, PJRT_Buffer_Type_F8E5M2FNUZ},
    {ScalarType::Float8_e4m3fnuz, PJRT_Buffer_Type_F8E4M3FNUZ},
    {ScalarType::Float8_e8m0fnu, PJRT_Buffer_Type_F8E8M0FNU},
    {ScalarType::Float4_e2m1fn_x2, PJRT_Buffer_Type_F4E2M1FN},
}};

std::array<PJRT_Buffer_Type, 128> make_forward() {
  std::array<PJRT_Buffer_Type, 128> table{};
  for (auto [torch_type, pjrt_type] : kTable) table[static_cast<size_t>(torch_type)] = pjrt_type;
  return table;
}
const std::array<PJRT_Buffer_Type, 128> kForward = make_forward();
}  // namespace

bool has_pjrt_type(ScalarType dtype) { return kForward[static_cast<size_t>(dtype)] != PJRT_Buffer_Type_INVALID; }

pjrt::DType to_pjrt(ScalarType dtype) {
  const auto type = kForward[static_cast<size_t>(dtype)];
  TORCH_CHECK_TYPE(type != PJRT_Buffer_Type_INVALID, "tpu tensors cannot have dtype ", dtype, ".");
  return type;
}

ScalarType to_torch(pjrt::DType dtype) {
  for (auto [torch_type, pjrt_type] : kTable)
    if (pjrt_type == dtype) return torch_type;
  TORCH_CHECK(false, "The program has a result of element type ", pjrt::dtype_name(dtype),
              ", which PyTorch does not have.");
}

}  // namespace torch_tpu
