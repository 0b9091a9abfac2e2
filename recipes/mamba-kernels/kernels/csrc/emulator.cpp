// Fibers, their synchronization points, and the workers that run blocks. Linux only: poisoning shared memory needs this
// library's thread-local segment.
#include "emulator.h"

#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {
namespace {

constexpr size_t STACK_BYTES = 256 * 1024;
constexpr unsigned char POISON = 0xff;  // a NaN in every element type, -1 as an integer
constexpr size_t STACK_GUARD_BYTES = 64;
constexpr size_t SHARED_GUARD_BYTES = 64 * 1024;

void run_fiber();

#if defined(__x86_64__)

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.type emulator_switch, @function
.hidden emulator_switch
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

// A suspended fiber: six saved registers and the return address, on its own stack.
struct Context {
  void* stack_pointer = nullptr;

  void prepare(char* stack) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 2;
    top[0] = reinterpret_cast<void*>(&run_fiber);
    top[1] = nullptr;
    stack_pointer = top - 6;
  }
  void switch_to(Context& other) { emulator_switch(&stack_pointer, other.stack_pointer); }
};

#else

struct Context {
  ucontext_t state;

  void prepare(char* stack) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack;
    state.uc_stack.ss_size = STACK_BYTES;
    state.uc_link = nullptr;
    makecontext(&state, run_fiber, 0);
  }
  void switch_to(Context& other) { swapcontext(&state, &other.state); }
};

#endif

// A synchronization point of a number of threads.
struct Meeting {
  int expected = 0;
  int arrived = 0;
  uint64_t generation = 0;
  Operation operation{};
};

struct Warp {
  Meeting meeting;
  Lane lanes[2][64];  // a lane is at most one operation ahead of another
};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  bool finished = false;
  const Meeting* waits_for = nullptr;
  uint64_t generation = 0;
  Operation operation{};

  bool runnable() const { return !finished && (!waits_for || waits_for->generation != generation); }
};

std::string format(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

std::string name_of(Operation operation) {
  return operation.variant ? format("%s(%d)", operation.name, operation.variant) : operation.name;
}

bool same(Operation a, Operation b) { return !strcmp(a.name, b.name) && a.variant == b.variant; }

// One block at a time, on one CPU thread.
struct Block {
  const Launch& launch;
  int64_t index = 0;
  int thread = 0;
  Context scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting whole;
  std::vector<float> shared;
  std::string error;

  explicit Block(const Launch& launch)
      : launch(launch),
        fibers(launch.threads),
        warps((launch.threads + launch.warp - 1) / launch.warp),
        shared((launch.dynamic_shared_bytes + SHARED_GUARD_BYTES) / 4 + 4) {
    for (Fiber& fiber : fibers) fiber.stack.reset(new char[STACK_BYTES]);
  }

  char* dynamic_shared() {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared.data()) + 15) / 16 * 16);
  }
  void run(int64_t block);
  void reset();
  bool pass(int64_t number);
  void resume(int next);
  void arrive(Meeting& meeting, Operation operation);
  void check_stalled();
  void check_guards();
};

// Lies in the segment that is poisoned, so it is restored afterwards.
thread_local Block* current = nullptr;

int poison_segment(dl_phdr_info* info, size_t, void* inside) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    char* data = static_cast<char*>(info->dlpi_tls_data);
    if (header.p_type != PT_TLS || !data) continue;
    if (inside < data || inside >= data + header.p_memsz) continue;
    memset(data, POISON, header.p_memsz);
    return 1;
  }
  return 0;
}

void Block::reset() {
  memset(dynamic_shared(), POISON, launch.dynamic_shared_bytes + SHARED_GUARD_BYTES);
  dl_iterate_phdr(poison_segment, &current);
  current = this;
  whole = Meeting{launch.threads};
  for (size_t i = 0; i < warps.size(); ++i) {
    warps[i].meeting = Meeting{std::min(launch.warp, launch.threads - int(i) * launch.warp)};
    memset(warps[i].lanes, POISON, sizeof warps[i].lanes);
  }
  for (Fiber& fiber : fibers) {
    fiber.finished = false;
    fiber.waits_for = nullptr;
    memset(fiber.stack.get(), POISON, STACK_GUARD_BYTES);
    fiber.context.prepare(fiber.stack.get());
  }
}

void Block::resume(int next) {
  thread = next;
  scheduler.switch_to(fibers[next].context);
}

// Resumes every runnable thread. The order changes from pass to pass and block to block: a GPU promises none, so a
// kernel that depends on it differs from the reference.
bool Block::pass(int64_t number) {
  const int count = launch.threads;
  const bool backward = (index + number) % 2;
  bool progress = false;
  for (int i = 0; i < count && error.empty(); ++i) {
    const int next = backward ? count - 1 - i : i;
    if (!fibers[next].runnable()) continue;
    progress = true;
    resume(next);
  }
  return progress;
}

