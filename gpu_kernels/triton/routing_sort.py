"""Stable sort of the token-expert pairs of one routing by expert, without atomics or communication between programs.

routing_sort's program (e, c) places the pairs of expert e in chunk c in ascending (t, k). It needs the number of pairs
of every expert, and of expert e in earlier chunks. With one chunk it counts them itself; with more, routing_count runs
first.

| argument | shape | dtype | |
|---|---|---|---|
| ids | [T, K] | int32 or int64 | any value; outside 0 .. E_ids-1 names no expert |
| expert_map | [E_ids] | int32 | HAS_MAP: local index of each global expert, -1 = not here |
| num_tokens | [] | int32 | HAS_BOUND: rows past it route nowhere |
| counts | [chunks, E_PAD] | int32 | routing_count writes, routing_sort reads it with chunks > 1 |
| offsets | [E+1] | int32, out | expert e owns sorted rows offsets[e] .. offsets[e+1] - 1 |
| row_tokens | [T*K] | int32, out | token of each sorted row; rows past offsets[E] are not written |
| inverse | [T, K] | int32, out | sorted row of each pair, -1 where it names no expert here |
| tiles | [bound, 2] | int32, out | (expert, first row) of each tile of BLOCK_M rows |
| num_tiles | [1] | int32, out | tiles in use |

bound = min(ceil(P / BLOCK_M) + min(E, P), P), P = T*K.
Grids: routing_count (chunks), routing_sort (E, chunks). Consumers: gate_up, grouped_matmul and combine.
"""

import triton
import triton.language as tl


@triton.jit
def _experts_of(ids, expert_map, at, limit, E_ids, HAS_MAP: tl.constexpr):
    """Local expert of each pair; -1: none."""
    e = tl.load(ids + at, mask=at < limit, other=-1)
    here = (e >= 0) & (e < E_ids)
    e = tl.where(here, e, 0).to(tl.int32)
    if HAS_MAP:
        e = tl.load(expert_map + e, mask=here, other=-1)
    return tl.where(here, e, -1)


@triton.jit
def _limit(num_tokens, P, K, HAS_BOUND: tl.constexpr):
    if HAS_BOUND:
        return tl.minimum(tl.maximum(tl.load(num_tokens), 0).to(tl.int64) * K, P).to(tl.int32)
    else:
        return P


@triton.jit(do_not_specialize=["P"])
def routing_count(
    ids,
    expert_map,
    num_tokens,
    counts,
    P,
    E_ids,
    K,
    HAS_MAP: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    e = _experts_of(ids, expert_map, at, _limit(num_tokens, P, K, HAS_BOUND), E_ids, HAS_MAP)
    found = tl.histogram(tl.maximum(e, 0), E_PAD, mask=e >= 0)
    tl.store(counts + chunk * E_PAD + tl.arange(0, E_PAD), found)


@triton.jit(do_not_specialize=["P", "chunks"])
def routing_sort(
    ids,
    expert_map,
    num_tokens,
    counts,
    offsets,
    row_tokens,
    inverse,
    tiles,
    num_tiles,
    P,
    E_ids,
    E,
    K,
    chunks,
    HAS_MAP: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    me = tl.program_id(0)
    chunk = tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    e = _experts_of(ids, expert_map, at, _limit(num_tokens, P, K, HAS_BOUND), E_ids, HAS_MAP)
    experts = tl.arange(0, E_PAD)
    earlier = 0
    if COUNTED:
        total = tl.zeros([E_PAD], tl.int32)
        before = tl.zeros([E_PAD], tl.int32)
        for c in range(0, chunks):
            found = tl.load(counts + c * E_PAD + experts)
            total += found
            before += tl.where(c < chunk, found, 0)
        earlier = tl.sum(tl.where(experts == me, before, 0))
    else:
        total = tl.histogram(tl.maximum(e, 0), E_PAD, mask=e >= 0)
    n = tl.sum(tl.where(experts == me, total, 0))
    start = tl.sum(tl.where(experts < me, total, 0))

    mine = e == me
    place = start + earlier + tl.cumsum(mine.to(tl.int32)) - 1
    tl.store(row_tokens + place, at // K, mask=mine)
    tl.store(inverse + at, place, mask=mine)
    if me == 0:
        tl.store(inverse + at, -1, mask=(e < 0) & (at < P))

    if chunk == 0:
        tl.store(offsets + me, start)
        tiles_of = (total + BLOCK_M - 1) // BLOCK_M
        tile = tl.sum(tl.where(experts < me, tiles_of, 0))
        used = (n + BLOCK_M - 1) // BLOCK_M
        for first in range(0, used, 32):
            i = first + tl.arange(0, 32)
            tl.store(tiles + 2 * (tile + i), me, mask=i < used)
            tl.store(tiles + 2 * (tile + i) + 1, start + i * BLOCK_M, mask=i < used)
        if me == E - 1:
            tl.store(offsets + E, start + n)
            tl.store(num_tiles, tile + used)
