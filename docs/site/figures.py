"""Measured figures, looked up in the files that the measuring programs wrote."""

import functools
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@functools.cache
def read(path):
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def only(entries, **wanted):
    found = [one for one in entries if all(one.get(k) == v for k, v in wanted.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} entries, not one, with {wanted}")
    return found[0]


def full_name(short):
    """k6 is k6_overlap."""
    names = [one["name"] for one in read("worklog/results.json")["steps"]]
    found = [name for name in names if name.split("_")[0] == short]
    if len(found) != 1:
        raise LookupError(f"worklog/results.json has no step {short}")
    return found[0]


def ladder():
    return read("worklog/results.json")


def step(short, seqlen=4096, causal=False):
    """How fast a step of the ladder is."""
    return only(ladder()["results"], step=full_name(short), seqlen=seqlen, causal=causal)


def built(short):
    """What a step takes: threads, registers, shared memory."""
    return only(ladder()["steps"], name=full_name(short))


def yardstick(name, seqlen=4096, causal=False):
    if name in ("gemm", "gemm_fp8"):
        return only(ladder()["yardsticks"], name=name)
    return only(ladder()["yardsticks"], name=name, seqlen=seqlen, causal=causal)


def outliers():
    """The problem whose inputs have outliers."""
    return ladder()["outliers"]


def outlier(short):
    """A step's errors there."""
    return only(outliers()["results"], step=full_name(short))


def flash_decode():
    return read("worklog/decode/results.json")


def decode(step, batch=1, keys=8192):
    """How fast a step of flash decode is: d0_block is "d0"."""
    found = [one for one in flash_decode()["results"] if one["step"].startswith(f"{step}_")]
    return only(found, batch=batch, keys=keys)


def profile(short, kernel=None):
    """One launch under Nsight Compute, full, 4096 tokens."""
    wanted = {"step": full_name(short)}
    if kernel:
        wanted["kernel"] = kernel
    return only(read("worklog/bottlenecks.json"), **wanted)


def profile_ms(short):
    """All kernels of a step together."""
    found = [one for one in read("worklog/bottlenecks.json") if one["step"] == full_name(short)]
    return sum(one["ms"] for one in found)


def bench(card):
    """A file of bench/results."""
    return read(f"bench/results/{card}.json")


def cell(card, phase, head_dim, causal, seqlen):
    return only(bench(card)[phase], head_dim=head_dim, causal=causal, seqlen=seqlen)


def figure(value, digits=3):
    """Three digits, without a point where they are before it."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e" in text or float(text) >= 10 ** (digits - 1) else text


def change(ratio):
    """1.15 is +15%."""
    percent = round((ratio - 1) * 100)
    return f"{'+' if percent > 0 else '−' if percent < 0 else ''}{abs(percent)}%"


def ratio(value):
    return f"{value:.2f}"


def million(value):
    return f"{value / 1e6:.4g}"


def kib(value):
    return f"{value / 1024:.0f}"


LOOKUPS = {
    "bench": bench,
    "built": built,
    "cell": cell,
    "decode": decode,
    "flash_decode": flash_decode,
    "ladder": ladder,
    "outlier": outlier,
    "outliers": outliers,
    "profile": profile,
    "profile_ms": profile_ms,
    "step": step,
    "yardstick": yardstick,
}
FORMATS = {
    "change": change,
    "figure": figure,
    "kib": kib,
    "million": million,
    "ratio": ratio,
}
