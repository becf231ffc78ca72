#include "eager/fuse.h"

#include <algorithm>

namespace torch_tpu {

Fusion::Fusion(const Batch& batch) {
  find_live(batch);
  connect(batch);
  pair_donations(batch);
}

// From the last operator to the first: it is needed if somebody waits for it, or something needed reads it.
void Fusion::find_live(const Batch& batch) {
  const size_t count = batch.nodes.size();
  needed_.assign(count, 0);
  first_output_.reserve(count + 1);
  first_output_.push_back(0);
  for (const auto& node : batch.nodes) first_output_.push_back(first_output_.back() + node->program->outputs.size());
  is_live_.assign(first_output_.back(), 0);
  if (batch.flag.kind == Source::kNode)
    is_live_[first_output_[batch.flag.index] + batch.flag.output] = needed_[batch.flag.index] = 1;
  for (size_t i = count; i-- > 0;) {
    Node& node = *batch.nodes[i];
    for (size_t o = first_output_[i]; o < first_output_[i + 1]; ++o)
      if (node.held(static_cast<int>(o - first_output_[i]))) is_live_[o] = needed_[i] = 1;
    if (!needed_[i]) continue;
    for (size_t s = 0; s < node.program->operands.size(); ++s) {
      const Source& source = batch.sources[node.first_source + s];
      if (source.kind == Source::kNode) needed_[source.index] = 1;
    }
  }
}

void Fusion::connect(const Batch& batch) {
  std::vector<int32_t> node_at(batch.nodes.size(), -1), leaf_at(batch.leaves.size(), -1);
  nodes_.reserve(batch.nodes.size());
  first_source_.reserve(batch.nodes.size());
  sources_.reserve(batch.sources.size());
  leaves_.reserve(batch.leaves.size());
  for (size_t i = 0; i < batch.nodes.size(); ++i) {
    if (!needed_[i]) continue;
    const Node& node = *batch.nodes[i];
    node_at[i] = static_cast<int32_t>(nodes_.size());
    first_source_.push_back(sources_.size());
    for (size_t s = 0; s < node.program->operands.size(); ++s) {
      Source source = batch.sources[node.first_source + s];
      if (source.kind == Source::kNode) {
        source.index = node_at[source.index];
      } else if (source.kind == Source::kLeaf) {
        auto& place = leaf_at[source.index];
        if (place < 0) {
          place = static_cast<int32_t>(leaves_.size());
          leaves_.push_back(source.index);
        }
        source.index = place;
      }
      sources_.push_back(source);
    }
    for (size_t o = 0; o < node.program->outputs.size(); ++o) {
      if (!is_live_[first_output_[i] + o]) continue;
      if (node.program->outputs[o].slot == kFaultFlag) flag_ = static_cast<int32_t>(live_.size());
      live_.push_back({node_at[i], static_cast<int32_t>(o)});
    }
    nodes_.push_back(&node);
  }
}

// An array that only the batch holds any more gives its memory to what replaced it, over all the updates in between.
void Fusion::pair_donations(const Batch& batch) {
  if (std::none_of(nodes_.begin(), nodes_.end(), [](auto* node) { return !node->program->donations.empty(); })) return;
  std::vector<int32_t> origin(first_output_.back(), -1);  // the leaf that an output is the newest state of
  const auto place = [&](int32_t node, int32_t output) { return first_output_[nodes_[node]->index] + output; };
  for (size_t i = 0; i < nodes_.size(); ++i)
    for (const auto& [operand, output] : nodes_[i]->program->donations) {
      const Source& source = sources(i)[operand];
      origin[place(static_cast<int32_t>(i), output)] = source.kind == Source::kLeaf ? source.index
                                                       : source.kind == Source::kNode
                                                           ? origin[place(source.index, source.output)]
                                                           : -1;
    }
  std::vector<uint8_t> given(leaves_.size(), 0);
  for (size_t k = live_.size(); k-- > 0;) {  // the newest state of all
    const int32_t leaf = origin[place(live_[k].node, live_[k].output)];
    if (leaf < 0 || given[leaf] || batch.leaves[leaves_[leaf]].use_count() != 1) continue;
    if (batch.leaves[leaves_[leaf]]->type() != nodes_[live_[k].node]->program->outputs[live_[k].output].type) continue;
    given[leaf] = 1;
    donations_.push_back({leaf, static_cast<int32_t>(k)});
  }
}

Key Fusion::key() const {
  Key key;
  key.reserve(4 + nodes_.size() + sources_.size() + live_.size() + donations_.size());
  key.push_back(nodes_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) {
    key.push_back(reinterpret_cast<uint64_t>(&nodes_[i]->program->code()));
    const Source* source = sources(i);
    for (const auto& operand : nodes_[i]->program->operands) {
      if (!is_number(operand.kind))
        key.push_back(static_cast<uint64_t>(source->kind) << 62 | static_cast<uint64_t>(source->index) << 24 |
                      static_cast<uint64_t>(source->output));
      ++source;
    }
  }
  for (const auto& live : live_)
    key.push_back(static_cast<uint64_t>(live.node) << 32 | static_cast<uint64_t>(live.output));
  key.push_back(~uint64_t{0});
  for (const auto& [leaf, live] : donations_)
    key.push_back(static_cast<uint64_t>(leaf) << 32 | static_cast<uint64_t>(live));
  return key;
}

Numbers::Numbers(const Fusion& fusion, const Batch& batch) {
  for (size_t i = 0; i < fusion.nodes().size(); ++i) {
    const auto& operands = fusion.nodes()[i]->program->operands;
    for (size_t s = 0; s < operands.size(); ++s) {
      if (!is_number(operands[s].kind)) continue;
      const bool random = operands[s].kind == OperandKind::kRng;
      const auto dtype = random ? PJRT_Buffer_Type_U64 : operands[s].dtype;
      auto bucket = std::find_if(buckets_.begin(), buckets_.end(),
                                 [&](auto& b) { return b.dtype == dtype && b.random == random; });
      if (bucket == buckets_.end()) bucket = buckets_.insert(bucket, {dtype, random, {}, 0});
      const auto* bits = reinterpret_cast<const char*>(&batch.numbers[fusion.sources(i)[s].index]);
      const size_t size = random ? sizeof(ScalarBits) : pjrt::dtype_size(dtype);
      bucket->bytes.insert(bucket->bytes.end(), bits, bits + size);
      bucket->count += random ? 2 : 1;
    }
  }
}

std::vector<ArrayPtr> Numbers::arrays(DeviceState& device) const {
  std::vector<ArrayPtr> out;
  for (const auto& bucket : buckets_) {
    const auto* type = ArrayType::get(bucket.dtype, {bucket.count});
    out.push_back(bucket.random ? device.from_host(bucket.bytes.data(), type)
                                : device.scalars.get_packed({bucket.bytes.data(), bucket.bytes.size()}, type, device));
  }
  return out;
}

}  // namespace torch_tpu
