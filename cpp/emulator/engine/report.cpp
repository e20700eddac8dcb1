// SPDX-License-Identifier: Apache-2.0
// The end of a run: the last checks, and the result as JSON.
#include <cmath>
#include <iostream>

#include "machine.hpp"
#include "program.hpp"

namespace emulator {
namespace {

std::string quoted(const std::string& plain) {
    std::string out = "\"";
    for (const char c : plain) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            out += text("\\u%04x", c);
        } else {
            out += c;
        }
    }
    return out + '"';
}

void field(std::ostream& out, const char* name, std::uint64_t value) {
    out << ",\"" << name << "\":" << value;
}

}  // namespace

void check_end() {
    if (machine.deadlock) {
        return;  // what is left in the buffers follows from that
    }
    for (auto& core : machine.cores) {
        for (const CircularBuffer& buffer : core->buffers) {
            if (!buffer.there || buffer.pushed == buffer.popped) {
                continue;
            }
            Finding finding;
            finding.kind = "push-pop-mismatch";
            finding.core = text("(%d, %d)", core->x, core->y);
            finding.message =
                text("circular buffer %d: %llu pages were pushed and %llu popped when all kernels had ended",
                     buffer.index, static_cast<unsigned long long>(buffer.pushed),
                     static_cast<unsigned long long>(buffer.popped));
            finding.offset = static_cast<std::uint64_t>(buffer.index);
            machine.findings.add(std::move(finding));
        }
    }
}

void write_result(std::ostream& out) {
    out << "{\"findings\":[";
    const char* comma = "";
    for (const Finding& f : machine.findings.all()) {
        out << comma << "{\"kind\":" << quoted(f.kind) << ",\"core\":" << quoted(f.core)
            << ",\"role\":" << quoted(f.role) << ",\"kernel\":" << quoted(f.kernel)
            << ",\"file\":" << quoted(f.file) << ",\"line\":" << f.line
            << ",\"library\":" << quoted(f.library) << ",\"offset\":" << f.offset
            << ",\"message\":" << quoted(f.message) << ",\"count\":" << f.count << "}";
        comma = ",";
    }
    out << "],\"prints\":[";
    comma = "";
    for (const std::string& line : machine.prints) {
        out << comma << quoted(line);
        comma = ",";
    }
    out << "],\"tensors\":{";
    comma = "";
    for (const DramBuffer& buffer : machine.dram) {
        out << comma << quoted(buffer.name) << ":{\"read_bytes\":" << buffer.read_bytes
            << ",\"written_bytes\":" << buffer.written_bytes << "}";
        comma = ",";
    }
    out << "},\"steps\":" << machine.steps << ",\"cores\":[";
    comma = "";
    for (const auto& core : machine.cores) {
        if (core->roles.empty() && core->high_water == 0) {
            continue;
        }
        const Counters& c = core->counters;
        out << comma << "{\"x\":" << core->x << ",\"y\":" << core->y;
        field(out, "dram_read_bytes", c.dram_read_bytes);
        field(out, "dram_written_bytes", c.dram_written_bytes);
        field(out, "noc_read_bytes", c.noc_read_bytes);
        field(out, "noc_written_bytes", c.noc_written_bytes);
        field(out, "multicast_bytes", c.multicast_bytes);
        field(out, "multicast_received_bytes", c.multicast_received_bytes);
        field(out, "tile_multiplies", c.tile_multiplies);
        field(out, "eltwise_tiles", c.eltwise_tiles);
        field(out, "sfpu_tiles", c.sfpu_tiles);
        field(out, "unpacked_tiles", c.unpacked_tiles);
        field(out, "packed_tiles", c.packed_tiles);
        field(out, "semaphore_messages", c.semaphore_messages);
        field(out, "dram_packets", c.dram_packets);
        field(out, "noc_packets", c.noc_packets);
        field(out, "barriers", c.barriers);
        out << ",\"bank_bytes\":[";
        for (std::size_t i = 0; i < c.bank_bytes.size(); i++) {
            out << (i == 0 ? "" : ",") << c.bank_bytes[i];
        }
        out << "]";
        field(out, "l1_high_water", core->high_water);
        for (const auto& role : core->roles) {
            out << ",\"" << name_of(role->kind) << "_cycles\":" << role->time << ",\"" << name_of(role->kind)
                << "_waiting\":" << role->waited;
        }
        out << "}";
        comma = ",";
    }
    out << "]}\n";
}

}  // namespace emulator
