"""fa3 verify: takes what is right, and nothing else."""
import json

import numpy as np

import program
from program import DIFFERS, INPUT, NO_BOUND, USAGE, attention, batched, bfloat16, random_qkv

INPUTS = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy")


class Verify(program.ProgramTest):
    def prepare(self, dtype=np.float32, **masks):
        qkv = random_qkv(dtype=dtype)
        output, lse = batched(*qkv, **masks)
        self.save(q=qkv[0], k=qkv[1], v=qkv[2], o=output.astype(dtype), lse=lse.astype(np.float32))
        return output.astype(dtype), lse.astype(np.float32)

    def test_right_outputs(self):
        for dtype in (np.float32, np.float16, bfloat16):
            self.prepare(dtype)
            done = self.succeed("verify", *INPUTS, "--bf16", "--out", "o.npy", "--lse", "lse.npy",
                                "--rows", "all")
            self.assertIn("rows     40 of 40", done.stdout)
            self.assertIn("verdict  correct", done.stdout)
            self.assertNotIn("NaN", done.stdout)

    def test_own_outputs(self):
        for dtype in (np.float32, np.float16, bfloat16):
            self.prepare(dtype)
            for extra in ((), ("--causal",), ("--window", "1,1"), ("--softcap", "2"),
                          ("--seqused-q", "2,5", "--seqused-k", "0,3")):
                both = (*INPUTS, "--bf16", *extra, "--out", "own.npy", "--lse", "own_lse.npy")
                self.succeed("run", *both)
                self.succeed("verify", *both, "--rows", "all")

    def test_computed_here(self):
        self.prepare()
        done = self.succeed("verify", *INPUTS, "--causal", "--device", "cpu", "--rows", "all")
        self.assertRegex(done.stdout, r"^computed on cpu \(.*\)\nrows     40 of 40 ")
        self.assertIn("lse      40 values", done.stdout)
        self.assertIn("verdict  correct", done.stdout)

    def test_plain_16_bit_implementation(self):
        """Probabilities and output rounded, all else in float32: what the bound has room for."""
        for dtype in (np.float16, bfloat16):
            query, key, value = random_qkv(seed=3, dtype=dtype, heads_k=4, seqlen_k=200)
            scores = np.einsum("bihd,bjhd->bhij", query.astype(np.float32) / 4,
                               key.astype(np.float32))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            total = weights.sum(-1).swapaxes(1, 2)[..., None]
            product = np.einsum("bhij,bjhd->bihd", weights.astype(dtype).astype(np.float32),
                                value.astype(np.float32))
            self.save(q=query, k=key, v=value, o=(product / total).astype(dtype))
            self.succeed("verify", *INPUTS, "--bf16", "--out", "o.npy", "--rows", "all")

    def test_one_wrong_value(self):
        for dtype in (np.float32, np.float16, bfloat16):
            output, _ = self.prepare(dtype)
            output[1, 4, 2, 23] *= 1.25
            self.save(o=output)
            done = self.refuse(DIFFERS, ["o.npy: 1 of 960 output values",
                                         "batch 1, row 4, head 2, column 23"],
                               "verify", *INPUTS, "--bf16", "--out", "o.npy", "--rows", "all")
            self.assertIn("verdict  WRONG", done.stdout)

    def test_json(self):
        output, lse = self.prepare()
        report = json.loads(self.succeed("verify", *INPUTS, "--out", "o.npy", "--lse", "lse.npy",
                                         "--rows", "all", "--json").stdout)
        self.assertEqual((report["verdict"], report["rows"]), ("correct", report["rows_in_all"]))
        self.assertEqual([(tensor["tensor"], tensor["values"]) for tensor in report["tensors"]],
                         [("output", output.size), ("lse", lse.size)])
        output[1, 4, 2, 23] *= 1.25
        self.save(o=output)
        done = self.refuse(DIFFERS, ["o.npy: 1 of 960"], "verify", *INPUTS, "--out", "o.npy",
                           "--rows", "all", "--json")
        report = json.loads(done.stdout)
        self.assertEqual((report["verdict"], report["tensors"][0]["beyond_bound"]), ("wrong", 1))
        worst = report["tensors"][0]["closest_to_bound"]
        self.assertEqual([worst[name] for name in ("batch", "row", "head", "column")], [1, 4, 2, 23])

    def test_enormous_scores(self):
        """An output is bound at any score; gradients are not, and the verdict says so."""
        query, key, value = random_qkv(heads_k=4, value_head_dim=16)
        self.save(q=query * 3000, k=key * 3000, v=value, do=np.ones((2, 5, 4, 16), np.float32))
        done = self.succeed("verify", *INPUTS)
        self.assertIn("verdict  correct", done.stdout)
        self.save(q=query * 1e10, k=key * 1e10)
        self.assertIn("verdict  correct", self.succeed("verify", *INPUTS).stdout)
        done = self.refuse(NO_BOUND, ["have no bound"], "verify", *INPUTS, "--backward",
                           "--grad-output", "do.npy")
        self.assertIn("verdict  none", done.stdout)
        self.save(o=np.full((2, 5, 4, 16), 100, np.float32))
        self.refuse(DIFFERS, ["o.npy: "], "verify", *INPUTS, "--out", "o.npy")

    def test_sink_that_is_nan(self):
        query, key, value = random_qkv(heads_k=4, value_head_dim=16)
        self.save(q=query, k=key, v=value, do=np.ones((2, 5, 4, 16), np.float32),
                  s=np.full(4, np.nan, np.float32))
        self.succeed("verify", *INPUTS, "--sink", "s.npy", "--backward", "--grad-output", "do.npy")

    def test_sink_far_below(self):
        """It changes nothing, and makes no room for errors either."""
        output, lse = self.prepare()
        self.save(s=np.full(4, -3.4e38, np.float32))
        arguments = ("verify", *INPUTS, "--sink", "s.npy", "--out", "o.npy", "--rows", "all")
        self.succeed(*arguments, "--lse", "lse.npy")
        self.save(o=output + np.float32(0.01))
        self.refuse(DIFFERS, ["o.npy"], *arguments)
        self.save(o=output, lse=lse + np.float32(0.01))
        self.refuse(DIFFERS, ["lse.npy"], *arguments, "--lse", "lse.npy")

    def test_exact_values_without_a_bound(self):
        """They are right, and no value that is named is as close as NaN to its bound."""
        self.prepare()
        query = random_qkv()[0]
        self.save(huge=np.full(4, -3.4e38, np.float32), do=np.zeros((*query.shape[:3], 24), np.float32),
                  nan=np.full(4, np.nan, np.float32))
        for sink in "huge.npy", "nan.npy":
            done = self.succeed("verify", *INPUTS, "--sink", sink, "--backward", "--grad-output", "do.npy")
            self.assertNotIn(" of nan", done.stdout)
            self.assertNotIn(" of -nan", done.stdout)
            self.assertIn("correct", done.stdout)

    def test_wrong_lse(self):
        _, lse = self.prepare()
        lse[0, 3, 1] += 1e-3
        self.save(lse=lse)
        self.refuse(DIFFERS, ["lse.npy: 1 of 40 lse values", "batch 0, row 1, head 3"], "verify",
                    *INPUTS, "--out", "o.npy", "--lse", "lse.npy", "--rows", "all")

    def test_not_finite(self):
        for bad in (np.nan, np.inf, -np.inf):
            output, lse = self.prepare()
            output[1, 2, 3, 4] = bad
            self.save(o=output)
            self.refuse(DIFFERS, ["batch 1, row 2, head 3, column 4"], "verify", *INPUTS, "--out",
                        "o.npy", "--rows", "all")
            # Far from the one row that is sampled.
            self.refuse(DIFFERS, ["o.npy", "not finite"], "verify", *INPUTS, "--out", "o.npy",
                        "--rows", "1")
            lse[0, 0, 0] = bad
            self.prepare()
            self.save(lse=lse)
            self.refuse(DIFFERS, ["lse.npy"], "verify", *INPUTS, "--out", "o.npy", "--lse",
                        "lse.npy", "--rows", "all")

    def test_not_finite_inputs(self):
        query, key, value = random_qkv()
        value[0, 3, 1, 5] = np.nan
        with np.errstate(invalid="ignore"):
            output, _ = batched(query, key, value)
        self.save(q=query, k=key, v=value, o=output.astype(np.float32))
        done = self.succeed("verify", *INPUTS, "--out", "o.npy", "--rows", "all")
        # Column 5 of the two query heads that share key head 1, in each row of sequence 0.
        self.assertEqual(np.isnan(output).sum(), 10)
        self.assertIn("\n         10 values are NaN, as they should be\n", done.stdout)
        self.save(o=np.nan_to_num(output).astype(np.float32))
        self.refuse(DIFFERS, ["column 5 is 0, expected nan"], "verify", *INPUTS, "--out", "o.npy",
                    "--rows", "all")

    def test_output_beyond_its_dtype(self):
        """Infinity is right where float16 can't hold the value, and nowhere else."""
        query, key, value = random_qkv()
        value[...] = 1e6
        infinite = np.full((2, 5, 4, 24), np.inf, np.float16)
        self.save(q=query, k=key, v=value, o=infinite, negative=-infinite, nan=np.full_like(infinite, np.nan))
        self.succeed("verify", *INPUTS, "--out", "o.npy")
        self.refuse(DIFFERS, ["is -inf, expected 1000000"], "verify", *INPUTS, "--out",
                    "negative.npy")
        self.refuse(DIFFERS, ["is nan, expected 1000000"], "verify", *INPUTS, "--out", "nan.npy")
        self.save(v=value / 100)
        self.refuse(DIFFERS, ["is inf, expected 10000"], "verify", *INPUTS, "--out", "o.npy")

    def test_wrong_mask(self):
        self.prepare()
        for extra in (("--causal",), ("--window", "1,1"), ("--scale", "0.3"), ("--softcap", "1")):
            self.refuse(DIFFERS, ["o.npy"], "verify", *INPUTS, "--out", "o.npy", *extra)

    def test_rows_that_see_no_key(self):
        query, key, value = random_qkv(seqlen_q=9, seqlen_k=4)
        output, lse = batched(query, key, value, causal=True)
        self.save(q=query, k=key, v=value, o=output.astype(np.float32),
                  lse=lse.astype(np.float32))
        arguments = ("verify", *INPUTS, "--causal", "--out", "o.npy", "--lse", "lse.npy", "--rows",
                     "all")
        self.succeed(*arguments)
        output[0, 0, 0, 0] = 1e-30
        self.save(o=output.astype(np.float32))
        self.refuse(DIFFERS, ["row 0, head 0, column 0 is 1e-30, expected 0"], *arguments)

    def test_sampling(self):
        output, _ = self.prepare()
        first = self.succeed("verify", *INPUTS, "--out", "o.npy", "--rows", "7").stdout
        self.assertIn("rows     7 of 40 checked against float64 (seed 1)", first)
        self.assertIn("168 values", first)
        self.assertEqual(first, self.succeed("verify", *INPUTS, "--out", "o.npy", "--rows", "7",
                                             "--seed", "1").stdout)
        # Whatever the seed, a fifth of the rows finds an output that is wrong from some row on.
        output[:, 2:] += 1
        self.save(o=output)
        for seed in range(5):
            self.refuse(DIFFERS, ["o.npy"], "verify", *INPUTS, "--out", "o.npy", "--rows", "8",
                        "--seed", seed)

    def test_output_of_another_dtype(self):
        """Any output: float32 from bfloat16 inputs, and float16 from float32 ones."""
        qkv = random_qkv(dtype=bfloat16)
        self.save(q=qkv[0], k=qkv[1], v=qkv[2], o=batched(*qkv)[0].astype(np.float32))
        self.succeed("verify", *INPUTS, "--bf16", "--out", "o.npy", "--rows", "all")
        qkv = random_qkv()
        self.save(q=qkv[0], k=qkv[1], v=qkv[2], o=batched(*qkv)[0].astype(np.float16))
        self.succeed("verify", *INPUTS, "--out", "o.npy", "--rows", "all")

    def test_packed(self):
        query, key, value = (array[0] for array in random_qkv(batch=1, seqlen_q=9, seqlen_k=11))
        parts = [attention(query[:4], key[:3], value[:3]), attention(query[4:], key[3:], value[3:])]
        output = np.concatenate([part[0] for part in parts]).astype(np.float32)
        self.save(q=query, k=key, v=value, o=output)
        arguments = ("verify", *INPUTS, "--out", "o.npy", "--rows", "all", "--cu-seqlens-q")
        self.succeed(*arguments, "0,4,9", "--cu-seqlens-k", "0,3,11")
        self.refuse(DIFFERS, ["o.npy"], *arguments, "0,5,9", "--cu-seqlens-k", "0,3,11")

    def test_nothing_to_check(self):
        qkv = random_qkv(batch=0)
        self.save(q=qkv[0], k=qkv[1], v=qkv[2], o=np.zeros((0, 5, 4, 24), np.float32))
        self.assertIn("0 of 0", self.succeed("verify", *INPUTS, "--out", "o.npy").stdout)

    def test_shapes_and_options(self):
        output, lse = self.prepare()
        self.save(short=output[:, :4], flat=lse[0], ints=np.zeros((2, 5, 4, 24), np.int32))
        self.refuse(INPUT, ["short.npy: output.shape[1] is 4: expected 5, query's rows"],
                    "verify", *INPUTS, "--out", "short.npy")
        self.refuse(INPUT, ["flat.npy: lse.shape[0] is 1: expected 2, query's batch"], "verify",
                    *INPUTS, "--out", "o.npy", "--lse", "flat.npy")
        self.refuse(INPUT, ["o.npy: has 4 dimensions: expected 2 or 3"], "verify", *INPUTS, "--out", "o.npy", "--lse",
                    "o.npy")
        self.save(wide=lse.astype(np.float64))
        done = self.refuse(INPUT, ["wide.npy: its elements are float64 ('<f8'): expected float32"],
                           "verify", *INPUTS, "--out", "o.npy", "--lse", "wide.npy")
        self.assertIn(": expected float32 (in NumPy: .astype(", done.stderr)
        self.refuse(INPUT, ["ints.npy: output.dtype is int"], "verify", *INPUTS, "--out",
                    "ints.npy")
        self.refuse(USAGE, ["--lse needs --out"], "verify", *INPUTS, "--lse", "lse.npy")
        for option in (("--device", "cpu"), ("--threads", "1")):
            self.refuse(USAGE, ["--out"], "verify", *INPUTS, "--out", "o.npy", *option)
        for rows in ("0", "-1", "x", ""):
            self.refuse(USAGE, ["--rows"], "verify", *INPUTS, "--out", "o.npy", "--rows", rows)


program.main()
