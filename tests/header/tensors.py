"""What follows fa3.h by hand: src/tensors.def has the tensors of its argument structs, all of them and
in their order; every status has its name."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from header import read_header  # noqa: E402

types, constants = read_header()
table = (ROOT / "src/tensors.def").read_text()
structs = [name for name in types if name.endswith("_args")]
assert structs, "fa3.h has no argument structs"
for name in structs:
    fields = [field for field, kind in types[name]._fields_ if kind is types["fa3_tensor"]]
    macro = name.removeprefix("fa3_").removesuffix("_args").upper()
    rows = re.findall(rf"^{macro}\(\w+, (\w+)\)$", table, flags=re.MULTILINE)
    assert rows == fields, f"{name}: tensors.def has {rows}, fa3.h {fields}"
    print(name, len(rows), "tensors")

error = (ROOT / "src/error.c").read_text()
for name in constants:
    if name.startswith("FA3_INVALID_"):
        assert f"NAME({name})" in error, f"fa3_status_name does not know {name}"
