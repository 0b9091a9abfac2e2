// The emulator with happens-before: kernels are compiled with -fsanitize=thread, whose calls for each access come here
// instead of to its library. Lanes are threads: those of a wavefront are ordered by its collective operations and by
// barriers, wavefronts of a block by barriers alone, blocks by nothing. Two accesses to a byte, one of them a write, that
// nothing orders are a race. Lanes in lock step hide some of these on AMD; CUDA has promised no lock step since Volta, and
// the compiler of either may move an access.
// One fault can be planted, at a place of the code: a barrier is left out, or passed one access to shared memory too late,
// as where buffers are swapped early, or an access of every second wavefront goes to the element behind its own.
#define barrier whole_barrier
#define exchange whole_exchange
#include "emulator.cpp"
#undef barrier
#undef exchange

#include <unistd.h>

#include <set>
#include <unordered_map>

extern "C" void places_from_here() {}

namespace {

// Of a lane, after so many barriers of its block and collective operations of its wavefront.
struct Access {
  int32_t block = -1, lane = -1;
  uint32_t barriers = 0, operations = 0;
};
// The last write; the last read, the last one of another lane of its wavefront, the last one of another wavefront.
struct Byte {
  Access write, read, of_lane, of_wave;
};

constexpr uint64_t PAGE = 1024;
std::unordered_map<uint64_t, std::unique_ptr<Byte[]>> pages;
std::set<char*> written;
enum Plant { NONE, LEFT_OUT, SWAPPED_EARLY, OFF_BY_ONE };
Plant plant = NONE;
ptrdiff_t planted_at = 0;
std::set<std::pair<int, ptrdiff_t>> plants;
// The launch that is tried, and whether this process is the one that tries it.
const emulator::Launch* pending = nullptr;
bool tries = false;
std::string first_race;

// A place of the code is a distance, which is the same in every process.
ptrdiff_t place(const void* called) { return static_cast<const char*>(called) - reinterpret_cast<const char*>(&places_from_here); }

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

int wave(int lane) { return lane / emulator::current->launch.warp; }

bool unordered(const Access& before, const Access& now, bool shared) {
  if (before.lane < 0 || before.lane == now.lane && before.block == now.block) return false;
  if (before.block != now.block) return !shared;
  if (before.barriers != now.barriers) return false;
  return wave(before.lane) != wave(now.lane) || before.operations == now.operations;
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

void keep(Byte& byte, const Access& now, char* address, bool writes, bool shared) {
  bool race = unordered(byte.write, now, shared);
  if (writes) {
    for (const Access& read : {byte.read, byte.of_lane, byte.of_wave}) race = race || unordered(read, now, shared);
    byte.write = now;
    if (!shared) written.insert(address);
  } else {
    const Access last = byte.read;
    if (last.block != now.block || wave(last.lane) != wave(now.lane)) byte.of_wave = last;
    else if (last.lane != now.lane) byte.of_lane = last;
    byte.read = now;
  }
  if (!race || !first_race.empty()) return;
  first_race = emulator::format("%s, block %d: lane %d of wavefront %d %s what another touched after barrier %u in %s memory",
                                emulator::current->launch.kernel, now.block, now.lane % emulator::current->launch.warp,
                                wave(now.lane), writes ? "writes" : "reads", now.barriers, shared ? "shared" : "global");
  // At once: a kernel that reads what nobody wrote may end the process.
  emulator::say("race", first_race);
}

void access(const void* at, size_t size, bool writes, const void* called) {
  if (!tries || !emulator::current) return;
  settle(false);
  emulator::Block& block = *emulator::current;
  emulator::Fiber& fiber = block.fibers[block.thread];
  char* address = static_cast<char*>(const_cast<void*>(at));
  const char* stack = fiber.stack.get();
  if (address >= stack && address < stack + emulator::STACK_BYTES) return;
  const bool shared = is_shared(address);
  // Nobody writes what a kernel reads from global memory: off by one, that is wrong in any order.
  if (writes || shared) plants.insert({OFF_BY_ONE, place(called)});
  fiber.held.touched = shared && fiber.held.late;
  // In every second wavefront: where all are off alike, the result is wrong in any order, and there is no race.
  const bool off = plant == OFF_BY_ONE && place(called) == planted_at && wave(block.thread) % 2 == 0;
  if (off && size <= sizeof fiber.held.before && shared == is_shared(address + 2 * size - 1)) {
    // Put right when this lane goes on: what was there before, and behind it what it wrote; or it reads what lies behind.
    fiber.held = {fiber.held.late, fiber.held.touched, writes, size, address};
    memcpy(fiber.held.before, address, size);
    if (!writes) memcpy(address, address + size, size);
    address += size;
  }
  const Access now{int32_t(block.index), block.thread, uint32_t(block.whole.generation),
                   uint32_t(block.warps[wave(block.thread)].meeting.generation)};
  for (size_t i = 0; i < size; ++i) {
    const uint64_t key = reinterpret_cast<uint64_t>(address + i);
    std::unique_ptr<Byte[]>& page = pages[key / PAGE];
    if (!page) page.reset(new Byte[PAGE]);
    keep(page[key % PAGE], now, address + i, writes, shared);
  }
}

}  // namespace

namespace emulator {

void barrier() {
  const ptrdiff_t called = place(__builtin_return_address(0));
  settle(true);
  if (tries) plants.insert({{LEFT_OUT, called}, {SWAPPED_EARLY, called}});
  if (called == planted_at && plant == LEFT_OUT) return;
  if (called == planted_at && plant == SWAPPED_EARLY)
    current->fibers[current->thread].held.late = true;
  else
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

// Before each launch `called` may run it by races_run, in processes of its own.
EXPORT void races_at_launch(void (*called)(const char* kernel, int warp)) {
  emulator::at_launch = [=](const emulator::Launch& launch) {
    pending = &launch;
    if (called) called(launch.kernel, launch.warp);
  };
}
// Runs the launch with a fault in an order; writes to a file the first race, the faults that can be planted in the code that
// ran, and a digest of the global memory that was written.
EXPORT void races_run(int kind, int64_t at, unsigned order, int file) {
  tries = true;
  plant = Plant(kind);
  planted_at = at;
  emulator::order = order;
  emulator::say = [=](const char* word, const std::string& text) {
    const std::string line = std::string(word) + " " + text + "\n";
    if (write(file, line.c_str(), line.size()) < 0) _exit(1);
  };
  emulator::at_end = [] { settle(true); };
  emulator::at_launch = {};
  if (emulator::launch(*pending)) return emulator::say("refused", emulator::last_error);
  std::string places;
  for (const auto& [kind, at] : plants) places += std::to_string(kind) + ":" + std::to_string(at) + " ";
  emulator::say("plants", places);
  uint64_t digest = 14695981039346656037u;
  for (const char* at : written) digest = (digest ^ (reinterpret_cast<uint64_t>(at) << 8 | (*at & 0xff))) * 1099511628211u;
  emulator::say("result", std::to_string(digest));
}
