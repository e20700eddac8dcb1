// SPDX-License-Identifier: Apache-2.0
// The simulated chip: cores with their L1, circular buffers and roles; DRAM buffers; what is counted.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/abi.h"
#include "findings.hpp"
#include "order.hpp"

extern "C" EmuPlace emu_place;  // where the role that runs is

namespace emulator {

// L1 of core i is mapped at kL1Base + i * kL1Stride, below 4 GiB, so that a kernel's 32-bit address is a
// pointer. An address of one core is valid on every other: the NoC takes it modulo the stride.
constexpr std::uint32_t kL1Base = 0x10000000;
constexpr std::uint32_t kL1Stride = 0x200000;
constexpr std::uint32_t kPoison = 0xFFBAFFBA;  // NaN as fp32, and as bf16 in both halves
constexpr int kCircularBuffers = 64;
constexpr std::uint32_t kSemaphores = 16;  // of a core

// State of four bytes of L1 or DRAM.
enum Shadow : std::uint8_t { WRITTEN = 1, ARRIVING = 2, LEAVING = 4 };

enum class RoleKind : std::uint8_t { Reader, Writer, Compute };
const char* name_of(RoleKind kind);

struct DramBuffer {
    std::string name;
    std::uint32_t base;       // address in every bank
    std::uint32_t page_size;  // bytes from one page of a bank to the next, aligned
    std::uint32_t pages;
    std::uint8_t* bytes;   // page after page
    std::uint8_t* shadow;  // a byte per four; null: everything is written
    std::vector<std::uint8_t> own_shadow;
    History history;
    std::uint64_t read_bytes = 0, written_bytes = 0;
};

struct CircularBuffer {
    bool there = false;
    int index = 0;
    std::uint32_t address = 0;  // in L1
    std::uint32_t size = 0;
    std::uint32_t page_size = 0;
    std::uint32_t pages = 0;
    std::uint32_t format = 0;
    std::uint64_t pushed = 0, popped = 0;
    std::uint64_t pushed_at = 0, popped_at = 0;  // time of the last one
    int pusher = -1, popper = -1;                // RoleKind
    Sync filled, emptied;
};

// A role's own view of a circular buffer: the pointers are kept by each RISC, not shared.
struct CircularBufferView {
    std::uint32_t write = 0, read = 0;  // byte offset in the buffer
    std::uint32_t reserved = 0, waited = 0;
    std::uint32_t packed = 0;  // tiles packed in order since the last push
};

struct Counters {
    std::uint64_t dram_read_bytes = 0, dram_written_bytes = 0;
    std::uint64_t noc_read_bytes = 0, noc_written_bytes = 0;
    std::uint64_t multicast_bytes = 0, multicast_received_bytes = 0;
    std::uint64_t tile_multiplies = 0, eltwise_tiles = 0, sfpu_tiles = 0, unpacked_tiles = 0,
                  packed_tiles = 0;
    std::uint64_t semaphore_messages = 0;
    // packets of data: reads, unicast and multicast writes; waits of a role for its transfers
    std::uint64_t dram_packets = 0, noc_packets = 0, barriers = 0;
    std::vector<std::uint64_t> bank_bytes;  // read over NoC 0 from each bank, then over NoC 1
};

struct Transfer {
    enum Kind : std::uint8_t { Read, Write, Multicast, Add, AddMulticast } kind;
    std::uint64_t remote;  // NoC address
    std::uint32_t local;   // L1 offset of the issuing core
    std::uint32_t size;
    std::uint32_t value;  // Add: what is added
    bool with_self;
    bool sent = false;      // the source bytes have been taken
    bool synchronises;      // a semaphore: may be looked at while it changes
    std::uint32_t tag;      // Read: its transaction id
    std::uint64_t arrival;  // time
    std::vector<std::uint8_t> bytes;
    EmuPlace place;
    Stamp stamp{};          // Read: what the issuer knew. A semaphore: what the message passes on
    std::uint32_t noc = 0;  // Read: that its barrier names
    bool ahead = false;  // had left when a semaphore message to the same place was issued: it stays in front
};

// Messages of one role on one NoC and virtual channel arrive in the order of issue.
struct Channel {
    std::uint32_t noc, vc;
    std::deque<Transfer> transfers;
};

struct Core;
struct Compute;
struct Fiber;

struct Kernel {
    std::string library, source;
    RoleKind kind = RoleKind::Reader;
    bool own_globals = false;  // has writable globals: every core loads a copy of its own
    std::vector<std::uint32_t> common_args;
    bool fp32_dest = false, full_sync = false;
    int fidelity_phases = 4;
    std::vector<int> unpack_fp32;  // circular buffers that are unpacked to DST as fp32
};

struct Wait {
    enum Kind : std::uint8_t { None, Reserve, Front, Semaphore, Time, Poll } kind = None;
    std::uint32_t a = 0, b = 0, at_least = 0;
};

struct Role {
    Core* core = nullptr;
    const Kernel* kernel = nullptr;
    RoleKind kind = RoleKind::Reader;
    void (*entry)() = nullptr;
    std::unique_ptr<Fiber> fiber;
    std::uint32_t id = 0;
    std::shared_ptr<Clock> known;  // see order.hpp
    std::uint32_t clock = 1;
    bool done = false, queued = false;
    std::uint64_t time = 0, waited = 0;
    bool open_atomics = false;  // increments since the last atomic barrier
    bool stored = false;        // to a semaphore, with a plain store
    Wait wait;
    EmuPlace place{nullptr, 0};
    std::uint8_t my_x[2], my_y[2];
    std::uint32_t args = 0, common = 0;  // L1 offsets
    std::uint32_t arg_count = 0, common_count = 0;
    std::uint32_t last_read = 0, same_reads = 0;  // raw loads in a row of one address
    std::array<CircularBufferView, kCircularBuffers> views;
    std::deque<Transfer> reads;
    std::uint32_t read_tag = 0;  // transaction id of the reads to come
    std::vector<std::unique_ptr<Channel>> channels;
    std::unique_ptr<Compute> compute;
    Role();
    ~Role();
};

struct Region {
    std::uint32_t begin, end;  // L1 offsets
    std::string name;
};

struct Core {
    int index = 0, x = 0, y = 0;
    std::uint8_t noc_x = 0, noc_y = 0;
    std::uint8_t* l1 = nullptr;
    std::uint8_t* shadow = nullptr;
    std::array<CircularBuffer, kCircularBuffers> buffers;
    std::vector<Region> regions;  // everything that is allocated in L1
    std::vector<std::uint64_t> semaphore_time;
    std::unordered_map<std::uint32_t, Sync>
        syncs;  // by L1 offset: semaphores, and words that are used as one
    History history;
    std::vector<std::unique_ptr<Role>> roles;
    Counters counters;
    std::uint32_t high_water = 0;
};

struct Chip {
    std::string arch;
    std::uint32_t l1_size = 0, l1_first = 0;
    std::uint32_t dram_banks = 0;
    std::uint32_t dram_alignment = 0, dram_read_alignment = 0, l1_alignment = 16;
    double dram_bytes_per_cycle = 0;  // of one bank
    std::uint32_t noc_bytes_per_cycle = 32;
    int columns = 0, rows = 0;
    std::uint32_t semaphores = 0;  // L1 offset of semaphore 0
    std::vector<std::uint64_t> bank_free;
};

struct Machine {
    Chip chip;
    std::vector<std::unique_ptr<Core>> cores;
    std::vector<DramBuffer> dram;
    std::vector<std::unique_ptr<Kernel>> kernels;
    std::vector<Role*> roles;  // by id
    Findings findings;
    std::vector<std::string> prints;
    Role* role = nullptr;                       // the one that runs
    std::array<std::int16_t, 64 * 64> core_at;  // by NoC y * 64 + x; -1: no Tensix core
    std::uint64_t steps = 0;
    bool deadlock = false;
    std::uint64_t seed = 0;  // of the schedule; 0: the least simulated time first
    // Matrix products as the FPU rounds them, and accesses checked for their order; else plain fp32 sums and
    // no such check, which is faster.
    bool exact = true;

