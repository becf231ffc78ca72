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

bool Program::settled() const {
  constexpr uint32_t kReturns = 8;
  constexpr uint64_t kFew = 32;
  if (variety->last.load(std::memory_order_relaxed) == this) return false;
  variety->last.store(this, std::memory_order_relaxed);
  return returns.fetch_add(1, std::memory_order_relaxed) >= kReturns &&
         variety->programs.load(std::memory_order_relaxed) <= kFew;
}

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

ProgramTable::Entry* ProgramTable::slot(const Key& key, uint64_t hash) {
  const size_t mask = entries_.size() - 1;
  for (size_t i = hash & mask;; i = (i + 1) & mask) {
    Entry& entry = entries_[i];
    if (!entry.program) return &entry;
    if (entry.hash == hash && entry.key.size() == key.size() &&
        std::memcmp(entry.key.data(), key.data(), key.size() * sizeof(uint64_t)) == 0)
      return &entry;
  }
}

void ProgramTable::grow() {
  std::vector<Entry> old = std::move(entries_);
  entries_ = std::vector<Entry>(old.empty() ? 8 : old.size() * 2);
  for (auto& entry : old)
    if (entry.program) *slot(entry.key, entry.hash) = std::move(entry);
}

ProgramPtr ProgramTable::find(const Key& key, uint64_t hash) {
  std::lock_guard<Spinlock> lock(mutex_);
  if (entries_.empty()) return nullptr;
  const Entry* entry = slot(key, hash);
  if (!entry->program) return nullptr;
  entry->program->hits++;
  entry->program->last_used = tables().clock.load(std::memory_order_relaxed);
  return entry->program;
}

void ProgramTable::insert(const Key& key, uint64_t hash, ProgramPtr program) {
  auto& t = tables();
  program->last_used = t.clock++;  // time passes with each new program
  t.misses++;
  {
    std::lock_guard<Spinlock> lock(mutex_);
    if (2 * (used_ + 1) > entries_.size()) grow();
    Entry* entry = slot(key, hash);
    if (!entry->program) {
      ++used_;
      ++t.programs;
    }
    *entry = {hash, key, std::move(program)};
  }
  while (t.programs > t.capacity) evict_oldest();
}

void ProgramTable::evict_oldest() {
  auto& t = tables();
  std::lock_guard<std::mutex> lock(t.mutex);
  ProgramTable* owner = nullptr;
  uint64_t oldest = UINT64_MAX;
  for (auto* table : t.all) {
    std::lock_guard<Spinlock> inner(table->mutex_);
    for (auto& entry : table->entries_)
      if (entry.program && entry.program->last_used < oldest) {
        oldest = entry.program->last_used;
        owner = table;
      }
  }
  if (!owner) return;
  std::lock_guard<Spinlock> inner(owner->mutex_);
  std::vector<Entry> kept;
  for (auto& entry : owner->entries_) {
    if (!entry.program) continue;
    if (entry.program->last_used > oldest) {
      kept.push_back(std::move(entry));
      continue;
    }
    t.forgotten_hits += entry.program->hits;
    t.evictions++;
    t.programs--;
  }
  owner->entries_ = std::vector<Entry>(owner->entries_.size());
  owner->used_ = kept.size();
  for (auto& entry : kept) *owner->slot(entry.key, entry.hash) = std::move(entry);
}

TableStats ProgramTable::stats() {
  auto& t = tables();
  uint64_t hits = t.forgotten_hits;
  std::lock_guard<std::mutex> lock(t.mutex);
  for (auto* table : t.all) {
    std::lock_guard<Spinlock> inner(table->mutex_);
    for (auto& entry : table->entries_)
      if (entry.program) hits += entry.program->hits;
  }
  return {hits, t.misses, t.evictions, t.programs};
}

void ProgramTable::reset_stats() {
  auto& t = tables();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.misses = t.evictions = t.forgotten_hits = 0;
  for (auto* table : t.all) {
    std::lock_guard<Spinlock> inner(table->mutex_);
    for (auto& entry : table->entries_)
      if (entry.program) entry.program->hits = 0;
  }
}

void ProgramTable::clear_all() {
  auto& t = tables();
  std::lock_guard<std::mutex> lock(t.mutex);
  for (auto* table : t.all) {
    std::vector<Entry> dropped;  // programs are freed outside of the lock
    std::lock_guard<Spinlock> inner(table->mutex_);
    dropped.swap(table->entries_);
    table->used_ = 0;
  }
  t.programs = 0;
}

void ProgramTable::set_capacity(size_t programs) { tables().capacity = programs; }

}  // namespace torch_tpu
