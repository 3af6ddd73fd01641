"""The program on a GPU, as far as tests/driver/fake.c can play one: its kernels compute nothing, each
adds 1 to the first byte of every tensor."""
import json
import os
import subprocess
import unittest

import numpy as np
import safetensors.numpy

import program
from program import DIFFERS, FAILED, UNSUPPORTED, bfloat16, random_qkv

INPUTS = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--bf16")
SMALL = ("bench", "--seqlen", "64", "--head-dim", "64", "--repeat", "2")


def gpu(gpus="90", **settings):
    """An environment in which the driver shows these GPUs, and FAKE_CUDA_... are these settings."""
    path = os.pathsep.join(filter(None, (os.environ["FAKE_CUDA_FOLDER"],
                                         os.environ.get("LD_LIBRARY_PATH"))))
    return {**os.environ, "LD_LIBRARY_PATH": path, "FAKE_CUDA_GPUS": gpus,
            **{"FAKE_CUDA_" + name: value for name, value in settings.items()}}


def has_kernels():
    done = subprocess.run([program.PROGRAM, "info", "--json"], env=gpu(), text=True,
                          capture_output=True, check=True)
    return json.loads(done.stdout)["devices"][1]["usable"]


class CudaTest(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.make(bfloat16)

    def make(self, dtype, **extents):
        qkv = random_qkv(dtype=dtype, **extents)
        self.save(**dict(zip("qkv", qkv)))

    def run_on(self, device, *options, env=None):
        return self.succeed("run", *INPUTS, "--device", device, "--out", "o.npy", *options,
                            env=env or gpu())

    def refuse_on(self, device, code, texts, *options, env=None):
        self.refuse(code, texts, "run", *INPUTS, "--device", device, "--out", "none.npy", *options,
                    env=env or gpu())


class Cuda(CudaTest):
    def test_devices_that_are_not_there(self):
        for device, env in (("cuda", gpu("")), ("cuda:1", gpu()), ("cuda", gpu("80")),
                            ("cuda", gpu(VERSION="11080")), ("cuda", gpu(INIT="999"))):
            reason = [entry["reason"] for entry in json.loads(
                self.succeed("info", "--json", env=env).stdout)["devices"]
                      if entry["device"] == device + ":0"]
            self.refuse_on(device, UNSUPPORTED, [f"--device {device}", *reason], env=env)
        self.refuse_on("cuda:1", UNSUPPORTED, ["the driver shows 1 GPU"])

    def test_auto_without_a_gpu(self):
        for env in (gpu(""), gpu(VERSION="11080")):
            self.assertRegex(self.run_on("auto", env=env).stderr, r"^fa3: using cpu \(.*\)\n$")

    def test_auto_says_why_not_the_gpu(self):
        self.assertRegex(self.run_on("auto", env=gpu("80")).stderr,
                         r"^fa3: using cpu \(.*\), not cuda:0: .+\n$")

    def test_threads_mean_the_cpu(self):
        self.assertRegex(self.run_on("auto", "--threads", "1").stderr,
                         r"^fa3: using cpu \(.*\)\n$")


@unittest.skipUnless(has_kernels(), "this build has no CUDA kernels")
class CudaKernels(CudaTest):
    """With kernels a fake GPU can be used."""

    def check_output(self, name="o.npy"):
        """The launches' mark and nothing else: it went there, and came back after them."""
        data = self.load(name).view(np.uint8).ravel()
        self.assertGreater(data[0], 0)
        self.assertEqual(np.count_nonzero(data), 1)

    def test_run(self):
        for extra in ((), ("--causal",), ("--seqused-k", "3,7"), ("--window", "2,2")):
            done = self.run_on("cuda", *extra, "--lse", "lse.npy")
            self.assertEqual(done.stderr, "")
            self.assertRegex(done.stdout, r"(?m)^attention .* TFLOP/s, copies to and from the GPU")
            self.check_output()
            self.check_output("lse.npy")

    def test_packed(self):
        query, key, value = (array[0] for array in random_qkv(batch=1, dtype=np.float16))
        self.save(q=query, k=key, v=value)
        for starts in ("0,2,5", "0,0"):
            self.run_on("cuda", "--cu-seqlens-q", starts, "--cu-seqlens-k", starts)

    def test_nothing_to_compute(self):
        for extents in ({"batch": 0}, {"seqlen_q": 0}):
            self.make(bfloat16, **extents)
            self.run_on("cuda")

    def test_auto(self):
        self.assertEqual(self.run_on("auto").stderr,
                         "fa3: using cuda:0 (Fake GPU 0 of sm_90, sm_90a)\n")
        self.check_output()
        self.assertEqual(self.run_on("auto", env=gpu("80 90")).stderr,
                         "fa3: using cuda:1 (Fake GPU 1 of sm_90, sm_90a)\n")

    def test_what_the_gpu_refuses(self):
        self.make(np.float32)
        self.refuse_on("cuda", UNSUPPORTED, ["--device cuda:0: query's dtype is fp32: the CUDA kernels take fp16"])
        self.assertRegex(self.run_on("auto").stderr,
                         r"^fa3: using cpu \(.*\), not cuda:0: query's dtype .+\n$")

    def test_failures(self):
        for function in ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemAlloc",
                         "cuMemcpyHtoD", "cuCtxSynchronize", "cuMemcpyDtoH", "cuLaunchKernelEx"):
            self.refuse_on("cuda", FAILED, [function + " gave CUDA_ERROR_UNKNOWN (999)"],
                           env=gpu(FAILING=function))
        self.refuse_on("cuda", UNSUPPORTED, ["has no cuMemAlloc"], env=gpu(MISSING="cuMemAlloc"))
        self.refuse_on("cuda", FAILED, ["cuda:0: no memory for query: 1280 bytes, and 500 are free"],
                       env=gpu(MEMORY="500"))

    def test_gradients(self):
        gradients = ("grad_query", "grad_key", "grad_value")
        for sink in ((), ("--sink", "sink.npy")):
            self.save(do=np.zeros((2, 5, 4, 24), bfloat16), sink=np.zeros(4, np.float32))
            self.run_on("cuda", *sink, "--grad-output", "do.npy", "--grad", "g.safetensors")
            got = safetensors.numpy.load_file(self.path("g.safetensors"))
            self.assertEqual(sorted(got), sorted((*gradients, *(("grad_sink",) if sink else ()))))
            for name in gradients:
                self.save(gradient=got[name])
                self.check_output("gradient.npy")
        for function in ("cuMemAlloc", "cuCtxSynchronize", "cuLaunchKernelEx"):
            self.refuse_on("cuda", FAILED, [function + " gave"], "--grad-output", "do.npy", "--grad",
                           "none.safetensors", env=gpu(FAILING=function))

    def test_verify(self):
        done = self.refuse(DIFFERS, ["the output: "], "verify", *INPUTS, "--device", "cuda",
                           env=gpu())
        self.assertIn("computed on cuda:0 (Fake GPU 0 of sm_90, sm_90a)", done.stdout)

    def test_bench(self):
        """Which finds that a fake computes nothing."""
        done = self.refuse(DIFFERS, ["wrong output for bf16, seqlen 64"], *SMALL, env=gpu())
        self.assertIn("132 SMs; median of 2 runs", done.stdout)
        done = self.refuse(UNSUPPORTED, ["query's dtype"], *SMALL, "--device", "cuda", "--dtype",
                           "bf16,fp32", env=gpu())
        self.assertEqual(done.stdout, "")
        done = self.succeed(*SMALL, "--dtype", "bf16,fp32", env=gpu())
        self.assertRegex(done.stderr, r"^fa3: using cpu \(.*\), not cuda:0: query's dtype")
        self.assertEqual(len(done.stdout.splitlines()), 7)


program.main()
