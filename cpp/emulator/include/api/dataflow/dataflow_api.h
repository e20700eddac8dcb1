// SPDX-License-Identifier: Apache-2.0
// Data movement: NoC reads and writes, multicast, semaphores. See tt-metal's header of this name for what
// each call means; engine/noc.cpp for when data lands here.
#pragma once

#include "api/compile_time_args.h"
#include "api/debug/assert.h"
#include "api/tensor/tensor_accessor.h"
#include "emulator/common.h"

#define noc_index (emu_noc_index())
#define my_x (emu_my_x())
#define my_y (emu_my_y())
constexpr std::uint8_t NOC_UNICAST_WRITE_VC = 1;
constexpr std::uint8_t NOC_MULTICAST_WRITE_VC = 4;
#ifdef ARCH_BLACKHOLE
constexpr std::uint32_t NOC_MAX_BURST_SIZE = 16384;
constexpr std::uint32_t NOC_DRAM_READ_ALIGNMENT_BYTES = 64;
constexpr std::uint32_t DRAM_ALIGNMENT = 64;
#else
constexpr std::uint32_t NOC_MAX_BURST_SIZE = 8192;
constexpr std::uint32_t NOC_DRAM_READ_ALIGNMENT_BYTES = 32;
constexpr std::uint32_t DRAM_ALIGNMENT = 32;
#endif
constexpr std::uint32_t NOC_DRAM_WRITE_ALIGNMENT_BYTES = 16;
constexpr std::uint32_t NOC_L1_READ_ALIGNMENT_BYTES = 16;
constexpr std::uint32_t NOC_L1_WRITE_ALIGNMENT_BYTES = 16;
constexpr std::uint32_t L1_ALIGNMENT = 16;
constexpr std::uint32_t INVALID = 0, VALID = 1;
inline constexpr std::uint32_t emulator_all_tags = ~0u;

constexpr std::uint32_t align_power_of_2(std::uint32_t address, std::uint32_t unit) {
    return ((address - 1) | (unit - 1)) + 1;
}
constexpr std::uint32_t align(std::uint32_t address, std::uint32_t unit) {
    return (address + unit - 1) / unit * unit;
}

// Addresses.
FORCE_INLINE std::uint64_t get_noc_addr(std::uint32_t x, std::uint32_t y, std::uint32_t address,
                                        std::uint8_t = emulator_any_noc) {
    return std::uint64_t{address} | std::uint64_t{x & 63} << 36 | std::uint64_t{y & 63} << 42;
}
FORCE_INLINE std::uint64_t get_noc_addr(std::uint32_t address, std::uint8_t = emulator_any_noc) {
    return get_noc_addr(my_x[0], my_y[0], address);
}
template <typename AddrGen, typename = std::enable_if_t<std::is_class_v<AddrGen>>>
FORCE_INLINE std::uint64_t get_noc_addr(std::uint32_t page, const AddrGen& accessor, std::uint32_t offset = 0,
                                        std::uint8_t noc = emulator_any_noc) {
    return accessor.get_noc_addr(page, offset, noc);
}
FORCE_INLINE std::uint64_t get_noc_multicast_addr(std::uint32_t x_start, std::uint32_t y_start,
                                                  std::uint32_t x_end, std::uint32_t y_end,
                                                  std::uint32_t address, std::uint8_t = emulator_any_noc) {
    return get_noc_addr(x_end, y_end, address) | std::uint64_t{x_start & 63} << 48 |
           std::uint64_t{y_start & 63} << 54;
}
template <bool DRAM>
FORCE_INLINE std::uint64_t get_noc_addr_from_bank_id(std::uint32_t bank, std::uint32_t address,
                                                     std::uint8_t = emulator_any_noc) {
    static_assert(DRAM, "the emulator has tensors in DRAM only");
    return emu_dram_bank_address(bank, address);
}

// Circular buffers.
FORCE_INLINE std::uint32_t get_write_ptr(std::uint32_t cb, EMU_PLACE) {
    EMU_HERE;
    return emu_cb_write_ptr(cb);
}
FORCE_INLINE std::uint32_t get_read_ptr(std::uint32_t cb, EMU_PLACE) {
    EMU_HERE;
    return emu_cb_read_ptr(cb);
}
FORCE_INLINE bool cb_pages_reservable_at_back(std::int32_t cb, std::int32_t pages, EMU_PLACE) {
    EMU_HERE;
    return emu_cb_reservable(cb, pages) != 0;
}
FORCE_INLINE bool cb_pages_available_at_front(std::int32_t cb, std::int32_t pages, EMU_PLACE) {
    EMU_HERE;
    return emu_cb_available(cb, pages) != 0;
}

