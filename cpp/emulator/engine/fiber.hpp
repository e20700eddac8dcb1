// SPDX-License-Identifier: Apache-2.0
// A role's stack and registers. Roles are cooperative: one runs until it waits, on one thread of the host. So
// runs are deterministic, and the scheduler always knows which role waits for what.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace emulator {

struct Fiber {
    explicit Fiber(void (*body)());
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    void enter();  // from the scheduler
    void leave();  // from the fiber, back to the scheduler
    [[noreturn]] void end();

    void (*body)();
    ucontext_t context{};
    void* stack = nullptr;
    std::size_t stack_size = 0;
    void* fake_stack = nullptr;  // AddressSanitizer's
    void* tsan = nullptr;        // ThreadSanitizer's
};

// Order between roles that a sanitizer has to know about; nothing without one.
void publish(void* object);
void observe(void* object);

}  // namespace emulator
