// Toy: producer, two consumers and the matrix unit, in clocks (timeline.c).
"use strict";

toys.start("timeline", (root, library) => {
  const MOST_TILES = 24;
  const LANES = ["loads", "warpgroup 1", "warpgroup 2", "matrix unit"];
  const UNIT = 3;
  const KINDS = ["keys", "values", "issue", "scores", "softmax", "output"];
  const SOFTMAX = KINDS.indexOf("softmax");
  const LETTERS = ["K", "V", "", "S", "P", "O"];
  const find = (name) => root.querySelector(`#timeline-${name}`);
  const { grouped } = toys;

  function read() {
    const clocks = (name, least) => toys.number(find(name), { least, most: 100000, whole: false });
    return {
      tiles: toys.number(find("tiles"), { least: 1, most: MOST_TILES }),
      turns: find("turns").checked,
      overlap: find("overlap").checked,
      stages: toys.number(find("stages"), { least: 1, most: 8 }),
      clocks: [clocks("product", 1), clocks("softmax", 1), clocks("issue", 0), clocks("load", 1),
        clocks("second", 0)],
    };
  }

  function simulate(p, turns, overlap) {
    return library.scope(() => {
      const most = 32 * MOST_TILES;
      const spans = library.space(32 * most); // struct span
      const timeline = library.struct([p.tiles, turns, overlap, p.stages], p.clocks);
      const count = library.functions.toy_timeline(timeline, spans, most);
      const all = library.structs(spans, count, 4, 2).map(
        ([lane, kind, tile, warpgroup, begin, end]) => ({ lane, kind, tile, warpgroup, begin, end }));
      const softmaxes = all.filter((span) => span.kind === SOFTMAX && span.lane === 1);
      const [before, last] = softmaxes.slice(-2);
      const round = last ? last.begin - before.begin : undefined;
      return {
        spans: all,
        end: Math.max(...all.map((span) => span.end)),
        round,
        busy: round && (4 * p.clocks[0]) / round, // two products of each warpgroup
      };
    });
  }

  function picture({ spans, end }, p) {
    const left = 84, wide = Math.max(580, 90 * p.tiles), lane = 34, gap = 10;
    const at = (clock) => left + (wide * clock) / end;
    const height = LANES.length * (lane + gap) + 22;
    const children = [];
    LANES.forEach((name, index) => {
      const y = index * (lane + gap);
      children.push(
        toys.svg("text", { x: 0, y: y + 21, class: "small" }, name),
        toys.svg("rect", { x: left, y, width: wide, height: lane, class: "idle" }));
    });
    const every = roundStep(end / 6), baseline = height - 6;
    for (let clock = 0; clock <= end; clock += every)
      children.push(
        toys.svg("line", { x1: at(clock), x2: at(clock), y1: 0, y2: baseline - 12, class: "line" }),
        toys.svg("text", { x: at(clock) + 2, y: baseline, class: "small muted" }, grouped(clock)));
    for (const { lane: index, kind, tile, warpgroup, begin, end: until } of spans) {
      const shared = index === UNIT; // half of the lane for each warpgroup
      const y = index * (lane + gap) + (shared ? (warpgroup * lane) / 2 : 0);
      const width = at(until) - at(begin);
      children.push(toys.svg("rect", {
        x: at(begin), y, width, height: shared ? lane / 2 : lane, class: KINDS[kind],
      }));
      const names = [`${LETTERS[kind]}${tile + 1}`, LETTERS[kind]]; // the longest that has room
      const name = names.find((text) => width > 8 * text.length + 4);
      if (name)
        children.push(toys.svg("text", {
          x: at(begin) + width / 2, y: y + (shared ? 13 : 21), class: "small on middle",
        }, name));
    }
    const drawn = toys.picture(left + wide + 2, height, "Timeline of a thread block",
      `${p.tiles} tiles of keys in ${grouped(end)} clocks; the sentence and the table below say the rest`, children);
    drawn.style.width = `${left + wide + 2}px`;
    return drawn;
  }

  // 1, 2 or 5 times a power of ten.
  function roundStep(clocks) {
    const power = 10 ** Math.floor(Math.log10(clocks));
    return power * [1, 2, 5, 10].find((digit) => digit * power >= clocks);
  }

  const percent = (share) => `${(100 * share).toFixed(1)}%`;

  function sentence(p, now) {
    const how = [p.turns ? "with" : "without", " ping-pong, ", p.overlap ? "with" : "without", " overlap"].join("");
    const both = overlapOf(now.spans.filter((span) => span.lane === UNIT));
    const one = p.tiles > 1 ? ` A round at the end takes ${grouped(now.round)}, the matrix unit is busy for ${percent(now.busy)} of it.` : "";
    return `${how[0].toUpperCase()}${how.slice(1)}: ${grouped(now.end)} clocks.${one} ` +
      `For ${grouped(both)} clocks both warpgroups had products under way, and each waited longer for it.`;
  }

  // Clocks in which both warpgroups use the unit.
  function overlapOf(spans) {
    const [first, second] = [0, 1].map((warpgroup) => spans.filter((span) => span.warpgroup === warpgroup));
    let clocks = 0;
    for (const a of first)
      for (const b of second) clocks += Math.max(Math.min(a.end, b.end) - Math.max(a.begin, b.begin), 0);
    return clocks;
  }

  function draw() {
    const p = read();
    const ways = [[false, false], [true, false], [false, true], [true, true]];
    const results = ways.map(([turns, overlap]) => simulate(p, turns, overlap));
    const chosen = ways.findIndex(([turns, overlap]) => turns === p.turns && overlap === p.overlap);
    const now = results[chosen];
    find("picture").replaceChildren(picture(now, p));
    find("sentence").textContent = sentence(p, now);
    const names = ["neither", "ping-pong", "overlap", "both"];
    toys.rows(find("ways"), results.map(({ end, round, busy }, way) =>
      [names[way], grouped(end), round ? grouped(round) : "one tile only", round ? percent(busy) : "one tile only"]), chosen);
  }

  const PRODUCT_KERNEL = 79.3; // docs/notes/hopper-forward-clocks.md
  const { k4_wgmma: k4, k5_specialised: k5, k6_overlap: k6 } = toys.measured;
  find("measured").textContent =
    `Measured for whole kernels of the ladder, beginnings and ends of blocks included (worklog/bottlenecks.json): ` +
    `the matrix unit was busy for ${k4.toFixed(0)}% of the cycles in K4, whose warpgroups meet at a barrier every round, ` +
    `${k5.toFixed(0)}% in K5, where they drift apart, and ${k6.toFixed(0)}% in K6, with ping-pong and overlap. The product kernel, ` +
    `when the stamps below were taken, had ${PRODUCT_KERNEL.toFixed(0)}% at 8192 tokens (docs/notes/hopper-forward-clocks.md).`;
  return draw;
});
