// SPDX-License-Identifier: Apache-2.0
// Unpack and math: tiles of circular buffers into DST.
#include "compute.hpp"

#include <algorithm>
#include <memory>

#include "fpu.hpp"

using namespace emulator;

namespace {

constexpr std::uint64_t kMatmulCycles = 16;  // a fidelity phase of 32 x 32 x 32
constexpr std::uint64_t kCopyCycles = 40, kEltwiseCycles = 32, kTilizeCycles = 64;

int phases() { return machine.role->kernel->fidelity_phases; }

// x goes through source register B, y through A.
void multiply_tiles(const Tile& x, const Tile& y, Tile& dst) {
    if (machine.exact) {
        fpu_multiply(x, y, dst, phases(), machine.role->kernel->fp32_dest);
    } else {
        multiply(x, y, dst, !machine.role->kernel->fp32_dest);
    }
}

void broadcast(std::uint32_t how, Tile& tile, std::uint32_t row) {
    for (int m = 0; m < 32; ++m) {
        for (int n = 0; n < 32; ++n) {
            if (how == COLUMN) {
                tile.at[m][n] = tile.at[m][0];
            } else if (how == SCALAR) {
                tile.at[m][n] = tile.at[0][0];
            }
        }
    }
    if (how == ROW) {
        float kept[32];
        std::memcpy(kept, tile.at[row], sizeof kept);
        for (auto& to : tile.at) {
            std::memcpy(to, kept, sizeof kept);
        }
    }
}

void binary_into(Compute& state, std::uint32_t op, const Tile& a, const Tile& b, std::uint32_t dst,
                 bool accumulate, bool keep) {
    Tile& to = state.section[state.math_section].tiles[dst];
    const bool fp32 = machine.role->kernel->fp32_dest;
    if (op == MUL) {
        if (!accumulate || !keep) {
            to = Tile{};
        }
        fpu_multiply_values(a, b, to, phases(), fp32);
    } else {
        fpu_add_values(a, b, to, op == SUB, accumulate && keep, fp32);
    }
    ++machine.role->core->counters.eltwise_tiles;
    spend(kEltwiseCycles * static_cast<std::uint64_t>(op == MUL ? phases() : 1));
}

bool was_written(Compute& state, std::uint32_t dst) {
    return dst < static_cast<std::uint32_t>(state.capacity) && state.section[state.math_section].written[dst];
}

}  // namespace

