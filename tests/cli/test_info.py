"""fa3 info, and what --device answers."""
import json
import os
import re

import numpy as np
from safetensors.numpy import save_file

import program
from program import INPUT, UNSUPPORTED, USAGE, random_qkv


class Info(program.ProgramTest):
    def test_table(self):
        text = self.succeed("info").stdout
        self.assertRegex(text, r"^fa3 \d+\.\d+\.\d+\n")
        self.assertRegex(text, r"\ncpu +\w+: .*, \d+ threads, \d+\.\d GiB\n")
        self.assertRegex(text, r"\ncuda")
        for dtype in ("fp32", "fp16", "bf16"):
            for phase in ("forward", "backward"):
                self.assertRegex(text, rf"\ncpu +{phase} +{dtype} +256 +256 .*plain\n")

    def test_tensors_of_a_file(self):
        save_file({"layer.0.q": np.zeros((2, 3), np.float32), "number": np.zeros((), np.int64),
                   "deep": np.zeros((1, 1, 1, 1, 7), np.float16)}, self.path("f.safetensors"))
        lines = self.succeed("info", "f.safetensors").stdout.splitlines()
        self.assertEqual(sorted(lines), ["F16   (1, 1, 1, 1, ...)  deep", "F32   (2, 3)  layer.0.q",
                                         "I64   ()  number"])
        listed = json.loads(self.succeed("info", "--json", "f.safetensors").stdout)["tensors"]
        self.assertIn({"name": "layer.0.q", "dtype": "F32", "rank": 2, "shape": [2, 3]}, listed)
        (self.folder / "bad.safetensors").write_bytes(b"bad")
        self.refuse(INPUT, ["bad.safetensors: "], "info", "bad.safetensors")
        self.refuse(USAGE, ["f.npy: expected a .safetensors file"], "info", "f.npy")

    def test_json_says_the_same(self):
        text = self.succeed("info").stdout
        info = json.loads(self.succeed("info", "--json").stdout)
        self.assertIn("fa3 " + info["version"], text)
        cpu, cuda = info["devices"][:2]
        self.assertEqual((cpu["device"], cpu["usable"], cpu["status"]), ("cpu", True, "FA3_OK"))
        self.assertIn(cpu["name"], text)
        self.assertEqual(cuda["device"], "cuda:0")
        if not cuda["usable"]:
            self.assertIn(cuda["reason"], text)
        has_kernels = any(kernel["engine"] == "cuda" for kernel in info["kernels"])
        self.assertEqual(bool(re.search("^cuda  *forward ", text, re.M)), has_kernels)  # scripts/demo
        selected = [kernel for kernel in info["kernels"] if kernel["selected"]]
        for phase in ("forward", "backward"):
            dtypes = [kernel["dtype"] for kernel in selected if kernel["phase"] == phase]
            codes = ["e4m3"] if phase == "forward" else []
            self.assertEqual(sorted(dtypes), sorted(["bf16", "fp16", "fp32"] + codes))
        self.assertEqual({kernel["name"] for kernel in selected}, {cpu["level"]})
        self.assertTrue(all(kernel["usable"] for kernel in selected))

    def test_level_by_environment(self):
        environment = {**os.environ, "FA3_CPU_LEVEL": "plain"}
        info = json.loads(self.succeed("info", "--json", env=environment).stdout)
        self.assertEqual(info["devices"][0]["level"], "plain")
        environment["FA3_CPU_LEVEL"] = "none"
        text = self.succeed("info", env=environment).stdout
        self.assertRegex(text, r"\ncpu +can't be used: .*FA3_CPU_LEVEL")

    def run_on(self, code, texts, device, **options):
        query, key, value = random_qkv()
        self.save(q=query, k=key, v=value)
        arguments = ("run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "o.npy",
                     "--device", device)
        if code:
            return self.refuse(code, texts, *arguments, **options)
        return self.succeed(*arguments, **options)

    def test_devices(self):
        info = json.loads(self.succeed("info", "--json").stdout)
        self.assertEqual(self.run_on(0, [], "cpu").stderr, "")
        self.assertIn("fa3: using ", self.run_on(0, [], "auto").stderr)
        cuda = info["devices"][1]
        if not cuda["usable"]:
            for device in ("cuda", "cuda:0"):
                self.run_on(UNSUPPORTED, ["--device cuda:0: " + cuda["reason"]], device)
        for device in ("gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:0 ", "CPU", ""):
            self.run_on(USAGE, ["--device " + device], device)
        self.run_on(USAGE, ["FA3_CPU_LEVEL"], "cpu", env={**os.environ, "FA3_CPU_LEVEL": "none"})


program.main()
