// SPDX-License-Identifier: Apache-2.0
// Stands in for NCCL's device API: the types and calls that network.cuh uses, without bodies that send.
#pragma once

#define offsetof(type, member) __builtin_offsetof(type, member)

struct Window;
using ncclWindow_t = Window*;

struct ncclTeam {
    int ranks, rank, stride;
};

struct ncclDevComm {
    int ginContextCount;
};

struct ncclGin_StrongVASignalAdd {
    ncclWindow_t signalWindow;
    unsigned long signalOffset;
    unsigned long value;
};

struct ncclGin_WeakVASignalAdd {
    ncclWindow_t signalWindow;
    unsigned long signalOffset;
    unsigned long value;
};

__device__ inline ncclTeam ncclTeamWorld(const ncclDevComm&) { return {}; }

__device__ unsigned long long sent[8];  // what the calls were told, so that they are not dropped

struct ncclGin {
    __device__ ncclGin(const ncclDevComm&, int context) { sent[0] += context; }
    __device__ void get(ncclTeam, int peer, ncclWindow_t, unsigned long from, ncclWindow_t, unsigned long to,
                        unsigned long bytes) const {
        sent[1] += peer + from + to + bytes;
    }
    template <class Value>
    __device__ void putValue(ncclTeam, int peer, ncclWindow_t, unsigned long to, Value value) const {
        sent[2] += peer + to + value;
    }
    template <class Signal>
    __device__ void put(ncclTeam, int peer, ncclWindow_t, unsigned long to, ncclWindow_t, unsigned long from,
                        unsigned long bytes, Signal given) const {
        sent[3] += peer + to + from + bytes + given.signalOffset + given.value;
    }
    template <class Signal>
    __device__ void signal(ncclTeam, int peer, Signal given) const {
        sent[4] += peer + given.signalOffset + given.value;
    }
};