    Core* core_of_noc(std::uint32_t x, std::uint32_t y);
    void report(const char* kind, const std::string& message);
    void report_at(const char* kind, const std::string& message, const EmuPlace& place, const Role& role);
};
extern Machine machine;

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string core_name(const Core& core);

// L1 memory with its shadow (memory.cpp).
inline std::uint32_t l1_offset(std::uint32_t address) {
    return address >= kL1Base ? (address - kL1Base) & (kL1Stride - 1) : address;
}
inline std::uint32_t l1_address(const Core& core, std::uint32_t offset) {
    return kL1Base + static_cast<std::uint32_t>(core.index) * kL1Stride + offset;
}
void map_l1(Core& core);
bool inside_l1(const Core& core, std::uint32_t offset, std::uint64_t size, const char* what);
const Region* region_of(const Core& core, std::uint32_t offset);
std::uint8_t any_shadow(const std::uint8_t* shadow, std::uint32_t begin, std::uint32_t size);
std::uint8_t all_shadow(const std::uint8_t* shadow, std::uint32_t begin, std::uint32_t size);
void set_shadow(std::uint8_t* shadow, std::uint32_t begin, std::uint32_t size, std::uint8_t set,
                std::uint8_t clear);
void poison(std::uint8_t* bytes, std::uint32_t size);
// Whether an L1 word is a semaphore: roles meet there, so their accesses need no other order.
bool is_semaphore(std::uint32_t offset);
// Complains if the role that runs reads, or is to write, bytes that are not settled or not its turn.
void check_read(Core& core, std::uint32_t offset, std::uint32_t size, const char* who);
void check_write(const Core& core, std::uint32_t offset, std::uint32_t size, const char* who);

// DRAM (dram.cpp). `visit` gets (buffer, byte offset in it, bytes, offset in the transfer).
struct DramSpan {
    DramBuffer* buffer;
    std::uint64_t at;
    std::uint32_t size, done;
};
bool dram_spans(std::uint32_t bank, std::uint32_t address, std::uint32_t size, const char* what,
                std::vector<DramSpan>& spans);

// Scheduling (scheduler.cpp).
void start(Role& role);
void run_all();
void wait_until(Wait::Kind kind, std::uint32_t a, std::uint32_t b, std::uint32_t at_least);
void sleep_until(std::uint64_t time);
void changed(Core& core);  // something that a role of this core may wait for
void spend(std::uint64_t cycles);
void arrives(Role& role, Channel& channel, std::uint64_t time);
// What the seed changes: how long a role or a message takes beyond its time, and where a role gives way.
std::uint64_t delay();
void may_give_way();
std::string describe_wait(const Role& role);

// NoC (noc.cpp).
void land_channel(Role& role, Channel& channel, std::uint64_t time, bool everything);
void finish_noc(Role& role);

}  // namespace emulator