void Block::run(int64_t block) {
  index = block;
  reset();
  for (int64_t number = 0; error.empty() && pass(number);) ++number;
  if (error.empty()) check_stalled();
  if (error.empty()) check_guards();
  if (!error.empty()) error = format("%s, block %lld: ", launch.kernel, (long long)block) + error;
}

void Block::check_stalled() {
  const auto waits = [](const Fiber& fiber) { return !fiber.finished; };
  const auto waiting = std::find_if(fibers.begin(), fibers.end(), waits);
  if (waiting == fibers.end()) return;
  const auto differs = [&](const Fiber& other) {
    return other.finished || !same(other.operation, waiting->operation);
  };
  const auto other = std::find_if(fibers.begin(), fibers.end(), differs);
  error = format("divergence: thread %d waits at %s", int(waiting - fibers.begin()),
                 name_of(waiting->operation).c_str());
  if (other == fibers.end()) return;
  error += format(" while thread %d ", int(other - fibers.begin()));
  error += other->finished ? "has finished" : "waits at " + name_of(other->operation);
}

void Block::check_guards() {
  const auto spoilt = [](const char* guard, size_t bytes) {
    return std::any_of(guard, guard + bytes, [](char x) { return x != char(POISON); });
  };
  if (spoilt(dynamic_shared() + launch.dynamic_shared_bytes, SHARED_GUARD_BYTES))
    error = format("writes past its %zu bytes of dynamic shared memory", launch.dynamic_shared_bytes);
  for (const Fiber& fiber : fibers)
    if (spoilt(fiber.stack.get(), STACK_GUARD_BYTES)) error = "a thread needs more stack than the emulator gives it";
}

// Never returns to a thread that diverged: the block is abandoned.
void Block::arrive(Meeting& meeting, Operation operation) {
  Fiber& fiber = fibers[thread];
  fiber.operation = operation;
  if (meeting.arrived == 0) meeting.operation = operation;
  if (!same(meeting.operation, operation)) {
    error = format("divergence: thread %d is at %s while others are at %s", thread, name_of(operation).c_str(),
                   name_of(meeting.operation).c_str());
    fiber.context.switch_to(scheduler);
  }
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  fiber.waits_for = &meeting;
  fiber.generation = meeting.generation;
  fiber.context.switch_to(scheduler);
  fiber.waits_for = nullptr;
}

void run_fiber() {
  Block& block = *current;
  Fiber& fiber = block.fibers[block.thread];
  block.launch.body(block.launch.params);
  fiber.finished = true;
  fiber.context.switch_to(block.scheduler);
}

std::string last_error;

std::string run_blocks(const Launch& launch) {
  const unsigned processors = std::max(1u, std::thread::hardware_concurrency());
  const int64_t count = std::min<int64_t>(processors, launch.blocks);
  std::atomic<int64_t> next{0};
  std::vector<std::string> errors(count);
  const auto work = [&](int64_t worker) {
    Block block(launch);
    for (int64_t i; errors[worker].empty() && (i = next++) < launch.blocks;) {
      block.run(i);
      errors[worker] = block.error;
    }
    current = nullptr;
  };
  std::vector<std::thread> workers;
  for (int64_t i = 1; i < count; ++i) workers.emplace_back(work, i);
  work(0);
  for (std::thread& worker : workers) worker.join();
  for (const std::string& error : errors)
    if (!error.empty()) return error;
  return "";
}

std::string refusal(const Launch& launch) {
  if (launch.threads == launch.compiled_threads && launch.blocks > 0 && launch.blocks < int64_t(1) << 31)
    return "";
  return format("%s: %lld blocks of %d threads; compiled for 1 to 2147483647 blocks of %d threads",
                launch.kernel, (long long)launch.blocks, launch.threads, launch.compiled_threads);
}

}  // namespace

int launch(const Launch& launch) {
  last_error = refusal(launch);
  if (last_error.empty()) last_error = run_blocks(launch);
  return last_error.empty() ? 0 : 1;
}

// Filled by static initializers while the library is loaded.
std::string& listed() {
  static std::string lines;
  return lines;
}

Listed::Listed(const char* kernel, int threads, const int32_t (&launch)[3]) {
  listed() += format("%s %d %d %d %d\n", kernel, threads, launch[0], launch[1], launch[2]);
}

int thread_index() { return current->thread; }
int64_t block_index() { return current->index; }
float* dynamic_shared() { return reinterpret_cast<float*>(current->dynamic_shared()); }
void barrier() { current->arrive(current->whole, {"barrier", 0}); }

const Lane* exchange(Operation operation, const float* values, int count) {
  Block& block = *current;
  const int warp_size = block.launch.warp;
  Warp& warp = block.warps[block.thread / warp_size];
  Lane* lanes = warp.lanes[warp.meeting.generation % 2];
  std::copy(values, values + count, lanes[block.thread % warp_size].value);
  block.arrive(warp.meeting, operation);
  return lanes;
}

}  // namespace emulator

extern "C" const char* emulator_kernels() { return emulator::listed().c_str(); }
extern "C" const char* emulator_message() { return emulator::last_error.c_str(); }
