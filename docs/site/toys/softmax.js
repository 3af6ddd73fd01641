// Toy: the online softmax, step by step (softmax.c).
"use strict";

toys.start("softmax", (root, library) => {
  const MOST_KEYS = 64;
  const ROW = ["maximum", "rescale", "sum", "output", "result", "lse"]; // struct softmax_row
  const find = (name) => root.querySelector(`#softmax-${name}`);
  const { shown } = toys;
  let step = 0; // tiles that have been taken

  function steps(scores, values, width) {
    return library.scope(() => {
      const count = scores.length;
      const rows = library.space(4 * ROW.length * count);
      const exponentials = library.space(4 * count);
      const taken = library.functions.toy_softmax(
        count, library.put(scores), library.put(values), width, rows, exponentials);
      const numbers = library.get(Float32Array, rows, ROW.length * taken);
      return {
        rows: Array.from({ length: taken }, (_, index) =>
          Object.fromEntries(ROW.map((name, i) => [name, numbers[index * ROW.length + i]])),
        ),
        exponentials: library.get(Float32Array, exponentials, count),
      };
    });
  }

  function naive(scores, values) {
    return library.scope(() => {
      const result = library.space(12);
      library.functions.toy_naive_softmax(
        scores.length, library.put(scores), library.put(values), result);
      return [...library.get(Float32Array, result, 3)];
    });
  }

  // In JavaScript's own numbers, which are float64.
  function exact(scores, values) {
    const maximum = Math.max(...scores);
    let sum = 0, output = 0;
    scores.forEach((score, key) => {
      sum += Math.exp(score - maximum);
      output += Math.exp(score - maximum) * values[key];
    });
    return [sum, output, output / sum];
  }

  const keysOf = (index, width, count) => {
    const first = index * width + 1, last = Math.min((index + 1) * width, count);
    return first === last ? `${first}` : `${first} to ${last}`;
  };

  function sentence(rows, width, count) {
    if (step === 0) return [`Nothing is known yet: maximum −∞, sum 0, output 0. Press “Next”.`];
    const now = rows[step - 1];
    const before = rows[step - 2] ?? { maximum: -Infinity, sum: 0, output: 0 };
    const lines = [`Tile ${step} of ${rows.length}, keys ${keysOf(step - 1, width, count)}.`];
    if (step > 1 && now.maximum > before.maximum)
      lines.push(
        `The maximum grows from ${shown(before.maximum)} to ${shown(now.maximum)}. All that was summed ` +
          `was relative to the old one, so sum and output are multiplied by ` +
          `exp(${shown(before.maximum)} − ${shown(now.maximum)}) = ${shown(now.rescale)}.`,
      );
    else if (step > 1)
      lines.push(`The maximum stays ${shown(now.maximum)}: nothing has to be rescaled.`);
    const tile = now.sum - before.sum * now.rescale;
    lines.push(
      `Sum: ${shown(before.sum)} × ${shown(now.rescale)} + ${shown(tile, 5)} = ${shown(now.sum)}. ` +
        `Output / sum: ${shown(now.output)} / ${shown(now.sum)} = ${shown(now.result)}.`);
    return lines;
  }

  const short = (weight) =>
    weight > 0 && weight < 0.001 ? "< 0.001" : String(Number(weight.toFixed(3)));

  // The weight of each key so far, relative to today's maximum: what the rescaling does to it.
  function picture(scores, { rows, exponentials }, width) {
    const column = 56, left = 52, top = 18, high = 90, count = scores.length;
    const children = [
      toys.svg("text", { x: 0, y: top - 5, class: "muted small" }, "weight"),
      toys.svg("text", { x: 0, y: top + high + 16, class: "muted small" }, "score"),
    ];
    scores.forEach((score, key) => {
      const tile = Math.floor(key / width), x = left + key * column + 4, seen = tile < step;
      let weight = exponentials[key];
      for (let later = tile + 1; later < step; later++) weight *= rows[later].rescale;
      const height = seen ? weight * high : 0;
      children.push(
        toys.svg("rect", { x, y: top, width: column - 8, height: high, class: "slot" }),
        toys.svg("rect", {
          x, y: top + high - height, width: column - 8, height,
          class: tile === step - 1 ? "bar current" : "bar",
        }),
        toys.svg("text", { x: x + column / 2 - 4, y: top - 5, class: "middle" }, seen ? short(weight) : "?"),
        toys.svg("text", { x: x + column / 2 - 4, y: top + high + 16, class: "middle mono" }, shown(score, 4)),
      );
      if (key % width === 0 && key > 0)
        children.push(toys.svg("line", {
          x1: left + key * column, x2: left + key * column, y1: 0, y2: top + high + 36, class: "divider",
        }));
    });
    for (let tile = 0; tile * width < count; tile++)
      children.push(toys.svg(
        "text", { x: left + tile * width * column + 4, y: top + high + 33, class: "muted small" },
        width > 1 ? `tile ${tile + 1}` : `${tile + 1}`));
    const described = step === 0
      ? "No key has been seen"
      : `After tile ${step} of ${rows.length} the maximum is ${shown(rows[step - 1].maximum)}`;
    const drawn = toys.picture(
      left + count * column, top + high + 40, "Weight of each key, exp(score − maximum)", described, children);
    drawn.style.width = `${left + count * column}px`;
    return drawn;
  }

  function draw() {
    const range = { least: -1e30, most: 1e30 };
    const scores = Float32Array.from(toys.numbers(find("scores"), range));
    const values = Float32Array.from(toys.numbers(find("values"), range));
    const width = toys.number(find("width"), { least: 1, most: MOST_KEYS });
    if (scores.length === 0 || scores.length > MOST_KEYS)
      throw new Error(`Scores: expected 1 to ${MOST_KEYS} numbers, there are ${scores.length}.`);
    if (scores.length !== values.length)
      throw new Error(`Each key has one value: there are ${scores.length} scores and ${values.length} values.`);
    const taken = steps(scores, values, width), { rows } = taken;
    step = Math.min(step, rows.length);

    find("picture").replaceChildren(picture(scores, taken, width));
    find("sentence").textContent = sentence(rows, width, scores.length).join(" ");
    toys.rows(find("steps"), rows.slice(0, step).map((row, index) => [
      keysOf(index, width, scores.length),
      ...[row.maximum, row.rescale, row.sum, row.output, row.result].map((number) => shown(number)),
    ]), step - 1);
    const keys = Math.min(step * width, scores.length);
    const ways = keys === 0 ? [] : [
      ["online (our C, float32)", ...[rows[step - 1].sum, rows[step - 1].output, rows[step - 1].result]],
      ["as it is written, exp(score) (float32)", ...naive(scores.slice(0, keys), values.slice(0, keys))],
      ["maximum known first (float64)", ...exact([...scores.slice(0, keys)], values)],
    ];
    toys.rows(find("ways"), ways.map(([way, ...numbers]) => [way, ...numbers.map((number) => shown(number))]));
    find("back").disabled = find("first").disabled = step === 0;
    find("next").disabled = find("last").disabled = step === rows.length;
  }

  const go = (name, move) =>
    find(name).addEventListener("click", () => {
      step = Math.max(move(step), 0);
      root.dispatchEvent(new Event("redraw"));
      if (find(name).disabled) find(step ? "back" : "next").focus();
    });
  go("first", () => 0);
  go("back", (at) => at - 1);
  go("next", (at) => at + 1);
  go("last", () => MOST_KEYS);
  find("large").addEventListener("click", () => {
    find("scores").value = "88 91 86 89 95 90 93 87";
    find("values").value = "1 2 3 4 5 6 7 8";
    find("width").value = 2;
    step = 1;
    root.dispatchEvent(new Event("redraw"));
  });
  return draw;
});
