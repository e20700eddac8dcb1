"""Correctness and times of int4_24 variants on a GPU: MODEL T tile ... ; a tile is m.n.k.N.slabs.stages.blocks[r]."""
import sys, statistics, torch
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.formats import int4_24
from ttnn_moe.cuda.arch import target_of
from ttnn_moe.cuda.moe import sort
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.cuda.moe.sm80_int4_24 import INT4_24, NarrowTile, SparseTile
from ttnn_moe.cuda.moe.int4_24_few import INT4_24_FEW, ColumnPlan, ColumnSizes
from ttnn_moe.cuda.moe.int4_24_v6 import INT4_24_V6
from ttnn_moe.cuda.moe.sorted import SortedPlan

SIZES = {"ds": (256, 8, 7168, 2048), "q3": (128, 8, 2048, 768)}
dev = torch.device("cuda", 0)
torch.backends.cuda.matmul.allow_tf32 = False

def words(E, R, C, g):
    n = E * (C // 64) * R * 2
    out = torch.randint(0, 1 << 48, (n,), device=dev, generator=g)
    scale = ((torch.rand(n, device=dev, generator=g) + 0.5) * 0.4 * C**-0.5).bfloat16().view(torch.int16).long()
    return out.add_(scale * (1 << 48)).view(E, C // 64, R, 2)

def layer(model, g):
    E, K, H, I = SIZES[model]
    return Experts("int4_24", E, H, I, {"w13": words(E, 2 * I, H, g), "w2": words(E, H, I, g)})

def reference(hidden, r, ids, w, ex):
    out = torch.zeros(hidden.shape, device=dev)
    I = ex.I
    for e in ids.unique().tolist():
        t, k = (ids == e).nonzero(as_tuple=True)
        gu = int4_24.dequantise(ex.tensors["w13"][e]); dn = int4_24.dequantise(ex.tensors["w2"][e])
        y = hidden[t].float() @ gu.T
        a = (torch.nn.functional.silu(y[:, :I]) * y[:, I:]).bfloat16().float()
        out.index_add_(0, t, (a @ dn.T).bfloat16().float() * w[t, k][:, None])
    return out

def main():
    model, tokens = sys.argv[1], [int(t) for t in sys.argv[2].split(",")]
    E, K, H, I = SIZES[model]
    g = torch.Generator(dev); g.manual_seed(0)
    layers = [layer(model, g) for _ in range(1 if model == "ds" else 5)]
    target = target_of(dev)
    print(torch.cuda.get_device_name(), target.arch.name)
    for T in tokens:
        p = Problem(T, E, K, H, I, torch.bfloat16, torch.bfloat16, weight_format="int4_24")
        n = 6 if T < 2048 else 2
        calls = []
        for i in range(n):
            ids = torch.rand(T, E, device=dev, generator=g).topk(K, 1).indices.int()
            w = torch.rand(T, K, device=dev, generator=g); w /= w.sum(1, keepdim=True)
            hidden = torch.randn(T, H, device=dev, generator=g).bfloat16()
            calls.append((hidden, Routing.from_topk(ids, w, E), ids, w, layers[i % len(layers)]))
        hidden, r, ids, w, ex = calls[0]
        some = min(T, 64)
        want = reference(hidden[:some], r, ids[:some], w[:some], ex)
        used = statistics.mean(float(c[2].unique().numel()) for c in calls)
        gb = used * 3 * H * I / 4 / 1e9
        print(f"{model} T={T} experts {used:.1f} weights {gb*1e3:.0f} MB = {gb/4.4*1e6:.0f} us at 4.4 TB/s", flush=True)
        forms = [("default", None)] + [(a, a) for a in sys.argv[3:] if a != "v6"] + [("v6", 0)] * ("v6" in sys.argv)
        for name, text in forms:
            family = INT4_24
            if text is None: plan = INT4_24.plan(p, target)
            elif text == 0:
                family = INT4_24_V6; plan = family.plan(p, target)
            elif text[0] == "f":
                if T > 3: continue
                family = INT4_24_FEW; plan = ColumnPlan(p, target.arch, ColumnSizes(*(int(x) for x in text[2:].split("."))))
            else:
                text, _, probe = text.partition("p")
                sizes = [int(x) for x in text.lstrip("n").rstrip("r").split(".")]
                tile = NarrowTile(*sizes, probe=int(probe or 0)) if text[0] == "n" else SparseTile(*sizes, read_once=text.endswith("r"), probe=int(probe or 0))
                plan = SortedPlan(p, target.arch, tile, sort.choose(p, target.arch))
            try:
                bufs = tuple(torch.empty(b.shape, dtype=b.dtype, device=dev) for b in family.scratch(plan))
                outs = [torch.full((T, H), float("nan"), dtype=torch.bfloat16, device=dev) for _ in range(2)]
                for o in outs: family.launch(plan, Call(hidden, r, ex, o, False), bufs)
                torch.cuda.synchronize()
                err = float((outs[0][:some].float() - want).norm() / want.norm())
                same = torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16))
                out = outs[0]
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for hd, rt, _, _, e2 in calls: family.launch(plan, Call(hd, rt, e2, out, False), bufs)
                times = []
                for i in range(24):
                    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    a.record(); graph.replay(); b.record(); b.synchronize()
                    if i > 3: times.append(a.elapsed_time(b) * 1e3 / n)
                print(f"  {name:28} {statistics.median(times):9.1f} us  min {min(times):9.1f}  err {err:.1e} {'same' if same else 'DIFFERENT BITS'}", flush=True)
            except Exception as error:
                print(f"  {name:28} {type(error).__name__}: {str(error)[:300]}", flush=True)
                if "CUDA" in str(error) and "illegal" in str(error): raise

main()
