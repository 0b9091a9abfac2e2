// The emulator with happens-before: kernels are compiled with -fsanitize=thread, whose calls for each access come here
// instead of to its library. Two wavefronts of a block are ordered by barriers alone, blocks by nothing: two accesses to a
// byte, one of them a write, with no barrier between them are a race. Lanes of a wavefront are ordered by their code.
// A barrier of the code can be left out by its number, and the order of wavefronts is by a seed.
#define barrier whole_barrier
#include "emulator.cpp"
#undef barrier

#include <map>
#include <mutex>
#include <unordered_map>

namespace {

struct Access {
  int64_t block = -1;
  int wave = -1;
  uint64_t epoch = 0;
};
// The last write, and the last read of up to two wavefronts: with more, two of them differ from any third.
struct Byte {
  Access write, reads[2];
};

std::mutex lock;
std::unordered_map<uint64_t, Byte> bytes;
std::map<void*, int> sites;
int left_out = -1;
long races = 0;
std::string first_race;

// Shared memory is each block's own, wherever the worker keeps it.
bool is_shared(const char* address) {
  const char* dynamic = emulator::current->dynamic_shared();
  if (address >= dynamic && address < dynamic + emulator::current->launch.dynamic_shared_bytes) return true;
  // The segment of a thread is poisoned between blocks, so where it lies is kept as distances from one variable.
  const char* inside = reinterpret_cast<char*>(&emulator::current);
  static ptrdiff_t before = 0, after = 0;
  if (!after)
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* inside) {
          const char *data = static_cast<char*>(info->dlpi_tls_data), *at = static_cast<char*>(inside);
          for (int i = 0; data && i < info->dlpi_phnum; ++i) {
            const size_t size = info->dlpi_phdr[i].p_memsz;
            if (info->dlpi_phdr[i].p_type != PT_TLS || at < data || at >= data + size) continue;
            before = at - data;
            after = data + size - at;
          }
          return 0;
        },
        &emulator::current);
  return address >= inside - before && address < inside + after;
}

bool unordered(const Access& before, const Access& now, bool shared) {
  if (before.wave < 0) return false;
  if (before.block != now.block) return !shared;
  return before.wave != now.wave && before.epoch == now.epoch;
}

void access(const void* at, size_t size, bool writes) {
  if (!emulator::current) return;
  emulator::Block& block = *emulator::current;
  const char* address = static_cast<const char*>(at);
  const char* stack = block.fibers[block.thread].stack.get();
  if (address >= stack && address < stack + emulator::STACK_BYTES) return;
  const std::lock_guard<std::mutex> guard(lock);
  // One launch ends before the next begins.
  static unsigned launch = 0;
  if (launch != emulator::launches) bytes.clear();
  launch = emulator::launches;
  const bool shared = is_shared(address);
  const Access now{block.index, block.thread / block.launch.warp, block.whole.generation};
  for (size_t i = 0; i < size; ++i) {
    const uint64_t key = reinterpret_cast<uint64_t>(address + i) ^ (shared ? uint64_t(block.index + 1) << 48 : 0);
    Byte& byte = bytes[key];
    bool race = unordered(byte.write, now, shared);
    if (writes)
      for (const Access& read : byte.reads) race = race || unordered(read, now, shared);
    if (race && !races++)
      first_race = emulator::format("%s, block %lld: wavefront %d %s what another touched in epoch %llu of %s memory",
                                    block.launch.kernel, (long long)block.index, now.wave,
                                    writes ? "writes" : "reads", (unsigned long long)now.epoch,
                                    shared ? "shared" : "global");
    if (writes) {
      byte.write = now;
    } else {
      Access& other = byte.reads[0].wave == now.wave && byte.reads[0].block == now.block ? byte.reads[0] : byte.reads[1];
      if (&other == &byte.reads[1] && byte.reads[0].epoch < now.epoch) byte.reads[0] = byte.reads[1];
      other = now;
    }
  }
}

}  // namespace

namespace emulator {

void barrier() {
  const void* called = __builtin_return_address(0);
  {
    const std::lock_guard<std::mutex> guard(lock);
    if (sites.emplace(const_cast<void*>(called), int(sites.size())).first->second == left_out) return;
  }
  whole_barrier();
}

}  // namespace emulator

#define EXPORT extern "C" __attribute__((visibility("default")))
#define HOOKS(size)                                                                     \
  EXPORT void __tsan_read##size(void* at) { access(at, size, false); }                  \
  EXPORT void __tsan_write##size(void* at) { access(at, size, true); }                  \
  EXPORT void __tsan_unaligned_read##size(void* at) { access(at, size, false); }        \
  EXPORT void __tsan_unaligned_write##size(void* at) { access(at, size, true); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
EXPORT void __tsan_read_range(void* at, size_t size) { access(at, size, false); }
EXPORT void __tsan_write_range(void* at, size_t size) { access(at, size, true); }
EXPORT void __tsan_vptr_update(void**, void*) {}
EXPORT void __tsan_vptr_read(void**) {}
EXPORT void __tsan_func_entry(void*) {}
EXPORT void __tsan_func_exit() {}
EXPORT void __tsan_init() {}

// Forgets all accesses; from now on the barrier of this number is left out, none for -1.
EXPORT void races_begin(int site) {
  bytes.clear();
  first_race.clear();
  races = 0;
  left_out = site;
}
EXPORT void races_forget_sites() { sites.clear(); }
EXPORT int races_sites() { return int(sites.size()); }
EXPORT long races_found() { return races; }
EXPORT const char* races_message() { return first_race.c_str(); }
EXPORT void races_order(unsigned seed) { emulator::order = seed; }
