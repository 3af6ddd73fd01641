"""examples/ in Python, and the benchmarks of the package."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_train_gpt(tmp_path):
    out = tmp_path / "result.json"
    program = [sys.executable, EXAMPLES / "train_gpt.py", "--tiny", "--steps", "4", "--out", out]
    subprocess.run(program, check=True)
    ours, plain = (run["losses"] for run in json.loads(out.read_text())["runs"])
    assert ours[-1] < ours[0]
    # bf16 has 8 bits: losses of two attentions part in the third digit.
    assert all(abs(a - b) < 0.01 * b for a, b in zip(ours, plain))


def test_benchmarks_find_the_package():
    """A program finds what lies beside it first, so nothing there may have the package's name."""
    program = [sys.executable, ROOT / "bench" / "context_parallel.py", "--help"]
    subprocess.run(program, check=True)
