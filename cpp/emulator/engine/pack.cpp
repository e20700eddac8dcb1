// SPDX-License-Identifier: Apache-2.0
// The packer: DST into circular buffers, as tiles or as rows.
#include <algorithm>

#include "compute.hpp"

using namespace emulator;

namespace {

constexpr std::uint64_t kPackCycles = 64;

// Where `bytes` at byte `at` of the reserved pages of `out` go, or null.
std::uint8_t* reserved(Compute& state, std::uint32_t out, std::uint32_t at, std::uint32_t bytes,
                       const char* call) {
    Role& role = *machine.role;
    Core& core = *role.core;
    const std::uint32_t format = format_of(out);
    if (out >= kCircularBuffers || !core.buffers[out].there) {
        return nullptr;
    }
    if (state.format_pack != format) {
        machine.report("mismatched-format",
                       text("%s: the packer is configured for %s, circular buffer %u holds %s "
                            "(pack_reconfig_data_format)",
                            call, format_name(state.format_pack), out, format_name(format)));
    }
    const CircularBuffer& buffer = core.buffers[out];
    const CircularBufferView& view = role.views[out];
    if (at + bytes > view.reserved * buffer.page_size) {
        machine.report("pack-without-reserve",
                       text("%s: bytes %u to %u behind the write pointer of circular buffer %u; %u pages of "
                            "%u bytes are reserved",
                            call, at, at + bytes, out, view.reserved, buffer.page_size));
    }
    if (view.write + at + bytes > buffer.size) {
        machine.report("wrap", text("%s: past the end of circular buffer %u", call, out));
        return nullptr;
    }
    const std::uint32_t offset = buffer.address + view.write + at;
    check_write(core, offset, bytes, call);
    set_shadow(core.shadow, offset, bytes, WRITTEN, 0);
    core.history.written(role, offset, bytes, role.clock);
    return core.l1 + offset;
}

bool packs(Compute& state, const char* call, const Setup& wanted) {
    if (state.pack == wanted) {
        return true;
    }
    if (state.pack.name == wanted.name) {
        machine.report("mismatched-init",
                       text("%s: %s was called with other arguments", call, wanted.name.c_str()));
    } else {
        machine.report("missing-init", text("%s needs the packer as %s leaves it; it is as after %s", call,
                                            wanted.name.c_str(), state.pack.name.c_str()));
    }
    return false;
}

void pack_rows(Compute& state, const Tile& tile, std::uint32_t out, std::uint32_t row, std::uint32_t column,
               std::uint32_t stride) {
    const std::uint32_t format = format_of(out), size = element_bytes(format);
    for (std::uint32_t m = 0; m < 32; ++m) {
        std::uint8_t* to =
            reserved(state, out, ((row + m) * stride + column) * size, 32 * size, "pack_untilize");
        if (to == nullptr) {
            return;
        }
        pack_row(format, tile.at[m], 32, to);
    }
    ++machine.role->core->counters.packed_tiles;
    spend(kPackCycles);
}

}  // namespace

