// A batch of recorded operators as one program: what of it is needed, and the key of that program.
#pragma once

#include <utility>
#include <vector>

#include "eager/graph.h"

namespace torch_tpu {

// The part of a batch that somebody needs. Indices of nodes and leaves count what is needed only.
class Fusion {
 public:
  explicit Fusion(const Batch& batch);

  struct Live {
    int32_t node, output;
  };
  struct Donation {
    int32_t leaf, live;  // the operand whose memory that result may have
  };

  const std::vector<const Node*>& nodes() const { return nodes_; }
  const Source* sources(size_t node) const { return sources_.data() + first_source_[node]; }
  const std::vector<int32_t>& leaves() const { return leaves_; }  // places among the batch's
  const std::vector<Live>& live() const { return live_; }
  const std::vector<Donation>& donations() const { return donations_; }
  int32_t flag() const { return flag_; }  // the result that is the fault flag, or -1
  Key key() const;

 private:
  void find_live(const Batch& batch);
  void connect(const Batch& batch);
  void pair_donations(const Batch& batch);

  std::vector<uint8_t> needed_;       // by node of the batch
  std::vector<size_t> first_output_;  // by node of the batch: where its outputs begin in
  std::vector<uint8_t> is_live_;
  std::vector<const Node*> nodes_;
  std::vector<size_t> first_source_;
  std::vector<Source> sources_;
  std::vector<int32_t> leaves_;
  std::vector<Live> live_;
  std::vector<Donation> donations_;
  int32_t flag_ = -1;
};

// The numbers of a fused program, packed into one operand for each element type; pairs of random state are one more.
class Numbers {
 public:
  Numbers(const Fusion& fusion, const Batch& batch);
  std::vector<ArrayPtr> arrays(DeviceState& device) const;

 private:
  struct Bucket {
    pjrt::DType dtype;
    bool random;
    std::vector<char> bytes;
    int64_t count = 0;
  };
  std::vector<Bucket> buckets_;
};

}  // namespace torch_tpu
