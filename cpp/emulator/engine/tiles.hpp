// SPDX-License-Identifier: Apache-2.0
// Tiles of 32 x 32 values: four 16 x 16 faces, row after row, in L1; plain rows of fp32 here.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulator {

// tt-metal's numbers of the formats that are implemented.
enum Format : std::uint32_t {
    Float32 = 0,
    Float16_b = 5,
    Bfp8_b = 6,
    Bfp4_b = 7,
    Int32 = 8,
    UInt16 = 9,
    UInt32 = 24,
    UInt8 = 30
};
const char* format_name(std::uint32_t format);
bool is_integer(std::uint32_t format);
bool is_block_float(std::uint32_t format);
std::uint32_t tile_bytes(std::uint32_t format);
std::uint32_t element_bytes(std::uint32_t format);  // 0 for block formats

struct alignas(64) Tile {
    float at[32][32];
};

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounds to bf16, halves away from zero, as the FPU and the packer do; NaN stays NaN.
inline float round_bf16(float value) {
    const std::uint32_t bits = bits_of(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) {
        return float_of((bits & 0xFFFF0000) | 0x00400000);
    }
    return float_of((bits + 0x8000) & 0xFFFF0000);
}

// Face order of L1 <-> rows. Integers travel as the bits of a float.
void unpack_tile(std::uint32_t format, const std::uint8_t* from, Tile& to);
void pack_tile(std::uint32_t format, const Tile& from, std::uint8_t* to);
void pack_row(std::uint32_t format, const float* from, int count, std::uint8_t* to);
void unpack_row(std::uint32_t format, const std::uint8_t* from, int count, float* to);

void keep_mantissa(Tile& tile, int bits);  // cuts mantissas to that many explicit bits
void round_tile_bf16(Tile& tile);

// dst += a * b, k in ascending order; with `round`, dst is rounded to bf16 after every 16 of k.
void multiply(const Tile& a, const Tile& b, Tile& dst, bool round);

}  // namespace emulator
