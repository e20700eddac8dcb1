// SPDX-License-Identifier: Apache-2.0
// The compute role: how unpacker, math and packer are configured, and the destination registers.
#pragma once

#include <deque>
#include <string>

#include "machine.hpp"
#include "tiles.hpp"

namespace emulator {

// The setup of a unit by its last init call. A call that needs another setup is an error: silicon would
// compute wrong values.
struct Setup {
    std::string name = "nothing";  // as in "matmul_init"
    std::uint32_t a = 0, b = 0, c = 0, d = 0;
    bool operator==(const Setup& other) const {
        return name == other.name && a == other.a && b == other.b && c == other.c && d == other.d;
    }
};

struct Compute {
    bool started = false;
    std::uint32_t format_a = ~0u, format_b = ~0u, format_pack = ~0u;
    Setup work;  // unpacker and math
    Setup pack;  // packer
    std::uint32_t sfpu = SFPU_NONE;
    bool l1_accumulate = false, relu = false;

    int capacity = 8;  // tiles of DST one section holds
    int sections = 2;
    int in_use = 0;  // sections acquired and not yet released
    bool acquired = false, waited = false;
    int math_section = 0, pack_section = 0;
    std::deque<int> committed;
    struct Section {
        Tile tiles[16];
        bool written[16] = {};
    };
    Section section[2];
};

// The compute state of the role that runs; reports a data-movement role that calls the compute API.
Compute* compute_state(const char* call);
void set_up(const char* name, std::uint32_t a = 0, std::uint32_t b = 0, std::uint32_t c = 0,
            std::uint32_t d = 0);
bool needs(Compute& state, const char* call, const Setup& wanted);
std::uint32_t format_of(std::uint32_t cb);

// A tile of DST that math may write (null and a report otherwise), and one that the packer may read.
Tile* dst_for_math(Compute& state, std::uint32_t index, const char* call, bool must_be_written);
Tile* dst_for_pack(Compute& state, std::uint32_t index, const char* call);
void settle(Compute& state, std::uint32_t index);  // rounds it to DST's format

// Source registers: what the unpacker makes of a tile of a circular buffer.
// Of a tile that is broadcast only `part` is used, so only that has to be written.
bool load(Compute& state, std::uint32_t cb, std::uint32_t tile, Unit unit, const char* call, Tile& into,
          bool to_dst = false, std::uint32_t part = NO_BROADCAST);

}  // namespace emulator
