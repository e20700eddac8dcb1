// SPDX-License-Identifier: Apache-2.0
// DRAM: which buffer and page an address of a bank belongs to. Pages of a buffer are interleaved over the
// banks. This memory stores them one after the other, so that the host reads and writes them in place.
#include <algorithm>

#include "machine.hpp"

namespace emulator {

bool dram_spans(std::uint32_t bank, std::uint32_t address, std::uint32_t size, const char* what,
                std::vector<DramSpan>& spans) {
    spans.clear();
    const std::uint32_t banks = machine.chip.dram_banks;
    std::uint32_t done = 0;
    while (done < size) {
        const std::uint32_t at = address + done;
        DramBuffer* found = nullptr;
        for (DramBuffer& buffer : machine.dram) {
            const std::uint64_t rows = (buffer.pages + banks - 1) / banks;
            if (at >= buffer.base && at < buffer.base + rows * buffer.page_size) {
                found = &buffer;
                break;
            }
        }
        if (bank >= banks || found == nullptr) {
            machine.report("dram-out-of-range",
                           text("%s: bank %u, address 0x%x lies in no tensor", what, bank, at));
            return false;
        }
        const std::uint32_t row = (at - found->base) / found->page_size;
        const std::uint32_t inside = (at - found->base) % found->page_size;
        const std::uint64_t page = std::uint64_t{row} * banks + bank;
        if (page >= found->pages) {
            machine.report("dram-out-of-range",
                           text("%s: page %llu of tensor %s, which has %u pages", what,
                                static_cast<unsigned long long>(page), found->name.c_str(), found->pages));
            return false;
        }
        const std::uint32_t part = std::min(size - done, found->page_size - inside);
        spans.push_back({found, page * found->page_size + inside, part, done});
        done += part;
    }
    return true;
}

}  // namespace emulator
