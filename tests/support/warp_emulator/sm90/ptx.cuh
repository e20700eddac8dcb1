// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm90/ptx.cuh.
#pragma once

#include <tuple>

#include "common/copies.cuh"
#include "common/flags.cuh"

// As tests/support/host_kernels.py makes it: innermost dimension first, rows of 128 bytes; swizzled by 128 bytes.
struct TensorMap {
    const unsigned char* from;
    int rank;
    u32 sizes[5], box[5];
    u64 strides[5];  // bytes
    int bytes;       // of an element
};

namespace emulator {

// Eight bytes of shared memory.
struct Barrier {
    int bytes;  // that are still to come
    u16 open, count : 15, parity : 1;
};
static_assert(sizeof(Barrier) == 8);

inline Barrier& barrier_at(int block, u32 address) {
    if (address % 8 || static_cast<int>(address) + 8 > shared_bytes) fail("a barrier outside shared memory");
    return *reinterpret_cast<Barrier*>(memories[block].bytes + address);
}

inline void settle(Barrier& barrier) {
    ++events;
    if (barrier.open || barrier.bytes) return;
    barrier.open = barrier.count;
    barrier.parity ^= 1;
}

inline void come(int block, u32 address) {
    Barrier& barrier = barrier_at(block, address);
    if (barrier.open-- == 0) fail("more come to a barrier than it counts");
    settle(barrier);
}

inline void land_bytes(int block, u32 address, int bytes) {
    Barrier& barrier = barrier_at(block, address);
    barrier.bytes -= bytes;
    settle(barrier);
}

// What lands for a block's barrier: at once or, late, when that block waits for it.
inline void fly(int block, u32 barrier, std::function<void()> land) {
    if (late)
        flights.push_back({block, barrier, std::move(land)});
    else
        land();
}

inline bool land_all(u32 barrier) {
    std::vector<Flight> here;
    for (std::size_t i = 0; i < flights.size();) {
        if (flights[i].block == block() && flights[i].barrier == barrier) {
            here.push_back(std::move(flights[i]));
            flights.erase(flights.begin() + i);
        } else {
            ++i;
        }
    }
    for (const Flight& flight : here) flight.land();
    return !here.empty();
}

// Where bytes of a swizzled row lie: eight rows of 128 bytes begin at a multiple of 1024.
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

inline void load(u32 to, const TensorMap* map, u32 barrier, std::array<int, 5> at) {
    if (to % 128 || map->box[0] * map->bytes != 128) fail("a box does not fit the swizzle");
    const int me = block();
    fly(me, barrier, [=, map = *map] {
        int rows = 1;
        for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
        if (static_cast<int>(to) + rows * 128 > shared_bytes) fail("a box outside shared memory");
        for (int row = 0; row < rows; ++row) {
            const unsigned char* from = map.from;
            bool inside = true;
            for (int d = 1, left = row; d < map.rank; left /= map.box[d++]) {
                const int place = at[d] + left % map.box[d];
                inside &= place >= 0 && place < static_cast<int>(map.sizes[d]);
                from += place * static_cast<int64_t>(map.strides[d]);
            }
            for (int i = 0; i < 128 / map.bytes; ++i) {
                const int place = at[0] + i;
                unsigned char* out = memories[me].bytes + swizzled(to + row * 128 + i * map.bytes);
                if (inside && place >= 0 && place < static_cast<int>(map.sizes[0]))
                    std::memcpy(out, from + place * map.bytes, map.bytes);
                else
                    std::memset(out, 0, map.bytes);
            }
        }
        land_bytes(me, barrier, rows * 128);
    });
}

inline Named& named(u32 id) { return of_names[block()][id]; }

inline unsigned come_named(u32 id, u32 threads) {
    Named& barrier = named(id);
    const unsigned generation = barrier.generation;
    ++events;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    return generation;
}

// Lane l gives the address of row l % 8 of matrix l / 8.
inline void store_fragments(u32 row, const std::array<u32, 4>& words, bool transpose) {
    const int me = current, lane = me % 32;
    fibers[me].words[0] = row;
    meet_warp();
    for (int m = 0; m < 4; ++m)
        for (int i = 0; i < 2; ++i) {
            const int r = lane / 4, c = lane % 4 * 2 + i;
            const u32 to = fibers[me - lane + 8 * m + (transpose ? c : r)].words[0];
            const u16 element = words[m] >> (16 * i);
            std::memcpy(shared(to) + (transpose ? r : c) * 2, &element, 2);
        }
    meet_warp();
}

}  // namespace emulator

// ---- barriers

