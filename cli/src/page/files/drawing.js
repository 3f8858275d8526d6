// Elements, tables, curves and maps. Whatever comes from the daemon becomes text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; a child that is no node becomes text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Sets a text if it is another one, so that screen readers hear only what is new. */
export function setText(of, text) {
  if (of.textContent !== text) of.textContent = text;
}

let sections = 0;

/** A section with a heading, by which screen readers name it. */
export function section(title, ...children) {
  sections += 1;
  const id = `section-${sections}`;
  return element("section", { "aria-labelledby": id }, element("h2", { id }, title), ...children);
}

/** Pairs of a name and a value that are written again and again. */
export class Facts {
  constructor() {
    this.element = element("dl");
    this.values = new Map();
  }

  /** Pairs whose value is null are left out. */
  update(pairs) {
    const wanted = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
    const same = wanted.length === this.values.size && wanted.every(([name]) => this.values.has(name));
    if (!same) {
      this.values = new Map(wanted.map(([name]) => [name, element("dd")]));
      const rows = wanted.map(([name]) => element("div", {}, element("dt", {}, name), this.values.get(name)));
      this.element.replaceChildren(...rows);
    }
    for (const [name, value] of wanted) setText(this.values.get(name), String(value));
  }
}

/** How long items are written in one frame of the screen. Unit: milliseconds. */
const FRAME = 6;

/** Writes a long list in parts, a frame each, so that nothing stalls. What is written next ends what was being written. */
export class Parts {
  write(items, writeOne) {
    this.stop();
    const part = (from) => {
      const until = performance.now() + FRAME;
      for (let index = from; index < items.length; index += 1) {
        if (performance.now() > until) {
          this.next = requestAnimationFrame(() => part(index));
          return;
        }
        writeOne(items[index]);
      }
    };
    part(0);
  }

  stop() {
    cancelAnimationFrame(this.next);
  }
}

/** Only what has this text in one of its `texts` is wanted. */
export function filter(label, texts, changed) {
  const input = element("input", { id: "filter", type: "search", autocomplete: "off", spellcheck: "false" });
  input.addEventListener("input", changed);
  const box = element("p", { class: "filter" }, element("label", { for: "filter" }, `${label} `), input);
  return { box, wants: (item) => texts(item).some((text) => text.toLowerCase().includes(input.value.toLowerCase())) };
}

/** Names with commas between them, each in one piece: one that is too long ends in dots, and its title has all of it. */
function unbroken(names, more) {
  const comma = (index) => (index < names.length - 1 ? "," : "");
  return [...names.flatMap((name, index) => [element("span", { class: "name", title: name }, name + comma(index)), " "]), more];
}

/** A table whose rows are kept as long as their key is there. */
export class Table {
  /** Columns: [title, class]. `cells` gives of an item a text, {text, href}, or {names, more} of names that are not broken, for each. */
  constructor(caption, columns, key, cells, empty) {
    Object.assign(this, { columns, key, cells });
    this.rows = new Map();
    this.parts = new Parts();
    this.body = element("tbody");
    const titles = columns.map(([title, kind = ""]) => element("th", { scope: "col", class: kind }, title));
    const head = element("thead", {}, element("tr", {}, ...titles));
    this.table = element("table", {}, element("caption", { class: "unseen" }, caption), head, this.body);
    this.none = element("p", { class: "none" }, empty);
    this.element = element("div", {}, this.none, this.table);
    // Before the first answer, nothing is said.
    this.none.hidden = true;
    this.table.hidden = true;
  }

  update(items) {
    this.none.hidden = items.length > 0;
    this.table.hidden = items.length === 0;
    const keys = new Set(items.map(this.key));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    }
    // The row before which the next one belongs.
    let at = this.body.firstChild;
    this.parts.write(items, (item) => {
      let row = this.rows.get(this.key(item));
      if (!row) {
        row = this.newRow();
        this.rows.set(this.key(item), row);
      }
      this.write(row, this.cells(item));
      if (row.element === at) at = at.nextSibling;
      else this.body.insertBefore(row.element, at);
    });
  }

  newRow() {
    const cells = this.columns.map(([, kind = ""], index) =>
      element(index === 0 ? "th" : "td", index === 0 ? { scope: "row", class: kind } : { class: kind }));
    return { element: element("tr", {}, ...cells), cells, said: [] };
  }

  write(row, cells) {
    cells.forEach((cell, index) => {
      const { text, href, names, more } = typeof cell === "object" ? cell : { text: cell };
      const said = JSON.stringify([href, text, names, more]);
      if (row.said[index] === said) return;
      row.said[index] = said;
      row.cells[index].replaceChildren(...(names ? unbroken(names, more) : [href ? element("a", { href }, text) : text]));
    });
  }
}

const WIDTH = 600;
const HEIGHT = 120;

/** Narrower, a pause could not be seen. */
const NARROWEST = 3;

