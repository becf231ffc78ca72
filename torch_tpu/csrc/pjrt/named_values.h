// Options as the array of PJRT_NamedValue that the C API takes.
#pragma once

#include <vector>

#include "client.h"

namespace torch_tpu::pjrt {

// Points into the options it was made from, which must outlive it.
class NamedValues {
 public:
  explicit NamedValues(const Options& options) {
    for (const auto& [name, value] : options) values_.push_back(named(name, value));
  }
  const PJRT_NamedValue* data() const { return values_.data(); }
  size_t size() const { return values_.size(); }

 private:
  static PJRT_NamedValue named(const std::string& name, const OptionValue& value) {
    auto result = make_args<PJRT_NamedValue, PJRT_NamedValue_STRUCT_SIZE>();
    result.name = name.data();
    result.name_size = name.size();
    result.value_size = 1;
    if (auto* text = std::get_if<std::string>(&value)) {
      result.type = PJRT_NamedValue_kString;
      result.string_value = text->data();
      result.value_size = text->size();
    } else if (auto* integer = std::get_if<int64_t>(&value)) {
      result.type = PJRT_NamedValue_kInt64;
      result.int64_value = *integer;
    } else if (auto* flag = std::get_if<bool>(&value)) {
      result.type = PJRT_NamedValue_kBool;
      result.bool_value = *flag;
    } else {
      result.type = PJRT_NamedValue_kFloat;
      result.float_value = static_cast<float>(std::get<double>(value));
    }
    return result;
  }
  std::vector<PJRT_NamedValue> values_;
};

}  // namespace torch_tpu::pjrt
