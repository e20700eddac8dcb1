// SPDX-License-Identifier: Apache-2.0
// Divide a decode step's attention into units that end at about the same time: long rows are cut, and the
// longest units come first.
//
// | argument   | shape  | dtype         |                                                     |
// |------------|--------|---------------|-----------------------------------------------------|
// | positions  | [T]    | int64         | of each token; 0 and more                           |
// | num_tokens | []     | int32 or null | tokens from it on have no keys, and come last       |
// | units      | [room] | Unit          | out; every token has one or more; the rest are none |
//
// A row of `capacity` tokens holds as many keys at most. A unit has at most max(least, all tiles / extra)
// tiles. So T + extra units and 2 * extra slots suffice: room >= T + extra. A row's units have as many tiles
// as one another, or one more.
//
// One block of 1024 threads; T <= 1024. A thread counts the tokens whose units are longer than its own's.
#include "common/scan.cuh"
#include "common/units.cuh"

constexpr int MOST = 1024, WARPS = MOST / 32;

struct Shared {
    int longest[MOST];  // tiles of a token's longest unit
    u32 units[MOST];    // by place in the order: units in the low half, of them in slots in the high one
    u64 sums[WARPS];
};

extern "C" __global__ void __launch_bounds__(MOST)
    decode_units(const long long* positions, const int* num_tokens, Unit* units, int T, int capacity,
                 int least, int extra, int room) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_memory());
    const int t = threadIdx.x, count = num_tokens ? *num_tokens : T;
    const long long position = t < T && t < count ? positions[t] : -1;
    const int tiles = static_cast<int>((position < capacity ? position + 1 : capacity) + 15) / 16;
    scan(tiles, shared.sums, WARPS);
    const int most = max(least, static_cast<int>(shared.sums[WARPS - 1] + extra - 1) / extra);
    const int parts = t < T ? max(1, (tiles + most - 1) / most) : 0;
    const int mine = parts ? (tiles + parts - 1) / parts : -1;
    shared.longest[t] = mine;
    __syncthreads();
    int place = t;  // past the last token: no units
    if (t < T) {
        place = 0;
        for (int i = 0; i < T; i += 4) {
            const int4 four = *reinterpret_cast<const int4*>(shared.longest + i);
            const int others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) place += others[j] > mine || (others[j] == mine && i + j < t);
        }
    }
    shared.units[place] = static_cast<u32>(parts) | static_cast<u32>(parts > 1 ? parts : 0) << 16;
    __syncthreads();
    shared.units[t] = static_cast<u32>(scan(shared.units[t], shared.sums, WARPS));
    const int total = static_cast<int>(shared.sums[WARPS - 1] & 0xffff);  // of units
    __syncthreads();
    if (t < T) {
        const u32 at = shared.units[place];
        const int each = tiles / parts, more = tiles % parts;
        for (int i = 0, first = 0; i < parts; ++i) {
            const int end = first + each + (i < more);
            units[(at & 0xffff) + i] =
                Unit{t | parts << 16, first, end, static_cast<int>(at >> 16 | static_cast<u32>(i) << 16)};
            first = end;
        }
    }
    for (int i = total + t; i < room; i += MOST) units[i] = Unit{-1, 0, 0, 0};
}
