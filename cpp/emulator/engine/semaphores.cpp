// SPDX-License-Identifier: Apache-2.0
// Semaphores, as kernels call them.
#include <algorithm>
#include <cstring>

#include "fiber.hpp"
#include "noc.hpp"

using namespace emulator;

namespace {

// Publish a word of every receiver; false: one has no such word.
bool publish_to(const std::vector<Core*>& receivers, std::uint32_t at, const char* call) {
    for (const Core* to : receivers) {
        if (!inside_l1(*to, at, 4, call)) {
            return false;
        }
        publish(to->l1 + at);
    }
    return true;
}

}  // namespace

extern "C" {

std::uint32_t emu_semaphore(std::uint32_t id) {
    Core& core = *machine.role->core;
    if (id >= core.semaphore_time.size()) {
        machine.report("no-such-semaphore",
                       text("get_semaphore(%u): the program has %zu", id, core.semaphore_time.size()));
    }
    return l1_address(core, machine.chip.semaphores + id * 16);
}

void emu_semaphore_wait(std::uint32_t address, std::uint32_t value, std::uint32_t at_least) {
    Core& core = *machine.role->core;
    const std::uint32_t at = l1_offset(address);
    spend(kIssueCycles);
    if (at % 4 != 0 || !inside_l1(core, at, 4, "noc_semaphore_wait")) {
        return;
    }
    wait_until(Wait::Semaphore, at, value, at_least);
    observe(core.l1 + at);
    core.syncs[at].wait(*machine.role, value);
}

void emu_semaphore_set(std::uint32_t address, std::uint32_t value) {
    Core& core = *machine.role->core;
    const std::uint32_t at = l1_offset(address);
    spend(kIssueCycles / 3);
    if (!inside_l1(core, at, 4, "noc_semaphore_set")) {
        return;
    }
    std::memcpy(core.l1 + at, &value, 4);
    set_shadow(core.shadow, at, 4, WRITTEN, 0);
    const std::uint32_t id = (at - machine.chip.semaphores) / 16;
    if (at >= machine.chip.semaphores && id < core.semaphore_time.size()) {
        core.semaphore_time[id] = machine.role->time;
    }
    publish(core.l1 + at);
    core.syncs[at].set(value, stamp_of(*machine.role));
    changed(core);
}

void emu_semaphore_inc(std::uint64_t destination, std::uint32_t value, std::uint32_t noc, std::uint32_t vc) {
    Core* to = far_core(destination, "noc_semaphore_inc");
    if (to == nullptr || !inside_l1(*to, local_of(destination), 4, "noc_semaphore_inc")) {
        return;
    }
    machine.role->open_atomics = true;
    ++machine.role->core->counters.semaphore_messages;
    publish(to->l1 + local_of(destination));
    issue(Transfer::Add, 0, destination, 4, noc, vc, true).value = value;
}

void emu_semaphore_inc_multicast(std::uint64_t destination, std::uint32_t value, std::uint32_t receivers,
                                 std::uint32_t noc, std::uint32_t vc) {
    constexpr const char* call = "noc_semaphore_inc_multicast";
    if (!publish_to(receivers_of(destination, noc, false, receivers, call), local_of(destination), call)) {
        return;
    }
    machine.role->open_atomics = true;
    ++machine.role->core->counters.semaphore_messages;
    issue(Transfer::AddMulticast, 0, destination, 4, noc, vc, true).value = value;
}

void emu_semaphore_set_remote(std::uint32_t source, std::uint64_t destination, std::uint32_t noc) {
    const std::uint32_t local = l1_offset(source);
    Core* to = far_core(destination, "noc_semaphore_set_remote");
    if (to == nullptr || !source_ready(local, 4, "noc_semaphore_set_remote") ||
        !inside_l1(*to, local_of(destination), 4, "noc_semaphore_set_remote")) {
        return;
    }
    aligned(destination, local, false, "noc_semaphore_set_remote");
    ++machine.role->core->counters.semaphore_messages;
    publish(to->l1 + local_of(destination));
    take(*machine.role, issue(Transfer::Write, local, destination, 4, noc, 1, true));
}

void emu_semaphore_set_multicast(std::uint32_t source, std::uint64_t destination, std::uint32_t receivers,
                                 std::uint32_t noc, std::uint32_t vc, std::uint32_t with_self) {
    const std::uint32_t local = l1_offset(source);
    if (!source_ready(local, 4, "noc_semaphore_set_multicast")) {
        return;
    }
    aligned(destination, local, false, "noc_semaphore_set_multicast");
    constexpr const char* call = "noc_semaphore_set_multicast";
    if (!publish_to(receivers_of(destination, noc, with_self != 0, receivers, call), local_of(destination),
                    call)) {
        return;
    }
    ++machine.role->core->counters.semaphore_messages;
    Transfer& t = issue(Transfer::Multicast, local, destination, 4, noc, vc, true);
    t.with_self = with_self != 0;
    take(*machine.role, t);
}

}  // extern "C"