inline void barrier_init(u32 barrier, u32 arrivals) {
    emulator::barrier_at(emulator::block(), barrier) = {0, static_cast<u16>(arrivals),
                                                        static_cast<u16>(arrivals), 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(u32 barrier) { emulator::come(emulator::block(), barrier); }
inline void barrier_arrive_expect(u32 barrier, u32 bytes) {
    emulator::barrier_at(emulator::block(), barrier).bytes += bytes;
    barrier_arrive(barrier);
}
namespace emulator {

// To another block's shared memory, whose barrier counts the bytes.
template <class T>
void send(u32 here, u32 rank, u32 barrier, const T& value) {
    if (cluster < 2) fail("st.async without a cluster is an illegal instruction");
    if (here % sizeof value || static_cast<int>(here + sizeof value) > shared_bytes) fail("outside shared memory");
    std::memcpy(memory_of(rank) + here, &value, sizeof value);
    land_bytes(block() - emulator::rank() + rank, barrier, sizeof value);
}

}  // namespace emulator

inline void send_one(u32 here, u32 rank, u32 barrier, float value) { emulator::send(here, rank, barrier, value); }
inline void send_two(u32 here, u32 rank, u32 barrier, float first, float second) {
    emulator::send(here, rank, barrier, std::array{first, second});
}
inline void send_bytes(u32 from, u32 here, u32 rank, u32 barrier, u32 bytes) {
    if (emulator::cluster < 2) emulator::fail("bytes for another block without a cluster");
    if (from % 16 || here % 16 || bytes % 16) emulator::fail("bytes that begin between");
    if (static_cast<int>(std::max(from, here) + bytes) > emulator::shared_bytes) emulator::fail("outside shared memory");
    const int me = emulator::block(), to = me - emulator::rank() + rank;
    emulator::fly(to, barrier, [=] {
        std::memcpy(emulator::memories[to].bytes + here, emulator::memories[me].bytes + from, bytes);
        emulator::land_bytes(to, barrier, bytes);
    });
}
inline void barrier_wait(u32 barrier, u32 parity) {
    while (emulator::barrier_at(emulator::block(), barrier).parity == parity)
        if (!emulator::land_all(barrier)) emulator::pause();
    ++emulator::events;
}
inline void named_sync(u32 id, u32 threads) {
    const unsigned generation = emulator::come_named(id, threads);
    while (emulator::named(id).generation == generation) emulator::pause();
}
inline void named_arrive(u32 id, u32 threads) { emulator::come_named(id, threads); }

// ---- words in memory by which blocks hear of each other

// ---- copies

inline void prefetch_map(const TensorMap*) {}
inline void tensor_load_2d(u32 to, const TensorMap* map, u32 barrier, int x, int y) {
    emulator::load(to, map, barrier, {x, y});
}
inline void tensor_load_3d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, u64 = 0) {
    emulator::load(to, map, barrier, {x, y, z});
}
inline void tensor_load_4d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, int u) {
    emulator::load(to, map, barrier, {x, y, z, u});
}
inline void tensor_load_5d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, int u, int v,
                           u64 = 0) {
    emulator::load(to, map, barrier, {x, y, z, u, v});
}

inline void bytes_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulator::fail("bytes that begin between");
    if (static_cast<int>(to + bytes) > emulator::shared_bytes) emulator::fail("bytes outside shared memory");
    const int me = emulator::block();
    emulator::fly(me, barrier, [=] {
        std::memcpy(emulator::memories[me].bytes + to, from, bytes);
        emulator::land_bytes(me, barrier, bytes);
    });
}

inline void bytes_prefetch(const void* from, u32 bytes) {
    if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulator::fail("bytes that begin between");
}

// Copies that were committed are not among those that it waits for here.
inline void copies_arrive(u32 barrier) {
    auto& open = emulator::fibers[emulator::current].open;
    std::vector<std::tuple<unsigned char*, const void*, int>> copies;
    for (const auto& copy : open)
        copies.emplace_back(emulator::shared(copy.to, copy.bytes), copy.from, copy.bytes);
    open.clear();
    const int me = emulator::block();
    emulator::fly(me, barrier, [=] {
        for (const auto& [to, from, bytes] : copies) std::memcpy(to, from, bytes);
        emulator::come(me, barrier);
    });
}

inline void fence_async_proxy() {}
inline void store_float(u32 to, float value) {
    std::memcpy(emulator::shared(to / 16 * 16) + to % 16, &value, sizeof value);
}
inline void store_two(u32 to, float first, float second) {
    const float both[2] = {first, second};
    std::memcpy(emulator::shared(to, 8), both, 8);
}
inline void store_16(u32 to, uint4 words) { std::memcpy(emulator::shared(to), &words, 16); }
inline u32 load_word(u32 from) {
    u32 word;
    std::memcpy(&word, emulator::shared(from / 16 * 16) + from % 16, 4);
    return word;
}
inline u32 load_byte(u32 from) { return emulator::shared(from / 16 * 16)[from % 16]; }
inline void store_transposed(u32 row, u32 a, u32 b, u32 c, u32 d) {
    emulator::store_fragments(row, {a, b, c, d}, true);
}
inline void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
    emulator::store_fragments(row, {a, b, c, d}, false);
}

// ---- arithmetic, registers

inline u32 multiply_pairs(u32 a, u32 b) {
    return pack(first_of(a) * first_of(b), second_of(a) * second_of(b));
}
inline uint4 times(uint4 a, uint4 b) {
    return make_uint4(multiply_pairs(a.x, b.x), multiply_pairs(a.y, b.y), multiply_pairs(a.z, b.z),
                      multiply_pairs(a.w, b.w));
}
inline float exp2_of(float x) { return std::exp2(x); }
inline void before_all_else(float, u32) {}

template <int COUNT>
void give_registers() {}
template <int COUNT>
void take_registers() {}
