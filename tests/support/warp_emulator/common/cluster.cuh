// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/common/cluster.cuh.
#pragma once

#include "common/element.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif

inline int rank_in_cluster() { return emulator::rank(); }
inline void sync_cluster() { emulator::wait(emulator::own_cluster()); }
inline void arrive_in_cluster() {
    emulator::fibers[emulator::current].of_cluster = emulator::arrive(emulator::own_cluster());
}
inline void wait_for_cluster() {
    emulator::await(emulator::own_cluster(), emulator::fibers[emulator::current].of_cluster);
}

inline int read_from(const int* here, int rank) {
    const auto* byte = reinterpret_cast<const unsigned char*>(here);
    int word;
    std::memcpy(&word, emulator::memory_of(rank) + (byte - dynamic_memory()), sizeof word);
    return word;
}
