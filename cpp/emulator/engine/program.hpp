// SPDX-License-Identifier: Apache-2.0
// Reads the program to run and writes its result. Both are plain text; see _describe in
// ttnn_moe/tenstorrent/emulator/run.py, and result.py beside it.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

namespace emulator {

void read_program(std::istream& in, std::uint8_t* memory, std::uint64_t memory_bytes);
void load_kernels(const std::string& scratch);
void check_end();
void write_result(std::ostream& out);

}  // namespace emulator
