"""sm80/int4_24.cuh and sm80/sparse.cuh without a GPU: one product of words, on the host emulator, against the format.

The fragments of the emulator come from the PTX ISA alone (tests/support/warp_emulator/sm80/sparse.cuh).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from host_kernels import GXX, HostKernels
from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.formats import int4_24

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")

SOURCE = """
#include "common/copies.cuh"
#include "sm80/int4_24.cuh"

// out [16, 8] = words [16] of 32 channels * x [32, 8]
extern "C" __global__ void product(const Word* words, const u16* x, float* out) {
    const int lane = threadIdx.x, group = lane / 4, t = lane % 4;
    u16* shared = reinterpret_cast<u16*>(dynamic_memory());
    for (int i = lane; i < 256; i += 32) shared[i] = x[i];
    __syncwarp();
    const Word top = words[group], bottom = words[group + 8];
    u32 b[4], pairs[2][2];
    load_transposed(b, shared_address(shared + lane * 8));
    pairs_of(pairs[0], top, t);
    pairs_of(pairs[1], bottom, t);
    const u32 a[4] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
    const u32 metadata = t / 2 == OF_HALF ? metadata_of(top.rest, bottom.rest, t % 2) : 0;
    float sums[4] = {};
    multiply_sparse<OF_HALF>(sums, a, b, metadata);
    for (int i = 0; i < 4; ++i) {
        const float scale = scale_of(i < 2 ? top.rest : bottom.rest);
        out[(group + i / 2 * 8) * 8 + t * 2 + i % 2] = sums[i] * scale;
    }
}
"""


@pytest.mark.parametrize("selector", [0, 1])
def test_a_product_of_words_is_that_of_the_format(
    selector: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every q4 with every idx2 in every chunk; other bits at random."""
    source = tmp_path / "product.cu"
    source.write_text(SOURCE)
    kernels = HostKernels(tmp_path, sources={"product": source})
    kernels.use(monkeypatch)
    launch = load.Launch(Spec.of("product", "sm_80", OF_HALF=selector), 0, (1,), 32, shared_memory=512)
    torch.manual_seed(selector)
    for code in range(0, 64, 4):
        row = torch.arange(16)[:, None]
        field = (torch.arange(8) + code + row) % 64
        values, index = field // 4 - 8, field % 4
        scales = torch.randn(16, 1).bfloat16()
        words = int4_24.pack(values.repeat(1, 2), index.repeat(1, 2), scales.repeat(1, 2))[0, :, 1].contiguous()
        x = torch.randint(-8, 9, (32, 8)).bfloat16()
        out = torch.full((16, 8), torch.nan)
        launch(None, words.data_ptr(), x.data_ptr(), out.data_ptr())
        whole = int4_24.dequantise(torch.stack([words, words], 1)[None])[:, :32]
        assert kernels.sound and torch.equal(out, whole @ x.float())
