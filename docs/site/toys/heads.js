// Toy: a text's attention, by the library and in float64 (heads.c).
"use strict";

toys.start("heads", (root, library) => {
  const find = (name) => root.querySelector(`#heads-${name}`);
  const { shown } = toys;
  const SHOWN_KEYS = 5, SHOWN_COLUMNS = 3;
  let alice, text, parameters, head = 0;

  // Data that only this toy needs.
  function load(name) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `toys/${name}.js`;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`toys/${name}.js is missing.`));
      document.head.append(script);
    });
  }

  // float16: not every browser has Float16Array.
  function fromHalf(bits) {
    const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent === 0) return sign * mantissa * 2 ** -24;
    return sign * (1 + mantissa / 1024) * 2 ** (exponent - 15);
  }

  function read() {
    const most = text.tokens.length;
    const first = toys.number(find("first"), { least: 1, most }) - 1;
    const count = toys.number(find("count"), { least: 1, most: most - first });
    return {
      first, count,
      causal: find("causal").checked,
      left: toys.number(find("left"), { least: 0, most, empty: -1 }),
    };
  }

  function rowsOf(name, p) {
    const row = (name === "q" ? text.heads : text.heads_k) * text.head_dim;
    return text[name].subarray(p.first * row, (p.first + p.count) * row);
  }

  function byLibrary(p) {
    return library.scope(() => {
      const width = Math.ceil(p.count / 8) * 8;
      const sizes = [p.count * text.heads * width, p.count * text.heads * text.head_dim, p.count * text.heads];
      const results = sizes.map((size) => library.space(4 * size));
      const wrong = library.functions.toy_heads(
        p.count, text.heads, text.heads_k, text.head_dim, ...["q", "k", "v"].map((name) => library.put(rowsOf(name, p))),
        p.causal, p.left, ...results);
      if (wrong) throw new Error(library.text(wrong));
      const [weights, output, lse] = results.map((at, i) => library.get(Float32Array, at, sizes[i]));
      return {
        weight: (h, i, j) => weights[(i * text.heads + h) * width + j],
        output: (h, i, c) => output[(i * text.heads + h) * text.head_dim + c],
        lse: (h, i) => lse[h * p.count + i],
      };
    });
  }

  // softmax(QK^T / sqrt(d)) V as it is written, in float64.
  function byFormula(p) {
    const [q, k, v] = ["q", "k", "v"].map((name) => Float64Array.from(rowsOf(name, p)));
    const { heads, heads_k, head_dim } = text;
    const at = (row, h, column) => (row * heads + h) * head_dim + column;
    const at_k = (row, h, column) => (row * heads_k + Math.floor((h * heads_k) / heads)) * head_dim + column;
    const rows = [];
    for (let h = 0; h < heads; h++) {
      rows.push([]);
      for (let i = 0; i < p.count; i++) {
        const scores = Array.from({ length: p.count }, (_, j) => {
          const hidden = (p.causal && j > i) || (p.left >= 0 && j < i - p.left);
          if (hidden) return -Infinity;
          let sum = 0;
          for (let c = 0; c < head_dim; c++) sum += q[at(i, h, c)] * k[at_k(j, h, c)];
          return sum / Math.sqrt(head_dim);
        });
        const greatest = Math.max(...scores);
        const sum = scores.reduce((total, score) => total + Math.exp(score - greatest), 0);
        const weights = scores.map((score) => Math.exp(score - greatest) / sum);
        const output = Array.from({ length: head_dim }, (_, c) =>
          weights.reduce((total, weight, j) => total + weight * v[at_k(j, h, c)], 0));
        rows[h].push({ weights, output, lse: greatest + Math.log(sum) });
      }
    }
    return {
      weight: (h, i, j) => rows[h][i].weights[j],
      output: (h, i, c) => rows[h][i].output[c],
      lse: (h, i) => rows[h][i].lse,
    };
  }

  function largestDifference(a, b, ...extents) {
    let largest = 0;
    const visit = (indices) => {
      if (indices.length < extents.length)
        for (let i = 0; i < extents[indices.length]; i++) visit([...indices, i]);
      else {
        const difference = Math.abs(a(...indices) - b(...indices));
        if (!(difference <= largest)) largest = difference; // NaN too
      }
    };
    visit([]);
    return largest;
  }

  // One head as a picture: row asks, column is looked at.
  function paint(canvas, p, ours, h, query) {
    const colour = getComputedStyle(root).getPropertyValue("--accent");
    const pen = canvas.getContext("2d");
    canvas.width = canvas.height = p.count;
    pen.clearRect(0, 0, p.count, p.count);
    for (let i = 0; i < p.count; i++)
      for (let j = 0; j < p.count; j++) {
        pen.globalAlpha = Math.sqrt(ours.weight(h, i, j)); // small weights can be seen too
        pen.fillStyle = colour;
        pen.fillRect(j, i, 1, 1);
      }
    canvas.setAttribute("aria-label",
      `Weights of head ${h + 1}; row ${query + 1} looks most at ${strongest(p, ours, h, query)[0].token}`);
  }

  function strongest(p, ours, h, query) {
    return text.tokens.slice(p.first, p.first + p.count)
      .map((token, j) => ({ token, j, weight: ours.weight(h, query, j) }))
      .sort((a, b) => b.weight - a.weight).slice(0, SHOWN_KEYS);
  }

  function fillQueries(p) {
    const select = find("query"), range = `${p.first} ${p.count} ${text.tokens.join(" ")}`;
    if (select.dataset.range === range) return;
    const kept = Number(select.value || p.first + Math.min(p.count - 1, 11));
    select.replaceChildren(...Array.from({ length: p.count }, (_, i) =>
      toys.html("option", { value: p.first + i }, `${p.first + i + 1} ${text.tokens[p.first + i]}`)));
    select.value = Math.min(Math.max(kept, p.first), p.first + p.count - 1);
    select.dataset.range = range;
  }

  function shade(p, ours, query) {
    const greatest = strongest(p, ours, head, query)[0].weight;
    find("text").replaceChildren(...Array.from({ length: p.count }, (_, j) => {
      const token = text.tokens[p.first + j], joined = token.startsWith("##");
      const share = ours.weight(head, query, j) / greatest;
      const word = toys.html("span", { class: j === query ? "token asks" : "token" },
        joined ? token.slice(2) : token);
      word.style.setProperty("--weight", `${(45 * Math.sqrt(share)).toFixed(1)}%`);
      return j && !joined && text === alice ? [" ", word] : [word];
    }).flat());
  }

  function draw() {
    const p = read();
    const ours = byLibrary(p), exact = byFormula(p);
    fillQueries(p);
    const query = Number(find("query").value) - p.first;
    [...find("all").children].forEach((button, h) => {
      button.setAttribute("aria-pressed", h === head);
      paint(button.querySelector("canvas"), p, ours, h, query);
    });
    shade(p, ours, query);
    const keys = strongest(p, ours, head, query);
    const asking = text.tokens[p.first + query];
    find("sentence").textContent =
      `Head ${head + 1}: “${asking}” looks most at ` +
      `${keys.slice(0, 3).map(({ token, weight }) => `“${token}” (${(100 * weight).toFixed(1)}%)`).join(", ")}.`;
    toys.rows(find("rows"), [
      ...keys.map(({ token, j, weight }) =>
        [`weight of ${p.first + j + 1} ${token}`, shown(weight, 7), shown(exact.weight(head, query, j), 7)]),
      ...Array.from({ length: SHOWN_COLUMNS }, (_, c) =>
        [`output, column ${c}`, shown(ours.output(head, query, c), 7), shown(exact.output(head, query, c), 7)]),
      ["log-sum-exp", shown(ours.lse(head, query), 7), shown(exact.lse(head, query), 7)],
    ]);
    const { heads, head_dim } = text;
    const differences = [
      largestDifference(ours.weight, exact.weight, heads, p.count, p.count),
      largestDifference(ours.output, exact.output, heads, p.count, head_dim),
      largestDifference(ours.lse, exact.lse, heads, p.count),
    ].map((difference) => shown(difference, 2));
    find("errors").textContent =
      `Over all heads and words the greatest difference from float64 is ${differences[0]} in a weight, ` +
      `${differences[1]} in the output, ${differences[2]} in the log-sum-exp.`;
  }

  function makeHeads() {
    find("all").replaceChildren(...Array.from({ length: text.heads }, (_, h) => {
      const button = toys.html("button", { type: "button" },
        toys.html("canvas", { role: "img", "aria-label": "" }), toys.html("span", {}, `head ${h + 1}`));
      button.addEventListener("click", () => {
        head = h;
        root.dispatchEvent(new Event("redraw"));
      });
      return button;
    }));
  }

  // The model's queries, keys and values of one's own text; a token is a byte.
  function ownText(bytes, layer) {
    return library.scope(() => {
      const sizes = library.space(16);
      library.functions.toy_read_sizes(sizes);
      const [layers, heads, heads_k, head_dim] = library.get(Int32Array, sizes, 4);
      const counts = [heads, heads_k, heads_k].map((of) => bytes.length * of * head_dim);
      const results = counts.map((count) => library.space(4 * count));
      library.functions.toy_read(library.put(bytes), bytes.length, library.put(parameters), layer, ...results);
      const [q, k, v] = results.map((at, i) => library.get(Float32Array, at, counts[i]));
      return { tokens: Array.from(bytes, nameOf), layers, heads, heads_k, head_dim, q, k, v };
    });
  }

  // A byte as a letter, where it is one.
  function nameOf(byte) {
    if (byte === 32) return "␣";
    return byte > 32 && byte < 127 ? String.fromCharCode(byte) : byte.toString(16).padStart(2, "0");
  }

  // Takes up the text that is asked for, and shows all of it.
  function changeText() {
    const bytes = new TextEncoder().encode(find("own").value).slice(0, 128);
    const own = bytes.length > 0;
    const before = text;
    text = own ? ownText(bytes, Number(find("layer").value || 0)) : alice;
    find("layer").disabled = !own;
    if (own && !find("layer").length)
      find("layer").replaceChildren(...Array.from({ length: text.layers }, (_, i) =>
        toys.html("option", { value: i }, i + 1)));
    find("causal").checked = find("causal").disabled = own; // as the model was trained
    const [first, count] = own ? [1, text.tokens.length] : [2, 38];
    if (before.tokens.join() !== text.tokens.join()) [find("first").value, find("count").value] = [first, count];
    if (before.heads !== text.heads) {
      head = 0;
      makeHeads();
    }
  }

  async function readOwn() {
    try {
      if (!parameters) {
        await load("model");
        parameters = toys.bytes(toys.parameters);
      }
      changeText();
      root.dispatchEvent(new Event("redraw"));
    } catch (error) {
      root.querySelector(".message").textContent = error.message;
    }
  }

  return load("text").then(() => {
    alice = { ...toys.text, heads_k: toys.text.heads };
    for (const name of ["q", "k", "v"])
      alice[name] = Float32Array.from(new Uint16Array(toys.bytes(alice[name]).buffer), fromHalf);
    text = alice;
    makeHeads();
    for (const name of ["own", "layer"]) find(name).addEventListener("input", readOwn);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => root.dispatchEvent(new Event("redraw")));
    return draw;
  });
});
