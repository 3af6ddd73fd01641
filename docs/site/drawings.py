"""Drawings of tiles and of who does what when, as SVG whose colours follow the page's."""

WIDTH = 360


def drawing(height, title, told, parts, caption):
    return (
        f'<figure class="picture"><svg role="img" aria-label="{title}. {told}" '
        f'viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg"><title>{title}</title>'
        f"{''.join(parts)}</svg><figcaption>{caption}</figcaption></figure>"
    )


def causal():
    """Eight by eight tiles under a causal mask."""
    tiles, side, left, top = 8, 34, 80, 26
    parts = [
        f'<text x="{left + tiles * side / 2}" y="14" text-anchor="middle">keys</text>',
        f'<text x="{left - 10}" y="{top + tiles * side / 2}" text-anchor="end">queries</text>',
    ]
    for row in range(tiles):
        for column in range(tiles):
            x, y = left + column * side, top + row * side
            kind = "score" if column < row else "value" if column == row else "panel"
            parts.append(
                f'<rect class="{kind}" x="{x + 1}" y="{y + 1}" width="{side - 2}" '
                f'height="{side - 2}"/>'
            )
            word = {"score": "all", "value": "some", "panel": ""}[kind]
            if word:
                parts.append(
                    f'<text class="on small" x="{x + side / 2}" y="{y + 21}" '
                    f'text-anchor="middle">{word}</text>'
                )
    return drawing(
        top + tiles * side + 4,
        "Tiles under a causal mask",
        "Eight by eight tiles. Those below the diagonal are seen whole, the eight on it in part, "
        "and those above it not at all.",
        parts,
        "Eight by eight tiles under a causal mask: seen whole, seen in part, and (empty) not "
        "computed.",
    )


def warps():
    """How four warps share a tile of scores: by keys, and by queries."""
    parts = []
    for which, (left, name, year) in enumerate(
        [(20, "by keys", "FlashAttention"), (200, "by queries", "FlashAttention-2")]
    ):
        parts.append(f'<text x="{left + 70}" y="16" text-anchor="middle">{year}</text>')
        parts.append(
            f'<text class="muted" x="{left + 70}" y="34" text-anchor="middle">{name}</text>'
        )
        for warp, kind in enumerate(["query", "key", "value", "score"]):
            x, y = (left + 35 * warp, 46) if which == 0 else (left, 46 + 35 * warp)
            width, height = (33, 138) if which == 0 else (138, 33)
            parts.append(
                f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>'
                f'<text class="on small" x="{x + width / 2}" y="{y + height / 2 + 4}" '
                f'text-anchor="middle">{"" if which == 0 else "warp "}{warp}</text>'
            )
    parts.append('<text class="muted small" x="90" y="202" text-anchor="middle">a row: 4 warps</text>')
    parts.append('<text class="muted small" x="270" y="202" text-anchor="middle">a row: 1 warp</text>')
    return drawing(
        208,
        "How four warps share a tile of scores",
        "On the left each warp has a quarter of the columns, so a row is spread over four warps. "
        "On the right each warp has a quarter of the rows, so a row belongs to one warp.",
        parts,
        "A tile of scores, rows are queries and columns are keys. On the left every row is spread "
        "over four warps, which must exchange maxima and sums; on the right it belongs to one.",
    )


def rounds(title, told, caption, lanes, clocks):
    """Who does what when: `lanes` are (name, [(first clock, last clock, class, word)])."""
    left, top, lane_height = 84, 6, 36
    scale = (WIDTH - left - 6) / clocks
    height = top + len(lanes) * lane_height + 24
    parts = []
    for i, (name, pieces) in enumerate(lanes):
        y = top + i * lane_height
        parts.append(f'<text x="{left - 6}" y="{y + 19}" text-anchor="end">{name}</text>')
        for first, last, kind, word in pieces:
            x, width = left + first * scale, (last - first) * scale
            style = "muted" if kind == "idle" else "on"
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width - 1:.1f}" height="28"/>'
                f'<text class="{style} small" x="{x + width / 2:.1f}" y="{y + 18}" '
                f'text-anchor="middle">{word}</text>'
            )
    y = top + len(lanes) * lane_height
    for clock in range(0, clocks + 1, 1024):
        x = left + clock * scale
        anchor = "start" if clock == 0 else "middle"
        parts.insert(0, f'<path class="line" d="M{x:.1f} {top} V{y}"/>')  # behind all else
        parts.append(
            f'<text class="muted small" x="{x:.1f}" y="{y + 14}" text-anchor="{anchor}">{clock}</text>'
        )
    return drawing(height, title, told, parts, caption)


def together():
    softmax = (1024, 2524, "query", "softmax")
    lane = [(0, 1024, "score", "scores"), softmax, (2524, 3548, "output", "output")]
    return rounds(
        "A round of K4",
        "Both warpgroups do the same at the same time. The matrix unit works from clock 0 to 1024 "
        "on scores, has nothing to do until 2524, and works on the output until 3548.",
        "A round of K4 as a drawing, in clocks: what each warpgroup waits for or computes. Times of "
        "products are counted. The softmax is drawn with the 1,500 clocks that the profile leaves for it: "
        "1,024 for the exponentials of both groups at once, the rest for maximum, sums, waits and barrier.",
        [
            ("group 0", lane),
            ("group 1", lane),
            ("matrix unit", [lane[0], (1024, 2524, "idle", "nothing"), lane[2]]),
        ],
        3600,
    )


