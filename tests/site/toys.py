"""Plays with every toy in Chromium: what a page shows is what the library gives as native code, and that
is what the definition says.

    tests/site/toys.py SITE LIBRARY      LIBRARY is libfa3_toys.so
"""

import json
import math
import os
import pathlib
import random
import re
import struct
import sys
import time

import browser
from native import Native, float32
from toy import Toy, check_bad_inputs, expect, expect_number, number

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The online softmax.


def check_softmax_case(toy, native, scores, values, width):
    toy.set(scores=" ".join(map(str, scores)), values=", ".join(map(str, values)), width=width)
    expect("message", toy.message(), "")
    if toy.element("first").is_enabled():
        toy.press("first")
    expect("rows before the first step", toy.rows("steps"), [])
    scores, values = [float32(s) for s in scores], [float32(v) for v in values]
    rows, _ = native.softmax(scores, values, width)
    for step, row in enumerate(rows):
        toy.press("next")
        seen = min((step + 1) * width, len(scores))
        maximum = max(scores[:seen])
        weights = [math.exp(score - maximum) for score in scores[:seen]]
        output = math.fsum(w * v for w, v in zip(weights, values))
        size = math.fsum(w * abs(v) for w, v in zip(weights, values))
        # Native code against the definition: a few roundings for each key and for each step.
        roundings = (4 * len(scores) + 16) * 2.0**-24
        expect("maximum", row["maximum"], maximum)
        assert abs(row["sum"] - sum(weights)) <= roundings * sum(weights), (step, row)
        assert abs(row["output"] - output) <= roundings * size, (step, row)
        cells = toy.rows("steps")[step][1:]
        for name, cell in zip(("maximum", "rescale", "sum", "output", "result"), cells, strict=True):
            expect_number(f"{name} after step {step + 1}", cell, row[name], 6)
        online, naive, exact = (cells[1:] for cells in toy.rows("ways"))
        for cell, name in zip(online, ("sum", "output", "result"), strict=True):
            expect_number(f"{name} in the second table", cell, row[name], 6)
        for cell, wanted in zip(naive, native.naive_softmax(scores[:seen], values[:seen]), strict=True):
            expect_number("the formula as it is written", cell, wanted, 6)
        for cell, wanted in zip(exact, (sum(weights), output, output / sum(weights)), strict=True):
            expect_number("float64", cell, wanted, 6)
    expect("next at the end", toy.element("next").is_enabled(), False)


def check_softmax(toy, native):
    check_softmax_case(toy, native, [1, 2, 0.5, 4, 3, 1.5, 6, 2], [1, 2, 3, 4, 5, 6, 7, 8], 2)
    check_softmax_case(toy, native, [-3.5, 0.25, 7.125, -80, 7.125], [2, -1, 0.5, 100, 3], 3)
    check_softmax_case(toy, native, [12.5], [-4], 64)
    toy.press("large")
    toy.press("last")
    _, naive, exact = toy.rows("ways")
    expect("exp of large scores in float32", naive[1:], ["∞", "∞", "NaN"])
    assert math.isfinite(number(exact[3]))
    many = " ".join(["1"] * 65)
    check_bad_inputs(toy, scores=["1 two 3", "", "1 2", "NaN", many], width=["", "0", "65", "1.5"])


# The tiles.


def kinds_by_definition(problem):
    """Every query asked about every key."""
    queries, keys, causal, left, right, tile_q, tile_k = problem
    right = 0 if causal else right

    def sees(i, j):
        distance = j - (i + keys - queries)
        return (left < 0 or distance >= -left) and (right < 0 or distance <= right)

    kinds = []
    for first in range(0, queries, tile_q):
        rows = range(first, min(first + tile_q, queries))
        for begin in range(0, keys, tile_k):
            inside = [sees(i, j) for i in rows for j in range(begin, min(begin + tile_k, keys))]
            whole = all(inside) and begin + tile_k <= keys
            kinds.append(2 if whole else 1 if any(inside) else 0)
    return kinds


