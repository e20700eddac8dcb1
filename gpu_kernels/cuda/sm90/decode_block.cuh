// SPDX-License-Identifier: Apache-2.0
// Sizes and shared memory of a block of decode_attention.
#pragma once

#ifndef PARTS
#define PARTS 4
#endif
#define CLUSTER PARTS

#include "common/cluster.cuh"
#include "common/flags.cuh"
#include "sm80/mma.cuh"
#include "sm80/sparse.cuh"
#include "sm90/ptx.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 1
#endif
#ifndef GROUP
#define GROUP 8
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef STRIDE
#define STRIDE HEAD_DIM
#endif
#ifndef PAGE
#define PAGE 64
#endif
#ifndef RING
#define RING 1
#endif
#ifndef NARROW
#define NARROW 0
#endif
#ifndef EARLY
#define EARLY 1
#endif
#ifndef SECTIONS
#define SECTIONS 1
#endif

#ifndef UNITS
#define UNITS 0
#endif
#define SHARED_ROWS (SECTIONS > 1 || UNITS)  // several clusters may share a row

static_assert(!UNITS || (PARTS == 1 && SECTIONS == 1), "a block takes a unit");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "eight or sixteen chunks of a key");
static_assert(GROUP >= 1 && GROUP <= 16 && PAGE % 16 == 0 && PARTS <= 8, "see the table");

constexpr int D = HEAD_DIM, TILE = 16, THREADS = 32 * WARPS, ALL_WARPS = PARTS * WARPS;
constexpr int CHUNKS = D / 8, FOURS = CHUNKS / 4;              // of 16 bytes in a key; of four chunks
constexpr int GROUPS = (GROUP + 7) / 8, QUERIES = 8 * GROUPS;  // of eight queries; with padding
constexpr int COLUMNS = D / PARTS;                             // channels that a block finishes
constexpr u32 MATRIX = TILE * D * 2, SLOT = 2 * MATRIX;        // bytes
constexpr u32 SUMS = PARTS > 1 ? WARPS * STAGES * SLOT : 0;
constexpr u32 STATES = SUMS + ALL_WARPS * COLUMNS * QUERIES * 4;
constexpr u32 BARRIER = STATES + ALL_WARPS * 2 * QUERIES * 4;  // counts the bytes from SUMS to here
constexpr float LOWEST = -1e30f;                               // finite: a warp without keys has weight 0
constexpr int PAIRS = QUERIES * COLUMNS / 2;                   // of channels that a block finishes
constexpr int EACH = (PAIRS + THREADS - 1) / THREADS;          // of them a thread's
constexpr int HELD = ALL_WARPS * STAGES;                       // tiles of a cluster

#if NARROW
using Row = int;
#else
using Row = long long;
#endif

// Bytes of a slot before a chunk. A lane reads the keys that its own lane number copies, 16 bytes each;
// ldmatrix reads a chunk of eight values, in different banks.
__device__ __forceinline__ u32 key_at(int row, int chunk) {
    return ((row / 8 * FOURS + chunk / 4) * 32 + row % 8 * 4 + chunk % 4) * 16;
}
__device__ __forceinline__ u32 value_at(int row, int chunk) {
    return MATRIX + row * (2 * D) + (chunk ^ row % 8) * 16;
}
