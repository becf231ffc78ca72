#include "eager/program.h"

#include <cstring>

namespace torch_tpu {
namespace {

struct Tables {
  std::mutex mutex;
  std::vector<ProgramTable*> all;  // one per operator; operators are never unregistered
  std::atomic<uint64_t> clock{0}, misses{0}, evictions{0}, programs{0}, forgotten_hits{0};
  std::atomic<size_t> capacity{16384};
};
Tables& tables() {
  static auto* instance = new Tables;
  return *instance;
}

}  // namespace

uint64_t hash_key(const Key& key) {
  uint64_t h = 0x9E3779B97F4A7C15ull ^ key.size();
  for (uint64_t word : key) {
    h ^= word;
    h *= 0xFF51AFD7ED558CCDull;
    h ^= h >> 32;
  }
  return h;
}

ProgramTable::ProgramTable() {
  std::lock_guard<std::mutex> lock(tables().mutex);
  tables().all.push_back(this);
}

ProgramPtr ProgramTable::find(const Key& key, uint64_t hash) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto [begin, end] = entries_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const Key& known = it->second.key;
    if (known.size() == key.size() && std::memcmp(known.data(), key.data(), key.size() * sizeof(uint64_t)) == 0) {
      const auto& program = it->second.program;
      program->hits.fetch_add(1, std::memory_order_relaxed);
      program->last_used.store(tables().clock.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
      return program;
    }
  }
  return nullptr;
}

void ProgramTable::insert(const Key& key, uint64_t hash, ProgramPtr program) {
  auto& t = tables();
  program->last_used = t.clock++;
  t.misses++;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.emplace(hash, Entry{key, std::move(program)});
  }
  if (++t.programs > t.capacity) evict_oldest();
}

void ProgramTable::evict_oldest() {
  auto& t = tables();
  std::lock_guard<std::mutex> lock(t.mutex);
  ProgramTable* owner = nullptr;
  uint64_t oldest = UINT64_MAX;
  for (auto* table : t.all) {
    std::lock_guard<std::mutex> inner(table->mutex_);
    for (auto& [hash, entry] : table->entries_)
      if (entry.program->last_used < oldest) {
        oldest = entry.program->last_used;
        owner = table;
      }
  }
  if (!owner) return;
  std::lock_guard<std::mutex> inner(owner->mutex_);
  for (auto it = owner->entries_.begin(); it != owner->entries_.end(); ++it)
    if (it->second.program->last_used == oldest) {
      t.forgotten_hits += it->second.program->hits;
      owner->entries_.erase(it);
      t.evictions++;
      t.programs--;
      return;
    }
}

TableStats ProgramTable::stats() {
  auto& t = tables();
  uint64_t hits = t.forgotten_hits;
  std::lock_guard<std::mutex> lock(t.mutex);
  for (auto* table : t.all) {
    std::lock_guard<std::mutex> inner(table->mutex_);
    for (auto& [hash, entry] : table->entries_) hits += entry.program->hits;
  }
  return {hits, t.misses, t.evictions, t.programs};
}

void ProgramTable::reset_stats() {
  auto& t = tables();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.misses = t.evictions = t.forgotten_hits = 0;
  for (auto* table : t.all) {
    std::lock_guard<std::mutex> inner(table->mutex_);
    for (auto& [hash, entry] : table->entries_) entry.program->hits = 0;
  }
}

void ProgramTable::clear_all() {
  auto& t = tables();
  std::lock_guard<std::mutex> lock(t.mutex);
  for (auto* table : t.all) {
    std::lock_guard<std::mutex> inner(table->mutex_);
    table->entries_.clear();
  }
  t.programs = 0;
}

void ProgramTable::set_capacity(size_t programs) { tables().capacity = programs; }

}  // namespace torch_tpu
