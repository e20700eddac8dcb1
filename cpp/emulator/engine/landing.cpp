// SPDX-License-Identifier: Apache-2.0
// When transfers land. A read lands when its issuer waits for it. A write lands at its barrier, or when a
// later semaphore message arrives at the same place on the same channel. That is the latest time that silicon
// allows. Until then the bytes are poisoned (reads) or marked (writes), and each access to them is reported.
#include <algorithm>
#include <cstring>

#include "noc.hpp"

namespace emulator {

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

// What a read finds on the far side must have been known to the issuer when it issued the read.
void read_far(Role& role, const Transfer& t, History& history, std::uint64_t at, std::uint32_t size,
              const char* tensor) {
    const Conflict conflict = history.before_read(role.id, *t.stamp.known, at, size);
    if (conflict.role >= 0) {
        const std::string where =
            tensor != nullptr ? text("tensor %s", tensor) : "L1 of " + core_name(*history.core);
        machine.report_at("unordered-read",
                          text("noc_async_read of %s, byte 0x%llx: %s", where.c_str(),
                               static_cast<unsigned long long>(at), conflict.what().c_str()),
                          t.place, role);
    }
    history.read(role, at, size);
}

void land_read(Role& role, const Transfer& t) {
    Core& core = *role.core;
    core.history.written(role, t.local, t.size, role.clock);
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
                read_far(role, t, span.buffer->history, span.at, span.size, span.buffer->name.c_str());
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
        read_far(role, t, from->history, local_of(t.remote), t.size, nullptr);
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
    if (!is_semaphore(t.local)) {
        core.history.read(role, t.local, t.size);
    }
    t.sent = true;
}

// `clock`: of the issuer, at the message or the barrier that made the bytes land.
void deliver(const Role& role, Core& core, const Transfer& t, std::uint32_t clock) {
    const std::uint32_t at = local_of(t.remote);
    std::uint32_t before = 0;
    std::memcpy(&before, core.l1 + at, std::min<std::uint32_t>(t.size, 4));
    if (t.kind == Transfer::Add || t.kind == Transfer::AddMulticast) {
        const std::uint32_t value = before + t.value;
        std::memcpy(core.l1 + at, &value, 4);
        core.syncs[at].rise(before, value, t.stamp);
    } else {
        std::memcpy(core.l1 + at, t.bytes.data(), t.size);
        copy_shadow(core.shadow, at, t.bytes.data() + (t.size + 3) / 4 * 4, 0, t.size);
        if (t.synchronises) {
            std::uint32_t value;
            std::memcpy(&value, core.l1 + at, 4);
            core.syncs[at].set(value, t.stamp);
        }
    }
    if (!is_semaphore(at)) {
        core.history.written(role, at, t.size, clock);
    }
    const std::uint32_t id = (at - machine.chip.semaphores) / 16;
    if (at >= machine.chip.semaphores && id < core.semaphore_time.size()) {
        core.semaphore_time[id] = std::max(core.semaphore_time[id], t.arrival);
    }
    changed(core);
}

void land(Role& role, Transfer& t, std::uint32_t clock) {
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
                    deliver(role, *core, t, clock);
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
                span.buffer->history.written(role, span.at, span.size, clock);
            }
        }
        return;
    }
    if (Core* core = machine.core_of_noc(end_x(t.remote), end_y(t.remote)); core != nullptr) {
        deliver(role, *core, t, clock);
    }
}

// The clock from which on others know that a transfer has landed: that of the next semaphore message to its
// place, else the issuer's now.
std::vector<std::uint32_t> landing_clocks(const Role& role, const std::deque<Transfer>& queue,
                                          std::size_t count) {
    std::vector<std::uint32_t> clocks(count);
    std::vector<const Transfer*> messages;
    for (std::size_t i = count; i-- > 0;) {
        clocks[i] = role.clock;
        if (queue[i].synchronises) {
            messages.push_back(&queue[i]);
        }
        for (auto message = messages.rbegin(); message != messages.rend(); ++message) {
            if ((*message)->remote >> 36 == queue[i].remote >> 36) {
                clocks[i] = (*message)->stamp.clock;
                break;
            }
        }
    }
    return clocks;
}

void land_channel(Role& role, Channel& channel, std::uint64_t time, bool everything) {
    auto& queue = channel.transfers;
    if (everything) {
        const std::vector<std::uint32_t> clocks = landing_clocks(role, queue, queue.size());
        for (std::size_t j = 0; j < queue.size(); ++j) {
            land(role, queue[j], clocks[j]);
        }
        queue.clear();
        return;
    }
    for (std::size_t i = 0; i < queue.size(); ++i) {
        if (!queue[i].synchronises || queue[i].arrival > time) {
            continue;
        }
        // Earlier messages to the same place come first, if they had left: a write and a semaphore message
        // are in different command buffers until then. To other places there is no order.
        const std::uint64_t place = queue[i].remote >> 36;
        const auto in_front = [&](std::size_t j) {
            return j == i || (queue[j].remote >> 36 == place && queue[j].ahead);
        };
        const std::vector<std::uint32_t> clocks = landing_clocks(role, queue, i + 1);
        for (std::size_t j = 0; j <= i; ++j) {
            if (in_front(j)) {
                land(role, queue[j], clocks[j]);
            }
        }
        queue[i].ahead = true;
        for (std::size_t j = i + 1; j-- > 0;) {
            if (in_front(j)) {
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
    if (role.read_tag != 0) {
        machine.report_at(
            "transaction-id",
            text("the kernel ends with transaction id %u set: the next kernel's reads would have it",
                 role.read_tag),
            role.place, role);
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
