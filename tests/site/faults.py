"""That the course's build and pages.py find what is wrong: each fault is made on purpose.

    tests/site/faults.py SITE
"""

import pathlib
import shutil
import sys
import tempfile

import jinja2

import pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
import build  # noqa: E402
import excerpts  # noqa: E402
import figures  # noqa: E402

# What the build must refuse.
REFUSED = {
    "a function that is not there": lambda: excerpts.code("kernels/mask.h", "no_such_function"),
    "a function that is only called": lambda: excerpts.code("worklog/k3_tma.cu", "mbarrier_wait"),
    "a file that is not there": lambda: excerpts.code("kernels/none.h", "fa3_make_mask"),
    "a first line that is not there": lambda: excerpts.code("kernels/mask.h", begin="no such line"),
    "a first line that is there twice": lambda: excerpts.code("kernels/mask.h", begin="return tiles"),
    "a last line that does not follow": lambda: excerpts.code(
        "kernels/mask.h", begin="fa3_make_mask", end="#ifndef FA3_MASK_H"
    ),
    "a row that is not there": lambda: excerpts.row("worklog/README.md", "K9"),
    "a step that is not there": lambda: figures.step("k9"),
    "a length that was not measured": lambda: figures.step("k6", 777),
    "a card that was not measured": lambda: figures.bench("nvidia-none"),
    "a picture that is not there": lambda: build.picture("none"),
    "a toy that is not there": lambda: build.toy("none"),
    "a chapter that is not there": lambda: build.link("none"),
    "a field that is not there": lambda: jinja2.Environment(undefined=jinja2.StrictUndefined)
    .from_string('{{ step("k6").speed }}')
    .render(figures.LOOKUPS),
}

# What is put into a page, and what pages.py must say of it.
ON_A_PAGE = {
    '<a href="nowhere.html">x</a>': "leads nowhere: nowhere.html",
    '<a href="#nowhere">x</a>': "no such anchor: #nowhere",
    '<a href="http://example.org">x</a>': "not an https link",
    '<a href="index.html"></a>': "a link without text",
    '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA=">': "no alt text",
    '<svg role="img" viewBox="0 0 9 9"></svg>': "no text alternative",
    '<svg role="img" viewBox="0 0 90 20"><title>t</title><text x="60" y="9">out of it</text></svg>':
        "text leaves its picture",
    "<input>": "no label",
    "<button></button>": "no name",
    '<p id="text">x</p>': "two elements have the id text",
    "<h1>x</h1>": "2 headings of the first level",
    "<h4>x</h4>": "a level is left out",
    '<p style="width: 2000px">x</p>': "wider than 360 pixels",
    '<p style="color: #888; background: #999">x</p>': "contrast",
    '<pre style="overflow-x: auto; width: 90px">much too long for it</pre>':
        "the keyboard cannot reach it",
    "<script>no_such_function()</script>": "no_such_function is not defined",
}


def main(site):
    missed = []
    for what, make in REFUSED.items():
        try:
            make()
        except (LookupError, OSError, ValueError, jinja2.UndefinedError):
            continue
        missed.append(f"the build takes {what}")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(pathlib.Path(site) / "style.css", folder)
        page = (pathlib.Path(site) / "index.html").read_text(encoding="utf-8")
        page = page.replace("</main>", "".join(ON_A_PAGE) + "</main>")
        (pathlib.Path(folder) / "index.html").write_text(page, encoding="utf-8")
        (pathlib.Path(folder) / "orphan.html").write_text(page, encoding="utf-8")
        found, _ = pages.faults_of(folder)
    for fault in [*ON_A_PAGE.values(), "orphan.html: no page leads to it"]:
        if not any(fault in one for one in found):
            missed.append(f"pages.py does not say: {fault}")
    for one in missed:
        print(one)
    print(f"{len(REFUSED) + len(ON_A_PAGE) + 1} faults made, {len(missed)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
