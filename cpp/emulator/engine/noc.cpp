// SPDX-License-Identifier: Apache-2.0
// NoC reads, writes, multicast and barriers, as kernels call them.
#include "noc.hpp"

#include <algorithm>
#include <cstring>

using namespace emulator;

namespace {

constexpr std::uint32_t kTransactionIds = 16;
constexpr std::uint64_t kMostPackets = 255;  // the counter of an id has 8 bits

// A barrier of one id reads its counter; nothing reads that of id 0.
void count_packets(const Role& role, std::uint32_t noc, std::uint32_t tag) {
    std::uint64_t under_way = 0;
    for (const Transfer& t : role.reads) {
        under_way += t.noc == noc && t.tag == tag ? packets(t.size) : 0;
    }
    if (tag != 0 && under_way > kMostPackets) {
        machine.report(
            "transaction-id",
            text("noc_async_read: %llu packets of transaction id %u are under way, its counter holds %llu",
                 static_cast<unsigned long long>(under_way), tag,
                 static_cast<unsigned long long>(kMostPackets)));
    }
}

}  // namespace

extern "C" {

std::uint64_t emu_dram_bank_address(std::uint32_t bank, std::uint32_t address) {
    return std::uint64_t{address} | std::uint64_t{bank & 63} << 36 | std::uint64_t{kDramRow} << 42;
}
std::uint32_t emu_dram_banks() { return machine.chip.dram_banks; }
std::uint32_t emu_dram_alignment() { return machine.chip.dram_alignment; }

void emu_noc_read(std::uint64_t source, std::uint32_t destination, std::uint32_t size, std::uint32_t noc) {
    Role& role = *machine.role;
    Core& core = *role.core;
    const std::uint32_t tag = role.read_tag;
    const std::uint32_t local = l1_offset(destination);
    spend(kIssueCycles);
    if (size == 0 || !inside_l1(core, local, size, "noc_async_read")) {
        return;
    }
    aligned(source, local, true, "noc_async_read");
    check_write(core, local, size, "noc_async_read");
    if (is_dram(source)) {
        std::vector<DramSpan> spans;
        if (!dram_spans(end_x(source), static_cast<std::uint32_t>(source), size, "noc_async_read", spans)) {
            return;
        }
        for (const DramSpan& span : spans) {
            span.buffer->read_bytes += span.size;
        }
        core.counters.dram_read_bytes += size;
        core.counters.bank_bytes.resize(2 * machine.chip.dram_banks);
        core.counters.bank_bytes[(noc & 1) * machine.chip.dram_banks + end_x(source)] += size;
        core.counters.dram_packets += packets(size);
    } else {
        if (far_core(source, "noc_async_read") == nullptr) {
            return;
        }
        core.counters.noc_read_bytes += size;
        core.counters.noc_packets += packets(size);
    }
    poison(core.l1 + local, size);
    set_shadow(core.shadow, local, size, ARRIVING, WRITTEN);
    Transfer t{Transfer::Read, source, local, size, 0, false, false, false, tag, 0, {}, emu_place};
    t.arrival = transfer_time(role, source, size, true);
    t.stamp.known = role.known;
    t.noc = noc;
    role.reads.push_back(std::move(t));
    count_packets(role, noc, tag);
}

void emu_noc_read_tag(std::uint32_t tag) {
    if (tag >= kTransactionIds) {
        machine.report("transaction-id",
                       text("noc_async_read_set_trid(%u): ids are 0 to %u", tag, kTransactionIds - 1));
        return;
    }
    machine.role->read_tag = tag;
}

void emu_noc_read_barrier(std::uint32_t noc, std::uint32_t tag) {
    Role& role = *machine.role;
    const auto waits_for = [&](const Transfer& t) { return t.noc == noc && (tag == ~0u || t.tag == tag); };
    ++role.core->counters.barriers;
    spend(kIssueCycles);
    std::uint64_t last = 0;
    for (const Transfer& t : role.reads) {
        if (waits_for(t)) {
            last = std::max(last, t.arrival);
        }
    }
    sleep_until(last);
    std::deque<Transfer> left;
    for (Transfer& t : role.reads) {
        if (waits_for(t)) {
            land_read(role, t);
        } else {
            left.push_back(std::move(t));
        }
    }
    role.reads.swap(left);
    changed(*role.core);
}

void emu_noc_write(std::uint32_t source, std::uint64_t destination, std::uint32_t size, std::uint32_t noc,
                   std::uint32_t vc) {
    Role& role = *machine.role;
    Core& core = *role.core;
    const std::uint32_t local = l1_offset(source);
    if (!source_ready(local, size, "noc_async_write")) {
        return;
    }
    aligned(destination, local, false, "noc_async_write");
    if (is_dram(destination)) {
        std::vector<DramSpan> spans;
        if (!dram_spans(end_x(destination), static_cast<std::uint32_t>(destination), size, "noc_async_write",
                        spans)) {
            return;
        }
        for (const DramSpan& span : spans) {
            DramBuffer& buffer = *span.buffer;
            buffer.written_bytes += span.size;
            if (buffer.shadow == nullptr) {
                buffer.own_shadow.assign(std::uint64_t{buffer.pages} * buffer.page_size / 4, WRITTEN);
                buffer.shadow = buffer.own_shadow.data();
            }
            set_shadow(buffer.shadow + span.at / 4, 0, span.size, ARRIVING, 0);
            const Conflict conflict = buffer.history.before_write(role, span.at, span.size);
            if (conflict.role >= 0) {
                machine.report("unordered-write",
                               text("noc_async_write of tensor %s, byte %llu: %s", buffer.name.c_str(),
                                    static_cast<unsigned long long>(span.at), conflict.what().c_str()));
            }
        }
        core.counters.dram_written_bytes += size;
        core.counters.dram_packets += packets(size);
    } else {
        Core* to = far_core(destination, "noc_async_write");
        if (to == nullptr) {
            return;
        }
        expect_in(*to, local_of(destination), size, "noc_async_write");
        core.counters.noc_written_bytes += size;
        core.counters.noc_packets += packets(size);
    }
    set_shadow(core.shadow, local, size, LEAVING, 0);
    issue(Transfer::Write, local, destination, size, noc, vc, false);
}

void emu_noc_write_multicast(std::uint32_t source, std::uint64_t destination, std::uint32_t size,
                             std::uint32_t receivers, std::uint32_t noc, std::uint32_t vc,
                             std::uint32_t with_self) {
    Core& core = *machine.role->core;
    const std::uint32_t local = l1_offset(source);
    if (!source_ready(local, size, "noc_async_write_multicast")) {
        return;
    }
    aligned(destination, local, false, "noc_async_write_multicast");
    for (Core* to : receivers_of(destination, noc, with_self != 0, receivers, "noc_async_write_multicast")) {
        if (to != &core || local_of(destination) != local) {
            expect_in(*to, local_of(destination), size, "noc_async_write_multicast");
        }
        to->counters.multicast_received_bytes += size;
    }
    core.counters.multicast_bytes += size;
    core.counters.noc_packets += packets(size);
    set_shadow(core.shadow, local, size, LEAVING, 0);
    issue(Transfer::Multicast, local, destination, size, noc, vc, false).with_self = with_self != 0;
}

void emu_noc_writes_flushed(std::uint32_t noc) {
    Role& role = *machine.role;
    spend(kIssueCycles);
    for (auto& channel : role.channels) {
        for (Transfer& t : channel->transfers) {
            if (channel->noc == noc) {
                take(role, t);
            }
        }
    }
}

void emu_noc_write_barrier(std::uint32_t noc) {
    Role& role = *machine.role;
    ++role.core->counters.barriers;
    spend(kIssueCycles);
    std::uint64_t last = 0;
    for (auto& channel : role.channels) {
        for (const Transfer& t : channel->transfers) {
            if (channel->noc == noc) {
                last = std::max(last, t.arrival);
            }
        }
    }
    sleep_until(last);
    for (auto& channel : role.channels) {
        if (channel->noc == noc) {
            land_channel(role, *channel, 0, true);
        }
    }
}

void emu_noc_atomic_barrier(std::uint32_t noc) {
    Role& role = *machine.role;
    role.open_atomics = false;
    ++role.core->counters.barriers;
    spend(kIssueCycles);
    std::uint64_t last = 0;
    for (auto& channel : role.channels) {
        for (const Transfer& t : channel->transfers) {
            if (channel->noc == noc && t.synchronises) {
                last = std::max(last, t.arrival);
            }
        }
    }
    sleep_until(last);
    for (auto& channel : role.channels) {
        if (channel->noc == noc) {
            land_channel(role, *channel, last, false);
        }
    }
}

void emu_noc_inline_write(std::uint64_t destination, std::uint32_t value, std::uint32_t noc,
                          std::uint32_t vc) {
    const Core* to = far_core(destination, "noc_inline_dw_write");
    if (to == nullptr || !inside_l1(*to, local_of(destination), 4, "noc_inline_dw_write")) {
        return;
    }
    if ((destination & 3) != 0) {
        machine.report("unaligned-noc-address", "noc_inline_dw_write: the address is no multiple of 4");
    }
    Transfer& t = issue(Transfer::Write, 0, destination, 4, noc, vc, true);
    t.bytes.resize(5, WRITTEN);
    std::memcpy(t.bytes.data(), &value, 4);
    t.sent = true;
}

}  // extern "C"
