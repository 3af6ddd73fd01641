"""fa3 run: right results from every kind of file, mask and length."""
import re

import numpy as np
import safetensors.numpy

import program
from program import INPUT, assert_close, attention, batched, bfloat16, random_qkv


class Run(program.ProgramTest):
    def check(self, expected, tensors, *options, name="o.npy", dtype=None):
        """Runs on q.npy, k.npy, v.npy and compares output and lse."""
        self.succeed("run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", name,
                     "--lse", "lse.npy", *options)
        query, _, value = tensors
        largest = np.abs(value.astype(np.float64)).max(initial=1)
        assert_close(self, self.load(name, dtype), expected[0], query.dtype, largest)
        lse = self.load("lse.npy")
        self.assertEqual(lse.dtype, np.float32)
        assert_close(self, lse, expected[1], np.float32, 8)

    def check_dense(self, *options, qkv=None, **masks):
        qkv = qkv or random_qkv()
        self.save(q=qkv[0], k=qkv[1], v=qkv[2])
        self.check(batched(*qkv, **masks), qkv, *options)

    def test_pages(self):
        """A cache in shuffled pages gives what it gives in one piece."""
        query, key, value = random_qkv(seqlen_k=8)
        places = np.array([[3, 0], [1, 4]])
        pages = {name: np.full((5, 4, *array.shape[2:]), np.nan, np.float32)
                 for name, array in (("k", key), ("v", value))}
        for name, array in (("k", key), ("v", value)):
            for (b, i), page in np.ndenumerate(places):
                pages[name][page] = array[b, 4 * i:4 * i + 4]
        self.save(q=query, k=pages["k"], v=pages["v"], table=places, dense_k=key, dense_v=value)
        masks = ("--causal", "--seqused-k", "7,5")
        self.succeed("run", "--q", "q.npy", "--k", "dense_k.npy", "--v", "dense_v.npy", *masks,
                     "--out", "dense.npy")
        paged = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy", *masks, "--page-table", "table.npy")
        said = self.succeed("run", *paged, "--out", "paged.npy").stdout
        for line in ("key         (pages 5, page size 4, heads", "page_table  (batch 2, pages of a sequence 2) int32"):
            self.assertIn(line, said)
        np.testing.assert_allclose(self.load("paged.npy"), self.load("dense.npy"), rtol=1e-5)
        self.succeed("verify", *paged, "--rows", "all")
        self.save(table=places + 1)
        self.refuse(INPUT, ["table.npy: page_table[1][1] is 5: expected one of key's 5 pages"],
                    "run", *paged, "--out", "o.npy")

    def test_plain(self):
        self.check_dense()

    def test_says_what_it_understood(self):
        """A file in another layout shows other axes; --quiet shows nothing."""
        query, key, value = random_qkv(batch=1, seqlen_q=5, seqlen_k=7, heads=4, heads_k=4)
        self.save(q=query, k=key, v=value)
        inputs = ("run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "o.npy")
        said = self.succeed(*inputs, "--lse", "lse.npy").stdout
        for line in ("query       (batch 1, seqlen 5, heads 4, head dim 16) fp32",
                     "key         (batch 1, seqlen 7, heads 4, head dim 16) fp32",
                     "value       (batch 1, seqlen 7, heads 4, head dim 24) fp32",
                     "output      (batch 1, seqlen 5, heads 4, head dim 24) fp32",
                     "lse         (batch 1, heads 4, seqlen 5) fp32"):
            self.assertIn(line + "\n", said)
        self.assertRegex(said, r"(?m)^attention   [0-9.e-]+ ms, [0-9.e-]+ TFLOP/s$")
        self.save(k=np.zeros((1, 4, 4, 16), np.float32), v=np.zeros((1, 4, 4, 24), np.float32),
                  q=np.zeros((1, 4, 5, 16), np.float32))
        said = self.succeed(*inputs, "--layout", "bhsd").stdout
        self.assertIn("query       (batch 1, heads 4, seqlen 5, head dim 16) fp32\n", said)
        self.assertEqual(self.succeed(*inputs, "--layout", "bhsd", "--quiet").stdout, "")

    def test_operations_of_full_pages(self):
        """Without --seqused-k every page is full, and so the speed that is printed counts."""
        query, value = np.ones((1, 5, 2, 16), np.float32), np.ones((3, 4, 2, 24), np.float32)
        self.save(q=query, k=value[..., :16], v=value, table=np.arange(3, dtype=np.int32)[None])
        said = self.succeed("run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "o.npy",
                            "--page-table", "table.npy").stdout
        milliseconds, speed = re.search(r"attention +(\S+) ms, (\S+) TFLOP/s", said).groups()
        operations = 2 * 2 * (16 + 24) * 5 * 12  # two heads, five queries, three pages of four keys
        self.assertAlmostEqual(float(milliseconds) * float(speed) * 1e9 / operations, 1, delta=0.02)

    def test_near_names(self):
        query, key, value = random_qkv()
        safetensors.numpy.save_file({"layer.0.query": query, "k": key, "v": value},
                                    self.path("in.safetensors"))
        self.refuse(program.INPUT, ["has no tensor 'layer0.query': there is 'layer.0.query'"], "run",
                    "--in", "in.safetensors", "--q", ":layer0.query", "--out", "o.npy")
        safetensors.numpy.save_file({"layer0.key": key, "layer0.query": query}, self.path("in.safetensors"))
        self.refuse(program.INPUT, ["has no tensor 'layer0.q': there is 'layer0.query'"], "run",
                    "--in", "in.safetensors", "--q", ":layer0.q", "--out", "o.npy")
        self.refuse(program.INPUT, ["has no tensor 'query' or 'q': there is 'layer0.query'"], "run",
                    "--in", "in.safetensors", "--out", "o.npy")

    def test_masks_and_scores(self):
        self.check_dense("--causal", causal=True)
        self.check_dense("--window", "2,1", window=(2, 1))
        self.check_dense("--window=-1,0", window=(-1, 0))
        self.check_dense("--causal", "--window", "1,3", causal=True, window=(1, 3))
        self.check_dense("--scale", "0.5", scale=0.5)
        self.check_dense("--scale", "-0.25", scale=-0.25)
        self.check_dense("--softcap", "1.5", softcap=1.5)

    def test_rows_that_see_no_key(self):
        qkv = random_qkv(seqlen_q=9, seqlen_k=4)
        self.check_dense("--causal", qkv=qkv, causal=True)
        self.assertEqual(np.abs(self.load("o.npy")[:, :5]).max(), 0)
        self.assertTrue(np.isneginf(self.load("lse.npy")[:, :, :5]).all())

    def test_sink(self):
        sink = np.array([0.5, -1, 2, -np.inf], np.float32)
        self.save(sink=sink)
        self.check_dense("--sink", "sink.npy", sink=sink)

    def test_float16(self):
        self.check_dense(qkv=random_qkv(dtype=np.float16))
        self.assertEqual(self.load("o.npy").dtype, np.float16)

    def test_bfloat16_as_ml_dtypes_saves_it(self):
        qkv = random_qkv(dtype=bfloat16)
        self.save(q=qkv[0], k=qkv[1], v=qkv[2])
        self.assertIn(b"'<V2'", (self.folder / "q.npy").read_bytes())
        self.check(batched(*qkv), qkv, "--bf16", dtype=bfloat16)
        self.assertIn(b"'<V2'", (self.folder / "o.npy").read_bytes())
        self.refuse(program.INPUT, ["q.npy: its 2-byte elements have no type", "--bf16"],
                    "run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "o.npy")

    def test_output_in_float32(self):
        qkv = random_qkv(dtype=np.float16)
        self.save(q=qkv[0], k=qkv[1], v=qkv[2])
        self.check(batched(*qkv), qkv, "--out-dtype", "fp32")
        self.assertEqual(self.load("o.npy").dtype, np.float32)

    def test_without_batch(self):
        qkv = [array[0] for array in random_qkv(batch=1)]
        self.save(q=qkv[0], k=qkv[1], v=qkv[2])
        self.check(attention(*qkv), qkv)

    def test_heads_first(self):
        qkv = random_qkv()
        self.save(**{name: np.ascontiguousarray(array.swapaxes(1, 2))
                     for name, array in zip("qkv", qkv)})
        output, lse = batched(*qkv, causal=True)
        self.check((output.swapaxes(1, 2), lse), qkv, "--layout", "bhsd", "--causal")

    def test_heads_first_without_batch(self):
        qkv = [array[0] for array in random_qkv(batch=1)]
        self.save(**{name: np.ascontiguousarray(array.swapaxes(0, 1))
                     for name, array in zip("qkv", qkv)})
        output, lse = attention(*qkv)
        self.check((output.swapaxes(0, 1), lse), qkv, "--layout", "bhsd")

    def test_packed(self):
        query, key, value = (array[0] for array in random_qkv(batch=1, seqlen_q=9, seqlen_k=11))
        starts_q, starts_k = [0, 4, 4, 9], [0, 3, 8, 11]
        parts = [attention(query[q:next_q], key[k:next_k], value[k:next_k], causal=True)
                 for q, next_q, k, next_k in zip(starts_q, starts_q[1:], starts_k, starts_k[1:])]
        expected = (np.concatenate([part[0] for part in parts]),
                    np.concatenate([part[1] for part in parts], axis=1))
        self.save(q=query, k=key, v=value, starts=np.array(starts_k))  # int64
        self.check(expected, (query, key, value), "--causal", "--cu-seqlens-q", "0,4,4,9",
                   "--cu-seqlens-k", "starts.npy")

    def test_used_lengths(self):
        query, key, value = random_qkv()
        parts = [attention(query[0, :3], key[0, 2:6], value[0, 2:6]),
                 attention(query[1, :5], key[1, 0:1], value[1, 0:1])]
        output = np.zeros((2, 5, 4, 24))
        lse = np.zeros((2, 4, 5))
        for b, rows in enumerate((3, 5)):
            output[b, :rows], lse[b, :, :rows] = parts[b]
        self.save(q=query, k=key, v=value, leftpad=np.array([2, 0], np.int32))
        self.check((output, lse), (query, key, value), "--seqused-q", "3,5", "--seqused-k", "6,1",
                   "--leftpad-k", "leftpad.npy")

    def test_cache_batch_index(self):
        query, key, value = random_qkv()
        key, value = (np.concatenate([array, array[:1] + 1]) for array in (key, value))
        self.save(q=query, k=key, v=value)
        index = [2, 1]
        self.check(batched(query, key[index], value[index]), (query, key, value),
                   "--cache-batch-index", "2,1")

    def test_diagonal(self):
        query, key, value = random_qkv()
        parts = [attention(query[b], key[b], value[b], causal=True, diagonal=diagonal)
                 for b, diagonal in enumerate((0, -2))]
        self.save(q=query, k=key, v=value)
        expected = tuple(np.stack([part[i] for part in parts]) for i in range(2))
        self.check(expected, (query, key, value), "--causal", "--diagonal", "0,-2")

    def test_empty(self):
        for extents in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}):
            self.check_dense(qkv=random_qkv(**extents))

    def test_threads(self):
        self.check_dense("--threads", "1", "--device", "cpu")

    def test_safetensors(self):
        for dtype in (np.float32, np.float16, bfloat16):
            query, key, value = random_qkv(dtype=dtype)
            sink = np.arange(4).astype(dtype)
            safetensors.numpy.save_file(
                {"query": query, "k": key, "deep.value": value, "sink": sink,
                 "starts": np.arange(3), "unused": np.zeros(3, bool)}, self.path("in.safetensors"))
            self.succeed("run", "--in", "in.safetensors", "--v", ":deep.value", "--sink", ":sink",
                         "--out", "o.safetensors", "--lse", "o.safetensors")
            got = safetensors.numpy.load_file(self.path("o.safetensors"))
            self.assertEqual((sorted(got), got["output"].dtype), (["lse", "output"], dtype))
            output, lse = batched(query, key, value, sink=sink)
            assert_close(self, got["output"], output, dtype, np.abs(value.astype(float)).max())
            assert_close(self, got["lse"], lse, np.float32, 8)

    def test_sources_mix(self):
        query, key, value = random_qkv()
        self.save(q=query)
        safetensors.numpy.save_file({"a:b": key}, self.path("k.safetensors"))
        safetensors.numpy.save_file({"value": value, "seqused_k": np.array([7, 7])},
                                    self.path("v.safetensors"))
        self.succeed("run", "--q", "q.npy", "--k", "k.safetensors:a:b", "--v", "v.safetensors",
                     "--seqused-k", "v.safetensors", "--out", "o.npy")
        assert_close(self, self.load("o.npy"), batched(query, key, value)[0], np.float32, 8)

    def test_data_at_any_offset(self):
        """A safetensors file may put a float tensor at an odd byte."""
        query, key, value = random_qkv()
        header = b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
        data = b"x"
        for name, array in zip("qkv", (query, key, value)):
            header += (f',"{name}":{{"dtype":"F32","shape":{list(array.shape)},"data_offsets":'
                       f'[{len(data)},{len(data) + array.nbytes}]}}').encode()
            data += array.tobytes()
        header += b"}"
        (self.folder / "odd.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + data)
        self.succeed("run", "--in", "odd.safetensors", "--out", "o.npy")
        assert_close(self, self.load("o.npy"), batched(query, key, value)[0], np.float32, 8)


program.main()
