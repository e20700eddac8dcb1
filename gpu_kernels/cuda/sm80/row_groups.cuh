// SPDX-License-Identifier: Apache-2.0
// Loops of kernels whose warps make all rows of a tile, in groups of 8.
#pragma once

// Numbers of groups whose loops are compiled, for tiles of GROUPS: of few all; else more of the upper half,
// where most items are. Tiles of more than eight take every second: they compile long.
template <int GROUPS>
struct RowGroups {
    static constexpr int FEWEST = GROUPS <= 4 ? 1 : GROUPS % 4 ? 2 : 4;
    __device__ __forceinline__ static constexpr int after(int groups) {
        const int step = GROUPS <= 8 ? 1 : 2;
        return groups + (GROUPS <= 4 || 2 * groups >= GROUPS ? step : 2 * step);
    }
};
