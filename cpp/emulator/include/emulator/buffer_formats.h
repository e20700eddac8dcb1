// SPDX-License-Identifier: Apache-2.0
// Format and tile size of each circular buffer, known when a kernel is compiled, as on the device: the build
// writes EMULATOR_CB_FORMATS, a list of {index, format, bytes of a tile}.
#pragma once

#include <cstdint>

namespace emulator {
struct BufferFormat {
    std::int32_t index;
    DataFormat format;
    std::uint32_t tile_bytes;
};
#ifndef EMULATOR_CB_FORMATS
#define EMULATOR_CB_FORMATS {-1, DataFormat::Invalid, 0}
#endif
constexpr BufferFormat buffer_formats[] = {EMULATOR_CB_FORMATS};
constexpr BufferFormat buffer_format(std::int32_t cb) {
    for (const BufferFormat& one : buffer_formats) {
        if (one.index == cb) {
            return one;
        }
    }
    return {cb, DataFormat::Invalid, 0};
}
}  // namespace emulator

constexpr std::uint32_t get_tile_size(const std::int32_t cb) {
    return emulator::buffer_format(cb).tile_bytes;
}
constexpr std::uint32_t get_tile_hw(const std::int32_t) { return 1024; }
constexpr std::uint32_t get_tile_num_faces(const std::int32_t) { return 4; }
constexpr DataFormat get_dataformat(const std::int32_t cb) { return emulator::buffer_format(cb).format; }
