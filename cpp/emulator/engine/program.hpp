// Reading what is to be run, and writing what came of it. Both are plain text; see
// ttnn_moe/tenstorrent/emulator/wire.py.
#pragma once

#include <iosfwd>
#include <string>

namespace emulator {

void read_program(std::istream& in, std::uint8_t* memory, std::uint64_t memory_bytes);
void load_kernels(const std::string& scratch);
void check_end();
void write_result(std::ostream& out);

}  // namespace emulator
