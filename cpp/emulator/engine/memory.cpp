// SPDX-License-Identifier: Apache-2.0
// L1: mapping, allocation regions, and the state of every four bytes.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.hpp"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace emulator {

Machine machine;

const char* name_of(RoleKind kind) {
    constexpr const char* names[] = {"reader", "writer", "compute"};
    return names[static_cast<int>(kind)];
}

std::string text(const char* format, ...) {
    char buffer[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

std::string core_name(const Core& core) { return text("core (%d, %d)", core.x, core.y); }

void Machine::report_at(const char* kind, const std::string& message, const EmuPlace& place,
                        const Role& who) {
    Finding finding;
    finding.kind = kind;
    finding.core = text("(%d, %d)", who.core->x, who.core->y);
    finding.role = name_of(who.kind);
    finding.kernel = who.kernel->source;
    finding.file = place.file != nullptr ? place.file : "";
    finding.line = place.line;
    finding.message = message;
    findings.add(std::move(finding));
}

void Machine::report(const char* kind, const std::string& message) {
    report_at(kind, message, emu_place, *role);
}

Core* Machine::core_of_noc(std::uint32_t x, std::uint32_t y) {
    const std::int16_t index = x < 64 && y < 64 ? core_at[y * 64 + x] : std::int16_t{-1};
    return index < 0 ? nullptr : cores[static_cast<std::size_t>(index)].get();
}

void map_l1(Core& core) {
    auto* want = reinterpret_cast<void*>(static_cast<std::uintptr_t>(l1_address(core, 0)));
    void* got = mmap(want, kL1Stride, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0);
    void* shadow = mmap(nullptr, kL1Stride / 4, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got != want || shadow == MAP_FAILED) {
        std::fprintf(stderr, "emulator: cannot map the L1 of core %d at %p\n", core.index, want);
        std::exit(2);
    }
    core.l1 = static_cast<std::uint8_t*>(got);
    core.shadow = static_cast<std::uint8_t*>(shadow);
}

const Region* region_of(const Core& core, std::uint32_t offset) {
    for (const Region& region : core.regions) {
        if (offset >= region.begin && offset < region.end) {
            return &region;
        }
    }
    return nullptr;
}

bool inside_l1(const Core& core, std::uint32_t offset, std::uint64_t size, const char* what) {
    const Region* region = region_of(core, offset);
    if (region == nullptr) {
        machine.report("l1-out-of-range",
                       text("%s: L1 address 0x%x of %s belongs to no circular buffer, semaphore or argument",
                            what, offset, core_name(core).c_str()));
        return offset + size <= machine.chip.l1_size;
    }
    if (offset + size > region->end) {
        machine.report(
            "l1-out-of-range",
            text("%s: %llu bytes at L1 address 0x%x of %s go %llu bytes past the end of %s", what,
                 static_cast<unsigned long long>(size), offset, core_name(core).c_str(),
                 static_cast<unsigned long long>(offset + size - region->end), region->name.c_str()));
        return offset + size <= machine.chip.l1_size;
    }
    return true;
}

std::uint8_t any_shadow(const std::uint8_t* shadow, std::uint32_t begin, std::uint32_t size) {
    std::uint8_t flags = 0;
    for (std::uint32_t i = begin / 4; i < (begin + size + 3) / 4; ++i) {
        flags |= shadow[i];
    }
    return flags;
}

std::uint8_t all_shadow(const std::uint8_t* shadow, std::uint32_t begin, std::uint32_t size) {
    std::uint8_t flags = 0xFF;
    for (std::uint32_t i = begin / 4; i < (begin + size + 3) / 4; ++i) {
        flags &= shadow[i];
    }
    return flags;
}

void set_shadow(std::uint8_t* shadow, std::uint32_t begin, std::uint32_t size, std::uint8_t set,
                std::uint8_t clear) {
    const auto keep = static_cast<std::uint8_t>(~clear);
    for (std::uint32_t i = begin / 4; i < (begin + size + 3) / 4; ++i) {
        shadow[i] = static_cast<std::uint8_t>((shadow[i] & keep) | set);
    }
}

bool is_semaphore(std::uint32_t offset) {
    return offset >= machine.chip.semaphores && offset < machine.chip.semaphores + kSemaphores * 16;
}

void poison(std::uint8_t* bytes, std::uint32_t size) {
    std::uint32_t i = 0;
    for (; i + 4 <= size; i += 4) {
        std::memcpy(bytes + i, &kPoison, 4);
    }
    std::memcpy(bytes + i, &kPoison, size - i);
}

#if defined(EMULATOR_SANITIZED)
constexpr bool kStoresSeen = false;  // a kernel's own stores go to the sanitizer
#else
constexpr bool kStoresSeen = true;
#endif

void check_read(Core& core, std::uint32_t offset, std::uint32_t size, const char* who) {
    const std::uint8_t any = any_shadow(core.shadow, offset, size);
    if ((any & ARRIVING) != 0) {
        machine.report("read-before-barrier",
                       text("%s reads L1 address 0x%x of %s, to which a NoC transfer is still under way", who,
                            offset, core_name(core).c_str()));
    } else if (kStoresSeen && (all_shadow(core.shadow, offset, size) & WRITTEN) == 0) {
        const Region* region = region_of(core, offset);
        machine.report(
            "uninitialised-read",
            text("%s reads %u bytes at L1 address 0x%x of %s (%s), not all written since the program began",
                 who, size, offset, core_name(core).c_str(),
                 region != nullptr ? region->name.c_str() : "not allocated"));
    }
    if (is_semaphore(offset)) {
        return;
    }
    const Conflict conflict = core.history.before_read(*machine.role, offset, size);
    if (conflict.role >= 0 && (any & ARRIVING) == 0) {
        machine.report("unordered-read", text("%s reads L1 address 0x%x of %s: %s", who, offset,
                                              core_name(core).c_str(), conflict.what().c_str()));
    }
    core.history.read(*machine.role, offset, size);
}

void check_write(const Core& core, std::uint32_t offset, std::uint32_t size, const char* who) {
    const std::uint8_t any = any_shadow(core.shadow, offset, size);
    if ((any & LEAVING) != 0) {
        machine.report(
            "source-overwritten",
            text("%s overwrites L1 address 0x%x of %s, the source of a NoC write that has not been flushed",
                 who, offset, core_name(core).c_str()));
    } else if ((any & ARRIVING) != 0) {
        machine.report("write-before-barrier",
                       text("%s writes L1 address 0x%x of %s, to which a NoC transfer is still under way",
                            who, offset, core_name(core).c_str()));
    } else if (!is_semaphore(offset)) {
        const Conflict conflict = core.history.before_write(*machine.role, offset, size);
        if (conflict.role >= 0) {
            machine.report("unordered-write", text("%s writes L1 address 0x%x of %s: %s", who, offset,
                                                   core_name(core).c_str(), conflict.what().c_str()));
        }
    }
}

}  // namespace emulator