// Reads.
template <std::uint32_t max_page_size = NOC_MAX_BURST_SIZE + 1, bool tracing = true>
inline void noc_async_read(std::uint64_t source, std::uint32_t destination, std::uint32_t size,
                           std::uint8_t noc = noc_index, std::uint32_t = NOC_UNICAST_WRITE_VC, EMU_PLACE) {
    EMU_HERE;
    emu_noc_read(source, destination, size, noc);
}
template <bool tracing = true>
inline void noc_async_read_one_packet(std::uint64_t source, std::uint32_t destination, std::uint32_t size,
                                      std::uint8_t noc = noc_index, std::uint32_t = NOC_UNICAST_WRITE_VC,
                                      EMU_PLACE) {
    EMU_HERE;
    ASSERT(size <= NOC_MAX_BURST_SIZE);
    emu_noc_read(source, destination, size, noc);
}
template <typename AddrGen, bool tracing = true>
inline void noc_async_read_page(std::uint32_t page, const AddrGen& accessor, std::uint32_t destination,
                                std::uint32_t offset = 0, std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_read(accessor.get_noc_addr(page, offset), destination, accessor.get_aligned_page_size(), noc);
}
template <typename AddrGen>
inline void noc_async_read_tile(std::uint32_t page, const AddrGen& accessor, std::uint32_t destination,
                                std::uint32_t offset = 0, std::uint8_t noc = noc_index, EMU_PLACE) {
    noc_async_read_page(page, accessor, destination, offset, noc, emu_file, emu_line);
}
inline void noc_async_read_barrier(std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_read_barrier(noc, emulator_all_tags);
}
FORCE_INLINE void noc_async_read_set_trid(std::uint32_t trid = 0, std::uint8_t = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_read_tag(trid);
}
FORCE_INLINE void noc_async_read_barrier_with_trid(std::uint32_t trid, std::uint8_t noc = noc_index,
                                                   EMU_PLACE) {
    EMU_HERE;
    emu_noc_read_barrier(noc, trid);
}

// Writes.
template <std::uint32_t max_page_size = NOC_MAX_BURST_SIZE + 1, bool tracing = true, bool posted = false>
inline void noc_async_write(std::uint32_t source, std::uint64_t destination, std::uint32_t size,
                            std::uint8_t noc = noc_index, std::uint32_t vc = NOC_UNICAST_WRITE_VC,
                            EMU_PLACE) {
    EMU_HERE;
    emu_noc_write(source, destination, size, noc, vc);
}
template <bool tracing = true, bool posted = false>
inline void noc_async_write_one_packet(std::uint32_t source, std::uint64_t destination, std::uint32_t size,
                                       std::uint8_t noc = noc_index, std::uint32_t vc = NOC_UNICAST_WRITE_VC,
                                       EMU_PLACE) {
    EMU_HERE;
    ASSERT(size <= NOC_MAX_BURST_SIZE);
    emu_noc_write(source, destination, size, noc, vc);
}
template <typename AddrGen, bool tracing = true, bool posted = false>
inline void noc_async_write_page(std::uint32_t page, const AddrGen& accessor, std::uint32_t source,
                                 std::uint32_t size = 0, std::uint32_t offset = 0,
                                 std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_write(source, accessor.get_noc_addr(page, offset),
                  size != 0 ? size : accessor.get_aligned_page_size(), noc, NOC_UNICAST_WRITE_VC);
}
template <typename AddrGen>
inline void noc_async_write_tile(std::uint32_t page, const AddrGen& accessor, std::uint32_t source,
                                 std::uint8_t noc = noc_index, EMU_PLACE) {
    noc_async_write_page(page, accessor, source, 0, 0, noc, emu_file, emu_line);
}
template <std::uint32_t max_page_size = NOC_MAX_BURST_SIZE + 1>
inline void noc_async_write_multicast(std::uint32_t source, std::uint64_t destination, std::uint32_t size,
                                      std::uint32_t receivers, bool = false, std::uint8_t noc = noc_index,
                                      std::uint8_t vc = NOC_MULTICAST_WRITE_VC, EMU_PLACE) {
    EMU_HERE;
    emu_noc_write_multicast(source, destination, size, receivers, noc, vc, 0);
}
template <bool tracing = true>
inline void noc_async_write_multicast_one_packet(std::uint32_t source, std::uint64_t destination,
                                                 std::uint32_t size, std::uint32_t receivers, bool = false,
                                                 std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_write_multicast(source, destination, size, receivers, noc, NOC_MULTICAST_WRITE_VC, 0);
}
inline void noc_async_write_multicast_loopback_src(std::uint32_t source, std::uint64_t destination,
                                                   std::uint32_t size, std::uint32_t receivers, bool = false,
                                                   std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_write_multicast(source, destination, size, receivers, noc, NOC_MULTICAST_WRITE_VC, 1);
}
inline void noc_async_write_barrier(std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_write_barrier(noc);
}
inline void noc_async_writes_flushed(std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_writes_flushed(noc);
}
inline void noc_async_atomic_barrier(std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_atomic_barrier(noc);
}
inline void noc_async_full_barrier(std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_noc_read_barrier(noc, emulator_all_tags);
    emu_noc_write_barrier(noc);
    emu_noc_atomic_barrier(noc);
}
template <int dst_type = 0, bool posted = false, bool flush = true>
inline void noc_inline_dw_write(std::uint64_t destination, std::uint32_t value, std::uint8_t = 0xF,
                                std::uint8_t noc = noc_index, std::uint8_t vc = NOC_UNICAST_WRITE_VC,
                                std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_noc_inline_write(destination, value, noc, vc);
}

