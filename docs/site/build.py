"""Builds the course: Markdown chapters with Jinja2 in them become HTML pages.

    docs/site/build.py [OUT]        OUT is build/site unless given

What a chapter may say in {{ }}, alone on a line but for the last three:
    code("worklog/k1_tiled.cu", "load_tile")            a listing of that function
    code("kernels/mask.h", begin="...", end="...")      of the lines from one to the other
    run("traffic", "loops")                             what programs/traffic.c prints
    tool("tma")                                         what worklog/tools/tma.cu printed on a GPU
    picture("tiling")   drawing("causal")   chart("ladder")   toy("softmax")
    row("worklog/README.md", "K3 |")[1]                 a cell of a document's table
    step("k6", 16384, causal=True).tflops | figure      a measured figure: see figures.py
    chapter("ladder")                                   a link with the chapter's number
    source("worklog/results.json")                      where a table's figures come from
All of it comes from the repository's files when the site is built, and the build fails where it is
not there.
"""

import pathlib
import shutil
import subprocess
import sys

import jinja2
import latex2mathml.converter
import markdown_it
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin

import charts
import drawings
import excerpts
import figures
import programs

SITE = pathlib.Path(__file__).resolve().parent
ROOT = SITE.parent.parent

# In the order of reading.
CHAPTERS = [
    "attention",
    "online-softmax",
    "tiling",
    "flash-attention",
    "hopper",
    "ladder",
    "fp8",
    "decode",
    "backward",
    "beyond",
]


class Blocks:
    """HTML that Markdown must not touch: a comment stands for each piece until the page is whole."""

    def __init__(self):
        self.pieces = []

    def hold(self, html):
        self.pieces.append(html)
        return f"\n\n<!--block {len(self.pieces) - 1}-->\n\n"

    def put_back(self, page):
        for i, html in enumerate(self.pieces):
            page = page.replace(f"<!--block {i}-->", html)
        return page


def inline_formula(self, tokens, index, options, env):
    return latex2mathml.converter.convert(tokens[index].content)


def formula(self, tokens, index, options, env):
    mathml = latex2mathml.converter.convert(tokens[index].content, display="block")
    return f'<div class="scroll" tabindex="0" role="group" aria-label="Formula">{mathml}</div>\n'


def open_table(self, tokens, index, options, env):
    return '<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>\n'


def close_table(self, tokens, index, options, env):
    return "</table></div>\n"


def markdown():
    md = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
    md.use(anchors_plugin, max_level=3)
    md.use(dollarmath_plugin, allow_space=False)
    md.add_render_rule("math_inline", inline_formula)
    md.add_render_rule("math_block", formula)
    md.add_render_rule("table_open", open_table)
    md.add_render_rule("table_close", close_table)
    return md


def picture(name):
    """A drawing of docs/site/pictures, inlined so that its colours follow the page's."""
    svg = (SITE / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    if 'role="img"' not in svg or "<title" not in svg:
        raise ValueError(f"pictures/{name}.svg: no role=\"img\" or no <title>")
    return f'<figure class="picture">{svg.strip()}</figure>'


def toy(name):
    """A toy's frame, with the markup of docs/site/toys/NAME.html in it."""
    fragment = (SITE / "toys" / f"{name}.html").read_text(encoding="utf-8").strip()
    if not (SITE / "toys" / f"{name}.js").exists():
        raise FileNotFoundError(f"toys/{name}.js")
    title = fragment.split("<h3>", 1)[1].split("</h3>", 1)[0]
    return (
        f'<section class="toy" id="toy-{name}" data-toy="{name}" aria-label="{title}">\n'
        f"{fragment}\n</section>"
    )


def link(name):
    return f"[chapter {CHAPTERS.index(name) + 1}]({name}.html)"


def source(*files):
    """The line under a table of measured figures."""
    return f'\n\n<p class="source">Figures: {" and ".join(files)}.</p>\n\n'


class Chapter:
    def __init__(self, name, number, environment, chapters=()):
        self.name = name
        self.number = number
        self.toys = []
        blocks = Blocks()

        def with_toy(toy_name):
            self.toys.append(toy_name)
            return blocks.hold(toy(toy_name))

        template = environment.from_string(
            (SITE / f"{name}.md").read_text(encoding="utf-8"),
            globals={
                "code": lambda *args, **kwargs: blocks.hold(excerpts.code(*args, **kwargs)),
                "run": lambda *args: blocks.hold(programs.run(*args)),
                "tool": lambda *args: blocks.hold(programs.tool(*args)),
                "row": excerpts.row,
                "picture": lambda picture_name: blocks.hold(picture(picture_name)),
                "chart": lambda chart_name: blocks.hold(charts.draw(chart_name)),
                "drawing": lambda drawing_name: blocks.hold(drawings.draw(drawing_name)),
                "toy": with_toy,
            },
        )
        md = markdown()
        text = template.render(chapters=chapters)
        tokens = md.parse(text)
        headings = [
            (token.tag, token.attrs["id"], tokens[i + 1].content)
            for i, token in enumerate(tokens)
            if token.type == "heading_open" and token.tag in ("h1", "h2")
        ]
        self.title = headings[0][2]
        self.sections = [(anchor, title) for tag, anchor, title in headings if tag == "h2"]
        self.body = blocks.put_back(md.render(text))


def build(out):
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(SITE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(figures.LOOKUPS, chapter=link, source=source)
    environment.filters.update(figures.FORMATS)

    chapters = [Chapter(name, i + 1, environment) for i, name in enumerate(CHAPTERS)]
    pages = [Chapter("index", 0, environment, chapters), *chapters]

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(SITE / "style.css", out)
    with_toys = any(page.toys for page in pages)
    if with_toys:
        (out / "toys").mkdir()
        for path in [*(SITE / "toys").glob("*.js"), *(SITE / "toys").glob("*.css")]:
            shutil.copy(path, out / "toys")
        if subprocess.run([SITE / "toys" / "build", out / "toys"]).returncode:
            sys.exit(1)  # it has said why
    template = environment.get_template("page.html")
    for i, page in enumerate(pages):
        html = template.render(
            page=page,
            chapters=chapters,
            before=pages[i - 1] if i > 0 else None,
            after=pages[i + 1] if i + 1 < len(pages) else None,
            toys_style=(out / "toys" / "toys.css").exists(),
        )
        (out / f"{page.name}.html").write_text(html, encoding="utf-8")
    print(f"{out / 'index.html'}: {len(chapters)} chapters")


if __name__ == "__main__":
    build(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site"))
