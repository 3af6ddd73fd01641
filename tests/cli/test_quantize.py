"""fa3 quantize, and codes in files: what fa3 run and fa3 verify make of them."""
import json
import re
import resource
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import program
from program import DIFFERS, INPUT, OUTPUT, SOURCE, UNSUPPORTED, USAGE, batched, random_qkv
from safetensors.numpy import load_file, save_file

e4m3 = ml_dtypes.float8_e4m3fn


def quantized(array, rows, axis=1):
    """Codes of (batch, seqlen, heads, head_dim), and what they stand for; scales by rows of a head."""
    largest = np.abs(array).max(-1).swapaxes(1, 2)  # (batch, heads, seqlen)
    starts = np.arange(0, array.shape[axis], rows)
    largest = np.maximum.reduceat(largest, starts, axis=2)
    scale = np.maximum(largest.astype(np.float32) / np.float32(448), np.float32(2.0**-126))
    spread = np.repeat(scale, rows, axis=2)[..., :array.shape[axis]].swapaxes(1, 2)[..., None]
    codes = (array.astype(np.float32) / spread).astype(e4m3)
    return codes, scale, codes.astype(np.float64) * spread


class Quantize(program.ProgramTest):
    def write_inputs(self, **sizes):
        query, key, value = random_qkv(seqlen_q=37, seqlen_k=50, head_dim=32, value_head_dim=16, **sizes)
        query[0, 5, 0, 3] = 40
        arrays = {"query": query, "key": key, "value": value}
        save_file(arrays, self.path("in.safetensors"))
        return arrays

    def load_codes(self, name):
        """safetensors' NumPy side has no FP8: the bytes, by the file's header."""
        data = (self.folder / name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        types = {"F8_E4M3": e4m3, "F32": np.float32, "I64": np.int64}
        return {key: np.frombuffer(data[8 + length:][slice(*entry["data_offsets"])],
                                   types[entry["dtype"]]).reshape(entry["shape"])
                for key, entry in json.loads(data[8:8 + length]).items()}

    def test_codes_and_scales(self):
        arrays = self.write_inputs()
        self.succeed("quantize", "--in", "in.safetensors", "--rows", 16, "--out", "codes.safetensors")
        tensors = self.load_codes("codes.safetensors")
        self.assertEqual(len(tensors), 9)
        for name, array in arrays.items():
            codes, scale, _ = quantized(array, 16)
            np.testing.assert_array_equal(tensors[name].view(np.uint8), codes.view(np.uint8))
            np.testing.assert_array_equal(tensors[name + "_scale"], scale)
            self.assertEqual(tensors[name + "_scale_rows"], [16])

    def test_run_reads_them(self):
        arrays = self.write_inputs()
        self.succeed("quantize", "--in", "in.safetensors", "--rows", 16, "--out", "codes.safetensors")
        done = self.succeed("run", "--in", "codes.safetensors", "--causal", "--out", "o.npy")
        self.assertIn("query_scale", done.stdout)
        exact = [quantized(array, 16)[2] for array in arrays.values()]
        expected, _ = batched(*exact, causal=True)
        program.assert_close(self, self.load("o.npy"), expected, np.float32, 8)
        self.succeed("run", "--in", "codes.safetensors", "--causal", "--out", "h.npy", "--out-dtype", "fp16")
        program.assert_close(self, self.load("h.npy"), expected, np.float16, 8)

    def test_space_is_taken_first(self):
        """What has no room is refused before the work."""
        self.save(k=np.zeros((1, 65536, 4, 64), np.float32))
        limit = 65536 * 4 * 64
        self.refuse(OUTPUT, ["c.safetensors: File too large", "bytes are needed"], "quantize", "--k", "k.npy",
                    "--out", "c.safetensors",
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))

    def test_no_gradients(self):
        arrays = self.write_inputs()
        self.succeed("quantize", "--in", "in.safetensors", "--out", "codes.safetensors")
        self.save(do=np.zeros((*arrays["query"].shape[:3], 16), np.float16))
        gradients = ("--in", "codes.safetensors", "--grad-output", "do.npy")
        self.refuse(UNSUPPORTED, ["'query': FP8 has no gradients"], "run", *gradients, "--grad",
                    "g.safetensors")
        self.refuse(UNSUPPORTED, ["'query': FP8 has no gradients"], "verify", *gradients, "--backward")

    def test_verify(self):
        self.write_inputs()
        for options in ((), ("--rows", "all"), ("--rows", "tensor"), ("--rows", 1),
                        ("--rotate", "--seed", 5, "--subtract-mean")):
            self.succeed("quantize", "--in", "in.safetensors", *options, "--out", "codes.safetensors")
            done = self.succeed("verify", "--in", "codes.safetensors", "--originals", "in.safetensors",
                                "--rows", "all", "--json")
            report = json.loads(done.stdout)
            against_codes = next(t for t in report["tensors"] if t["tensor"] == "output")["rms_error"]
            against_originals = report["originals"]["rms_error"]
            self.assertLess(against_codes, 1e-6)
            self.assertTrue(1e-3 < against_originals < 0.1, against_originals)
        self.assertIn("beside that of the originals",
                      self.succeed("verify", "--in", "codes.safetensors", "--originals", "in.safetensors").stdout)

    def test_originals_that_are_none(self):
        """Nothing is said of the output then, not that it is wrong either."""
        self.write_inputs()
        self.succeed("quantize", "--in", "in.safetensors", "--out", "codes.safetensors")
        self.succeed("run", "--in", "codes.safetensors", "--out", "o.npy")
        done = self.refuse(INPUT, ["'query'", "expected float32"], "verify", "--in", "codes.safetensors",
                           "--out", "o.npy", "--originals", "codes.safetensors")
        self.assertEqual(done.stdout, "")

    def test_codes_that_are_made_on_the_way(self):
        arrays = self.write_inputs()
        for fp8, options in ("--fp8", ()), ("--fp8=rotate", ("--rotate",)):
            self.succeed("quantize", "--in", "in.safetensors", *options, "--out", "codes.safetensors")
            self.succeed("run", "--in", "codes.safetensors", "--causal", "--out", "two.npy")
            done = self.succeed("run", "--in", "in.safetensors", "--causal", fp8, "--out", "one.npy")
            self.assertIn("quantize ", done.stdout)
            np.testing.assert_array_equal(self.load("one.npy"), self.load("two.npy"))
            with_file, on_the_way = (json.loads(self.succeed("verify", "--json", *given).stdout) for given in (
                ("--in", "codes.safetensors", "--originals", "in.safetensors"), ("--in", "in.safetensors", fp8)))
            for name, error in on_the_way["originals"].items():
                self.assertAlmostEqual(error, with_file["originals"][name])
        arrays = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
        save_file(arrays, self.path("packed.safetensors"))
        starts = ("--cu-seqlens-q", "0,30,30,74", "--cu-seqlens-k", "0,61,70,100")
        self.succeed("verify", "--in", "packed.safetensors", "--fp8=rotate", *starts, "--seqused-k", "60,9,5")
        self.succeed("run", "--in", "packed.safetensors", "--fp8", *starts, "--out", "o.npy", "--out-dtype", "bf16")

    def test_fp8_that_can_not_be(self):
        self.write_inputs()
        self.refuse(USAGE, ["--fp8=x: expected"], "run", "--in", "in.safetensors", "--fp8=x", "--out", "o.npy")
        self.refuse(USAGE, ["--fp8", "--out"], "verify", "--in", "in.safetensors", "--fp8", "--out", "o.npy")
        self.refuse(USAGE, ["--originals", "--fp8"], "verify", "--in", "in.safetensors", "--fp8", "--originals",
                    "in.safetensors")
        self.succeed("quantize", "--in", "in.safetensors", "--out", "codes.safetensors")
        self.refuse(INPUT, ["tensor 'query'", "e4m3 already"], "run", "--in", "codes.safetensors", "--fp8",
                    "--out", "o.npy")
        save_file({name: np.zeros((9, 2, 24), np.float32) for name in "qkv"}, self.path("odd.safetensors"))
        self.refuse(UNSUPPORTED, ["head_dim is 24"], "run", "--in", "odd.safetensors", "--fp8", "--out", "o.npy")

    def test_devices(self):
        self.write_inputs()
        for device in ("cpu",), ("auto",), ("cpu", "--threads", 1):
            self.succeed("quantize", "--in", "in.safetensors", "--device", *device, "--out", "codes.safetensors")
        self.refuse(UNSUPPORTED, ["--device cuda:7"], "quantize", "--in", "in.safetensors", "--device", "cuda:7",
                    "--out", "codes.safetensors")

    def test_verify_finds_wrong_outputs(self):
        self.write_inputs()
        self.succeed("quantize", "--in", "in.safetensors", "--out", "codes.safetensors")
        self.succeed("run", "--in", "in.safetensors", "--out", "o.npy")  # of the originals
        self.refuse(DIFFERS, ["o.npy", "more than their bound"], "verify", "--in", "codes.safetensors",
                    "--out", "o.npy")
        self.succeed("run", "--in", "codes.safetensors", "--out", "o.npy", "--out-dtype", "bf16")
        self.succeed("verify", "--in", "codes.safetensors", "--out", "o.npy", "--bf16")

    def test_layout_and_single_sequences(self):
        arrays = self.write_inputs()
        save_file({name: np.ascontiguousarray(array[0].swapaxes(0, 1)) for name, array in arrays.items()},
                  self.path("heads.safetensors"))
        self.succeed("quantize", "--in", "heads.safetensors", "--layout", "bhsd", "--rows", 8, "--out",
                     "codes.safetensors")
        tensors = self.load_codes("codes.safetensors")
        codes, scale, _ = quantized(arrays["key"][:1], 8)
        np.testing.assert_array_equal(tensors["key"].view(np.uint8),
                                      codes[0].swapaxes(0, 1).view(np.uint8))
        np.testing.assert_array_equal(tensors["key_scale"], scale)
        self.succeed("verify", "--in", "codes.safetensors", "--layout", "bhsd", "--rows", "all")

    def test_packed(self):
        arrays = {name: array.reshape(-1, *array.shape[2:]) for name, array in self.write_inputs().items()}
        save_file(arrays, self.path("packed.safetensors"))
        starts = ("--cu-seqlens-q", "0,30,30,74", "--cu-seqlens-k", "0,61,70,100")
        for rows in 16, "all", "tensor":
            self.succeed("quantize", "--in", "packed.safetensors", *starts, "--rows", rows, "--out",
                         "codes.safetensors")
            self.succeed("verify", "--in", "codes.safetensors", *starts, "--rows", "all", "--originals",
                         "packed.safetensors")
        self.assertEqual(self.load_codes("codes.safetensors")["key_scale"].shape, (1,))
        save_file({name: np.ascontiguousarray(array.swapaxes(0, 1)) for name, array in arrays.items()},
                  self.path("heads.safetensors"))
        heads = ("--layout", "bhsd", *starts)
        self.succeed("quantize", "--in", "heads.safetensors", *heads, "--out", "codes.safetensors")
        self.succeed("verify", "--in", "codes.safetensors", *heads, "--rows", "all", "--originals",
                     "heads.safetensors")

    def test_some_tensors(self):
        arrays = self.write_inputs()
        self.save(k=arrays["key"])
        done = self.succeed("quantize", "--k", "k.npy", "--out", "k.safetensors")
        self.assertEqual(done.stdout, "key      6400 codes, 4 scales\n")
        self.assertEqual(set(self.load_codes("k.safetensors")), {"key", "key_scale", "key_scale_rows"})

    def write_raw(self, name, **tensors):
        """Tensors of any dtype: (its name, shape, bytes)."""
        header, data = {}, b""
        for key, (dtype, shape, content) in tensors.items():
            header[key] = {"dtype": dtype, "shape": shape,
                           "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = json.dumps(header).encode()
        (self.folder / name).write_bytes(len(text).to_bytes(8, "little") + text + data)

    def test_other_formats_are_refused_by_name(self):
        shape = [1, 2, 1, 16]
        for dtype in "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ":
            self.write_raw("x.safetensors", **{name: (dtype, shape, bytes(32)) for name in ("q", "k", "v")})
            for command in "run", "quantize":
                self.refuse(INPUT, ["tensor 'q'", f"its elements are {dtype}: expected"], command, "--in",
                            "x.safetensors", "--out", "o.safetensors")

    def test_wrong_scales(self):
        shape, codes = [1, 2, 1, 16], bytes([0x38] * 32)
        good = {name: ("F8_E4M3", shape, codes) for name in ("query", "key", "value")}
        four = np.ones(4, np.float32).tobytes()
        for wrong, texts in (
                ({"key_scale": ("F32", [1, 4], four)}, ["key_scale'", "key_scale.shape[1] is 4"]),
                ({"key_scale": ("F16", [4, 2], four)}, ["key_scale'", "dtype"]),
                ({"key_scale": ("F64", [2], four)}, ["key_scale'", "expected float32"]),
                ({"key_scale": ("F32", [1, 1, 2, 2], four)}, ["key_scale'", "rank"]),
                ({"key_scale": ("F32", [0, 2**40, 2**40], b"")}, ["key_scale'", "rank"]),
                ({"key_scale_rows": ("I64", [1], (2).to_bytes(8, "little"))}, ["key_scale is absent"]),
                ({"key_scale_rows": ("F32", [4], four)}, ["key_scale_rows'", "expected one int64"])):
            self.write_raw("x.safetensors", **good, **wrong)
            self.refuse(INPUT, texts, "run", "--in", "x.safetensors", "--out", "o.npy")
        self.write_raw("x.safetensors", **good)  # codes alone: their scale is 1
        self.succeed("run", "--in", "x.safetensors", "--out", "o.npy")
        np.testing.assert_array_equal(self.load("o.npy"), np.ones(shape, np.float32))

    def test_empty_tensors_of_any_extents(self):
        self.write_raw("x.safetensors", k=("F32", [0, 1, 2**40, 16], b""))
        self.succeed("quantize", "--in", "x.safetensors", "--rows", 1, "--out", "o.safetensors")
        self.write_raw("x.safetensors", k=("F32", [0, 2**30, 2**40, 16], b""))
        self.refuse(INPUT, ["overflows"], "quantize", "--in", "x.safetensors", "--rows", 1, "--out",
                    "o.safetensors")

    def test_nan_codes(self):
        shape, codes = [1, 2, 1, 16], bytearray([0x38] * 32)
        good = {name: ("F8_E4M3", shape, bytes(codes)) for name in ("query", "key", "value")}
        codes[20] = 0xff
        self.write_raw("x.safetensors", **(good | {"value": ("F8_E4M3", shape, bytes(codes))}))
        self.succeed("run", "--in", "x.safetensors", "--out", "o.npy")
        output = self.load("o.npy")
        self.assertEqual(np.flatnonzero(np.isnan(output)).tolist(), [4, 20])
        self.succeed("verify", "--in", "x.safetensors")

    def test_documented_commands(self):
        shutil.copy(SOURCE / "examples/minilm/layer3.safetensors", self.folder)
        commands = re.findall(r"^    fa3 (.*)$", (SOURCE / "docs/fp8.md").read_text(), re.MULTILINE)
        self.assertEqual([command.split()[0] for command in commands], ["quantize", "run", "verify"])
        for command in commands:
            done = self.succeed(*command.split())
        self.assertIn("verdict  correct", done.stdout)

    def test_documented_figures(self):
        results = SOURCE / "bench/results/quantization.json"
        table = subprocess.run([sys.executable, SOURCE / "bench/quantization.py", "--table", results],
                               check=True, capture_output=True, text=True).stdout
        self.assertIn(table, (SOURCE / "docs/fp8.md").read_text())

    def test_wrong_options(self):
        self.write_inputs()
        for text, options in ((["--out is missing"], ["--in", "in.safetensors"]),
                              (["no --in"], ["--out", "o.safetensors"]),
                              (["o.npy", "E4M3"], ["--in", "in.safetensors", "--out", "o.npy"]),
                              (["--rows 0"], ["--rows", "0"]),
                              (["--seed needs --rotate"], ["--in", "in.safetensors", "--out", "o.safetensors",
                                                           "--seed", "3"])):
            self.refuse(USAGE, text, "quantize", *options)
        save_file({"v": np.zeros((9, 2, 16), np.float32)}, self.path("v.safetensors"))
        for text, options in ((["--rotate: there is no query and no key"], ["--rotate", "--seed", 2]),
                              (["--subtract-mean: there is no key"], ["--subtract-mean"]),
                              (["--cu-seqlens-q: there is no query"], ["--cu-seqlens-q", "0,9"]),
                              (["--seed needs --rotate"], ["--seed", 0])):
            self.refuse(USAGE, text, "quantize", "--in", "v.safetensors", "--out", "o.safetensors", *options)
        save_file({"q": np.zeros((9, 2, 16), np.float32)}, self.path("q.safetensors"))
        self.refuse(USAGE, ["--cu-seqlens-k: there is no key and no value"], "quantize", "--in",
                    "q.safetensors", "--out", "o.safetensors", "--cu-seqlens-k", "0,9")
        save_file({"other": np.zeros(3, np.float32)}, self.path("other.safetensors"))
        self.refuse(INPUT, ["no tensor 'query'"], "quantize", "--in", "other.safetensors", "--out",
                    "o.safetensors")
        save_file({"q": np.zeros((2, 3), np.float32)}, self.path("flat.safetensors"))
        self.refuse(INPUT, ["has 2 dimensions: expected 3 or 4"], "quantize", "--in", "flat.safetensors",
                    "--out", "o.safetensors")
        save_file({"k": np.zeros((9, 2, 16), np.float32)}, self.path("packed.safetensors"))
        self.refuse(INPUT, ["--cu-seqlens-k", "is 500"], "quantize", "--in", "packed.safetensors", "--out",
                    "o.safetensors", "--cu-seqlens-k", "0,500")


if __name__ == "__main__":
    program.main()
