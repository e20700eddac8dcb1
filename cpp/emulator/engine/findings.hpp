// SPDX-License-Identifier: Apache-2.0
// Findings of a run: each kind once per kernel line, with a count.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

struct Finding {
    std::string kind;    // stable name, e.g. "read-before-barrier"
    std::string core;    // "(x, y)" of the first core it happened on
    std::string role;    // "reader", "compute", "writer"
    std::string kernel;  // source of that role's kernel
    std::string file;    // line of kernel source, where known
    int line = 0;
    std::string library;  // and for a raw access: library and offset of the instruction, to be looked up with
                          // addr2line
    std::uint64_t offset = 0;
    std::string message;
    std::uint64_t count = 1;
};

class Findings {
  public:
    // Adds a finding; if its kind is known for its place, counts it.
    void add(Finding finding);
    const std::vector<Finding>& all() const { return findings_; }

  private:
    std::vector<Finding> findings_;
};

}  // namespace emulator
