"""Running the fa3 program, and what the tests of it share."""
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import ml_dtypes
import numpy as np

PROGRAM = os.environ["FA3"]
SOURCE = Path(os.environ["FA3_SOURCE"])
bfloat16 = ml_dtypes.bfloat16

# Exit codes, as documented.
OK, DIFFERS, USAGE, INPUT, OUTPUT, UNSUPPORTED, FAILED, NO_BOUND = range(8)


class ProgramTest(unittest.TestCase):
    """Each test has an empty folder to work in."""

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="fa3-test-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return str(self.folder / name)

    def run_fa3(self, *arguments, **options):
        return subprocess.run([PROGRAM, *map(str, arguments)], cwd=self.folder, text=True,
                              capture_output=True, timeout=120, **options)

    def succeed(self, *arguments, **options):
        done = self.run_fa3(*arguments, **options)
        self.assertEqual(done.returncode, OK, f"{arguments}: {done.stderr}")
        return done

    def refuse(self, code, texts, *arguments, **options):
        """It ends with this code and one line that holds these texts, and leaves no file behind."""
        before = sorted(os.listdir(self.folder))
        done = self.run_fa3(*arguments, **options)
        lines = [line for line in done.stderr.splitlines()
                 if not line.startswith(("fa3: using ", "Try `"))]
        self.assertEqual((done.returncode, len(lines)), (code, 1), f"{arguments}: {done.stderr}")
        for text in texts:
            self.assertIn(text, lines[0])
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        return done

    def save(self, **arrays):
        for name, array in arrays.items():
            np.save(self.path(name + ".npy"), np.asarray(array, order="C"))

    def load(self, name, dtype=None):
        array = np.load(self.path(name))
        return array.view(dtype) if dtype else array


def random_qkv(seed=0, batch=2, seqlen_q=5, seqlen_k=7, heads=4, heads_k=2, head_dim=16,
               value_head_dim=24, dtype=np.float32):
    generator = np.random.default_rng(seed)
    shapes = ((batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_k, head_dim),
              (batch, seqlen_k, heads_k, value_head_dim))
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


def attention(query, key, value, causal=False, window=(-1, -1), scale=None, softcap=0, sink=None,
              diagonal=None):
    """Output and lse of one sequence, (seqlen, heads, head_dim), in float64."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    rows, heads, head_dim = query.shape
    keys = key.shape[0]
    key, value = (np.repeat(array, heads // array.shape[1], axis=1) for array in (key, value))
    scores = np.einsum("ihd,jhd->hij", query, key) * (head_dim ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    own = np.arange(rows)[:, None] + (keys - rows if diagonal is None else diagonal)
    j = np.arange(keys)[None, :]
    hidden = np.zeros((rows, keys), bool)
    if causal:
        hidden |= j > own
    if window[0] >= 0:
        hidden |= j < own - window[0]
    if window[1] >= 0 and not causal:
        hidden |= j > own + window[1]
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores)  # the tests' scores are small
    total = weights.sum(-1)
    if sink is not None:
        total = total + np.exp(sink.astype(np.float64))[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        output = np.einsum("hij,jhd->ihd", weights, value) / total.T[..., None]
        lse = np.log(total)
    return np.where(total.T[..., None] == 0, 0, output), lse


def batched(query, key, value, **masks):
    batch, rows, heads, _ = query.shape
    output = np.empty((batch, rows, heads, value.shape[-1]))
    lse = np.empty((batch, heads, rows))
    for b in range(batch):
        output[b], lse[b] = attention(query[b], key[b], value[b], **masks)
    return output, lse


# What rounding probabilities and the output to 16 bits can do to a weighted mean, relative to the
# largest value; in float32 the error of the scores dominates, well below 64 roundings here.
RELATIVE = {np.dtype(np.float32): 64 * 2.0**-24, np.dtype(np.float16): 2 * 2.0**-11,
            np.dtype(bfloat16): 2 * 2.0**-8}


def assert_close(test, got, expected, inputs_dtype, largest=1.0):
    test.assertEqual(got.shape, expected.shape)
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    finite = np.isfinite(expected)
    bound = RELATIVE[np.dtype(inputs_dtype)] * largest
    error = np.abs(got[finite] - expected[finite])
    test.assertTrue((error <= bound).all(), f"error {error.max() if error.size else 0}, {bound=}")


def main():
    unittest.main()
