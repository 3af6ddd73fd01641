"""fa3 run --grad, and what fa3 verify says of gradients."""
import numpy as np
import safetensors.numpy

import program
from program import (DIFFERS, INPUT, USAGE, assert_close, attention, bfloat16, random_qkv)

INPUTS = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--bf16", "--grad-output", "do.npy")
NAMES = ("grad_query", "grad_key", "grad_value")


def gradients(query, key, value, grad_output, grad_lse=None, causal=False, scale=None, sink=None):
    """Of one sequence, (seqlen, heads, head_dim), in float64 from the whole matrix of scores; a
    dictionary by names."""
    query, key, value, grad_output = (array.astype(np.float64) for array in
                                      (query, key, value, grad_output))
    (rows, heads, head_dim), (keys, heads_k, _) = query.shape, key.shape
    scale = head_dim ** -0.5 if scale is None else scale
    output, lse = attention(query, key, value, causal=causal, scale=scale, sink=sink)
    wide_key, wide_value = (np.repeat(array, heads // heads_k, axis=1) for array in (key, value))
    scores = np.einsum("ihd,jhd->hij", query, wide_key) * scale
    if causal:
        hidden = np.arange(keys)[None] > np.arange(rows)[:, None] + keys - rows
        scores = np.where(hidden, -np.inf, scores)
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(scores - lse[..., None]))
    delta = np.einsum("ihd,ihd->hi", grad_output, output)
    if grad_lse is not None:
        delta = delta - grad_lse
    grad_scores = weights * (np.einsum("ihd,jhd->hij", grad_output, wide_value) - delta[..., None])

    def sum_groups(array):
        return array.reshape(keys, heads_k, heads // heads_k, -1).sum(2)

    result = {"grad_query": scale * np.einsum("hij,jhd->ihd", grad_scores, wide_key),
              "grad_key": sum_groups(scale * np.einsum("hij,ihd->jhd", grad_scores, query)),
              "grad_value": sum_groups(np.einsum("hij,ihd->jhd", weights, grad_output))}
    if sink is not None:
        result["grad_sink"] = -(np.exp(sink[:, None] - lse) * delta).sum(1)
    return result


class Shared(program.ProgramTest):
    def make(self, dtype=np.float32, **extents):
        qkv = random_qkv(dtype=dtype, **extents)
        shape = (*qkv[0].shape[:-1], qkv[2].shape[-1])
        self.grad_output = np.random.default_rng(9).standard_normal(shape).astype(dtype)
        self.save(q=qkv[0], k=qkv[1], v=qkv[2], do=self.grad_output)
        self.qkv = qkv
        return qkv

    def expected(self, grad_lse=None, **masks):
        parts = [gradients(*(array[b] for array in (*self.qkv, self.grad_output)),
                           None if grad_lse is None else grad_lse[b], **masks)
                 for b in range(len(self.qkv[0]))]
        result = {name: np.stack([part[name] for part in parts]) for name in NAMES}
        if "grad_sink" in parts[0]:
            result["grad_sink"] = sum(part["grad_sink"] for part in parts)
        return result

    def compute(self, *options, name="grad.safetensors"):
        self.succeed("run", *INPUTS, "--grad", name, *options)
        return safetensors.numpy.load_file(self.path(name))

    def check(self, got, expected, dtype=np.float32, inputs=np.float32):
        self.assertEqual(sorted(got), sorted(expected))
        for name, gradient in expected.items():
            self.assertEqual(got[name].dtype, dtype)
            # dS is rounded beside P, and sums over queries are no means: larger than a value.
            assert_close(self, got[name], gradient, inputs, 16)


class Gradients(Shared):
    def test_plain(self):
        self.make()
        self.check(self.compute(), self.expected())
        self.check(self.compute("--causal", "--scale", "0.5"), self.expected(causal=True, scale=0.5))

    def test_dtypes(self):
        for dtype in (np.float16, bfloat16):
            self.make(dtype)
            self.check(self.compute(), self.expected(), dtype, dtype)
            self.check(self.compute("--grad-dtype", "fp32", "--deterministic"), self.expected(),
                       np.float32, dtype)

    def test_sink_and_lse(self):
        self.make()
        sink = np.array([0.5, -1, 2, 0], np.float32)
        grad_lse = np.random.default_rng(3).standard_normal((2, 4, 5)).astype(np.float32)
        self.save(sink=sink, dlse=grad_lse)
        self.check(self.compute("--sink", "sink.npy", "--grad-lse", "dlse.npy"),
                   self.expected(grad_lse, sink=sink))

    def test_files(self):
        """Each in its own, all in one with the output and the lse, or none but one."""
        self.make()
        expected = self.expected()
        self.succeed("run", *INPUTS, "--out", "o.npy", "--grad-query", "dq.npy", "--grad-key",
                     "dk.npy", "--grad-value", "dv.npy")
        self.check({name: self.load(file) for name, file in
                    zip(NAMES, ("dq.npy", "dk.npy", "dv.npy"))}, expected)
        both = self.compute("--out", "grad.safetensors", "--lse", "grad.safetensors")
        self.assertEqual(sorted(both), sorted((*NAMES, "lse", "output")))
        np.testing.assert_array_equal(both["output"], self.load("o.npy"))
        self.succeed("run", *INPUTS, "--grad-key", "alone.safetensors")
        alone = safetensors.numpy.load_file(self.path("alone.safetensors"))
        self.check(alone, {"grad_key": expected["grad_key"]})

    def test_container(self):
        query, key, value = self.make()
        safetensors.numpy.save_file({"q": query, "k": key, "v": value, "do": self.grad_output},
                                    self.path("in.safetensors"))
        self.succeed("run", "--in", "in.safetensors", "--grad", "g.safetensors")
        self.check(safetensors.numpy.load_file(self.path("g.safetensors")), self.expected())

    def test_packed_and_heads_first(self):
        query, key, value = self.make(batch=1)
        self.save(**{name: array[0] for name, array in
                     zip(("q", "k", "v", "do"), (query, key, value, self.grad_output))})
        got = self.compute("--causal", "--cu-seqlens-q", "0,5", "--cu-seqlens-k", "0,7")
        expected = {name: array[0] for name, array in self.expected(causal=True).items()}
        self.check(got, expected)
        self.save(**{name: array[0].swapaxes(0, 1) for name, array in
                     zip(("q", "k", "v", "do"), (query, key, value, self.grad_output))})
        self.check(self.compute("--causal", "--layout", "bhsd"),
                   {name: array.swapaxes(0, 1) for name, array in expected.items()})

    def test_accumulate(self):
        self.make()
        once = self.compute()
        twice = self.compute("--accumulate")
        for name in NAMES:
            np.testing.assert_allclose(twice[name], 2 * once[name], rtol=1e-5, atol=1e-5)
        self.refuse(INPUT, ["none.safetensors: No such file"], "run", *INPUTS, "--grad",
                    "none.safetensors", "--accumulate")
        self.save(dk=np.zeros((2, 7, 2, 24), np.float32))
        self.refuse(INPUT, ["dk.npy: grad_key.shape[3] is 24: expected 16, query's head dim"], "run",
                    *INPUTS, "--grad-key", "dk.npy", "--accumulate")

    def test_nothing_left_behind(self):
        self.make()
        self.refuse(USAGE, ["--grad-query and --grad-key are the same file"], "run", *INPUTS,
                    "--grad-query", "same.npy", "--grad-key", "same.npy")

    def test_bad_options(self):
        self.make()
        self.save(short=self.grad_output[:, :4], dlse=np.zeros((2, 4, 4), np.float32),
                  half=self.grad_output.astype(np.float16))
        run = ("run", *INPUTS, "--grad", "g.safetensors")
        self.refuse(USAGE, ["--grad, which says where", "is missing"], "run", *INPUTS, "--out", "o.npy")
        self.refuse(USAGE, ["--grad g.npy: expected a .safetensors file"], "run", *INPUTS, "--grad",
                    "g.npy")
        self.refuse(USAGE, ["g.txt: expected a name"], "run", *INPUTS, "--grad-key", "g.txt")
        self.refuse(USAGE, ["fa3 run: --grad-output is missing"], "run", *INPUTS[:-2], "--grad",
                    "g.safetensors")
        self.refuse(USAGE, ["--grad-dtype"], *run, "--grad-dtype", "bf16")
        self.refuse(USAGE, ["--accumulate"], *run, "--accumulate", "--grad-dtype", "fp32")
        self.refuse(USAGE, ["fa3 run: --grad-sink: there is no --sink"], *run, "--grad-sink", "s.npy")
        self.refuse(USAGE, ["fa3 run: --cache-batch-index"], *run, "--cache-batch-index", "0,1")
        self.refuse(INPUT, ["short.npy: grad_output.shape[1] is 4: expected 5, query's rows"], *run,
                    "--grad-output", "short.npy")
        self.refuse(INPUT, ["half.npy: grad_output.dtype is fp16: expected output's, fp32"],
                    *run, "--grad-output", "half.npy")
        self.refuse(INPUT, ["dlse.npy: grad_lse.shape["], *run, "--grad-lse", "dlse.npy")


class Verify(Shared):
    FILES = ("--out", "all.safetensors", "--lse", "all.safetensors", "--grad", "all.safetensors")

    def test_own(self):
        for dtype in (np.float32, np.float16, bfloat16):
            self.make(dtype)
            for extra in ((), ("--causal",), ("--window", "1,1"), ("--softcap", "2"),
                          ("--seqused-q", "2,5", "--seqused-k", "0,3")):
                self.succeed("run", *INPUTS, *extra, *self.FILES)
                done = self.succeed("verify", *INPUTS, *extra, *self.FILES, "--rows", "all")
                for name in ("dquery", "dkey", "dvalue"):
                    self.assertRegex(done.stdout, rf"\n{name} +[1-9]\d* values")
                self.succeed("verify", *INPUTS, *extra, "--backward", "--rows", "all")

    def test_wrong_values(self):
        self.make()
        self.save(sink=np.zeros(4, np.float32))
        sink = ("--sink", "sink.npy")
        self.succeed("run", *INPUTS, *sink, *self.FILES)
        right = safetensors.numpy.load_file(self.path("all.safetensors"))
        for name, label, index in (("grad_query", "dquery", (1, 4, 3, 15)),
                                   ("grad_key", "dkey", (0, 6, 1, 2)),
                                   ("grad_value", "dvalue", (1, 0, 0, 23)),
                                   ("grad_sink", "dsink", (2,))):
            for wrong in (right[name][index] + 1e-2, np.nan, np.inf):
                wrongs = {key: array.copy() for key, array in right.items()}
                wrongs[name][index] = wrong
                safetensors.numpy.save_file(wrongs, self.path("all.safetensors"))
                done = self.refuse(DIFFERS, [f"'{name}': 1 of ", f" {label} values"], "verify",
                                   *INPUTS, *sink, *self.FILES, "--rows", "all")
                self.assertIn("verdict  WRONG", done.stdout)

    def test_wrong_inputs(self):
        """Gradients of another call are wrong ones."""
        self.make()
        self.succeed("run", *INPUTS, *self.FILES)
        self.save(do=-self.grad_output)
        self.refuse(DIFFERS, ["'grad_query'"], "verify", *INPUTS, *self.FILES)

    def test_options(self):
        self.make()
        self.succeed("run", *INPUTS, *self.FILES)
        self.refuse(USAGE, ["--lse is missing"], "verify", *INPUTS, *self.FILES[:2], *self.FILES[4:])
        self.refuse(USAGE, ["--out is missing", "or --backward"], "verify", *INPUTS, *self.FILES[4:])
        self.refuse(USAGE, ["--backward"], "verify", *INPUTS, *self.FILES[:4], "--backward")
        self.refuse(USAGE, ["--backward"], "verify", *INPUTS, *self.FILES[4:], "--backward")
        self.refuse(USAGE, ["--backward"], "verify", *INPUTS)
        self.refuse(USAGE, ["--deterministic"], "verify", *INPUTS, *self.FILES, "--deterministic")
        for options in ("--backward",), self.FILES:
            done = self.refuse(USAGE, ["fa3 verify: --grad-output is missing, and there is no --in"],
                               "verify", *INPUTS[:-2], *options)
            self.assertIn("\nTry `fa3 verify --help' ", done.stderr)


program.main()
