// SPDX-License-Identifier: Apache-2.0
// Transfers on the network on chip, up to their issue: addresses, times, receivers. landing.cpp has the rest.
#include <algorithm>

#include "noc.hpp"

namespace emulator {

std::uint64_t packets(std::uint32_t size) {
    const std::uint32_t burst = machine.chip.arch == "blackhole" ? 16384 : 8192;
    return (size + burst - 1) / burst;
}

std::uint64_t transfer_time(const Role& role, std::uint64_t remote, std::uint32_t size, bool read) {
    const Chip& chip = machine.chip;
    if (!is_dram(remote)) {
        return role.time + kHopLatency + size / chip.noc_bytes_per_cycle + delay();
    }
    std::uint64_t& free = machine.chip.bank_free[end_x(remote) % chip.dram_banks];
    free = std::max(free, role.time) + static_cast<std::uint64_t>(size / chip.dram_bytes_per_cycle);
    return free + (read ? kDramLatency : kHopLatency) + delay();
}

bool aligned(std::uint64_t remote, std::uint32_t local, bool read, const char* call) {
    const std::uint32_t unit =
        is_dram(remote) && read ? machine.chip.dram_read_alignment : machine.chip.l1_alignment;
    const std::uint32_t far = static_cast<std::uint32_t>(remote & (unit - 1));
    if (far == (local & (unit - 1))) {
        return true;
    }
    machine.report(
        "unaligned-noc-address",
        text("%s: 0x%llx on the far side and L1 address 0x%x differ modulo %u bytes, the alignment of %s",
             call, static_cast<unsigned long long>(remote & 0xFFFFFFFFFull), local, unit,
             is_dram(remote) ? "DRAM" : "L1"));
    return false;
}

Core* far_core(std::uint64_t remote, const char* call) {
    Core* core = machine.core_of_noc(end_x(remote), end_y(remote));
    if (core == nullptr) {
        machine.report("no-such-core", text("%s: no Tensix core at NoC coordinates (%u, %u)", call,
                                            end_x(remote), end_y(remote)));
    }
    return core;
}

std::vector<Core*> receivers_of(std::uint64_t remote, std::uint32_t noc, bool with_self,
                                std::uint32_t expected, const char* call) {
    std::uint32_t x0 = start_x(remote), y0 = start_y(remote), x1 = end_x(remote), y1 = end_y(remote);
    if (noc == 1) {  // NoC 1 runs the other way, so its rectangle starts at the far corner
        std::swap(x0, x1);
        std::swap(y0, y1);
    }
    std::vector<Core*> cores;
    if (x0 > x1 || y0 > y1) {
        machine.report("multicast-rectangle",
                       text("%s on NoC %u: the rectangle starts at (%u, %u) and ends at (%u, %u)", call, noc,
                            start_x(remote), start_y(remote), end_x(remote), end_y(remote)));
    }
    for (std::uint32_t y = y0; y <= y1; ++y) {
        for (std::uint32_t x = x0; x <= x1; ++x) {
            Core* core = machine.core_of_noc(x, y);
            if (core != nullptr && (with_self || core != machine.role->core)) {
                cores.push_back(core);
            }
        }
    }
    if (expected != ~0u && cores.size() != expected) {
        machine.report("multicast-receivers",
                       text("%s: %zu cores receive it%s, the call says %u", call, cores.size(),
                            with_self ? "" : " (the sender does not)", expected));
    }
    return cores;
}

Channel& channel_of(Role& role, std::uint32_t noc, std::uint32_t vc) {
    for (auto& channel : role.channels) {
        if (channel->noc == noc && channel->vc == vc) {
            return *channel;
        }
    }
    role.channels.push_back(std::make_unique<Channel>(Channel{noc, vc, {}}));
    return *role.channels.back();
}

Transfer& issue(Transfer::Kind kind, std::uint32_t source, std::uint64_t destination, std::uint32_t size,
                std::uint32_t noc, std::uint32_t vc, bool synchronises) {
    Role& role = *machine.role;
    spend(kIssueCycles);
    Channel& channel = channel_of(role, noc, vc);
    if (synchronises) {
        for (Transfer& t : channel.transfers) {
            t.ahead |= t.remote >> 36 == destination >> 36 && (t.sent || t.synchronises);
        }
    }
    std::uint64_t arrival = transfer_time(role, destination, size, false);
    // Messages to one place stay in order. With a seed, those to other places may overtake them.
    for (auto t = channel.transfers.rbegin(); t != channel.transfers.rend(); ++t) {
        if (machine.seed == 0 || t->remote >> 36 == destination >> 36) {
            arrival = std::max(arrival, t->arrival);
            break;
        }
    }
    channel.transfers.push_back(
        {kind, destination, source, size, 0, false, false, synchronises, 0, arrival, {}, emu_place});
    Transfer& issued = channel.transfers.back();
    if (synchronises) {
        issued.stamp = stamp_of(role);
        arrives(role, channel, arrival);
    }
    return issued;
}

bool source_ready(std::uint32_t source, std::uint32_t size, const char* call) {
    Core& core = *machine.role->core;
    if (size == 0 || !inside_l1(core, source, size, call)) {
        return size != 0 && source + size <= machine.chip.l1_size;
    }
    if ((any_shadow(core.shadow, source, size) & ARRIVING) != 0) {
        machine.report(
            "read-before-barrier",
            text("%s sends L1 address 0x%x, to which a NoC transfer is still under way", call, source));
    } else if (!is_semaphore(source)) {
        const Conflict conflict = core.history.before_read(*machine.role, source, size);
        if (conflict.role >= 0) {
            machine.report("unordered-read",
                           text("%s sends L1 address 0x%x: %s", call, source, conflict.what().c_str()));
        }
        core.history.read(*machine.role, source, size);
    }
    return true;
}

void expect_in(Core& core, std::uint32_t at, std::uint32_t size, const char* call) {
    if (inside_l1(core, at, size, call)) {
        check_write(core, at, size, call);
        set_shadow(core.shadow, at, size, ARRIVING, 0);
    }
}

}  // namespace emulator
