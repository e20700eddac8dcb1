// SPDX-License-Identifier: Apache-2.0
// Every load and store of a kernel. Kernels are compiled with -fsanitize=thread, but not linked with its
// runtime: the compiler's calls come here. L1 addresses are checked against bytes that are written and
// transfers under way.
#include <dlfcn.h>

#include <cstring>

#include "machine.hpp"

#if !defined(EMULATOR_SANITIZED)
namespace emulator {
namespace {

constexpr std::uint32_t kSameReads = 64;  // loads of one address in a row that make it polling

void located(const char* kind, const std::string& message, void* from) {
    Role& role = *machine.role;
    Finding finding;
    finding.kind = kind;
    finding.core = text("(%d, %d)", role.core->x, role.core->y);
    finding.role = name_of(role.kind);
    finding.kernel = role.kernel->source;
    Dl_info info;
    if (dladdr(from, &info) != 0) {
        finding.library = info.dli_fname;
        finding.offset =
            static_cast<std::uint64_t>(static_cast<char*>(from) - static_cast<char*>(info.dli_fbase)) - 1;
    }
    finding.message = message;
    machine.findings.add(std::move(finding));
}

// Core and L1 offset of an address, or null for memory of the host: the kernel's stack and constants.
Core* locate(void* address, std::uint32_t& offset) {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (at < kL1Base || at >= kL1Base + machine.cores.size() * std::uintptr_t{kL1Stride}) {
        return nullptr;
    }
    offset = static_cast<std::uint32_t>((at - kL1Base) % kL1Stride);
    return machine.cores[(at - kL1Base) / kL1Stride].get();
}

void accessed(void* address, std::uint32_t size, bool write, void* from) {
    Role* role = machine.role;
    std::uint32_t offset;
    Core* core = locate(address, offset);
    if (core == nullptr || role == nullptr) {
        return;
    }
    may_give_way();
    role->time += write ? 1 : 4;
    const char* verb = write ? "a store to" : "a load from";
    if (core != role->core) {
        located(
            "foreign-l1",
            text("%s an L1 address of %s: only the NoC reaches other cores", verb, core_name(*core).c_str()),
            from);
        return;
    }
    if ((offset & (size - 1)) != 0) {
        located("unaligned-access", text("%s L1 address 0x%x of %u bytes is not aligned", verb, offset, size),
                from);
    }
    const std::uint8_t flags = any_shadow(core->shadow, offset, size);
    if (!write) {
        if ((flags & ARRIVING) != 0) {
            located("read-before-barrier",
                    text("%s L1 address 0x%x, to which a NoC transfer is still under way", verb, offset),
                    from);
        } else if ((flags & WRITTEN) == 0) {
            const Region* region = region_of(*core, offset);
            located(region != nullptr ? "uninitialised-read" : "l1-out-of-range",
                    text("%s L1 address 0x%x (%s), which nothing has written since the program began", verb,
                         offset, region != nullptr ? region->name.c_str() : "not allocated"),
                    from);
        }
        if (auto sync = core->syncs.find(offset); sync != core->syncs.end()) {
            std::uint32_t value;
            std::memcpy(&value, core->l1 + offset, 4);
            sync->second.wait(*role, value);
        }
        if (!is_semaphore(offset)) {
            const Conflict conflict = core->history.before_read(*role, offset, size);
            if (conflict.role >= 0 && (flags & ARRIVING) == 0) {
                located("unordered-read",
                        text("%s L1 address 0x%x: %s", verb, offset, conflict.what().c_str()), from);
            }
            core->history.read(*role, offset, size);
        }
        if (offset == role->last_read && ++role->same_reads >= kSameReads) {
            role->same_reads = 0;
            emu_poll();
        } else if (offset != role->last_read) {
            role->last_read = offset;
            role->same_reads = 0;
        }
        return;
    }
    role->last_read = ~0u;
    if ((flags & LEAVING) != 0) {
        located("source-overwritten",
                text("%s L1 address 0x%x, the source of a NoC write that has not been flushed", verb, offset),
                from);
    } else if ((flags & ARRIVING) != 0) {
        located("write-before-barrier",
                text("%s L1 address 0x%x, to which a NoC transfer is still under way", verb, offset), from);
    } else if (flags == 0 && region_of(*core, offset) == nullptr) {
        located("l1-out-of-range", text("%s L1 address 0x%x, which is not allocated", verb, offset), from);
    }
    set_shadow(core->shadow, offset, size, WRITTEN, 0);
    if (is_semaphore(offset)) {
        core->syncs[offset & ~3u].set(~0u, stamp_of(*role));  // what is stored is not known here
    } else {
        const Conflict conflict = core->history.before_write(*role, offset, size);
        if (conflict.role >= 0 && (flags & (ARRIVING | LEAVING)) == 0) {
            located("unordered-write", text("%s L1 address 0x%x: %s", verb, offset, conflict.what().c_str()),
                    from);
        }
        core->history.written(*role, offset, size, role->clock);
    }
    const std::uint32_t id = (offset - machine.chip.semaphores) / 16;
    if (offset >= machine.chip.semaphores && id < core->semaphore_time.size()) {
        core->semaphore_time[id] = role->time;
        role->stored = true;  // the store itself comes after this hook: whoever waits looks again once this
                              // role gives way
    }
}

}  // namespace
}  // namespace emulator

using emulator::accessed;
#define HERE __builtin_return_address(0)
#define HOOK(name, size, write)                                                                 \
    void __tsan_##name##size(void* address) { accessed(address, size, write, HERE); }           \
    void __tsan_volatile_##name##size(void* address) { accessed(address, size, write, HERE); }  \
    void __tsan_unaligned_##name##size(void* address) { accessed(address, size, write, HERE); } \
    void __tsan_unaligned_volatile_##name##size(void* address) { accessed(address, size, write, HERE); }
extern "C" {
HOOK(read, 1, false)
HOOK(read, 2, false)
HOOK(read, 4, false)
HOOK(read, 8, false)
HOOK(read, 16, false)
HOOK(write, 1, true)
HOOK(write, 2, true)
HOOK(write, 4, true)
HOOK(write, 8, true)
HOOK(write, 16, true)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* address, unsigned long size) {
    for (unsigned long i = 0; i + 4 <= size; i += 4) {
        accessed(static_cast<char*>(address) + i, 4, false, HERE);
    }
}
void __tsan_write_range(void* address, unsigned long size) {
    for (unsigned long i = 0; i + 4 <= size; i += 4) {
        accessed(static_cast<char*>(address) + i, 4, true, HERE);
    }
}
}
#endif
