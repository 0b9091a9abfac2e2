// The emulator with happens-before: kernels are compiled with -fsanitize=thread, whose calls for each access come here
// instead of to its library. Lanes are threads: those of a wavefront are ordered by its collective operations and by
// barriers, wavefronts of a block by barriers alone, blocks by nothing. Two accesses to a byte, one of them a write, that
// nothing orders are a race. Lanes in lock step hide some of these on AMD; CUDA has promised no lock step since Volta, and
// the compiler of either may move an access.
#include "emulator.cpp"

#include <map>
#include <unordered_map>

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
// The first race of each kernel.
std::map<std::string, std::string> races;
std::string text;

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

void keep(Byte& byte, const Access& now, bool writes, bool shared) {
  bool race = unordered(byte.write, now, shared);
  if (writes) {
    for (const Access& read : {byte.read, byte.of_lane, byte.of_wave}) race = race || unordered(read, now, shared);
    byte.write = now;
  } else {
    const Access last = byte.read;
    if (last.block != now.block || wave(last.lane) != wave(now.lane)) byte.of_wave = last;
    else if (last.lane != now.lane) byte.of_lane = last;
    byte.read = now;
  }
  if (!race) return;
  const emulator::Launch& launch = emulator::current->launch;
  races.emplace(launch.kernel, emulator::format(
      "%s, block %d: lane %d of wavefront %d %s what another touched after barrier %u in %s memory", launch.kernel,
      now.block, now.lane % launch.warp, wave(now.lane), writes ? "writes" : "reads", now.barriers,
      shared ? "shared" : "global"));
}

void access(const void* at, size_t size, bool writes) {
  if (!emulator::current) return;
  const emulator::Block& block = *emulator::current;
  const char *address = static_cast<const char*>(at), *stack = block.fibers[block.thread].stack.get();
  if (address >= stack && address < stack + emulator::STACK_BYTES) return;
  const bool shared = is_shared(address);
  const Access now{int32_t(block.index), block.thread, uint32_t(block.whole.generation),
                   uint32_t(block.warps[wave(block.thread)].meeting.generation)};
  for (size_t i = 0; i < size; ++i) {
    const uint64_t key = reinterpret_cast<uint64_t>(address + i);
    std::unique_ptr<Byte[]>& page = pages[key / PAGE];
    if (!page) page.reset(new Byte[PAGE]);
    keep(page[key % PAGE], now, writes, shared);
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define HOOK(name, size, writes) EXPORT void __tsan_##name##size(void* at) { access(at, size, writes); }
#define HOOKS(size)          \
  HOOK(read, size, false)    \
  HOOK(write, size, true)    \
  HOOK(unaligned_read, size, false) \
  HOOK(unaligned_write, size, true)
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
EXPORT void __tsan_read_range(void* at, size_t size) { access(at, size, false); }
EXPORT void __tsan_write_range(void* at, size_t size) { access(at, size, true); }
EXPORT void __tsan_vptr_update(void**, void*) {}
EXPORT void __tsan_vptr_read(void**) {}
EXPORT void __tsan_func_entry(void*) {}
EXPORT void __tsan_func_exit() {}
EXPORT void __tsan_init() {}

// Has launches run in an order from now on.
EXPORT void races_order(unsigned order) {
  emulator::order = order;
  emulator::at_launch = [] { pages.clear(); };
}
// Returns a line for each kernel that has raced since the last call.
EXPORT const char* races_found() {
  text.clear();
  for (const auto& [kernel, race] : races) text += race + "\n";
  races.clear();
  return text.c_str();
}
