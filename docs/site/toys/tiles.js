// Toy: the tiles that a mask leaves, and the order in which multiprocessors take them (tiles.c).
"use strict";

toys.start("tiles", (root, library) => {
  const ROW_BLOCK_CLOCKS = 5700, KEY_TILE_CLOCKS = 2290, MEASURED_TILE = 128;
  const SECTION_BYTES = 10e6, KEY_BYTES = 512; // src/cuda/forward_plan.c; keys and values, head dim 128
  const MOST_CELLS = 128 * 128, MOST_TILES = 4096, MOST_LENGTH = 1 << 20;
  const KINDS = ["skipped", "masked", "whole"];
  const ORDERS = ["longest first", "in turn", "row block after row block"];
  const FIELDS = ["queries", "keys", "left", "right", "causal", "tile-q", "tile-k", "heads", "batches",
    "multiprocessors", "order"];
  const PRESETS = {
    causal: [1024, 1024, "", "", true, 128, 128, 4, 1, 8, 0],
    full: [1024, 1024, "", "", false, 128, 128, 4, 1, 8, 1],
    window: [2048, 2048, 512, "", true, 128, 128, 3, 1, 8, 0],
    cache: [200, 4000, "", "", true, 128, 128, 4, 2, 8, 0],
    h100: [4096, 4096, "", "", true, 128, 128, 16, 1, 132, 0],
  };
  const find = (name) => root.querySelector(`#tiles-${name}`);
  const { grouped } = toys;

  function read() {
    const count = (name, most) => toys.number(find(name), { least: 1, most });
    const p = {
      queries: count("queries", MOST_LENGTH), keys: count("keys", MOST_LENGTH),
      causal: find("causal").checked,
      left: toys.number(find("left"), { least: 0, most: MOST_LENGTH, empty: -1 }),
      right: toys.number(find("right"), { least: 0, most: MOST_LENGTH, empty: -1 }),
      tileQ: count("tile-q", MOST_LENGTH), tileK: count("tile-k", MOST_LENGTH),
      heads: count("heads", 256), batches: count("batches", 256),
      multiprocessors: count("multiprocessors", 256),
      order: Number(find("order").value),
    };
    p.rows = Math.ceil(p.queries / p.tileQ);
    p.columns = Math.ceil(p.keys / p.tileK);
    if (p.rows * p.columns > MOST_CELLS)
      throw new Error(`${grouped(p.rows)} × ${grouped(p.columns)} tiles are too many to draw: take longer tiles.`);
    if (p.rows * p.heads * p.batches > MOST_TILES)
      throw new Error(`${grouped(p.rows * p.heads * p.batches)} tiles of all heads are too many to draw: at most ${grouped(MOST_TILES)}.`);
    const allHeads = p.heads * p.batches;
    p.section = Math.min(Math.max(Math.floor(SECTION_BYTES / (KEY_BYTES * p.keys)), 1), allHeads);
    return p;
  }

  const problem = (p) =>
    library.struct([p.queries, p.keys, p.causal, p.left, p.right, p.tileQ, p.tileK], []);

  function kindsOf(p) {
    return library.scope(() => {
      const kinds = library.space(p.rows * p.columns);
      library.functions.toy_tile_kinds(problem(p), kinds);
      return library.get(Uint8Array, kinds, p.rows * p.columns);
    });
  }

  function scheduleOf(p, order) {
    return library.scope(() => {
      const total = p.rows * p.heads * p.batches;
      const tiles = library.space(32 * total); // struct scheduled_tile
      const schedule = library.struct(
        [p.heads, p.batches, p.section, p.multiprocessors, order],
        [
          (ROW_BLOCK_CLOCKS * p.tileQ) / MEASURED_TILE,
          (KEY_TILE_CLOCKS * p.tileQ * p.tileK) / (MEASURED_TILE * MEASURED_TILE),
        ]);
      const count = library.functions.toy_schedule(problem(p), schedule, tiles);
      const taken = library.structs(tiles, count, 4, 2).map(
        ([block, head, batch, multiprocessor, begin, end]) =>
          ({ block, head, batch, multiprocessor, begin, end }));
      const end = Math.max(...taken.map((tile) => tile.end));
      const busy = taken.reduce((sum, tile) => sum + tile.end - tile.begin, 0);
      return { taken, end, idle: 1 - busy / (end * p.multiprocessors) };
    });
  }

  function grid(p, kinds, counts) {
    const cell = Math.max(4, Math.min(28, Math.floor(560 / p.columns)));
    const high = Math.max(4, Math.min(28, Math.floor(420 / p.rows)));
    const left = 62, top = 18;
    const children = [toys.svg("text", { x: left, y: 12, class: "small muted" }, "keys →")];
    for (let row = 0; row < p.rows; row++) {
      if (high >= 12)
        children.push(toys.svg("text", { x: 0, y: top + row * high + high / 2 + 4, class: "small" },
          `rows ${row * p.tileQ}`));
      for (let begin = 0, end; begin < p.columns; begin = end) {
        const kind = kinds[row * p.columns + begin];
        for (end = begin; end < p.columns && kinds[row * p.columns + end] === kind; ) end++;
        children.push(toys.svg("rect", {
          x: left + begin * cell, y: top + row * high, width: (end - begin) * cell, height: high,
          class: KINDS[kind],
        }));
      }
    }
    for (let column = 0; column <= p.columns && cell > 5; column++)
      children.push(toys.svg("line", {
        x1: left + column * cell, x2: left + column * cell, y1: top, y2: top + p.rows * high, class: "line" }));
    for (let row = 0; row <= p.rows && high > 5; row++)
      children.push(toys.svg("line", {
        x1: left, x2: left + p.columns * cell, y1: top + row * high, y2: top + row * high, class: "line" }));
    const width = left + p.columns * cell + 2, height = top + p.rows * high + 2;
    const drawn = toys.picture(width, height, `${p.rows} × ${p.columns} tiles of one head`,
      `${counts[2]} whole, ${counts[1]} masked, ${counts[0]} skipped`, children);
    drawn.style.width = `${width}px`;
    return drawn;
  }

  function chart(p, { taken, end }, shown) {
    const lane = p.multiprocessors > 24 ? 4 : 18, left = p.multiprocessors > 24 ? 4 : 46;
    const wide = 620, height = lane * p.multiprocessors;
    const longest = Math.max(...taken.map((tile) => tile.end - tile.begin));
    const children = [toys.svg("rect", { x: left, y: 0, width: wide, height, class: "idle" })];
    for (let m = 0; m < p.multiprocessors && lane > 8; m++)
      children.push(toys.svg("text", { x: 0, y: m * lane + 13, class: "small" }, `SM ${m}`));
    taken.slice(0, shown).forEach((tile, index) => {
      const x = left + (wide * tile.begin) / end, width = (wide * (tile.end - tile.begin)) / end;
      const y = tile.multiprocessor * lane;
      children.push(toys.svg("rect", {
        x, y, width, height: lane, class: index === shown - 1 ? "tile current" : "tile",
        "fill-opacity": (0.3 + (0.7 * (tile.end - tile.begin)) / longest).toFixed(2),
      }));
      if (lane > 8 && width > 34)
        children.push(toys.svg("text", { x: x + 3, y: y + 13, class: "small" },
          width > 84 ? `head ${tile.head} block ${tile.block}` : `${tile.head}·${tile.block}`));
    });
    const drawn = toys.picture(left + wide + 2, height + 2, "What each multiprocessor computes",
      `${shown} of ${taken.length} tiles, ${ORDERS[p.order]}; ${grouped(end)} clocks in all`, children);
    drawn.style.width = `${left + wide + 2}px`;
    return drawn;
  }

  function latest(p, { taken }, shown) {
    if (shown === 0) return "No tile has been taken.";
    const tile = taken[shown - 1];
    const sequence = p.batches > 1 ? ` of sequence ${tile.batch}` : "";
    return `Tile ${shown} of ${taken.length}: row block ${tile.block} of head ${tile.head}${sequence}, ` +
      `multiprocessor ${tile.multiprocessor}, clocks ${grouped(tile.begin)} to ${grouped(tile.end)}.`;
  }

  function draw() {
    const p = read();
    const kinds = kindsOf(p), counts = [0, 0, 0];
    for (const kind of kinds) counts[kind]++;
    find("right").disabled = p.causal;
    find("grid").replaceChildren(grid(p, kinds, counts));
    const computed = counts[1] + counts[2];
    find("counts").textContent =
      `${counts[2]} tiles are whole, ${counts[1]} masked, ${counts[0]} skipped: ` +
      `${((100 * computed) / kinds.length).toFixed(1)}% of ${kinds.length} are computed.`;

    const schedules = ORDERS.map((_, order) => scheduleOf(p, order));
    const schedule = schedules[p.order], slider = find("taken");
    const atEnd = slider.value === slider.max;
    slider.max = schedule.taken.length;
    if (atEnd || Number(slider.value) > schedule.taken.length) slider.value = schedule.taken.length;
    const shown = Number(slider.value);
    find("chart").replaceChildren(chart(p, schedule, shown));
    find("latest").textContent = latest(p, schedule, shown);
    toys.rows(find("orders"), schedules.map(({ end, idle }, order) =>
      [ORDERS[order], grouped(end), `${(100 * idle).toFixed(1)}%`]), p.order);
  }

  function fill(preset) {
    PRESETS[preset].forEach((value, index) => {
      const input = find(FIELDS[index]);
      if (input.type === "checkbox") input.checked = value;
      else input.value = value;
    });
  }
  // Before the toy's own handler, which draws.
  root.addEventListener("input", (event) => {
    if (event.target === find("preset")) fill(event.target.value);
    else if (!["order", "taken"].some((name) => event.target === find(name))) find("preset").value = "own";
  });
  fill("causal");
  return draw;
});
