// What the toys share: the library as WebAssembly, inputs and their messages, drawing.
"use strict";

(() => {
  const toys = window.toys;

  // The library's functions, and arrays in its memory.
  class Library {
    constructor(exports) {
      this.functions = exports;
      this.taken = [];
    }

    // Frees what `work` has put into the library's memory.
    scope(work) {
      try {
        return work(this);
      } finally {
        for (const pointer of this.taken) this.functions.free(pointer);
        this.taken = [];
      }
    }

    space(bytes) {
      const pointer = this.functions.malloc(Math.max(bytes, 1));
      if (!pointer) throw new Error("The page has run out of memory.");
      this.taken.push(pointer);
      return pointer;
    }

    // A copy of a typed array.
    put(array) {
      const pointer = this.space(array.byteLength);
      const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
      new Uint8Array(this.functions.memory.buffer).set(bytes, pointer);
      return pointer;
    }

    // A copy of `count` numbers, in an array of the type that is given.
    get(type, pointer, count) {
      return new type(this.functions.memory.buffer, pointer, count).slice();
    }

    // A struct of 32-bit integers and, after them, of doubles.
    struct(integers, doubles) {
      const bytes = new ArrayBuffer(roundUp(4 * integers.length, 8) + 8 * doubles.length);
      new Int32Array(bytes, 0, integers.length).set(integers);
      new Float64Array(bytes, roundUp(4 * integers.length, 8)).set(doubles);
      return this.put(new Uint8Array(bytes));
    }

    // An array of such structs, each read as one array of numbers.
    structs(pointer, count, integers, doubles) {
      const view = new DataView(this.functions.memory.buffer);
      const doublesAt = roundUp(4 * integers, 8);
      const size = doublesAt + 8 * doubles;
      return Array.from({ length: count }, (_, index) => {
        const at = pointer + index * size;
        const numbers = [];
        for (let i = 0; i < integers; i++) numbers.push(view.getInt32(at + 4 * i, true));
        for (let i = 0; i < doubles; i++) numbers.push(view.getFloat64(at + doublesAt + 8 * i, true));
        return numbers;
      });
    }

    text(pointer) {
      const bytes = new Uint8Array(this.functions.memory.buffer, pointer);
      return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
    }
  }

  function roundUp(number, step) {
    return Math.ceil(number / step) * step;
  }

  toys.bytes = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));

  async function load() {
    const module = await WebAssembly.compile(toys.bytes(toys.module));
    // What libc asks of a system, for files that the library never opens here.
    const badFile = 8;
    const imports = {};
    for (const { module: from, name } of WebAssembly.Module.imports(module))
      (imports[from] ??= {})[name] = () => badFile;
    return new Library((await WebAssembly.instantiate(module, imports)).exports);
  }

  const library = load();

  // Runs a toy: `prepare(root, library)` returns what draws it from its inputs, or a promise of that. Whatever an input
  // holds that can't be used becomes a message.
  toys.start = async (name, prepare) => {
    const root = document.querySelector(`[data-toy="${name}"]`);
    const message = root.querySelector(".message");
    try {
      const draw = await prepare(root, await library);
      const update = () => {
        try {
          draw();
          message.textContent = "";
          root.classList.remove("stale");
        } catch (error) {
          message.textContent = error.message;
          root.classList.add("stale");
        }
      };
      root.addEventListener("input", update);
      root.addEventListener("redraw", update);
      update();
      root.dataset.ready = "yes";
    } catch (error) {
      message.textContent = `This toy does not run here: ${error.message}`;
    }
  };

  // An input's label, for messages.
  function labelOf(input) {
    return input.labels[0].firstChild.textContent.trim();
  }

  // The number in an input; `empty` stands for an empty one where that may be.
  toys.number = (input, { least, most, whole = true, empty }) => {
    const text = input.value.trim();
    const number = Number(text);
    if (text === "" && empty !== undefined && !input.validity.badInput) return empty;
    if (text === "" || !(number >= least && number <= most) || (whole && !Number.isInteger(number)))
      throw new Error(
        `${labelOf(input)}: expected ${whole ? "a whole number" : "a number"} from ${least} to ${most}` +
          (empty === undefined ? "." : ", or nothing."),
      );
    return number;
  };

  // The numbers in a line of text.
  toys.numbers = (input, { least, most }) => {
    const words = input.value.split(/[\s,;]+/).filter((word) => word);
    return words.map((word) => {
      const number = Number(word);
      if (!(number >= least && number <= most))
        throw new Error(`${labelOf(input)}: “${word}” is no number from ${least} to ${most}.`);
      return number;
    });
  };

  toys.shown = (number, digits = 6) => {
    if (Number.isNaN(number)) return "NaN";
    if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
    if (number === 0) return "0";
    const text =
      Math.abs(number) >= 1e-4 && Math.abs(number) < 1e7
        ? String(Number(number.toPrecision(digits)))
        : number.toExponential(digits - 1);
    return text.replaceAll("-", "−");
  };

  toys.grouped = (number) => Math.round(number).toLocaleString("en");

  // An element: attributes, then children, which may be texts.
  function made(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  toys.html = (tag, attributes = {}, ...children) =>
    made(document.createElement(tag), attributes, children);
  toys.svg = (tag, attributes = {}, ...children) =>
    made(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  // A picture with its text alternative.
  toys.picture = (width, height, title, description, children) =>
    toys.svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}. ${description}` },
      toys.svg("title", {}, title),
      toys.svg("desc", {}, description),
      ...children,
    );

  // The rows of a table's body: texts, the first one the row's heading.
  toys.rows = (body, rows, current) => {
    body.replaceChildren(
      ...rows.map((cells, index) =>
        toys.html(
          "tr",
          index === current ? { "aria-current": "true" } : {},
          ...cells.map((cell, column) =>
            column ? toys.html("td", {}, cell) : toys.html("th", { scope: "row" }, cell),
          ),
        ),
      ),
    );
  };
})();
