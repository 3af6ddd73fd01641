"""NumPy arrays, and the package from outside."""

import ast
import inspect
import pathlib
import subprocess
import sys

import fa3
import numpy
import pytest
import torch


def test_numpy():
    generator = numpy.random.default_rng(7)
    q, k, v = (generator.standard_normal((2, 20, 4, 32), dtype=numpy.float32) for _ in range(3))
    found, lse = fa3.attention(q, k, v, causal=True, window=(6, 0), return_lse=True)
    assert isinstance(found, numpy.ndarray)
    tensors = [torch.from_numpy(array) for array in (q, k, v)]
    wanted, wanted_lse = fa3.flash_attn_func(
        *tensors, causal=True, window_size=(6, 0), return_attn_probs=True
    )
    assert (found == wanted.numpy()).all() and (lse == wanted_lse.numpy()).all()
    with pytest.raises(TypeError, match="^query's dtype .*float64"):
        fa3.attention(q.astype(numpy.float64), k, v)
    with pytest.raises(TypeError, match="query is of .*Tensor.*flash_attn_func"):
        fa3.attention(*tensors)
    for wrong, name in (((q.tolist(), k, v), "query"), ((q, k, [1.0]), "value")):
        with pytest.raises(TypeError, match=f"{name} is of .*list"):
            fa3.attention(*wrong)
    with pytest.raises(ValueError, match="value has 0 dimensions"):
        fa3.attention(q, k, numpy.zeros((), numpy.float32))
    with pytest.raises(OverflowError, match="index"):
        fa3._core.prepare(2**40)


def test_empty_arrays():
    """NumPy's have strides of 0."""
    q, none = numpy.zeros((2, 5, 4, 32), numpy.float32), numpy.zeros((2, 0, 4, 32), numpy.float32)
    output, lse = fa3.attention(q, none, none, return_lse=True)
    assert not output.any() and numpy.isneginf(lse).all()
    assert fa3.attention(q[:0], q[:0], q[:0]).shape == (0, 5, 4, 32)
    assert fa3.attention(none, q, q).shape == none.shape


def test_numpy_packed():
    q, k, v = (numpy.full((6, 2, 16), fill, numpy.float32) for fill in (1, 2, 3))
    starts = numpy.array([0, 4, 6], numpy.int32)
    found = fa3.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert found.shape == q.shape and (abs(found - 3) < 1e-6).all()


def test_numpy_cache():
    """What else says where sequences lie, by the names of fa3.h."""
    generator = numpy.random.default_rng(8)
    q = generator.standard_normal((2, 3, 4, 32), dtype=numpy.float32)
    pages = [generator.standard_normal((5, 8, 2, 32), dtype=numpy.float32) for _ in range(2)]
    table, lengths, padding = (
        numpy.array(numbers, numpy.int32) for numbers in ([[3, 0], [4, 1]], [13, 9], [2, 0])
    )
    found = fa3.attention(
        q, *pages, causal=True, page_table=table, seqused_k=lengths, leftpad_k=padding
    )
    wanted = fa3.flash_attn_with_kvcache(
        *map(torch.from_numpy, (q, *pages)),
        cache_seqlens=torch.from_numpy(lengths),
        page_table=torch.from_numpy(table),
        cache_leftpad=torch.from_numpy(padding),
        causal=True,
    )
    assert (found == wanted.numpy()).all()
    for name in ("seqlens", "flags", "lse", "key_scale"):
        with pytest.raises(TypeError, match=f"no argument '{name}'"):
            fa3.attention(q, q, q, **{name: lengths})


def test_read_only_arrays_are_read():
    q, k, v = (numpy.full((1, 6, 2, 16), fill, numpy.float32) for fill in (1, 2, 3))
    for array in (q, k, v):
        array.flags.writeable = False
    assert (abs(fa3.attention(q, k, v) - 3) < 1e-6).all()
    with pytest.raises(ValueError, match="output is read-only"):
        fa3._core.forward(query=q, key=k, value=v, output=v)


def test_without_torch():
    code = """if True:
        import importlib.util, sys
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "torch" else find_spec(name, *a)
        import fa3
        assert "torch" not in sys.modules
        print(fa3.__all__)
        try:
            fa3.flash_attn_func
        except AttributeError as error:
            print(error)"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.startswith("['attention']\n")
    assert "flash_attn_func" in output.stdout and "PyTorch, which all" in output.stdout


@pytest.mark.parametrize("name", fa3.__all__)
def test_types(name):
    signature = inspect.signature(getattr(fa3, name))
    for parameter in signature.parameters.values():
        assert parameter.annotation is not parameter.empty, parameter
    assert signature.return_annotation is not signature.empty


def test_stub_of_the_extension():
    stub = ast.parse(pathlib.Path(fa3.__file__).with_name("_core.pyi").read_text()).body
    named = {node.target.id for node in stub if isinstance(node, ast.AnnAssign)}
    named |= {node.name for node in stub if isinstance(node, ast.FunctionDef)}
    assert named == {name for name in dir(fa3._core) if not name.startswith("_")}


def test_module_prints_what_the_program_does():
    output = subprocess.run(
        [sys.executable, "-m", "fa3"], capture_output=True, text=True, check=True
    )
    assert fa3.__version__ in output.stdout and "engine" in output.stdout.lower()
