// SPDX-License-Identifier: Apache-2.0
// What a kernel calls in the engine: plain C symbols, resolved when the kernel's library is loaded.
// The headers under api/ are thin C++17 wrappers of these, with the names and signatures of tt-metal.
#pragma once

#include <cstdint>

extern "C" {

// Line of kernel source that the calling role is at: what a finding names.
struct EmuPlace {
    const char* file;
    int line;
};
void emu_at(const char* file, int line);

// Arguments and place of the role.
std::uint32_t emu_arg_address(int index, int common);
std::uint32_t emu_logical_x();
std::uint32_t emu_logical_y();
std::uint8_t* emu_my_x();
std::uint8_t* emu_my_y();
std::uint8_t emu_noc_index();

// Circular buffers.
void emu_cb_reserve_back(std::uint32_t cb, std::uint32_t pages);
void emu_cb_push_back(std::uint32_t cb, std::uint32_t pages);
void emu_cb_wait_front(std::uint32_t cb, std::uint32_t pages);
void emu_cb_pop_front(std::uint32_t cb, std::uint32_t pages);
std::uint32_t emu_cb_reservable(std::uint32_t cb, std::uint32_t pages);
std::uint32_t emu_cb_available(std::uint32_t cb, std::uint32_t pages);
std::uint32_t emu_cb_write_ptr(std::uint32_t cb);
std::uint32_t emu_cb_read_ptr(std::uint32_t cb);
std::uint32_t emu_cb_tile_address(std::uint32_t cb, std::uint32_t tile);

// Network on chip. A NoC address: local address in bits 0-35, end x, y from bit 36, start x, y from bit 48 (6
// bits each).
std::uint64_t emu_dram_bank_address(std::uint32_t bank, std::uint32_t address);
std::uint32_t emu_dram_banks();
std::uint32_t emu_dram_alignment();
void emu_noc_read(std::uint64_t source, std::uint32_t destination, std::uint32_t size, std::uint32_t noc);
void emu_noc_read_tag(std::uint32_t tag);
void emu_noc_read_barrier(std::uint32_t noc, std::uint32_t tag);
void emu_noc_write(std::uint32_t source, std::uint64_t destination, std::uint32_t size, std::uint32_t noc,
                   std::uint32_t vc);
void emu_noc_write_multicast(std::uint32_t source, std::uint64_t destination, std::uint32_t size,
                             std::uint32_t receivers, std::uint32_t noc, std::uint32_t vc,
                             std::uint32_t with_self);
void emu_noc_writes_flushed(std::uint32_t noc);
void emu_noc_write_barrier(std::uint32_t noc);
void emu_noc_atomic_barrier(std::uint32_t noc);
void emu_noc_inline_write(std::uint64_t destination, std::uint32_t value, std::uint32_t noc,
                          std::uint32_t vc);

// Semaphores.
std::uint32_t emu_semaphore(std::uint32_t id);
void emu_semaphore_wait(std::uint32_t address, std::uint32_t value, std::uint32_t at_least);
void emu_semaphore_set(std::uint32_t address, std::uint32_t value);
void emu_semaphore_inc(std::uint64_t destination, std::uint32_t value, std::uint32_t noc, std::uint32_t vc);
void emu_semaphore_inc_multicast(std::uint64_t destination, std::uint32_t value, std::uint32_t receivers,
                                 std::uint32_t noc, std::uint32_t vc);
void emu_semaphore_set_remote(std::uint32_t source, std::uint64_t destination, std::uint32_t noc);
void emu_semaphore_set_multicast(std::uint32_t source, std::uint64_t destination, std::uint32_t receivers,
                                 std::uint32_t noc, std::uint32_t vc, std::uint32_t with_self);

// Lets other roles run: what a polling loop calls.
void emu_poll();
// A line of text from the kernel, kept with the result.
void emu_print(const char* text);
// A condition of the kernel's own (ASSERT) that does not hold.
void emu_assert_failed(const char* condition);

// Compute: configuration of unpacker, math and packer.
void emu_hw_startup(std::uint32_t source_a, std::uint32_t source_b, std::uint32_t out);
void emu_reconfig(std::uint32_t unit, std::uint32_t cb);
void emu_reconfig_from(std::uint32_t unit, std::uint32_t old_cb, std::uint32_t cb);
void emu_copy_init(std::uint32_t cb, std::uint32_t transpose);
void emu_binary_init(std::uint32_t op, std::uint32_t broadcast, std::uint32_t cb0, std::uint32_t cb1,
                     std::uint32_t accumulate);
void emu_reuse_init(std::uint32_t op, std::uint32_t to_b, std::uint32_t cb);
void emu_matmul_init(std::uint32_t in0, std::uint32_t in1, std::uint32_t transpose, std::uint32_t ct,
                     std::uint32_t rt, std::uint32_t kt, std::uint32_t block);
void emu_transpose_init(std::uint32_t cb);
void emu_broadcast_init(std::uint32_t broadcast, std::uint32_t cb);
void emu_broadcast_uninit(std::uint32_t cb);
void emu_tilize_init(std::uint32_t in, std::uint32_t block, std::uint32_t out);
void emu_tilize_uninit(std::uint32_t in, std::uint32_t out);
void emu_untilize_init(std::uint32_t in);
void emu_untilize_uninit(std::uint32_t in);
void emu_pack_init(std::uint32_t out);
void emu_pack_untilize_init(std::uint32_t out, std::uint32_t block_ct, std::uint32_t full_ct);
void emu_pack_untilize_uninit(std::uint32_t out);
void emu_sfpu_init(std::uint32_t op);

// Compute: destination registers.
void emu_tile_regs_acquire();
void emu_tile_regs_commit();
void emu_tile_regs_wait();
void emu_tile_regs_release();

// Compute: work on tiles.
void emu_copy_tile(std::uint32_t cb, std::uint32_t tile, std::uint32_t dst);
void emu_binary(std::uint32_t op, std::uint32_t broadcast, std::uint32_t cb0, std::uint32_t cb1,
                std::uint32_t tile0, std::uint32_t tile1, std::uint32_t dst, std::uint32_t row);
void emu_binary_reuse(std::uint32_t op, std::uint32_t to_b, std::uint32_t cb, std::uint32_t tile,
                      std::uint32_t dst);
void emu_matmul(std::uint32_t in0, std::uint32_t in1, std::uint32_t tile0, std::uint32_t tile1,
                std::uint32_t dst, std::uint32_t transpose, std::uint32_t ct, std::uint32_t rt,
                std::uint32_t kt, std::uint32_t block);
void emu_transpose(std::uint32_t cb, std::uint32_t tile, std::uint32_t dst);
void emu_broadcast(std::uint32_t broadcast, std::uint32_t cb, std::uint32_t tile, std::uint32_t dst);
void emu_tilize_block(std::uint32_t in, std::uint32_t block, std::uint32_t out, std::uint32_t in_tile,
                      std::uint32_t out_tile);
void emu_untilize_block(std::uint32_t in, std::uint32_t full_ct, std::uint32_t out);
void emu_pack_tile(std::uint32_t dst, std::uint32_t out, std::uint32_t tile, std::uint32_t at_tile);
void emu_pack_untilize_dest(std::uint32_t out, std::uint32_t block_ct, std::uint32_t full_ct,
                            std::uint32_t rt, std::uint32_t column_block, std::uint32_t dst);
void emu_pack_untilize_block(std::uint32_t in, std::uint32_t out, std::uint32_t block_ct,
                             std::uint32_t full_ct, std::uint32_t rt, std::uint32_t column_block);
void emu_pack_l1_accumulate(std::uint32_t on);
void emu_pack_relu(std::uint32_t on);
void emu_sfpu_unary(std::uint32_t op, std::uint32_t dst, std::uint32_t parameter);
void emu_sfpu_binary(std::uint32_t op, std::uint32_t dst0, std::uint32_t dst1, std::uint32_t out);
void emu_unsupported(const char* what);
}

