"""The Python in docs/ runs."""

import pathlib
import re

import pytest
import torch

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PROGRAMS = [
    pytest.param(program, id=f"{page.stem}-{index}")
    for page in sorted(DOCS.glob("*.md"))
    for index, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program):
    if "cuda" in program and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if "transformers" in program:
        pytest.importorskip("transformers")
    exec(program, {})