extern "C" {

void emu_copy_init(std::uint32_t, std::uint32_t transpose) { set_up("copy_init", transpose); }
void emu_transpose_init(std::uint32_t) { set_up("transpose_init"); }
void emu_broadcast_init(std::uint32_t broadcast, std::uint32_t) { set_up("unary_bcast_init", broadcast); }
void emu_broadcast_uninit(std::uint32_t) { set_up("unary_bcast_uninit"); }
void emu_binary_init(std::uint32_t op, std::uint32_t broadcast, std::uint32_t, std::uint32_t,
                     std::uint32_t accumulate) {
    set_up("binary init", op, broadcast, accumulate);
}
void emu_reuse_init(std::uint32_t op, std::uint32_t to_b, std::uint32_t) {
    set_up("reuse_dest init", op, to_b);
}
void emu_matmul_init(std::uint32_t, std::uint32_t, std::uint32_t transpose, std::uint32_t ct,
                     std::uint32_t rt, std::uint32_t kt, std::uint32_t block) {
    set_up(block != 0 ? "matmul_block_init" : "matmul_init", transpose, ct, rt, kt);
}

void emu_copy_tile(std::uint32_t cb, std::uint32_t tile, std::uint32_t dst) {
    Compute* state = compute_state("copy_tile");
    if (state == nullptr || !needs(*state, "copy_tile", {"copy_init", state->work.a})) {
        return;
    }
    Tile* to = dst_for_math(*state, dst, "copy_tile", false);
    Tile from;
    if (to != nullptr && load(*state, cb, tile, UNPACK_A, "copy_tile", from, true)) {
        *to = from;
        if (state->work.a != 0) {
            for (int m = 0; m < 32; ++m) {
                for (int n = 0; n < 32; ++n) {
                    to->at[m][n] = from.at[n][m];
                }
            }
        }
        if (!is_integer(format_of(cb))) {
            settle(*state, dst);
        }
        ++machine.role->core->counters.eltwise_tiles;
        spend(kCopyCycles);
    }
}

void emu_transpose(std::uint32_t cb, std::uint32_t tile, std::uint32_t dst) {
    Compute* state = compute_state("transpose_tile");
    if (state == nullptr || !needs(*state, "transpose_tile", {"transpose_init"})) {
        return;
    }
    Tile* to = dst_for_math(*state, dst, "transpose_tile", false);
    Tile from;
    if (to != nullptr && load(*state, cb, tile, UNPACK_A, "transpose_tile", from, true)) {
        for (int m = 0; m < 32; ++m) {
            for (int n = 0; n < 32; ++n) {
                to->at[m][n] = from.at[n][m];
            }
        }
        settle(*state, dst);
        spend(kCopyCycles);
    }
}

void emu_broadcast(std::uint32_t how, std::uint32_t cb, std::uint32_t tile, std::uint32_t dst) {
    Compute* state = compute_state("unary_bcast");
    if (state == nullptr || !needs(*state, "unary_bcast", {"unary_bcast_init", how})) {
        return;
    }
    Tile* to = dst_for_math(*state, dst, "unary_bcast", false);
    Tile from;
    // Through register B for 16-bit formats, as the device does it.
    if (to != nullptr && load(*state, cb, tile, format_of(cb) == Float32 ? UNPACK_A : UNPACK_B, "unary_bcast",
                              from, true, how)) {
        broadcast(how, from, 0);
        *to = from;
        settle(*state, dst);
        spend(kCopyCycles);
    }
}

void emu_binary(std::uint32_t op, std::uint32_t how, std::uint32_t cb0, std::uint32_t cb1,
                std::uint32_t tile0, std::uint32_t tile1, std::uint32_t dst, std::uint32_t row) {
    Compute* state = compute_state("binary tiles");
    if (state == nullptr || !needs(*state, "binary tiles", {"binary init", op, how, state->work.c})) {
        return;
    }
    const bool keep = was_written(*state, dst);
    Tile a, b;
    if (dst_for_math(*state, dst, "binary tiles", false) != nullptr &&
        load(*state, cb0, tile0, UNPACK_A, "binary tiles", a) &&
        load(*state, cb1, tile1, UNPACK_B, "binary tiles", b, false, how)) {
        broadcast(how, b, row);
        binary_into(*state, op, a, b, dst, op == MUL || state->work.c != 0, keep);
    }
}

void emu_binary_reuse(std::uint32_t op, std::uint32_t to_b, std::uint32_t cb, std::uint32_t tile,
                      std::uint32_t dst) {
    Compute* state = compute_state("reuse_dest tiles");
    if (state == nullptr || !needs(*state, "reuse_dest tiles", {"reuse_dest init", op, to_b})) {
        return;
    }
    Tile* to = dst_for_math(*state, dst, "reuse_dest tiles", true);
    Tile other;
    // The unpacker's register A is configured for the buffer whichever register the tile then goes to.
    if (to != nullptr && load(*state, cb, tile, UNPACK_A, "reuse_dest tiles", other)) {
        Tile held = *to;
        keep_mantissa(held, 10);  // DST passes through a source register
        binary_into(*state, op, to_b != 0 ? other : held, to_b != 0 ? held : other, dst, false, false);
    }
}

void emu_matmul(std::uint32_t in0, std::uint32_t in1, std::uint32_t tile0, std::uint32_t tile1,
                std::uint32_t dst, std::uint32_t transpose, std::uint32_t ct, std::uint32_t rt,
                std::uint32_t kt, std::uint32_t block) {
    const char* call = block != 0 ? "matmul_block" : "matmul_tiles";
    Compute* state = compute_state(call);
    if (state == nullptr) {
        return;
    }
    const Setup wanted = block != 0 ? Setup{"matmul_block_init", transpose, ct, rt, kt}
                                    : Setup{"matmul_init", state->work.a, 1, 1, 1};
    if (!needs(*state, call, wanted)) {
        return;
    }
    static std::vector<Tile> left, right;
    left.resize(std::max<std::size_t>(left.size(), rt));
    right.resize(std::max<std::size_t>(right.size(), ct));
    for (std::uint32_t r = 0; r < rt; ++r) {
        if (!load(*state, in0, tile0 + r * kt, UNPACK_B, call, left[r])) {
            return;
        }
    }
    for (std::uint32_t c = 0; c < ct; ++c) {
        if (!load(*state, in1, tile1 + c, UNPACK_A, call, right[c])) {
            return;
        }
        if (state->work.a != 0) {
            for (int m = 0; m < 32; ++m) {
                for (int n = 0; n < m; ++n) {
                    std::swap(right[c].at[m][n], right[c].at[n][m]);
                }
            }
        }
    }
    for (std::uint32_t r = 0; r < rt; ++r) {
        for (std::uint32_t c = 0; c < ct; ++c) {
            Tile* to = dst_for_math(*state, dst + r * ct + c, call, false);
            if (to == nullptr) {
                return;
            }
            multiply_tiles(left[r], right[c], *to);
            ++machine.role->core->counters.tile_multiplies;
            spend(kMatmulCycles * static_cast<std::uint64_t>(phases()));
        }
    }
}

void emu_tilize_init(std::uint32_t, std::uint32_t block, std::uint32_t) {
    set_up("tilize_init", block);
    if (Compute* state = compute_state("tilize_init"); state != nullptr && machine.chip.arch == "blackhole") {
        state->pack = {"tilize_init"};
    }
}

void emu_tilize_uninit(std::uint32_t, std::uint32_t) {
    set_up("tilize_uninit");
    if (Compute* state = compute_state("tilize_uninit")) {
        state->pack = {"pack_init"};
    }
}

void emu_tilize_block(std::uint32_t in, std::uint32_t block, std::uint32_t out, std::uint32_t in_tile,
                      std::uint32_t out_tile) {
    Compute* state = compute_state("tilize_block");
    if (state == nullptr || !needs(*state, "tilize_block", {"tilize_init", block})) {
        return;
    }
    Role& role = *machine.role;
    Core& core = *role.core;
    const std::uint32_t format = format_of(in);
    const CircularBuffer& buffer = core.buffers[in % kCircularBuffers];
    const CircularBufferView& view = role.views[in % kCircularBuffers];
    const std::uint32_t row = block * 32 * element_bytes(format);
    if (format != state->format_a) {
        machine.report(
            "mismatched-format",
            text("tilize_block: source register A is configured for %s, circular buffer %u holds %s",
                 format_name(state->format_a), in, format_name(format)));
    }
    if (in_tile != 0 || element_bytes(format) == 0 || !buffer.there) {
        emu_unsupported("tilize_block from a tile other than the first, or of a block format");
        return;
    }
    if (row * 32 > view.waited * buffer.page_size) {
        machine.report(
            "tile-not-waited-for",
            text("tilize_block reads %u bytes of circular buffer %u; cb_wait_front has waited for %u",
                 row * 32, in, view.waited * buffer.page_size));
    }
    if (view.read + row * 32 > buffer.size) {
        machine.report(
            "wrap", text("tilize_block: the rows of circular buffer %u go past the end of the buffer", in));
        return;
    }
    if (state->in_use >= state->sections) {
        machine.report("dst-order", "tilize_block needs a section of DST: all are acquired or committed");
    }
    check_read(core, buffer.address + view.read, row * 32, "tilize_block");
    const auto tile = std::make_unique<Tile>();
    const Setup before = state->pack;
    for (std::uint32_t t = 0; t < block; ++t) {
        for (std::uint32_t m = 0; m < 32; ++m) {
            unpack_row(format,
                       core.l1 + buffer.address + view.read + m * row + t * 32 * element_bytes(format), 32,
                       tile->at[m]);
        }
        if (!is_integer(format) && !role.kernel->fp32_dest) {
            round_tile_bf16(*tile);
        }
        state->pack = {"pack_init"};
        Compute::Section& section = state->section[state->math_section];
        section.tiles[0] = *tile;
        section.written[0] = true;
        const bool acquired = state->acquired;
        const bool waited = state->waited;
        const int pack_section = state->pack_section;
        state->waited = true;
        state->pack_section = state->math_section;
        emu_pack_tile(0, out, out_tile + t, 1);
        state->acquired = acquired;
        state->waited = waited;
        state->pack_section = pack_section;
        ++core.counters.unpacked_tiles;
        spend(kTilizeCycles);
    }
    state->pack = before;
}

}  // extern "C"
