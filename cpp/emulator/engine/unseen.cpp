// SPDX-License-Identifier: Apache-2.0
// In a build with ThreadSanitizer: memory functions of the engine's own that its runtime does not watch.
// Roles take turns inside the engine, on one thread, so what they do there to its data is no race; what
// kernels do to L1 may be.
#if defined(EMULATOR_TSAN)
#include <cstddef>
#include <cstdlib>
#include <new>

extern "C" {
void* __libc_malloc(std::size_t size);
void __libc_free(void* memory);

// The engine is linked with --wrap for these three.
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void* __wrap_memcpy(void* to, const void* from,
                                                                                  std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        static_cast<volatile char*>(to)[i] = static_cast<const char*>(from)[i];
    }
    return to;
}
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void* __wrap_memset(void* to, int value,
                                                                                  std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        static_cast<volatile char*>(to)[i] = static_cast<char>(value);
    }
    return to;
}
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void* __wrap_memmove(void* to, const void* from,
                                                                                   std::size_t size) {
    if (to < from) {
        return __wrap_memcpy(to, from, size);
    }
    for (std::size_t i = size; i-- > 0;) {
        static_cast<volatile char*>(to)[i] = static_cast<const char*>(from)[i];
    }
    return to;
}
}

void* operator new(std::size_t size) {
    void* memory = __libc_malloc(size);
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return memory;
}
// Aligned memory: the pointer that malloc gave lies before it.
void* operator new(std::size_t size, std::align_val_t alignment) {
    const auto unit = static_cast<std::size_t>(alignment);
    char* memory = static_cast<char*>(operator new(size + unit + sizeof(void*)));
    char* aligned = memory + sizeof(void*);
    aligned += (unit - reinterpret_cast<std::size_t>(aligned) % unit) % unit;
    reinterpret_cast<void**>(aligned)[-1] = memory;
    return aligned;
}
void operator delete(void* memory) noexcept { __libc_free(memory); }
void operator delete(void* memory, std::size_t) noexcept { __libc_free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept {
    if (memory != nullptr) {
        __libc_free(static_cast<void**>(memory)[-1]);
    }
}
void operator delete(void* memory, std::size_t, std::align_val_t alignment) noexcept {
    operator delete(memory, alignment);
}
#endif
