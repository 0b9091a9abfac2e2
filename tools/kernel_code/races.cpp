// The emulator with happens-before: kernels are compiled with -fsanitize=thread, whose calls for each access come here
// instead of to its library. Two wavefronts of a block are ordered by barriers alone, blocks by nothing: two accesses to a
// byte, one of them a write, with no barrier between them are a race. Lanes of a wavefront are ordered by their code.
// One fault can be planted, at a place of the code: a barrier is left out, or passed one access to shared memory too late,
// as where buffers are swapped early, or an access of
// every second wavefront goes to the element behind its own. The order of wavefronts is by a seed.
#define barrier whole_barrier
#define exchange whole_exchange
#include "emulator.cpp"
#undef barrier
#undef exchange

#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

extern "C" void places_from_here() {}

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
enum Plant { NONE, LEFT_OUT, SWAPPED_EARLY, OFF_BY_ONE };
Plant plant = NONE;
ptrdiff_t planted_at = 0;
std::set<ptrdiff_t> barriers, shared_accesses;
int report = -1;
long races = 0;
std::string first_race;

// A place of the code is a distance, which is the same in every process.
ptrdiff_t place(const void* called) { return static_cast<const char*>(called) - reinterpret_cast<const char*>(&places_from_here); }

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

// Ends what a planted fault holds of this lane: an access that went elsewhere, a barrier that is passed late.
void settle(bool whole) {
  if (plant == NONE || !emulator::current) return;
  emulator::Held& held = emulator::current->fibers[emulator::current->thread].held;
  if (held.size) {
    if (held.writes) memcpy(held.at + held.size, held.at, held.size);
    memcpy(held.at, held.before, held.size);
    held.size = 0;
  }
  if (held.late && (held.touched || whole)) {
    held.late = held.touched = false;
    emulator::whole_barrier();
  }
}

void access(const void* at, size_t size, bool writes, const void* called) {
  if (!emulator::current) return;
  settle(false);
  emulator::Block& block = *emulator::current;
  emulator::Fiber& fiber = block.fibers[block.thread];
  const char* address = static_cast<const char*>(at);
  const char* stack = fiber.stack.get();
  if (address >= stack && address < stack + emulator::STACK_BYTES) return;
  const std::lock_guard<std::mutex> guard(lock);
  // One launch ends before the next begins.
  static unsigned launch = 0;
  if (launch != emulator::launches) bytes.clear();
  launch = emulator::launches;
  const bool shared = is_shared(address);
  if (shared) {
    shared_accesses.insert(place(called));
    fiber.held.touched = fiber.held.late;
    // In every second wavefront: where all are off alike, the result is wrong in any order, and there is no race.
    const bool off = plant == OFF_BY_ONE && place(called) == planted_at && block.thread / block.launch.warp % 2 == 0;
    if (off && size <= 16 && is_shared(address + 2 * size - 1)) {
      // Put right when this lane goes on: what was there before, and behind it what it wrote; or it reads what lies behind.
      fiber.held = {false, false, writes, size, const_cast<char*>(address)};
      memcpy(fiber.held.before, address, size);
      if (!writes) memcpy(const_cast<char*>(address), address + size, size);
      address += size;
    }
  }
  const Access now{block.index, block.thread / block.launch.warp, block.whole.generation};
  for (size_t i = 0; i < size; ++i) {
    const uint64_t key = reinterpret_cast<uint64_t>(address + i) ^ (shared ? uint64_t(block.index + 1) << 48 : 0);
    Byte& byte = bytes[key];
    bool race = unordered(byte.write, now, shared);
    if (writes)
      for (const Access& read : byte.reads) race = race || unordered(read, now, shared);
    if (race && !races++) {
      first_race = emulator::format("%s, block %lld: wavefront %d %s what another touched in epoch %llu of %s memory",
                                    block.launch.kernel, (long long)block.index, now.wave,
                                    writes ? "writes" : "reads", (unsigned long long)now.epoch,
                                    shared ? "shared" : "global");
      // At once: a kernel that reads what nobody wrote may end the process.
      if (report >= 0 && write(report, (first_race + "\n").c_str(), first_race.size() + 1) < 0) report = -1;
    }
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
  const ptrdiff_t called = place(__builtin_return_address(0));
  settle(true);
  {
    const std::lock_guard<std::mutex> guard(lock);
    barriers.insert(called);
  }
  if (called == planted_at && plant == LEFT_OUT) return;
  if (called == planted_at && plant == SWAPPED_EARLY) {
    // Lanes run one after another here, and together on a GPU: all of a wavefront are at the barrier before one goes on.
    const float nothing = 0.0f;
    whole_exchange({"swapped early", 0}, &nothing, 1);
    current->fibers[current->thread].held.late = true;
    return;
  }
  whole_barrier();
}

const Lane* exchange(Operation operation, const float* values, int count) {
  settle(true);
  return whole_exchange(operation, values, count);
}

}  // namespace emulator

#define EXPORT extern "C" __attribute__((visibility("default")))
#define HOOK(name, size, writes) \
  EXPORT void __tsan_##name##size(void* at) { access(at, size, writes, __builtin_return_address(0)); }
#define HOOKS(size)          \
  HOOK(read, size, false)    \
  HOOK(write, size, true)    \
  HOOK(unaligned_read, size, false) \
  HOOK(unaligned_write, size, true)
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
EXPORT void __tsan_read_range(void* at, size_t size) { access(at, size, false, __builtin_return_address(0)); }
EXPORT void __tsan_write_range(void* at, size_t size) { access(at, size, true, __builtin_return_address(0)); }
EXPORT void __tsan_vptr_update(void**, void*) {}
EXPORT void __tsan_vptr_read(void**) {}
EXPORT void __tsan_func_entry(void*) {}
EXPORT void __tsan_func_exit() { settle(false); }
EXPORT void __tsan_init() {}

// Forgets all accesses; from now on a fault is at this place, and the first race is written to a file as well.
EXPORT void races_begin(int kind, int64_t at, unsigned order, int file) {
  bytes.clear();
  first_race.clear();
  races = 0;
  plant = Plant(kind);
  planted_at = at;
  emulator::order = order;
  report = file;
}
EXPORT const char* races_message() { return first_race.c_str(); }
// A line of places for barriers, and one for accesses to shared memory.
EXPORT const char* races_places() {
  static std::string text;
  text.clear();
  for (const std::set<ptrdiff_t>* some : {&barriers, &shared_accesses}) {
    for (const ptrdiff_t at : *some) text += std::to_string(at) + " ";
    text += "\n";
  }
  barriers.clear();
  shared_accesses.clear();
  return text.c_str();
}
