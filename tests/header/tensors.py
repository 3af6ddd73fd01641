"""src/tensors.def has the tensors of fa3.h's argument structs, all of them and in their order."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from header import read_header  # noqa: E402

types, _ = read_header()
table = (ROOT / "src/tensors.def").read_text()
structs = [name for name in types if name.endswith("_args")]
assert structs, "fa3.h has no argument structs"
for name in structs:
    fields = [field for field, kind in types[name]._fields_ if kind is types["fa3_tensor"]]
    macro = name.removeprefix("fa3_").removesuffix("_args").upper()
    rows = re.findall(rf"^{macro}\(\w+, (\w+)\)$", table, flags=re.MULTILINE)
    assert rows == fields, f"{name}: tensors.def has {rows}, fa3.h {fields}"
    print(name, len(rows), "tensors")