/** Values over time as a line, from 0 up to the largest, above an axis of time. */
export class Curve {
  constructor(title, format, formatTime) {
    Object.assign(this, { title, format, formatTime, points: [], pause: null });
    this.area = shape("path", { class: "area" });
    this.line = shape("path", { class: "line" });
    this.band = shape("rect", { class: "pause", y: 0, height: HEIGHT, width: 0 });
    this.label = element("span");
    this.legend = element("strong", { class: "pause" });
    this.picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      shape("path", { class: "ground", d: `M0 ${HEIGHT - 1}H${WIDTH}` }), this.band, this.area, this.line);
    [this.begin, this.end] = [element("span"), element("span")];
    // Screen readers have it with the picture.
    const axis = element("p", { class: "axis", "aria-hidden": "true" }, this.begin, element("span", {}, "time since the request"), this.end);
    this.element = element("figure", { class: "curve" }, element("figcaption", {}, this.label, " ", this.legend), this.picture, axis);
    this.element.hidden = true;
  }

  /** The guest stood still from then to then, in milliseconds; null: it did not. */
  mark(pause) {
    if (this.pause?.from === pause?.from && this.pause?.to === pause?.to) return;
    this.pause = pause;
    if (this.points.length > 0) this.draw();
  }

  /** At a time in milliseconds. Times only grow; so many points that each pixel has one are enough. */
  add(ms, value) {
    const last = this.points.at(-1);
    if (last && ms <= last[0]) return;
    this.points.push([ms, value]);
    if (this.points.length > 2 * WIDTH) this.points = this.points.filter((_, index) => index % 2 === 0);
    this.draw();
  }

  draw() {
    const begin = this.points[0][0];
    const [last] = this.points.at(-1);
    // A pause that came after the last value is in it, too, and one that was over before the first is not.
    const pause = this.pause?.to > begin ? this.pause : null;
    const end = Math.max(last, pause?.to ?? last);
    const length = Math.max(end - begin, 1);
    const most = Math.max(...this.points.map(([, value]) => value));
    const x = (ms) => (((ms - begin) / length) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (value / (most || 1)) * (HEIGHT - 6)).toFixed(1);
    const line = this.points.map(([ms, value]) => `${x(ms)} ${y(value)}`).join("L");
    this.line.setAttribute("d", `M${line}`);
    this.area.setAttribute("d", `M${x(begin)} ${HEIGHT}L${line}L${x(last)} ${HEIGHT}Z`);
    this.band.setAttribute("width", 0);
    if (pause) {
      const from = Math.max(Number(x(Math.max(pause.from, begin))), 0);
      const width = Math.max(Number(x(pause.to)) - from, NARROWEST);
      this.band.setAttribute("x", Math.min(from, WIDTH - width).toFixed(1));
      this.band.setAttribute("width", width.toFixed(1));
    }
    const now = this.format(this.points.at(-1)[1]);
    const said = `${this.title}: now ${now}, at most ${this.format(most)}.`;
    const stood = pause ? `Orange: the guest stood still for ${this.formatTime(pause.to - pause.from)}, ${this.formatTime(pause.from)} after the request.` : "";
    setText(this.label, said);
    setText(this.legend, stood);
    setText(this.begin, this.formatTime(begin));
    setText(this.end, this.formatTime(end));
    const times = `From ${this.formatTime(begin)} to ${this.formatTime(end)} after the request.`;
    this.picture.setAttribute("aria-label", [said, times, stood].filter(Boolean).join(" "));
    this.element.hidden = this.points.length < 2;
  }
}

const ACROSS = 32;

/** A RAM block as a field of squares, one for each of its parts, that fill as pages arrive. */
export class MemoryMap {
  constructor(block, size) {
    this.name = `${block}, ${size}`;
    this.label = element("figcaption");
    this.picture = shape("svg", { role: "img" });
    this.squares = [];
    this.element = element("figure", { class: "map" }, this.label, this.picture);
  }

  /** Everything has arrived. */
  fill(where) {
    this.update(this.squares.map(() => 100), where);
  }

  /** The share of each part that has arrived; `where` that is, in words. */
  update(parts, where) {
    if (this.squares.length !== parts.length) this.lay(parts.length);
    parts.forEach((percent, index) => {
      const square = this.squares[index];
      if (square.percent === percent) return;
      square.percent = percent;
      square.shape.setAttribute("fill-opacity", (percent / 100).toFixed(2));
    });
    const here = parts.length === 0 ? 0 : Math.floor(parts.reduce((sum, part) => sum + part, 0) / parts.length);
    setText(this.label, `${this.name}: ${here} % ${where}`);
    this.picture.setAttribute("aria-label", this.label.textContent);
  }

  lay(count) {
    const rows = Math.ceil(count / ACROSS);
    this.picture.setAttribute("viewBox", `0 0 ${ACROSS * 10} ${Math.max(rows, 1) * 10}`);
    this.squares = Array.from({ length: count }, (_, index) => {
      const at = { x: (index % ACROSS) * 10 + 0.5, y: Math.floor(index / ACROSS) * 10 + 0.5, width: 9, height: 9 };
      return { percent: undefined, shape: shape("rect", at) };
    });
    this.picture.replaceChildren(...this.squares.map((square) => square.shape));
  }
}

/** Spans of time, [name, start, length, whether the guest stands still] in milliseconds, as bars below each other. */
export function spans(title, parts, format) {
  const end = Math.max(...parts.map(([, start, length]) => start + length), 0.001);
  const bars = parts.map(([name, start, length, still]) => {
    const bar = shape("rect", { x: (start / end) * WIDTH, y: 2, width: Math.max((length / end) * WIDTH, 1), height: 12 });
    bar.classList.toggle("pause", still);
    const picture = shape("svg", { viewBox: `0 0 ${WIDTH} 16`, preserveAspectRatio: "none", "aria-hidden": "true" }, bar);
    return element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "number" }, format(length)),
      element("td", { class: "bar" }, picture));
  });
  return element("table", { class: "spans" }, element("caption", {}, title), element("tbody", {}, ...bars));
}
