// SPDX-License-Identifier: Apache-2.0
#include "tiles.hpp"

#include <algorithm>
#include <cmath>

namespace emulator {
namespace {

// Row and column of the first value of each of the 64 rows of 16 values that make a tile.
inline int face_row(int sixteen) { return (sixteen / 32) * 16 + sixteen % 16; }
inline int face_column(int sixteen) { return (sixteen / 16 % 2) * 16; }

float from_block(std::uint32_t magnitude, bool negative, std::uint32_t exponent, int bits) {
    if (magnitude == 0) {
        return negative ? -INFINITY : 0.0f;
    }
    const float value =
        std::ldexp(static_cast<float>(magnitude), static_cast<int>(exponent) - 127 - (bits - 1));
    return negative ? -value : value;
}

}  // namespace

const char* format_name(std::uint32_t format) {
    switch (format) {
        case Float32:
            return "Float32";
        case Float16_b:
            return "Float16_b";
        case Bfp8_b:
            return "Bfp8_b";
        case Bfp4_b:
            return "Bfp4_b";
        case Int32:
            return "Int32";
        case UInt16:
            return "UInt16";
        case UInt32:
            return "UInt32";
        case UInt8:
            return "UInt8";
        default:
            return "unknown";
    }
}

bool is_integer(std::uint32_t format) {
    return format == Int32 || format == UInt16 || format == UInt32 || format == UInt8;
}
bool is_block_float(std::uint32_t format) { return format == Bfp8_b || format == Bfp4_b; }

std::uint32_t element_bytes(std::uint32_t format) {
    switch (format) {
        case Float32:
        case Int32:
        case UInt32:
            return 4;
        case Float16_b:
        case UInt16:
            return 2;
        case UInt8:
            return 1;
        default:
            return 0;
    }
}

std::uint32_t tile_bytes(std::uint32_t format) {
    switch (format) {
        case Bfp8_b:
            return 1024 + 64;
        case Bfp4_b:
            return 512 + 64;
        default:
            return 1024 * element_bytes(format);
    }
}

void unpack_row(std::uint32_t format, const std::uint8_t* from, int count, float* to) {
    switch (format) {
        case Float32:
        case Int32:
        case UInt32:
            std::memcpy(to, from, static_cast<std::size_t>(count) * 4);
            break;
        case Float16_b:
            for (int i = 0; i < count; ++i) {
                std::uint16_t half;
                std::memcpy(&half, from + 2 * i, 2);
                to[i] = float_of(std::uint32_t{half} << 16);
            }
            break;
        case UInt16:
            for (int i = 0; i < count; ++i) {
                std::uint16_t half;
                std::memcpy(&half, from + 2 * i, 2);
                to[i] = float_of(half);
            }
            break;
        default:
            for (int i = 0; i < count; ++i) {
                to[i] = float_of(from[i]);
            }
    }
}

void pack_row(std::uint32_t format, const float* from, int count, std::uint8_t* to) {
    switch (format) {
        case Float32:
        case Int32:
        case UInt32:
            std::memcpy(to, from, static_cast<std::size_t>(count) * 4);
            break;
        case Float16_b:
            for (int i = 0; i < count; ++i) {
                std::uint32_t bits = bits_of(round_bf16(from[i]));
                if ((bits & 0x7F800000) == 0) {
                    bits = 0;  // subnormals are flushed
                }
                const auto half = static_cast<std::uint16_t>(bits >> 16);
                std::memcpy(to + 2 * i, &half, 2);
            }
            break;
        case UInt16:
            for (int i = 0; i < count; ++i) {
                const auto half = static_cast<std::uint16_t>(bits_of(from[i]));
                std::memcpy(to + 2 * i, &half, 2);
            }
            break;
        default:
            for (int i = 0; i < count; ++i) {
                to[i] = static_cast<std::uint8_t>(bits_of(from[i]));
            }
    }
}

void unpack_tile(std::uint32_t format, const std::uint8_t* from, Tile& to) {
    if (!is_block_float(format)) {
        const std::uint32_t bytes = 16 * element_bytes(format);
        for (int s = 0; s < 64; ++s) {
            unpack_row(format, from + static_cast<std::uint32_t>(s) * bytes, 16,
                       &to.at[face_row(s)][face_column(s)]);
        }
        return;
    }
    // 64 shared exponents, then sign and magnitude of each value.
    const std::uint8_t* values = from + 64;
    for (int s = 0; s < 64; ++s) {
        float* row = &to.at[face_row(s)][face_column(s)];
        for (int i = 0; i < 16; ++i) {
            if (format == Bfp8_b) {
                const std::uint8_t v = values[s * 16 + i];
                row[i] = from_block(v & 0x7F, (v & 0x80) != 0, from[s], 7);
            } else {
                const std::uint8_t v =
                    static_cast<std::uint8_t>(values[(s * 16 + i) / 2] >> (i % 2 * 4)) & 0xF;
                row[i] = from_block(v & 0x7, (v & 0x8) != 0, from[s], 3);
            }
        }
    }
}

void pack_tile(std::uint32_t format, const Tile& from, std::uint8_t* to) {
    if (!is_block_float(format)) {
        const std::uint32_t bytes = 16 * element_bytes(format);
        for (int s = 0; s < 64; ++s) {
            pack_row(format, &from.at[face_row(s)][face_column(s)], 16,
                     to + static_cast<std::uint32_t>(s) * bytes);
        }
        return;
    }
    for (int s = 0; s < 64; ++s) {
        const float* row = &from.at[face_row(s)][face_column(s)];
        std::uint32_t bits[16], top = 0;
        for (int i = 0; i < 16; ++i) {
            bits[i] = bits_of(row[i]) >> 16;
            top = std::max(top, (bits[i] >> 7) & 255);
        }
        to[s] = static_cast<std::uint8_t>(top);
        for (int i = 0; i < 16; ++i) {
            const std::uint32_t exponent = (bits[i] >> 7) & 255, shift = top - exponent;
            std::uint32_t magnitude = exponent == 0 ? 0 : (bits[i] & 127) | 128;
            magnitude = shift >= 8 ? 0 : std::min(127u, (magnitude + (1u << shift)) >> (shift + 1));
            if (format == Bfp8_b) {
                to[64 + s * 16 + i] =
                    static_cast<std::uint8_t>(magnitude | (magnitude != 0 ? (bits[i] >> 15) << 7 : 0));
            } else {
                magnitude >>= 4;
                const std::uint32_t nibble = magnitude | (magnitude != 0 ? (bits[i] >> 15) << 3 : 0);
                std::uint8_t& byte = to[64 + (s * 16 + i) / 2];
                byte = static_cast<std::uint8_t>(i % 2 == 0 ? (byte & 0xF0) | nibble
                                                            : (byte & 0x0F) | nibble << 4);
            }
        }
    }
}

void keep_mantissa(Tile& tile, int bits) {
    const std::uint32_t mask = ~((1u << (23 - bits)) - 1);
    float* value = &tile.at[0][0];
    for (int i = 0; i < 1024; ++i) {
        value[i] = float_of(bits_of(value[i]) & mask);
    }
}

void round_tile_bf16(Tile& tile) {
    float* value = &tile.at[0][0];
    for (int i = 0; i < 1024; ++i) {
        value[i] = round_bf16(value[i]);
    }
}

void multiply(const Tile& a, const Tile& b, Tile& dst, bool round) {
    for (int half = 0; half < 2; ++half) {
        for (int m = 0; m < 32; ++m) {
            float sum[32];
            for (int n = 0; n < 32; ++n) {
                sum[n] = 0.0f;
            }
            for (int k = half * 16; k < half * 16 + 16; ++k) {
                const float left = a.at[m][k];
                const float* right = b.at[k];
                for (int n = 0; n < 32; ++n) {
                    sum[n] += left * right[n];
                }
            }
            for (int n = 0; n < 32; ++n) {
                const float total = dst.at[m][n] + sum[n];
                dst.at[m][n] = round ? round_bf16(total) : total;
            }
        }
    }
}

}  // namespace emulator