// Semaphores.
template <int type = 0>
FORCE_INLINE std::uintptr_t get_semaphore(std::uint32_t id, EMU_PLACE) {
    EMU_HERE;
    return emu_semaphore(id);
}
inline std::uint32_t emulator_address(const volatile std::uint32_t* pointer) {
    return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(pointer));
}
inline void noc_semaphore_wait(volatile tt_l1_ptr std::uint32_t* semaphore, std::uint32_t value, EMU_PLACE) {
    EMU_HERE;
    emu_semaphore_wait(emulator_address(semaphore), value, 0);
}
inline void noc_semaphore_wait_min(volatile tt_l1_ptr std::uint32_t* semaphore, std::uint32_t value,
                                   EMU_PLACE) {
    EMU_HERE;
    emu_semaphore_wait(emulator_address(semaphore), value, 1);
}
inline void noc_semaphore_set(volatile tt_l1_ptr std::uint32_t* semaphore, std::uint32_t value, EMU_PLACE) {
    EMU_HERE;
    emu_semaphore_set(emulator_address(semaphore), value);
}
template <bool posted = false>
inline void noc_semaphore_inc(std::uint64_t address, std::uint32_t value, std::uint8_t noc = noc_index,
                              std::uint8_t vc = NOC_UNICAST_WRITE_VC, EMU_PLACE) {
    EMU_HERE;
    emu_semaphore_inc(address, value, noc, vc);
}
template <bool posted = false>
inline void noc_semaphore_inc_multicast(std::uint64_t address, std::uint32_t value, std::uint32_t receivers,
                                        std::uint8_t noc = noc_index,
                                        std::uint8_t vc = NOC_MULTICAST_WRITE_VC, EMU_PLACE) {
    EMU_HERE;
    emu_semaphore_inc_multicast(address, value, receivers, noc, vc);
}
inline void noc_semaphore_set_remote(std::uint32_t source, std::uint64_t destination,
                                     std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_semaphore_set_remote(source, destination, noc);
}
inline void noc_semaphore_set_multicast(std::uint32_t source, std::uint64_t destination,
                                        std::uint32_t receivers, bool = false, std::uint8_t noc = noc_index,
                                        std::uint8_t vc = NOC_MULTICAST_WRITE_VC, EMU_PLACE) {
    EMU_HERE;
    emu_semaphore_set_multicast(source, destination, receivers, noc, vc, 0);
}
inline void noc_semaphore_set_multicast_loopback_src(std::uint32_t source, std::uint64_t destination,
                                                     std::uint32_t receivers, bool = false,
                                                     std::uint8_t noc = noc_index, EMU_PLACE) {
    EMU_HERE;
    emu_semaphore_set_multicast(source, destination, receivers, noc, NOC_MULTICAST_WRITE_VC, 1);
}

// A polling loop calls this on the device to see what others wrote; here it lets them run.
FORCE_INLINE void invalidate_l1_cache(EMU_PLACE) {
    EMU_HERE;
    emu_poll();
}
