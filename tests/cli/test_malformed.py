"""Files that are cut short, lie, or are something else: one line that names the file."""
import io
import json
import struct

import numpy as np
import safetensors.numpy

import program
from program import INPUT, random_qkv


def npy_header(text, version=(1, 0)):
    text = text.encode() + b"\n"
    length = struct.pack("<H" if version[0] == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text


def npy(descr="'<f4'", order="False", shape="(1, 1, 1, 8)", size=32):
    return npy_header(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}") + (
        b"\0" * size)


NPY = {
    "not a .npy file": [b"", b"\x93NUMP", b"PK\x03\x04" + b"\0" * 100, b'{"a": 1}' * 20],
    "cut short in its header": [npy()[:9], npy()[:50],
                                b"\x93NUMPY\x02\0\xff\xff\xff\x7f" + b"{" * 70000],
    "its .npy version is 4.0": [npy_header("{}", (4, 0)) + b"\0" * 9],
    "its .npy version is 1.1": [npy_header("{}", (1, 1))],
    "its header is 65536 bytes": [npy_header(" " * 65535, (2, 0))],
    "malformed .npy header": [
        npy_header("  "), npy_header("[]"), npy_header("{}"), npy_header("{'descr'"),
        npy_header("{'descr': '<f4', 'fortran_order': False}"),
        npy_header("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}"),
        npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (), 'more': 1}"),
        npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': ()} x"),
        npy(descr="[('a', '<f4')]"), npy(descr="4"), npy(descr="'\\x3cf4'"),
        npy(descr="'" + "f" * 100 + "'"), npy(order="0"), npy(order="'False'"),
        npy(shape="8"), npy(shape="(8)"), npy(shape="[8]"), npy(shape="(8"), npy(shape="(8,,)"),
        npy(shape="(-8,)"), npy(shape="(8.0,)"), npy(shape="(8L,)"), npy(shape="(1, 8 8)"),
    ],
    "big-endian ('>f4')": [npy(descr="'>f4'")],
    "its elements are float64 ('<f8'): expected float32, float16 or bfloat16": [npy(descr="'<f8'", size=64)],
    "its elements are '<f4, ': expected": [npy(descr="'<f4")],
    "its elements are bool ('|b1'): expected": [npy(descr="'|b1'", size=8)],
    "its elements are object ('|O'): expected": [npy(descr="'|O'", size=64)],
    "is in Fortran order": [npy(order="True")],
    "more than 4 dimensions": [npy(shape="(1, 1, 1, 1, 8)")],
    "an extent of its shape overflows": [npy(shape="(9223372036854775808,)")],
    "the size of its shape overflows": [npy(shape="(4294967296, 4294967296, 1, 8)"),
                                        npy(shape="(4611686018427387904,)")],
    "cut short: its shape needs 32 bytes of data, it has 31": [npy(size=31)],
    "its shape needs 9223372036854775800 bytes": [npy(shape="(2305843009213693950,)")],
    "holds 33 bytes of data, its shape needs only 32": [npy(size=33)],
}


