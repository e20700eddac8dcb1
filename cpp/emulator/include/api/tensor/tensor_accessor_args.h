// SPDX-License-Identifier: Apache-2.0
// The compile-time arguments of an interleaved tensor: [flags, aligned page size], or the flags alone and the
// page size as a common runtime argument.
#pragma once

#include "api/compile_time_args.h"

namespace tensor_accessor {
constexpr std::size_t UNKNOWN = static_cast<std::size_t>(-1);
enum Flag : std::uint32_t { Sharded = 1, IsDram = 2, RuntimePageSize = 128 };
}  // namespace tensor_accessor

template <std::size_t CTA_OFFSET, std::size_t CRTA_OFFSET = tensor_accessor::UNKNOWN>
struct TensorAccessorArgs {
    static constexpr std::uint32_t flags = get_ct_arg<CTA_OFFSET>();
    static constexpr bool is_sharded = (flags & tensor_accessor::Sharded) != 0;
    static constexpr bool is_dram = (flags & tensor_accessor::IsDram) != 0;
    static constexpr bool page_size_is_crta = (flags & tensor_accessor::RuntimePageSize) != 0;
    static_assert(!is_sharded, "the emulator has interleaved tensors only");
    static_assert(is_dram, "the emulator has tensors in DRAM only");
    static constexpr std::uint32_t page_size_ct() {
        if constexpr (page_size_is_crta) {
            return 0;
        } else {
            return get_ct_arg<CTA_OFFSET + 1>();
        }
    }
    static constexpr std::uint32_t AlignedPageSize = page_size_ct();

    constexpr TensorAccessorArgs() : offset_(0) {}
    constexpr explicit TensorAccessorArgs(std::uint32_t offset) : offset_(offset) {}
    constexpr std::uint32_t crta_offset() const {
        return CRTA_OFFSET != tensor_accessor::UNKNOWN ? static_cast<std::uint32_t>(CRTA_OFFSET) : offset_;
    }
    constexpr std::uint32_t get_aligned_page_size() const {
        if constexpr (page_size_is_crta) {
            return get_common_arg_val<std::uint32_t>(static_cast<int>(crta_offset()));
        } else {
            return AlignedPageSize;
        }
    }
    static constexpr std::uint32_t num_compile_time_args() { return page_size_is_crta ? 1 : 2; }
    static constexpr std::uint32_t next_compile_time_args_offset() {
        return CTA_OFFSET + num_compile_time_args();
    }
    constexpr std::uint32_t num_common_runtime_args() const { return page_size_is_crta ? 1 : 0; }
    constexpr std::uint32_t next_common_runtime_args_offset() const {
        return crta_offset() + num_common_runtime_args();
    }

  private:
    std::uint32_t offset_;
};
