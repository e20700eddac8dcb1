// SPDX-License-Identifier: Apache-2.0
// Configuration of the compute units, and DST.
#include <algorithm>

#include "compute.hpp"
#include "fiber.hpp"

namespace emulator {

Role::Role() = default;
Role::~Role() = default;

Compute* compute_state(const char* call) {
    Role& role = *machine.role;
    if (role.compute == nullptr) {
        machine.report("not-a-compute-kernel", text("%s is called by the %s", call, name_of(role.kind)));
        return nullptr;
    }
    return role.compute.get();
}

std::uint32_t format_of(std::uint32_t cb) {
    const Core& core = *machine.role->core;
    if (cb >= kCircularBuffers || !core.buffers[cb].there) {
        machine.report("no-such-buffer",
                       text("circular buffer %u does not exist on %s", cb, core_name(core).c_str()));
        return Float16_b;
    }
    return core.buffers[cb].format;
}

void set_up(const char* name, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
    if (Compute* state = compute_state(name)) {
        if (!state->started) {
            machine.report("missing-init", text("%s before compute_kernel_hw_startup", name));
        }
        state->work = {name, a, b, c, d};
    }
}

bool needs(Compute& state, const char* call, const Setup& wanted) {
    if (state.work == wanted) {
        return true;
    }
    if (state.work.name == wanted.name) {
        machine.report("mismatched-init",
                       text("%s: %s was called with other arguments", call, wanted.name.c_str()));
    } else {
        machine.report("missing-init", text("%s needs %s; the last init was %s", call, wanted.name.c_str(),
                                            state.work.name.c_str()));
    }
    return false;
}

Tile* dst_for_math(Compute& state, std::uint32_t index, const char* call, bool must_be_written) {
    if (!state.acquired) {
        machine.report("dst-not-acquired", text("%s outside tile_regs_acquire ... tile_regs_commit", call));
        return nullptr;
    }
    if (index >= static_cast<std::uint32_t>(state.capacity)) {
        machine.report("dst-capacity",
                       text("%s: DST tile %u; this configuration has %d", call, index, state.capacity));
        return nullptr;
    }
    Compute::Section& section = state.section[state.math_section];
    if (must_be_written && !section.written[index]) {
        machine.report("uninitialised-dst", text("%s: nothing has written DST tile %u", call, index));
    }
    section.written[index] = true;
    return &section.tiles[index];
}

Tile* dst_for_pack(Compute& state, std::uint32_t index, const char* call) {
    if (!state.waited) {
        machine.report("dst-not-waited", text("%s outside tile_regs_wait ... tile_regs_release", call));
        if (state.committed.empty() && !state.acquired) {
            return nullptr;
        }
    }
    if (index >= static_cast<std::uint32_t>(state.capacity)) {
        machine.report("dst-capacity",
                       text("%s: DST tile %u; this configuration has %d", call, index, state.capacity));
        return nullptr;
    }
    Compute::Section& section = state.section[state.waited ? state.pack_section : state.math_section];
    if (!section.written[index]) {
        machine.report("uninitialised-dst", text("%s: nothing has written DST tile %u", call, index));
    }
    return &section.tiles[index];
}

void settle(Compute& state, std::uint32_t index) {
    if (!machine.role->kernel->fp32_dest) {
        round_tile_bf16(state.section[state.math_section].tiles[index]);
    }
}

namespace {

// The bytes of a tile in L1 that a broadcast takes its values from.
void check_part(Core& core, std::uint32_t at, std::uint32_t format, std::uint32_t part, const char* call) {
    const std::uint32_t size = element_bytes(format);
    if (part == NO_BROADCAST || part == ROW || size == 0) {
        check_read(core, at, tile_bytes(format), call);
        return;
    }
    for (std::uint32_t row = 0; row < (part == SCALAR ? 1u : 32u); ++row) {
        check_read(core, at + (row / 16 * 512 + row % 16 * 16) * size, size, call);
    }
}

}  // namespace

bool load(Compute& state, std::uint32_t cb, std::uint32_t tile, Unit unit, const char* call, Tile& into,
          bool to_dst, std::uint32_t part) {
    Role& role = *machine.role;
    Core& core = *role.core;
    const std::uint32_t format = format_of(cb);
    if (cb >= kCircularBuffers || !core.buffers[cb].there) {
        return false;
    }
    const std::uint32_t configured = unit == UNPACK_B ? state.format_b : state.format_a;
    if (configured != format) {
        machine.report("mismatched-format", text("%s: source register %c is configured for %s, circular "
                                                 "buffer %u holds %s (reconfig_data_format)",
                                                 call, unit == UNPACK_B ? 'B' : 'A', format_name(configured),
                                                 cb, format_name(format)));
    }
    const CircularBuffer& buffer = core.buffers[cb];
    const CircularBufferView& view = role.views[cb];
    if (tile >= view.waited) {
        machine.report("tile-not-waited-for",
                       text("%s: tile %u of circular buffer %u; cb_wait_front has waited for %u", call, tile,
                            cb, view.waited));
    }
    const std::uint32_t bytes = tile_bytes(format);
    const std::uint32_t at = view.read + tile * buffer.page_size;
    if (at + bytes > buffer.size) {
        machine.report("wrap", text("%s: tile %u of circular buffer %u lies past the end of the buffer", call,
                                    tile, cb));
        return false;
    }
    check_part(core, buffer.address + at, format, part, call);
    unpack_tile(format, core.l1 + buffer.address + at, into);
    ++core.counters.unpacked_tiles;
    if (format == Float32) {
        const auto& whole = role.kernel->unpack_fp32;
        if (!to_dst || std::find(whole.begin(), whole.end(), static_cast<int>(cb)) == whole.end()) {
            keep_mantissa(into, role.kernel->fp32_dest ? 10 : 7);  // source registers hold TF32 at most
        }
    }
    return true;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emu_hw_startup(std::uint32_t source_a, std::uint32_t source_b, std::uint32_t out) {
    if (Compute* state = compute_state("compute_kernel_hw_startup")) {
        state->started = true;
        state->format_a = format_of(source_a);
        state->format_b = format_of(source_b);
        state->format_pack = format_of(out);
        state->work = {"compute_kernel_hw_startup"};
        state->pack = {"pack_init"};
    }
}

void emu_reconfig(std::uint32_t unit, std::uint32_t cb) {
    if (Compute* state = compute_state("reconfig_data_format")) {
        if (!state->started) {
            machine.report("missing-init", "reconfig_data_format before compute_kernel_hw_startup");
        }
        spend(20);
        std::uint32_t& format = unit == PACKER     ? state->format_pack
                                : unit == UNPACK_B ? state->format_b
                                                   : state->format_a;
        format = format_of(cb);
    }
}

void emu_reconfig_from(std::uint32_t unit, std::uint32_t old_cb, std::uint32_t cb) {
    if (Compute* state = compute_state("reconfig_data_format")) {
        const std::uint32_t now = unit == PACKER     ? state->format_pack
                                  : unit == UNPACK_B ? state->format_b
                                                     : state->format_a;
        if (format_of(old_cb) != now) {
            machine.report("mismatched-format",
                           text("reconfig_data_format: the call says the unit is configured for circular "
                                "buffer %u (%s), it is for %s",
                                old_cb, format_name(format_of(old_cb)), format_name(now)));
        }
        if (format_of(old_cb) != format_of(cb)) {  // as the device: nothing happens between equal formats
            emu_reconfig(unit, cb);
        }
    }
}

void emu_tile_regs_acquire() {
    Compute* state = compute_state("tile_regs_acquire");
    if (state == nullptr) {
        return;
    }
    if (!state->started) {
        machine.report("missing-init", "tile_regs_acquire before compute_kernel_hw_startup");
    }
    if (state->acquired) {
        machine.report("dst-order", "tile_regs_acquire twice without tile_regs_commit");
        return;
    }
    if (state->in_use == state->sections) {
        machine.report(
            "dst-order",
            text("tile_regs_acquire waits for ever: all %d section%s of DST committed and not released",
                 state->sections, state->sections == 1 ? " is" : "s are"));
        return;
    }
    state->acquired = true;
    ++state->in_use;
    Compute::Section& section = state->section[state->math_section];
    std::memset(section.tiles, 0, sizeof section.tiles);  // the packer leaves zeros behind
    std::fill(std::begin(section.written), std::end(section.written), false);
}

void emu_tile_regs_commit() {
    if (Compute* state = compute_state("tile_regs_commit")) {
        if (!state->acquired) {
            machine.report("dst-order", "tile_regs_commit without tile_regs_acquire");
            return;
        }
        state->acquired = false;
        state->committed.push_back(state->math_section);
        state->math_section = (state->math_section + 1) % state->sections;
    }
}

void emu_tile_regs_wait() {
    if (Compute* state = compute_state("tile_regs_wait")) {
        if (state->waited) {
            return;
        }
        if (state->committed.empty()) {
            machine.report("dst-order", "tile_regs_wait waits for ever: nothing was committed");
            return;
        }
        state->waited = true;
        state->pack_section = state->committed.front();
        state->committed.pop_front();
    }
}

void emu_tile_regs_release() {
    if (Compute* state = compute_state("tile_regs_release")) {
        if (!state->waited) {
            machine.report("dst-order", "tile_regs_release without tile_regs_wait");
            return;
        }
        state->waited = false;
        --state->in_use;
    }
}

}  // extern "C"