def turns():
    def group(start):
        return [
            (start, start + 512, "score", "S"),
            (start + 512, start + 1536, "query", "softmax"),
        ]

    return rounds(
        "Two warpgroups that take turns",
        "Each warpgroup waits 512 clocks for its scores, then computes a softmax, and waits 512 clocks. The other is half "
        "a round behind. The matrix unit works on scores and output of one and then of the other.",
        "K6 as a drawing, at its best. S: scores, O: output. Each group issues S and O together, waits "
        "for S alone, and computes its softmax while the unit works on its own O and on the other’s S. Then it "
        "waits, while the unit works on the other’s O. A softmax is drawn with 1,024 clocks, twice what the "
        "exponentials of one group take alone.",
        [
            ("group 0", group(0) + [(1536, 2048, "idle", "waits")] + group(2048)),
            (
                "group 1",
                [(0, 512, "query", "softm."), (512, 1024, "idle", "waits")]
                + group(1024)
                + [(2560, 3072, "idle", "waits"), (3072, 3584, "score", "S")],
            ),
            (
                "matrix unit",
                [
                    (i * 512, i * 512 + 512, "score" if i % 2 == 0 else "output", f"{'SO'[i % 2]} {i // 2 % 2}")
                    for i in range(7)
                ],
            ),
        ],
        3600,
    )


def gradients():
    """Which sums stay in a block and which travel."""
    left, top, side = 96, 44, 44
    parts = [
        f'<text x="{left + 88}" y="14" text-anchor="middle">keys: a block each</text>',
        f'<text x="{left - 10}" y="{top + 84}" text-anchor="end">queries</text>',
        f'<text x="{left - 10}" y="{top + 101}" text-anchor="end" class="muted">steps</text>',
    ]
    for column in range(4):
        kind = "score" if column == 1 else "panel"
        parts.append(
            f'<text class="muted small" x="{left + column * side + 22}" y="34" text-anchor="middle">'
            f"{column}</text>"
        )
        for row in range(4):
            parts.append(
                f'<rect class="{kind}" x="{left + column * side + 1}" y="{top + row * side + 1}" '
                f'width="{side - 2}" height="{side - 2}"/>'
            )
    x = left + 1.5 * side
    parts.append(
        f'<path class="ink" d="M{x} {top + 8} V{top + 4 * side + 14} '
        f'M{x - 5} {top + 4 * side + 8} L{x} {top + 4 * side + 14} L{x + 5} {top + 4 * side + 8}"/>'
        f'<text x="{x}" y="{top + 4 * side + 32}" text-anchor="middle">dK, dV: stay in the block</text>'
    )
    y = top + 2.5 * side
    parts.append(
        f'<path class="ink" d="M{left + 4} {y} H{left + 4 * side + 12} '
        f'M{left + 4 * side + 6} {y - 5} L{left + 4 * side + 12} {y} L{left + 4 * side + 6} {y + 5}"/>'
        f'<text x="{left + 4 * side + 16}" y="{y - 4}">dQ: across</text>'
        f'<text x="{left + 4 * side + 16}" y="{y + 13}">blocks</text>'
    )
    return drawing(
        top + 4 * side + 42,
        "The sums of the backward pass",
        "Four by four tiles. A block has a column of them, one tile of keys, and sums dK and dV down "
        "the column. dQ of a tile of queries is summed along a row, across all blocks.",
        parts,
        "A block has one tile of keys, a column. Sums down the column stay in it; the sum along a row "
        "goes across all blocks.",
    )


def swizzle():
    """Where the eight units of eight rows lie: as they are, and swizzled."""
    side, top = 19, 44
    parts = []
    for swizzled, left in ((0, 18), (1, 192)):
        name = "swizzled: place u ⊕ r" if swizzled else "plain: place u"
        parts.append(f'<text x="{left + 4 * side}" y="14" text-anchor="middle">{name}</text>')
        parts.append(
            f'<text class="muted small" x="{left + 4 * side}" y="34" text-anchor="middle">'
            "places, 4 banks each</text>"
        )
        for row in range(8):
            y = top + row * side
            parts.append(
                f'<text class="muted small" x="{left - 5}" y="{y + 14}" text-anchor="end">{row}</text>'
            )
            for place in range(8):
                unit = place ^ row if swizzled else place
                kind = "key" if unit == 0 else "panel"
                x = left + place * side
                parts.append(
                    f'<rect class="{kind}" x="{x}" y="{y}" width="{side - 2}" height="{side - 2}"/>'
                    f'<text class="{"on" if unit == 0 else "muted"} small" x="{x + 8.5}" '
                    f'y="{y + 13}" text-anchor="middle">{unit}</text>'
                )
    return drawing(
        top + 8 * side + 4,
        "Where the units of eight rows lie",
        "Two grids of eight rows and eight places. On the left unit 0 of every row is at place 0. On "
        "the right it is at place 0 in row 0, at place 1 in row 1, and so on down the diagonal.",
        parts,
        "Rows from top to bottom; the numbers are units of 16 bytes. Unit 0 of all rows is marked: in "
        "the same four banks on the left, in all 32 on the right.",
    )


DRAWINGS = {
    "causal": causal,
    "gradients": gradients,
    "swizzle": swizzle,
    "together": together,
    "turns": turns,
    "warps": warps,
}


def draw(name):
    return DRAWINGS[name]()
