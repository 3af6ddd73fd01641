"""Bar charts of measured figures, and drawings of tiles, as SVG whose colours follow the page's."""

import html

import figures

WIDTH, BAR, GAP, LABEL = 360, 18, 10, 108


def bars(title, unit, rows, limit=None):
    """`rows` are (label, value, class of the bar); `limit` is (label, value), a line across."""
    most = max([value for _, value, _ in rows] + ([limit[1]] if limit else []))
    room = WIDTH - LABEL - 44
    top = 34 if limit else 12
    height = top + len(rows) * (BAR + GAP)
    parts = []
    for i, (label, value, kind) in enumerate(rows):
        y = top + i * (BAR + GAP)
        long = max(value / most * room, 1)
        parts.append(
            f'<text x="{LABEL - 6}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>'
            f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{long:.1f}" height="{BAR}"/>'
            f'<text x="{LABEL + long + 5:.1f}" y="{y + 14}">{figures.figure(value)}</text>'
        )
    if limit:
        x = LABEL + limit[1] / most * room
        parts.append(
            f'<path class="ink" stroke-dasharray="4 3" d="M{x:.1f} 22 V{height - GAP + 4}"/>'
            f'<text x="{x:.1f}" y="15" text-anchor="end">{html.escape(limit[0])}: '
            f"{figures.figure(limit[1])}</text>"
        )
    told = "; ".join(f"{label} {figures.figure(value)}" for label, value, _ in rows)
    if limit:
        told += f"; {limit[0]} {figures.figure(limit[1])}"
    return (
        f'<figure class="picture"><svg role="img" viewBox="0 0 {WIDTH} {height}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{html.escape(title)}, {unit}</title>'
        f"<desc>{html.escape(told)}</desc>{''.join(parts)}</svg>"
        f"<figcaption>{html.escape(title)}, in {unit}.</figcaption></figure>"
    )


def ladder():
    results = figures.ladder()
    rows = []
    for one in results["steps"]:
        short, _, idea = one["name"].partition("_")
        speed = figures.step(short)["tflops"]
        rows.append((f"{short.upper()} {idea.split('_')[0]}", speed, "output"))
    limit = ("cuBLAS’s matrix product", figures.yardstick("gemm")["tflops"])
    setting = figures.step("k6")
    return bars(
        f"The steps of the ladder: bfloat16, head dim 128, {setting['seqlen']} tokens, "
        f"no mask, one {results['gpu']}",
        "TFLOP/s",
        rows,
        limit,
    )


def drawing(height, title, told, parts, caption):
    return (
        f'<figure class="picture"><svg role="img" viewBox="0 0 {WIDTH} {height}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{title}</title><desc>{told}</desc>'
        f"{''.join(parts)}</svg><figcaption>{caption}</figcaption></figure>"
    )


def causal():
    """Eight by eight tiles under a causal mask."""
    tiles, side, left, top = 8, 30, 90, 26
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
                    f'<text class="on small" x="{x + side / 2}" y="{y + 19}" '
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


CHARTS = {"causal": causal, "ladder": ladder, "warps": warps}


def draw(name):
    return CHARTS[name]()