def container(header, data=b"", length=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(begin, end, shape=(1, 1, 1, 8), dtype="F32", **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def lone(**fields):
    """A file with one tensor, some of its fields replaced."""
    return container({"q": {**tensor(0, 32), **fields}}, b"\0" * 32)


SAFETENSORS = {
    "not a .safetensors file: 7 bytes": [b"\0" * 7],
    "not a .safetensors file: 0 bytes": [b""],
    "cut short, or not a .safetensors file": [npy(), container({}, length=3), b"\xff" * 100,
                                              container({}, length=2**63)],
    "does not begin with '{'": [container(b""), container(b"[]"), container(b" {}"),
                                container(b"\0\0")],
    "its header is not JSON": [container(b"{"), container(b"{} x"), container(b"{'q': 1}"),
                               container(b'{"q": 1,}'), container(b'{"\xff": 1}'),
                               container(b"{" * 100000), container(b"{}\0")],
    "__metadata__ is not an object": [container({"__metadata__": 1})],
    "__metadata__ holds something else than strings": [container({"__metadata__": {"a": 1}})],
    "__metadata__ is there twice": [container(b'{"__metadata__":{},"__metadata__":{}}')],
    "a tensor's name holds a zero byte": [container({"q\0": tensor(0, 32)}, b"\0" * 32)],
    "tensor 'q': is not an object": [container({"q": [1]})],
    "tensor 'q': expected dtype, shape and data_offsets, each once": [
        container({"q": {}}), lone(more=1),
        container(b'{"q":{"dtype":"F32","dtype":"F32","shape":[0]}}')],
    "tensor 'q': its dtype is not a string": [lone(dtype=4)],
    "tensor 'q': unknown dtype 'F33'": [lone(dtype="F33")],
    "tensor 'q': its shape is not an array": [lone(shape=8), lone(shape={})],
    "tensor 'q': an extent of its shape": [lone(shape=[-8]), lone(shape=[8.0]), lone(shape=["8"]),
                                           lone(shape=[2**63]), lone(shape=[2**64])],
    "tensor 'q': the size of its shape overflows": [lone(shape=[2**62, 2**62]),
                                                    lone(shape=[2**60])],
    "tensor 'q': its size is no whole number of bytes": [lone(dtype="F4", shape=[3])],
    "tensor 'q': its data_offsets are not two numbers": [
        lone(data_offsets=[0]), lone(data_offsets=[0, 32, 32]), lone(data_offsets=[-1, 32]),
        lone(data_offsets=["0", "32"]), lone(data_offsets=0)],
    "tensor 'q': its data_offsets end before they begin": [lone(data_offsets=[32, 0])],
    "tensor 'q': its data_offsets hold 28 bytes, its shape needs 32": [lone(data_offsets=[4, 32])],
    "tensor 'q': is there twice": [container(
        b'{"q":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"q":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"12")],
    "tensor 'k': its data overlaps another tensor's": [
        container({"q": tensor(0, 32), "k": tensor(31, 63)}, b"\0" * 63)],
    "tensor 'q': its data overlaps another tensor's": [
        container({"k": tensor(0, 32), "q": tensor(0, 32)}, b"\0" * 32)],
    "tensor 'k': there is a gap before its data": [
        container({"q": tensor(0, 32), "k": tensor(33, 65)}, b"\0" * 65)],
    "cut short: tensor 'q' ends at byte 32 of the data, it has 31": [
        container({"q": tensor(0, 32)}, b"\0" * 31)],
    "holds 33 bytes of data, its tensors need only 32": [
        container({"q": tensor(0, 32)}, b"\0" * 33)],
    "has no tensor 'query' or 'q'": [container({}), container({"Q": tensor(0, 32)}, b"\0" * 32)],
    "tensor 'q': its elements are F64: expected float32, float16 or bfloat16": [lone(dtype="F64", shape=[4])],
    "tensor 'q': its elements are BOOL: expected": [lone(dtype="BOOL", shape=[32])],
    "tensor 'q': has more than 4 dimensions": [lone(shape=[1, 1, 1, 1, 8])],
}


class Malformed(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.query, self.key, self.value = random_qkv(batch=1, seqlen_q=1, seqlen_k=1, heads=1,
                                                      heads_k=1, head_dim=8, value_head_dim=8)
        self.save(q=self.query, k=self.key, v=self.value)

    def refuse_npy(self, content, text):
        (self.folder / "bad.npy").write_bytes(content)
        self.refuse(INPUT, ["bad.npy: ", text], "run", "--q", "bad.npy", "--k", "k.npy", "--v",
                    "v.npy", "--out", "o.npy")

    def refuse_safetensors(self, content, text):
        (self.folder / "bad.safetensors").write_bytes(content)
        self.refuse(INPUT, ["bad.safetensors: ", text], "run", "--q", "bad.safetensors", "--k",
                    "k.npy", "--v", "v.npy", "--out", "o.npy")

    def test_npy(self):
        for text, contents in NPY.items():
            for content in contents:
                with self.subTest(text=text, content=content[:120]):
                    self.refuse_npy(content, text)

    def test_safetensors(self):
        for text, contents in SAFETENSORS.items():
            for content in contents:
                with self.subTest(text=text, content=content[:120]):
                    self.refuse_safetensors(content, text)

    def test_safetensors_with_a_huge_header(self):
        path = self.folder / "bad.safetensors"
        path.write_bytes(container(b"{", length=100000001))
        program.os.truncate(path, 200000000)
        self.refuse(INPUT, ["bad.safetensors: its header is 100000001 bytes"], "run", "--in",
                    "bad.safetensors", "--out", "o.npy")

    def test_npy_cut_anywhere(self):
        whole = io.BytesIO()
        np.save(whole, self.query)
        for size in range(len(whole.getvalue())):
            self.refuse_npy(whole.getvalue()[:size], "cut short" if size > 5 else "not a .npy file")

    def test_safetensors_cut_anywhere(self):
        whole = safetensors.numpy.save({"q": self.query})
        for size in range(len(whole)):
            self.refuse_safetensors(whole[:size], "cut short" if size > 7 else "bytes are too few")

    def test_every_reader_of_a_file(self):
        """Whichever option names the bad file, the line is about that file."""
        (self.folder / "bad.npy").write_bytes(npy(size=31))
        inputs = {"--q": "q.npy", "--k": "k.npy", "--v": "v.npy"}
        for option in ("--q", "--k", "--v", "--sink", "--cu-seqlens-q", "--cu-seqlens-k",
                       "--seqused-q", "--seqused-k", "--leftpad-k", "--cache-batch-index",
                       "--diagonal"):
            arguments = [word for pair in {**inputs, option: "bad.npy"}.items() for word in pair]
            self.refuse(INPUT, ["bad.npy: cut short"], "run", *arguments, "--causal", "--out",
                        "o.npy")
        arguments = [word for pair in inputs.items() for word in pair]
        self.refuse(INPUT, ["bad.npy: cut short"], "verify", *arguments, "--out", "bad.npy")
        self.save(o=self.value)
        self.refuse(INPUT, ["bad.npy: cut short"], "verify", *arguments, "--out", "o.npy", "--lse",
                    "bad.npy")

    def test_not_files(self):
        (self.folder / "folder.npy").mkdir()
        program.os.mkfifo(self.path("pipe.npy"))
        for name, text in (("none.npy", "No such file"), ("folder.npy", "not a regular file"),
                           ("pipe.npy", "not a regular file"), ("q.txt", "ends neither in .npy"),
                           ("none/q.npy", "No such file"), (".npy", "ends neither"),
                           ("none.safetensors:q", "No such file"), ("x" * 300 + ".npy", "too long"),
                           ("", "ends neither")):
            self.refuse(INPUT, [text], "run", "--q", name, "--k", "k.npy", "--v", "v.npy", "--out",
                        "o.npy")

    def test_control_characters_in_names(self):
        """They do not reach the terminal."""
        header = {"q": tensor(0, 32), "\x1b[31m\n": tensor(32, 63)}
        (self.folder / "bad.safetensors").write_bytes(container(header, b"\0" * 63))
        done = self.refuse(INPUT, ["tensor '?[31m?': its data_offsets hold"], "run", "--q",
                           "bad.safetensors", "--k", "k.npy", "--v", "v.npy", "--out", "o.npy")
        self.assertNotIn("\x1b", done.stderr)


program.main()
