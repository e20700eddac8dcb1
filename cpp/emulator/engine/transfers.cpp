// The network on chip. A read lands when its issuer waits for it. A write lands at its barrier, or when a
// later semaphore message arrives at the same place on the same channel. That is the latest time that silicon
// allows. Until then the bytes are poisoned (reads) or marked (writes), and each access to them is reported.
#include <algorithm>
#include <cstring>

#include "noc.hpp"

namespace emulator {
std::uint64_t transfer_time(const Role& role, std::uint64_t remote, std::uint32_t size, bool read) {
    const Chip& chip = machine.chip;
    if (!is_dram(remote)) {
        return role.time + kHopLatency + size / chip.noc_bytes_per_cycle;
    }
    std::uint64_t& free = machine.chip.bank_free[end_x(remote) % chip.dram_banks];
    free = std::max(free, role.time) + static_cast<std::uint64_t>(size / chip.dram_bytes_per_cycle);
    return free + (read ? kDramLatency : kHopLatency);
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

// Written-flags of the first four-byte words of `from` become those of `to`.
void copy_shadow(std::uint8_t* to, std::uint64_t to_at, const std::uint8_t* from, std::uint64_t from_at,
                 std::uint32_t size) {
    if (to == nullptr) {
        return;
    }
    for (std::uint32_t i = 0; i < (size + 3) / 4; ++i) {
        const std::uint8_t flags = from == nullptr ? std::uint8_t{WRITTEN} : from[from_at / 4 + i];
        to[to_at / 4 + i] = static_cast<std::uint8_t>((to[to_at / 4 + i] & LEAVING) | (flags & WRITTEN));
    }
}

void land_read(Role& role, const Transfer& t) {
    Core& core = *role.core;
    if (is_dram(t.remote)) {
        std::vector<DramSpan> spans;
        if (dram_spans(end_x(t.remote), static_cast<std::uint32_t>(t.remote), t.size, "noc_async_read",
                       spans)) {
            for (const DramSpan& span : spans) {
                if (span.buffer->shadow != nullptr &&
                    (any_shadow(span.buffer->shadow + span.at / 4, 0, span.size) & ARRIVING) != 0) {
                    machine.report_at(
                        "read-before-barrier",
                        text("noc_async_read of tensor %s, byte %llu: a write to it is still under way",
                             span.buffer->name.c_str(), static_cast<unsigned long long>(span.at)),
                        t.place, role);
                }
                std::memcpy(core.l1 + t.local + span.done, span.buffer->bytes + span.at, span.size);
                copy_shadow(core.shadow, t.local + span.done, span.buffer->shadow, span.at, span.size);
            }
        }
        set_shadow(core.shadow, t.local, t.size, 0, ARRIVING);
        return;
    }
    Core* from = far_core(t.remote, "noc_async_read");
    set_shadow(core.shadow, t.local, t.size, 0, ARRIVING);
    if (from != nullptr && inside_l1(*from, local_of(t.remote), t.size, "noc_async_read")) {
        if ((any_shadow(from->shadow, local_of(t.remote), t.size) & ARRIVING) != 0) {
            machine.report_at(
                "read-before-barrier",
                text("noc_async_read of L1 address 0x%x of %s, to which a transfer is still under way",
                     local_of(t.remote), core_name(*from).c_str()),
                t.place, role);
        }
        std::memmove(core.l1 + t.local, from->l1 + local_of(t.remote), t.size);
        copy_shadow(core.shadow, t.local, from->shadow, local_of(t.remote), t.size);
    }
}

void take(Role& role, Transfer& t) {
    if (t.sent || t.kind == Transfer::Add || t.kind == Transfer::AddMulticast) {
        return;
    }
    Core& core = *role.core;
    t.bytes.assign(core.l1 + t.local, core.l1 + t.local + t.size);
    const std::size_t words = (t.size + 3) / 4;
    t.bytes.resize((t.size + 3) / 4 * 4 + words);  // the flags follow the bytes
    std::memcpy(t.bytes.data() + words * 4, core.shadow + t.local / 4, words);
    set_shadow(core.shadow, t.local, t.size, 0, LEAVING);
    t.sent = true;
}

void deliver(Core& core, const Transfer& t) {
    const std::uint32_t at = local_of(t.remote);
    if (t.kind == Transfer::Add || t.kind == Transfer::AddMulticast) {
        std::uint32_t value;
        std::memcpy(&value, core.l1 + at, 4);
        value += t.value;
        std::memcpy(core.l1 + at, &value, 4);
    } else {
        std::memcpy(core.l1 + at, t.bytes.data(), t.size);
        copy_shadow(core.shadow, at, t.bytes.data() + (t.size + 3) / 4 * 4, 0, t.size);
    }
    const std::uint32_t id = (at - machine.chip.semaphores) / 16;
    if (at >= machine.chip.semaphores && id < core.semaphore_time.size()) {
        core.semaphore_time[id] = std::max(core.semaphore_time[id], t.arrival);
    }
    changed(core);
}

void land(Role& role, Transfer& t) {
    take(role, t);
    if (t.kind == Transfer::Multicast || t.kind == Transfer::AddMulticast) {
        const std::uint32_t x0 = std::min(start_x(t.remote), end_x(t.remote)),
                            x1 = std::max(start_x(t.remote), end_x(t.remote));
        const std::uint32_t y0 = std::min(start_y(t.remote), end_y(t.remote)),
                            y1 = std::max(start_y(t.remote), end_y(t.remote));
        for (std::uint32_t y = y0; y <= y1; ++y) {
            for (std::uint32_t x = x0; x <= x1; ++x) {
                Core* core = machine.core_of_noc(x, y);
                if (core != nullptr && (t.with_self || core != role.core)) {
                    deliver(*core, t);
                }
            }
        }
        return;
    }
    if (is_dram(t.remote)) {
        std::vector<DramSpan> spans;
        if (dram_spans(end_x(t.remote), static_cast<std::uint32_t>(t.remote), t.size, "noc_async_write",
                       spans)) {
            for (const DramSpan& span : spans) {
                std::memcpy(span.buffer->bytes + span.at, t.bytes.data() + span.done, span.size);
                copy_shadow(span.buffer->shadow, span.at, t.bytes.data() + (t.size + 3) / 4 * 4, span.done,
                            span.size);
            }
        }
        return;
    }
    if (Core* core = machine.core_of_noc(end_x(t.remote), end_y(t.remote)); core != nullptr) {
        deliver(*core, t);
    }
}

Transfer& issue(Transfer::Kind kind, std::uint32_t source, std::uint64_t destination, std::uint32_t size,
                std::uint32_t noc, std::uint32_t vc, bool synchronises) {
    Role& role = *machine.role;
    spend(kIssueCycles);
    Channel& channel = channel_of(role, noc, vc);
    std::uint64_t arrival = transfer_time(role, destination, size, false);
    if (!channel.transfers.empty()) {
        arrival = std::max(arrival, channel.transfers.back().arrival);
    }
    channel.transfers.push_back(
        {kind, destination, source, size, 0, false, false, synchronises, 0, arrival, {}, emu_place});
    if (synchronises) {
        arrives(role, channel, arrival);
    }
    return channel.transfers.back();
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
    }
    return true;
}

void expect_in(Core& core, std::uint32_t at, std::uint32_t size, const char* call) {
    if (inside_l1(core, at, size, call)) {
        check_write(core, at, size, call);
        set_shadow(core.shadow, at, size, ARRIVING, 0);
    }
}

void land_channel(Role& role, Channel& channel, std::uint64_t time, bool everything) {
    auto& queue = channel.transfers;
    if (everything) {
        for (Transfer& t : queue) {
            land(role, t);
        }
        queue.clear();
        return;
    }
    for (std::size_t i = 0; i < queue.size(); ++i) {
        if (!queue[i].synchronises || queue[i].arrival > time) {
            continue;
        }
        // Earlier messages to the same place come first; to other places there is no order.
        const std::uint64_t place = queue[i].remote >> 36;
        for (std::size_t j = 0; j <= i; ++j) {
            if (queue[j].remote >> 36 == place) {
                land(role, queue[j]);
            }
        }
        for (std::size_t j = i + 1; j-- > 0;) {
            if (queue[j].remote >> 36 == place) {
                queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(j));
            }
        }
        i = static_cast<std::size_t>(-1);  // from the front again
    }
}

void finish_noc(Role& role) {
    if (!role.reads.empty()) {
        machine.report_at("kernel-end",
                          text("the kernel ends with %zu NoC reads under way (no noc_async_read_barrier)",
                               role.reads.size()),
                          role.reads.front().place, role);
        for (const Transfer& t : role.reads) {
            land_read(role, t);
        }
        role.reads.clear();
    }
    if (role.open_atomics) {
        machine.report_at("kernel-end",
                          "the kernel ends after a semaphore increment without a noc_async_atomic_barrier",
                          role.place, role);
    }
    for (auto& channel : role.channels) {
        for (const Transfer& t : channel->transfers) {
            if (t.kind != Transfer::Add && t.kind != Transfer::AddMulticast) {
                machine.report_at("kernel-end",
                                  "the kernel ends with a NoC write under way (no noc_async_write_barrier)",
                                  t.place, role);
            }
        }
        land_channel(role, *channel, 0, true);
    }
}

}  // namespace emulator
