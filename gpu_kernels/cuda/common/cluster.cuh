// SPDX-License-Identifier: Apache-2.0
// A cluster of CLUSTER blocks (before sm_90 always one): synchronisation and distributed shared memory.
#pragma once

#include "common/element.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif

__device__ __forceinline__ int rank_in_cluster() {
#if CLUSTER > 1
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

__device__ __forceinline__ void sync_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Arrive; the wait follows later. No block of the cluster exits before it. Orders no memory.
__device__ __forceinline__ void arrive_in_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The word at the same offset in another block of the cluster.
__device__ __forceinline__ int read_from(const int* here, int rank) {
#if CLUSTER > 1
    u32 address = static_cast<u32>(__cvta_generic_to_shared(here)), there;
    int value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
    return value;
#else
    return *here;
#endif
}
