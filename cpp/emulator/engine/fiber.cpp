// SPDX-License-Identifier: Apache-2.0
#include "fiber.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMULATOR_TSAN)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace emulator {
namespace {

constexpr std::size_t kStack = 512 * 1024;
constexpr std::size_t kGuard = 64 * 1024;
ucontext_t scheduler_context;
Fiber* running = nullptr;
#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_size = 0;
void* scheduler_fake_stack = nullptr;
#endif
#if defined(EMULATOR_TSAN)
void* scheduler_tsan = nullptr;
#endif

void trampoline() {
    Fiber* self = running;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
    self->body();
    self->end();
}

}  // namespace

Fiber::Fiber(void (*what)()) : body(what) {
    stack_size = kStack;
    void* memory = mmap(nullptr, kStack + kGuard, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("emulator: no memory for a stack");
        std::exit(2);
    }
    mprotect(memory, kGuard, PROT_NONE);
    stack = static_cast<char*>(memory) + kGuard;
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = stack_size;
    context.uc_link = nullptr;
    makecontext(&context, trampoline, 0);
#if defined(EMULATOR_TSAN)
    tsan = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(EMULATOR_TSAN)
    if (tsan != nullptr) {
        __tsan_destroy_fiber(tsan);
    }
#endif
    munmap(static_cast<char*>(stack) - kGuard, kStack + kGuard);
}

void Fiber::enter() {
    running = this;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, stack, stack_size);
#endif
#if defined(EMULATOR_TSAN)
    if (scheduler_tsan == nullptr) {
        scheduler_tsan = __tsan_get_current_fiber();
    }
    // 1: the switch itself orders nothing, only publish() and observe() do.
    __tsan_switch_to_fiber(tsan, 1);
#endif
    swapcontext(&scheduler_context, &context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
    running = nullptr;
}

void Fiber::leave() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack, scheduler_stack, scheduler_stack_size);
#endif
#if defined(EMULATOR_TSAN)
    __tsan_switch_to_fiber(scheduler_tsan, 1);
#endif
    swapcontext(&context, &scheduler_context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &scheduler_stack, &scheduler_stack_size);
#endif
}

void Fiber::end() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(nullptr, scheduler_stack, scheduler_stack_size);
#endif
#if defined(EMULATOR_TSAN)
    __tsan_switch_to_fiber(scheduler_tsan, 1);
#endif
    setcontext(&scheduler_context);
    std::abort();
}

#if defined(EMULATOR_TSAN)
void publish(void* object) { __tsan_release(object); }
void observe(void* object) { __tsan_acquire(object); }
#else
void publish(void*) {}
void observe(void*) {}
#endif

}  // namespace emulator
