"""Files that are fine by themselves and do not fit together."""
import numpy as np

import program
from program import INPUT, UNSUPPORTED, USAGE, bfloat16, random_qkv


class Mismatched(program.ProgramTest):
    def setUp(self):
        super().setUp()
        query, key, value = random_qkv()
        self.save(q=query, k=key, v=value)

    def refuse_with(self, texts, *options, code=INPUT, **replaced):
        """Runs with some inputs replaced by other arrays."""
        query, key, value = random_qkv()
        self.save(**{"q": query, "k": key, "v": value, **replaced})
        self.refuse(code, texts, "run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out",
                    "o.npy", *options)

    def test_arrays_without_dimensions(self):
        """numpy.save of a number: refused wherever a vector is expected, not ignored."""
        for name in ("seqused-q", "seqused-k", "leftpad-k", "cu-seqlens-q", "cu-seqlens-k",
                     "cache-batch-index"):
            self.refuse_with(["s.npy: has 0 dimensions: expected 1"], f"--{name}", "s.npy",
                             s=np.int32(3))
        self.refuse_with(["s.npy: has 0 dimensions: expected 1"], "--causal", "--diagonal", "s.npy",
                         s=np.int64(3))
        self.refuse_with(["s.npy: has 0 dimensions: expected 1"], "--sink", "s.npy",
                         s=np.float32(3))

    def test_shapes(self):
        def zeros(*shape):
            return np.zeros(shape, np.float32)
        self.refuse_with(["k.npy: key.shape[3] is 24: expected 16, query's head dim"],
                         k=zeros(2, 7, 2, 24))
        self.refuse_with(["q.npy: query.shape[2] is 4: expected a multiple of key's 3 heads"],
                         k=zeros(2, 7, 3, 16))
        self.refuse_with(["k.npy: key.shape[2] is 0: expected at least one head"], k=zeros(2, 7, 0, 16))
        self.refuse_with(["v.npy: value.shape[2] is 4: expected 2, key's heads"],
                         v=zeros(2, 7, 4, 24))
        self.refuse_with(["v.npy: value.shape[1] is 8: expected 7, key's rows"], v=zeros(2, 8, 2, 24))
        self.refuse_with(["k.npy: key.shape[0] is 3: expected 2, query's batch"], k=zeros(3, 7, 2, 16),
                         v=zeros(3, 7, 2, 24))
        self.refuse_with(["v.npy: value.shape[0] is 1: expected 2, query's batch"], v=zeros(1, 7, 2, 24))
        self.refuse_with(["q.npy: has 2 dimensions: expected 3 or 4"], q=zeros(4, 16))
        self.refuse_with(["v.npy: has 1 dimensions"], v=zeros(4))
        for head_dim in (12, 264):
            self.refuse_with([f"q.npy: head_dim is {head_dim}: expected a multiple of 8"],
                             q=zeros(2, 5, 4, head_dim), k=zeros(2, 7, 2, head_dim),
                             code=UNSUPPORTED)
        self.refuse_with(["v.npy: value_head_dim is 4"], v=zeros(2, 7, 2, 4), code=UNSUPPORTED)

    def test_dtypes(self):
        self.refuse_with(["k.npy: key.dtype is fp16: expected query's, fp32"],
                         k=random_qkv(dtype=np.float16)[1])
        self.refuse_with(["v.npy: value.dtype is bf16: expected key's, fp32"], "--bf16",
                         v=random_qkv(dtype=bfloat16)[2])
        self.refuse_with(["q.npy: query.dtype is int32: expected fp32, fp16, bf16 or e4m3"],
                         q=np.zeros((2, 5, 4, 16), np.int32))
        self.refuse_with(["sink.npy: sink.dtype is fp16: expected query's, fp32"],
                         "--sink", "sink.npy", sink=np.zeros(4, np.float16))
        self.refuse_with(["sink.npy: sink.dtype is bf16: expected query's, fp16, or fp32"],
                         "--sink", "sink.npy", "--bf16", sink=np.zeros(4, bfloat16),
                         **dict(zip("qkv", random_qkv(dtype=np.float16))))
        self.refuse_with(["n.npy: its elements are floating point: expected int32 or int64"],
                         "--seqused-k", "n.npy", n=np.zeros(2, np.float32))
        self.refuse_with(["n.npy: its elements are float64 ('<f8'): expected int32 or int64"],
                         "--seqused-k", "n.npy", n=np.zeros(2))
        self.refuse_with(["n.npy: its elements are uint8 ('|u1'): expected int32 or int64"],
                         "--diagonal", "n.npy", "--causal", n=np.zeros(2, np.uint8))
        for name in "kv":
            self.refuse_with([f"{name}.npy: its elements are float64 ('<f8'): expected float32, "
                              "float16 or bfloat16"], **{name: np.zeros((2, 7, 2, 16))})
        self.refuse_with(["sink.npy: its elements are complex128 ('<c16'): expected float32, "],
                         "--sink", "sink.npy", sink=np.zeros(4, np.complex128))

    def test_vectors(self):
        self.refuse_with(["sink.npy: sink.shape[0] is 3: expected 4, query's heads"], "--sink",
                         "sink.npy", sink=np.zeros(3, np.float32))
        self.refuse_with(["sink.npy: has 2 dimensions: expected 1"], "--sink", "sink.npy",
                         sink=np.zeros((4, 1), np.float32))
        self.refuse_with(["n.npy: seqused_k.shape[0] is 3: expected 2, query's batch"], "--seqused-k",
                         "n.npy", n=np.zeros(3, np.int32))
        self.refuse_with(["n.npy: element 1 is 4294967296: expected less than 2^31"],
                         "--seqused-k", "n.npy", n=np.array([0, 2**32]))

    def test_scalars(self):
        """An array without dimensions is no vector, also of one sequence and one head."""
        query, key, value = random_qkv(batch=1, heads=1, heads_k=1)
        self.save(q=query, k=key, v=value)
        for option in ("--sink", "--cu-seqlens-q", "--cu-seqlens-k", "--seqused-q", "--seqused-k",
                       "--leftpad-k", "--cache-batch-index", "--diagonal"):
            np.save(self.path("n.npy"), np.float32(0) if option == "--sink" else np.int32(1))
            for command in ("run", "verify"):
                self.refuse(INPUT, ["n.npy: has 0 dimensions: expected 1"], command, "--q", "q.npy",
                            "--k", "k.npy", "--v", "v.npy", "--out", "o.npy", option, "n.npy",
                            "--causal")

    def test_lengths(self):
        for option, lists in {"--seqused-q": ("6,5", "5,-1"), "--seqused-k": ("8,7", "7,-1"),
                              "--leftpad-k": ("8,0", "0,-1"),
                              "--cache-batch-index": ("0,2", "-1,0")}.items():
            for lengths in lists:
                self.refuse_with([f"{option}: {option[2:].replace('-', '_')}[", "expected 0 to"], option, lengths)
        self.refuse_with(["--leftpad-k: leftpad_k[0] is 4: expected 0 to 3"], "--leftpad-k", "4,0",
                         "--seqused-k", "3,7")
        self.refuse_with(["--diagonal: diagonal[0]"], "--causal", "--diagonal=-9000000000000000000,0")
        self.refuse_with(["--diagonal needs --causal or --window"], "--diagonal", "0,0", code=USAGE)
        for lengths in ("1,,2", "1,", "-", "1,2,99999999999999999999"):
            self.refuse_with(["--seqused-k", lengths], "--seqused-k", lengths, code=USAGE)

    def test_packed(self):
        query, key, value = (array[0] for array in random_qkv(batch=1))
        packed = {"q": query, "k": key, "v": value}
        for starts, text in (("1,5", "cu_seqlens_q[0] is 1: expected 0"),
                             ("0,3,2", "cu_seqlens_q[2] is 2: expected at least cu_seqlens_q[1] = 3"),
                             ("0,6", "cu_seqlens_q[1] is 6: expected at most the 5 packed rows"),
                             ("0,-1", "cu_seqlens_q[1] is -1")):
            self.refuse_with(["--cu-seqlens-q: " + text], "--cu-seqlens-q", starts, **{
                "q": query, "k": np.stack([key] * (starts.count(","))),
                "v": np.stack([value] * (starts.count(",")))})
        self.refuse_with(["--cu-seqlens-k: cu_seqlens_k.shape[0] is 2: expected 3, cu_seqlens_q's batch + 1"], "--cu-seqlens-q", "0,2,5", "--cu-seqlens-k", "0,7",
                         **packed)
        # Without its own starts a tensor of three dimensions is one sequence.
        for other, text in (("--cu-seqlens-q", "cu_seqlens_q.shape[0] is 4: expected 2, key's batch"),
                            ("--cu-seqlens-k", "cu_seqlens_k.shape[0] is 4: expected 2, query's")):
            self.refuse_with([f"{other}: {text}"], other, "0,2,3,5", **packed)
            self.refuse_with([f"n.npy: {text}"], other, "n.npy", n=np.array([0, 2, 3, 5]), **packed)
        self.refuse_with(["q.npy: has 4 dimensions: expected 3, because of --cu-seqlens-q"],
                         "--cu-seqlens-q", "0,5")
        self.refuse_with(["n.npy"], "--cu-seqlens-q", "n.npy", n=np.zeros(0, np.int32), **packed)

    def test_verify_checks_the_same(self):
        query, key, value = (array[0] for array in random_qkv(batch=1))
        self.save(q=query, k=key, v=value, o=np.zeros((5, 4, 24), np.float32))
        self.refuse(INPUT, ["--cu-seqlens-k: cu_seqlens_k[1] is 1000000000"], "verify", "--q", "q.npy",
                    "--k", "k.npy", "--v", "v.npy", "--out", "o.npy", "--cu-seqlens-q", "0,5",
                    "--cu-seqlens-k", "0,1000000000")


program.main()