extern "C" {

void emu_pack_init(std::uint32_t) {
    if (Compute* state = compute_state("pack_init")) {
        state->pack = {"pack_init"};
    }
}

void emu_pack_untilize_init(std::uint32_t out, std::uint32_t block_ct, std::uint32_t full_ct) {
    if (Compute* state = compute_state("pack_untilize_init")) {
        state->pack = {"pack_untilize_init", block_ct, full_ct};
        state->format_pack = format_of(out);  // this init reconfigures the packer's format itself
    }
}

void emu_pack_untilize_uninit(std::uint32_t out) {
    if (Compute* state = compute_state("pack_untilize_uninit")) {
        state->pack = {"pack_init"};
        state->format_pack = format_of(out);
    }
}

void emu_pack_l1_accumulate(std::uint32_t on) {
    if (Compute* state = compute_state("pack_reconfig_l1_acc")) {
        state->l1_accumulate = on != 0;
    }
}

void emu_pack_relu(std::uint32_t on) {
    if (Compute* state = compute_state("pack_relu_config")) {
        state->relu = on != 0;
    }
}

void emu_pack_tile(std::uint32_t dst, std::uint32_t out, std::uint32_t tile, std::uint32_t at_tile) {
    Compute* state = compute_state("pack_tile");
    if (state == nullptr || !packs(*state, "pack_tile", {"pack_init"})) {
        return;
    }
    const Tile* from = dst_for_pack(*state, dst, "pack_tile");
    const std::uint32_t format = format_of(out), bytes = tile_bytes(format);
    Role& role = *machine.role;
    if (from == nullptr || out >= kCircularBuffers || !role.core->buffers[out].there) {
        return;
    }
    CircularBufferView& view = role.views[out];
    const std::uint32_t place = at_tile != 0 ? tile : view.packed++;
    const CircularBuffer& buffer = role.core->buffers[out];
    const std::uint32_t at = place * buffer.page_size;
    Tile sum;
    if ((state->l1_accumulate || state->relu) && view.write + at + bytes <= buffer.size) {
        sum = *from;
        if (state->relu) {
            for (int i = 0; i < 1024; ++i) {
                (&sum.at[0][0])[i] = std::max(0.0f, (&sum.at[0][0])[i]);
            }
        }
        if (state->l1_accumulate) {
            Tile held;
            check_read(*role.core, buffer.address + view.write + at, bytes, "pack_tile with L1 accumulation");
            unpack_tile(format, role.core->l1 + buffer.address + view.write + at, held);
            for (int i = 0; i < 1024; ++i) {
                (&sum.at[0][0])[i] += (&held.at[0][0])[i];
            }
        }
        from = &sum;
    }
    if (std::uint8_t* to = reserved(*state, out, at, bytes, "pack_tile")) {
        pack_tile(format, *from, to);
        ++role.core->counters.packed_tiles;
    }
    spend(kPackCycles);
}

void emu_pack_untilize_dest(std::uint32_t out, std::uint32_t block_ct, std::uint32_t full_ct,
                            std::uint32_t rt, std::uint32_t column_block, std::uint32_t dst) {
    Compute* state = compute_state("pack_untilize_dest");
    if (state == nullptr || !packs(*state, "pack_untilize_dest", {"pack_untilize_init", block_ct, full_ct})) {
        return;
    }
    for (std::uint32_t r = 0; r < rt; ++r) {
        for (std::uint32_t c = 0; c < block_ct; ++c) {
            if (const Tile* from = dst_for_pack(*state, dst + r * block_ct + c, "pack_untilize_dest")) {
                pack_rows(*state, *from, out, r * 32, (column_block * block_ct + c) * 32, full_ct * 32);
            }
        }
    }
}

void emu_pack_untilize_block(std::uint32_t in, std::uint32_t out, std::uint32_t block_ct,
                             std::uint32_t full_ct, std::uint32_t rt, std::uint32_t column_block) {
    Compute* state = compute_state("pack_untilize_block");
    if (state == nullptr ||
        !packs(*state, "pack_untilize_block", {"pack_untilize_init", block_ct, full_ct})) {
        return;
    }
    for (std::uint32_t r = 0; r < rt; ++r) {
        emu_tile_regs_acquire();
        for (std::uint32_t c = 0; c < block_ct; ++c) {
            emu_copy_tile(in, c, c);
        }
        emu_tile_regs_commit();
        emu_tile_regs_wait();
        for (std::uint32_t c = 0; c < block_ct; ++c) {
            if (const Tile* from = dst_for_pack(*state, c, "pack_untilize_block")) {
                pack_rows(*state, *from, out, r * 32, (column_block * block_ct + c) * 32, full_ct * 32);
            }
        }
        emu_tile_regs_release();
    }
}

void emu_untilize_init(std::uint32_t) { set_up("untilize_init"); }
void emu_untilize_uninit(std::uint32_t) { set_up("untilize_uninit"); }

void emu_untilize_block(std::uint32_t in, std::uint32_t full_ct, std::uint32_t out) {
    Compute* state = compute_state("untilize_block");
    if (state == nullptr || !needs(*state, "untilize_block", {"untilize_init"}) ||
        !packs(*state, "untilize_block", {"pack_init"})) {
        return;
    }
    static Tile tile;
    for (std::uint32_t c = 0; c < full_ct; ++c) {
        if (load(*state, in, c, UNPACK_A, "untilize_block", tile, true)) {
            if (!machine.role->kernel->fp32_dest && !is_integer(format_of(in))) {
                round_tile_bf16(tile);
            }
            pack_rows(*state, tile, out, 0, c * 32, full_ct * 32);
        }
    }
}

}  // extern "C"