def check_schedule(tiles, problem, heads, batches):
    """Each tile once, and a multiprocessor does one at a time."""
    rows = -(-problem[0] // problem[5])
    every = {(r, h, b) for r in range(rows) for h in range(heads) for b in range(batches)}
    assert len(tiles) == len(every) and {tile[:3] for tile in tiles} == every
    busy_until = {}
    for *_, multiprocessor, begin, end in tiles:
        expect("begin", begin, busy_until.get(multiprocessor, 0))
        busy_until[multiprocessor] = end


def check_tiles_case(toy, native, problem, heads, batches, multiprocessors, order):
    queries, keys, causal, left, right, tile_q, tile_k = problem
    limit = lambda side: "" if side < 0 else side
    toy.set(
        queries=queries, keys=keys, causal=bool(causal), left=limit(left), right=limit(right),
        tile_q=tile_q, tile_k=tile_k, heads=heads, batches=batches, multiprocessors=multiprocessors,
        order=order,
    )
    expect("message", toy.message(), "")
    kinds = native.tile_kinds(problem)
    expect("kinds", kinds, kinds_by_definition(problem))
    whole, masked, skipped = (kinds.count(kind) for kind in (2, 1, 0))
    said = f"{whole} tiles are whole, {masked} masked, {skipped} skipped:"
    assert toy.text("counts").startswith(said), f"{toy.text('counts')}, not {said}"
    section = min(max(int(10e6 / (512 * keys)), 1), heads * batches)
    area = tile_q * tile_k / 128**2
    for each, (_, clocks, idle) in enumerate(toy.rows("orders")):
        schedule = (heads, batches, section, multiprocessors, each, 5700 * tile_q / 128, 2290 * area)
        tiles = native.schedule(problem, schedule)
        check_schedule(tiles, problem, heads, batches)
        end = max(tile[5] for tile in tiles)
        busy = sum(tile[5] - tile[4] for tile in tiles)
        assert abs(number(clocks) - end) <= 0.5001, f"{clocks}, not {end}"
        share = 100 * (1 - busy / (end * multiprocessors))
        assert abs(number(idle) - share) <= 0.0501, f"{idle}, not {share}"
        if each != order:
            continue
        for taken in sorted({1, len(tiles) // 2, len(tiles)} - {0}):
            toy.set(taken=taken)
            block, head, batch, multiprocessor, begin, _ = tiles[taken - 1]
            said = re.match(
                r"Tile (\d+) of (\d+): row block (\d+) of head (\d+)(?: of sequence (\d+))?, "
                r"multiprocessor (\d+), clocks ([\d,]+) to",
                toy.text("latest"),
            )
            assert said, toy.text("latest")
            found = [int(group or 0) for group in said.groups()[:6]]
            expect("tile", found, [taken, len(tiles), block, head, batch, multiprocessor])
            assert abs(number(said[7]) - begin) <= 0.5001
    drawn = toy.chromium.run(
        "const sum = (kind) => [...document.querySelectorAll('#tiles-grid rect.' + kind)].length;"
        "return ['whole', 'masked', 'skipped'].map(sum)"
    )
    expect("kinds that are drawn", [n > 0 for n in drawn], [n > 0 for n in (whole, masked, skipped)])


def check_tiles(toy, native):
    check_tiles_case(toy, native, (512, 512, 1, -1, -1, 64, 64), 3, 1, 4, 0)
    check_tiles_case(toy, native, (300, 200, 0, -1, -1, 64, 48), 2, 2, 3, 1)
    check_tiles_case(toy, native, (130, 700, 1, 90, 5, 32, 64), 2, 3, 5, 2)
    check_tiles_case(toy, native, (400, 250, 0, 60, 30, 50, 40), 1, 1, 64, 0)
    for preset in ("full", "window", "cache", "h100", "causal"):
        toy.set(preset=preset)
        expect(f"message of {preset}", toy.message(), "")
    check_bad_inputs(
        toy, queries=["", "0", "-3", "1.5", "1e9", "1000000"], tile_k=["0"], left=["-1", "1.5"],
        heads=["0", "257"], multiprocessors=["", "1000"],
    )


# The timeline.

SCORES, SOFTMAX, OUTPUT = 3, 4, 5


def check_spans(spans, timeline):
    """All work is done, once, in an order that the data allow, and lanes do one thing at a time."""
    tiles, _, _, _, product, softmax, _, load, _ = timeline
    end = {}
    for lane, kind, tile, warpgroup, begin, until in spans:
        key = kind, tile, warpgroup
        assert key not in end and until > begin, key
        end[key] = until
        if kind in (0, 1):
            assert abs(until - begin - load) < 1e-3
        if kind == SOFTMAX:
            assert abs(until - begin - softmax) < 1e-3
            assert begin >= end[SCORES, tile, warpgroup] - 1e-3
        if kind == SCORES:
            assert begin >= end[0, tile, 0] - 1e-3
        if kind == OUTPUT:
            assert begin >= max(end[SOFTMAX, tile, warpgroup], end[1, tile, 0]) - 1e-3
        if kind in (SCORES, OUTPUT):
            assert product - 1e-3 <= until - begin <= 2 * product + 1e-3
    for kind in (SCORES, SOFTMAX, OUTPUT):
        for warpgroup in (0, 1):
            assert all((kind, tile, warpgroup) in end for tile in range(tiles))
    for lane in range(4):
        for warpgroup in (0, 1):
            own = sorted(span[4:] for span in spans if span[0] == lane and span[3] == warpgroup)
            assert all(b[0] >= a[1] - 1e-3 for a, b in zip(own, own[1:]))
    # The unit does one product's work in one product's time.
    used = sorted(span[4:] for span in spans if span[0] == 3)
    covered, at = 0.0, 0.0
    for begin, until in used:
        covered += max(until - max(begin, at), 0)
        at = max(at, until)
    assert abs(covered - 4 * tiles * product) < 1e-2, (covered, tiles)


def check_timeline_case(toy, native, turns, overlap, numbers):
    toy.set(turns=turns, overlap=overlap, **numbers)
    expect("message", toy.message(), "")
    values = {part: float(toy.element(part).get_attribute("value")) for part in (
        "tiles", "stages", "product", "softmax", "issue", "load", "second")}
    clocks = [values[part] for part in ("product", "softmax", "issue", "load", "second")]
    ways = ((0, 0), (1, 0), (0, 1), (1, 1))
    for way, (_, end, round_clocks, busy) in zip(ways, toy.rows("ways"), strict=True):
        timeline = (int(values["tiles"]), *way, int(values["stages"]), *clocks)
        spans = native.timeline(timeline)
        check_spans(spans, timeline)
        last = max(span[5] for span in spans)
        assert abs(number(end) - last) <= 0.5001, f"{end}, not {last}"
        softmaxes = [span[4] for span in spans if span[1] == SOFTMAX and span[0] == 1]
        if len(softmaxes) < 2:
            expect("a round", round_clocks, "one tile only")
            continue
        period = softmaxes[-1] - softmaxes[-2]
        assert abs(number(round_clocks) - period) <= 0.5001, f"{round_clocks}, not {period}"
        share = 400 * values["product"] / period
        assert abs(number(busy) - share) <= 0.0501, f"{busy}, not {share}"
        if way == (int(turns), int(overlap)):
            assert f": {end} clocks." in toy.text("sentence"), toy.text("sentence")


def check_timeline_sources(toy):
    """The clocks that the page begins with are in the notes that it names."""
    notes = (ROOT / "docs/notes/hopper-forward-clocks.md").read_text(encoding="utf-8")
    stamps = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|$", notes, re.M))
    total = lambda *names: sum(int(stamps[name]) for name in names)
    begins = lambda start: next(name for name in stamps if name.startswith(start))
    defaults = {
        "issue": total("descriptors, wait for keys", "issue of the first product"),
        "softmax": total(begins("maximum"), "exponentials", begins("packing")),
        "product": int(re.search(r"(\d+) cycles a round would be the", notes)[1]) // 4,
    }
    for part, wanted in defaults.items():
        expect(part, int(toy.element(part).get_attribute("value")), wanted)
    assert "600 to 800 clocks" in notes and "74.6 to 79.3% of the cycles at 8192 tokens" in notes
    expect("load", toy.element("load").get_attribute("value"), "700")


def check_timeline(toy, native):
    check_timeline_sources(toy)
    check_timeline_case(toy, native, True, True, {})
    check_timeline_case(toy, native, False, True, {"second": 50, "tiles": 12})
    check_timeline_case(toy, native, True, False, {"second": 3000, "stages": 1})
    check_timeline_case(toy, native, False, False, {"tiles": 1, "load": 2500, "issue": 0})
    check_timeline_case(toy, native, True, True, {"tiles": 24, "product": 900.5, "softmax": 100})
    check_bad_inputs(toy, tiles=["", "0", "25", "2.5"], product=["0", ""], second=["-1"], stages=["9"])


# The heads.


def safetensors(path):
    data = (ROOT / path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def alice(first, count):
    """Heads, heads_k, head_dim, and query, key and value of these tokens as float32's bytes."""
    header, data = safetensors("examples/minilm/layer3.safetensors")
    heads, head_dim = header["q"]["shape"][2:]
    row, parts = heads * head_dim, []
    for name in "qkv":
        begin = header[name]["data_offsets"][0] + 2 * first * row
        halves = struct.unpack(f"<{count * row}e", data[begin : begin + 2 * count * row])
        parts.append(struct.pack(f"<{count * row}f", *halves))
    return heads, heads, head_dim, *parts


def own_text(native, text, layer):
    """The same of a text that the model reads in the page."""
    return native.read(text, safetensors("examples/generate/jargon.safetensors")[1], layer)


def check_heads_rows(toy, native, text, tokens, first, causal, left, head, query, digits=7):
    """What is shown of one word that asks, in one head."""
    toy.set(query=first + query)
    toy.chromium.run(f"document.querySelectorAll('#heads-all button')[{head}].click()")
    expect("message", toy.message(), "")
    count = len(tokens)
    weight, output, lse = native.heads(count, *text, causal, left)
    rows = toy.rows("rows")
    order = sorted(range(count), key=lambda j: -weight(head, query, j))[:5]
    for j, (name, ours, exact) in zip(order, rows):
        expect("key", name, f"weight of {first + j + 1} {tokens[j]}")
        expect_number(name, ours, weight(head, query, j), digits)
        assert abs(number(ours) - number(exact)) <= 3e-6, (name, ours, exact)
    for column, (name, ours, exact) in enumerate(rows[len(order) : -1]):
        expect_number(name, ours, output(head, query, column), digits)
        assert abs(number(ours) - number(exact)) <= 1e-5, (name, ours, exact)
    expect_number("log-sum-exp", rows[-1][1], lse(head, query), digits)
    differences = [number(found) for found in re.findall(r"(\d[\d.e−]*) in ", toy.text("errors"))]
    assert len(differences) == 3 and all(d <= 1e-5 for d in differences), toy.text("errors")


def check_heads_case(toy, native, first, count, causal, left, head, query):
    limit = "" if left < 0 else left
    toy.set(first=1, count=1)  # so that no range in between is too long
    toy.set(first=first + 1, count=count, causal=causal, left=limit)
    tokens = (ROOT / "examples/minilm/tokens.txt").read_text(encoding="utf-8").splitlines()
    tokens = tokens[first : first + count]
    check_heads_rows(toy, native, alice(first, count), tokens, first, causal, left, head, query)


def check_own_text(toy, native, text, layer, head, query):
    toy.set(left="", own=text)
    toy.wait_for(lambda: toy.element("causal").is_selected())
    toy.set(layer=layer)
    tokens = ["␣" if letter == " " else letter for letter in text]
    read = own_text(native, text.encode(), layer)
    # The model's own sums are rounded in another order there: no seven digits.
    check_heads_rows(toy, native, read, tokens, 0, True, -1, head, query, digits=4)


def check_heads(toy, native):
    check_heads_case(toy, native, 1, 38, False, -1, 0, 11)
    check_heads_case(toy, native, 0, 64, True, -1, 8, 63)
    check_heads_case(toy, native, 20, 13, True, 3, 5, 7)
    check_heads_case(toy, native, 30, 1, False, 0, 11, 0)
    pixels = toy.chromium.run(
        "return [...document.querySelectorAll('#heads-all canvas')].map((canvas) =>"
        "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((v) => v))"
    )
    expect("heads that are painted", pixels, [True] * 12)
    check_bad_inputs(toy, first=["", "0", "65"], count=["0", "65", "1.5"], left=["-2"])
    check_own_text(toy, native, "A kernel is the heart of a heart.", 0, 3, 30)
    check_own_text(toy, native, "x", 3, 0, 0)
    toy.set(own="")
    toy.wait_for(lambda: not toy.element("causal").is_selected())
    check_heads_case(toy, native, 1, 38, False, -1, 11, 5)


# Without a page: random numbers against the definitions.


def check_random(native, random):
    for _ in range(300):
        clocks = [random.choice((1, 512, 99999.5, random.uniform(1, 1e4))) for _ in range(5)]
        flags = random.randint(0, 1), random.randint(0, 1)
        timeline = (random.randint(1, 24), *flags, random.randint(1, 8), *clocks)
        check_spans(native.timeline(timeline), timeline)
    for _ in range(100):
        size, side = lambda: random.randint(1, 90), lambda: random.randint(-1, 40)
        problem = (size(), size(), random.randint(0, 1), side(), side(), size(), size())
        expect(f"kinds of {problem}", native.tile_kinds(problem), kinds_by_definition(problem))
        heads, batches = random.randint(1, 5), random.randint(1, 4)
        section, multiprocessors = random.randint(1, heads * batches), random.randint(1, 20)
        for order in range(3):
            schedule = (heads, batches, section, multiprocessors, order, 5700.0, 2290.0)
            check_schedule(native.schedule(problem, schedule), problem, heads, batches)


CHECKS = {
    "softmax": check_softmax,
    "tiles": check_tiles,
    "timeline": check_timeline,
    "heads": check_heads,
}


def main(site, library):
    native, wrong = Native(library), []
    pages = {
        name: path.name
        for path in pathlib.Path(site).glob("*.html")
        for name in re.findall(r'data-toy="(\w+)"', path.read_text(encoding="utf-8"))
    }
    toys = {path.stem for path in (ROOT / "docs/site/toys").glob("*.html")}
    wrong += [f"{name}: on no page" for name in sorted(toys - set(pages))]
    seed = int(os.environ.get("FA3_TEST_SEED", time.time()))
    try:
        check_random(native, random.Random(seed))
    except AssertionError as failure:
        wrong.append(f"FA3_TEST_SEED={seed}: {failure}")
    with browser.Browser(site) as chromium:
        for name in sorted(toys & set(pages)):
            try:
                CHECKS[name](Toy(chromium, pages[name], name), native)
            except AssertionError as failure:
                wrong.append(f"{name}: {failure}")
            wrong += [f"{name}: {complaint}" for complaint in chromium.complaints()]
    for one in wrong:
        print(one)
    print(f"{len(toys)} toys, {len(wrong)} faults")
    return 1 if wrong or not toys else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
