// SPDX-License-Identifier: Apache-2.0
// The network on chip, between the calls of kernels (noc.cpp, semaphores.cpp) and what becomes of them
// (transfers.cpp, landing.cpp).
#pragma once

#include "machine.hpp"

namespace emulator {

constexpr std::uint64_t kIssueCycles = 30, kDramLatency = 350, kHopLatency = 120;
constexpr std::uint32_t kDramRow = 63;  // y of a DRAM bank's address

inline std::uint32_t local_of(std::uint64_t address) {
    return l1_offset(static_cast<std::uint32_t>(address & 0xFFFFFFFFFull));
}
inline std::uint32_t end_x(std::uint64_t address) { return (address >> 36) & 63; }
inline std::uint32_t end_y(std::uint64_t address) { return (address >> 42) & 63; }
inline std::uint32_t start_x(std::uint64_t address) { return (address >> 48) & 63; }
inline std::uint32_t start_y(std::uint64_t address) { return (address >> 54) & 63; }
inline bool is_dram(std::uint64_t address) { return end_y(address) == kDramRow; }

// Packets that a transfer is cut into.
std::uint64_t packets(std::uint32_t size);
std::uint64_t transfer_time(const Role& role, std::uint64_t remote, std::uint32_t size, bool read);
bool aligned(std::uint64_t remote, std::uint32_t local, bool read, const char* call);
Core* far_core(std::uint64_t remote, const char* call);
std::vector<Core*> receivers_of(std::uint64_t remote, std::uint32_t noc, bool with_self,
                                std::uint32_t expected, const char* call);
Channel& channel_of(Role& role, std::uint32_t noc, std::uint32_t vc);
void land_read(Role& role, const Transfer& t);
void take(Role& role, Transfer& t);
Transfer& issue(Transfer::Kind kind, std::uint32_t source, std::uint64_t destination, std::uint32_t size,
                std::uint32_t noc, std::uint32_t vc, bool synchronises);
bool source_ready(std::uint32_t source, std::uint32_t size, const char* call);
void expect_in(Core& core, std::uint32_t at, std::uint32_t size, const char* call);

}  // namespace emulator