// Trailing parameters of an API function: the line that calls it.
#define EMU_PLACE const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define EMU_HERE emu_at(emu_file, emu_line)

// What both sides number the same way.
namespace emulator {
enum Unit : std::uint32_t { UNPACK_A, UNPACK_B, PACKER };
enum Binary : std::uint32_t { ADD, SUB, MUL, DIV, RSUB, MAXIMUM, MINIMUM, COPY };
enum Broadcast : std::uint32_t { NO_BROADCAST, COLUMN, ROW, SCALAR };
enum Sfpu : std::uint32_t {
    SFPU_NONE,
    SFPU_SILU,
    SFPU_SIGMOID,
    SFPU_EXP,
    SFPU_RECIP,
    SFPU_SQRT,
    SFPU_RSQRT,
    SFPU_LOG,
    SFPU_TANH,
    SFPU_GELU,
    SFPU_RELU,
    SFPU_ABS,
    SFPU_SQUARE,
    SFPU_NEGATIVE,
    SFPU_SCALAR,
    SFPU_ADD_SCALAR,
    SFPU_SUB_SCALAR,
    SFPU_MUL_SCALAR,
    SFPU_DIV_SCALAR,
    SFPU_RSUB_SCALAR,
    SFPU_FILL,
    SFPU_TYPECAST,
    SFPU_BINARY,
    SFPU_COPY
};
}  // namespace emulator
