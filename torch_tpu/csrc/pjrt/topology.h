#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "client.h"

namespace torch_tpu::pjrt {

// A set of devices that need not be present: libtpu describes and compiles for every TPU generation by name
// ("v6e:2x2").
class Topology {
 public:
  Topology(const Plugin& plugin, const std::string& name, const Options& options = {});
  ~Topology();
  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  std::string platform_name() const;
  std::string platform_version() const;
  std::vector<std::string> device_kinds() const;  // one entry per device

  // Compiles without a device; the result can be analysed and serialised, not executed here.
  class Compiled {
   public:
    Compiled(const Plugin* plugin, PJRT_Executable* executable) : plugin_(plugin), executable_(executable) {}
    ~Compiled();
    Compiled(const Compiled&) = delete;
    Compiled& operator=(const Compiled&) = delete;
    std::string serialize() const;
    std::string optimized_program() const;
    std::map<std::string, double> cost_analysis() const;
    MemoryStats memory_stats() const;

   private:
    const Plugin* plugin_;
    PJRT_Executable* executable_;
  };
  std::unique_ptr<Compiled> compile(std::string_view stablehlo, const CompileOptions& options) const;

 private:
  const Plugin& plugin_;
  PJRT_TopologyDescription* topology_;
};

}  // namespace torch_tpu::pjrt
