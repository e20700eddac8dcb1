// Down projection and weighted sum of few tokens, unsorted, through int4_24 experts: out[t] (+)= sum over
// ascending k of weights[t, k] * (act[t*K + k] Wd_e^T), in fp32, one rounding.
//
// | argument | shape           | dtype | |
// |----------|-----------------|-------|-------------------------------------------------|
// | act      | [T*K, I]        | bf16  | of int4_24_few_gate_up; row-major, 16 bytes     |
// | w2       | [E, I/64, H, 2] | int64 | words                                           |
// | ids, expert_map, num_tokens |  |  | as routing_sort                                  |
// | weights  | [T, K]          | fp32  | of a pair without an expert: not used           |
// | out      | [T, H]          | bf16; OUT32: fp32 | out; ADD: added to                  |
//
// H and I are multiples of 64. Blocks: (H / (16 * ROW_TILES), T); threads: 32 * K. Warp k multiplies pair k.
// It requests its first words before it waits for the activations. Dynamic shared memory: K times the sums of
// its rows, K rings, K times zeros and 2 * I bytes.
#include "common/routing.cuh"
#include "common/sum_out.cuh"
#include "sm80/int4_24_column.cuh"

#ifndef TOP_K
#define TOP_K 8
#endif

constexpr int K = TOP_K;

extern "C" __global__ void __launch_bounds__(32 * K)
    int4_24_few_down(const u16* act, const uint4* w2, const Id* ids, const int* expert_map,
                     const int* num_tokens, const float* weights, void* out, int P, int E_ids, int H, int I) {
    auto& parts = *reinterpret_cast<float (*)[K][SLAB_ROWS]>(dynamic_memory());
    unsigned char* memory = dynamic_memory() + K * SLAB_ROWS * 4;
    const int t = blockIdx.y, k = threadIdx.x / 32, lane = threadIdx.x % 32, pair = t * K + k;
    const int row = blockIdx.x * SLAB_ROWS, slabs = I / 64;
    // ids are safe to read: the predecessor waited for them before it triggered this launch
    if (num_tokens && t >= *num_tokens) return;
    const int e = expert_of(ids, expert_map, pair, P, E_ids);
    Column column;
    column.ring = memory + k * RING_BYTES;
    column.slab_bytes = H * 16;
    column.pair_bytes = H * 32;
    column.step = 2;
    column.left = e >= 0 ? slabs : 0;
    column.rows =
        reinterpret_cast<const unsigned char*>(w2 + static_cast<u64>(max(e, 0)) * slabs * H + row + lane);
    column.second = 512;
    column.start();
    wait_for_predecessor();
    let_successor_start();
    uint4* zeros = reinterpret_cast<uint4*>(memory + K * RING_BYTES) + k * (ZERO_BYTES / 16 + I / 8);
    if (e >= 0) load_column(zeros + ZERO_BYTES / 16, act + static_cast<u64>(pair) * I, I, lane, 32);
    clear_zeros(zeros, lane);
    __syncwarp();
    float sums[ROW_TILES][2];
    column.multiply(sums, reinterpret_cast<const unsigned char*>(zeros), 0, e >= 0 ? slabs : 0, H & 63);
    if (lane % 4 == 0) {
        const float weight = e >= 0 ? weights[pair] : 0.0f;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            parts[k][16 * m + lane / 4] = e >= 0 ? weight * sums[m][0] : 0.0f;
            parts[k][16 * m + 8 + lane / 4] = e >= 0 ? weight * sums[m][1] : 0.0f;
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < SLAB_ROWS; c += 32 * K) {
        const u64 at = static_cast<u64>(t) * H + row + c;
        write_sum(parts, c, out, at);
    }
}
