// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/tensor/tensor_accessor_args.h"

inline constexpr std::uint8_t emulator_any_noc = 0xFF;

// Pages of an interleaved tensor go round the DRAM banks.
struct TensorAccessor {
    template <std::size_t CTA_OFFSET, std::size_t CRTA_OFFSET>
    TensorAccessor(const TensorAccessorArgs<CTA_OFFSET, CRTA_OFFSET>& args, std::size_t base)
        : TensorAccessor(args, base, args.get_aligned_page_size()) {}
    template <std::size_t CTA_OFFSET, std::size_t CRTA_OFFSET>
    TensorAccessor(const TensorAccessorArgs<CTA_OFFSET, CRTA_OFFSET>&, std::size_t base,
                   std::uint32_t page_bytes)
        : bank_base_address(static_cast<std::uint32_t>(base)), page_size(page_bytes) {}

    std::uint32_t get_aligned_page_size() const { return page_size; }
    std::uint32_t get_bank_base_address() const { return bank_base_address; }
    std::uint64_t get_noc_addr(std::uint32_t page, std::uint32_t offset = 0,
                               std::uint8_t = emulator_any_noc) const {
        const std::uint32_t banks = emu_dram_banks(), unit = emu_dram_alignment();
        const std::uint32_t stride = (page_size + unit - 1) / unit * unit;
        return emu_dram_bank_address(page % banks, bank_base_address + page / banks * stride + offset);
    }

    std::uint32_t bank_base_address;
    std::uint32_t page_size;
};
