"""Runs what `make build` has built: measure.py FOLDER.

The ladder and, where PyTorch is installed, its yardsticks: results.json. Flash decode:
decode/results.json. The small programs of Hopper's tools: what they print, tools/NAME.txt.

The yardsticks are cuDNN's attention and FlashAttention-2 (both through PyTorch) on
the ladder's shapes, and a matrix product 8192 x 8192 x 8192 in bf16 and in E4M3. They run
before the ladder and after it, in the ladder's own way: 200 ms of warming up, then ten
runs, two rounds, the median.
"""

import datetime
import json
import pathlib
import statistics
import subprocess
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None

HERE = pathlib.Path(__file__).resolve().parent
TOOLS = ("tma", "swizzle", "mbarrier", "wgmma", "setmaxnreg")
HEADS, HEAD_DIM = 16, 128
SHAPES = [(4, 4096), (1, 16384)]


def milliseconds(call):
    """The median time of a call, by events on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once():
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    times = []
    for _ in range(2):
        spent = 0.0
        while spent < 200.0:
            spent += once()
        times += [once() for _ in range(10)]
    return statistics.median(times)


def yardsticks():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    time = milliseconds(lambda: a @ b)
    found = [{"name": "gemm", "ms": time, "tflops": 2 * 8192**3 / time * 1e-9}]
    a, b = (x.to(torch.float8_e4m3fn) for x in (a, b.t().contiguous()))
    one = torch.ones(1, device="cuda")
    time = milliseconds(
        lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )
    found.append({"name": "gemm_fp8", "ms": time, "tflops": 2 * 8192**3 / time * 1e-9})
    for batch, seqlen in SHAPES:
        q, k, v = (
            torch.randn(batch, seqlen, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            .transpose(1, 2)
            for _ in range(3)
        )
        for causal in (False, True):
            flops = (2 if causal else 4) * seqlen**2 * HEAD_DIM * HEADS * batch
            for name, backend in (
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("fa2", SDPBackend.FLASH_ATTENTION),
            ):
                with sdpa_kernel(backend):
                    time = milliseconds(
                        lambda: torch.nn.functional.scaled_dot_product_attention(
                            q, k, v, is_causal=causal
                        )
                    )
                found.append(
                    {
                        "name": name,
                        "batch": batch,
                        "heads": HEADS,
                        "seqlen": seqlen,
                        "causal": causal,
                        "ms": time,
                        "tflops": flops / time * 1e-9,
                    }
                )
    return found


def card():
    """The card's clocks and so on, as they are at this moment."""
    fields = "driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    return dict(zip(fields.split(","), answer.stdout.strip().split(", ")))


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def measure_ladder(program):
    before = yardsticks() if torch else []
    cards = [card()]
    ladder = output(program)
    cards.append(card())
    after = yardsticks() if torch else []
    results = {"date": datetime.date.today().isoformat(), **json.loads(ladder)}
    results["card_before_and_after"] = cards
    if torch:
        results["pytorch"] = torch.__version__
        results["cudnn"] = torch.backends.cudnn.version()
    results["yardsticks"] = [
        {**one, "ms": (one["ms"] + other["ms"]) / 2, "tflops_before": one["tflops"],
         "tflops_after": other["tflops"], "tflops": (one["tflops"] + other["tflops"]) / 2}
        for one, other in zip(before, after)
    ]
    text = json.dumps(results, indent=1) + "\n"
    (HERE / "results.json").write_text(text, encoding="utf-8")
    for one in results["yardsticks"]:
        kind = "causal" if one.get("causal") else "full" if "seqlen" in one else ""
        print(f"{one['name']:16} {one.get('seqlen', ''):>5} {kind:6} {one['tflops']:7.1f} TFLOP/s "
              f"({one['tflops_before']:.1f} before, {one['tflops_after']:.1f} after)")


def main():
    build = pathlib.Path(sys.argv[1])
    for tool in TOOLS:
        (HERE / "tools" / f"{tool}.txt").write_text(output(build / "tools" / tool), encoding="utf-8")
    decode = output(build / "decode" / "decode")
    (HERE / "decode" / "results.json").write_text(decode, encoding="utf-8")
    measure_ladder(build / "ladder")


if __name__ == "__main__":
    main()
