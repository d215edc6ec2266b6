// The view of expert_map.py: one canvas pixel for each expert, enlarged by its style.
// The grid that a screen reader sees has one cell in the page, the one of the cursor.

const BLUES = [
  "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b",
];
const DIVERGING = {
  light: ["#d55e00", "#f2f2f2", "#0072b2"],
  dark: ["#e69f00", "#333333", "#56b4e9"],
};
const LEAST = 6, MOST = 32;  // pixels of a cell
const LINES_FROM = 8;  // pixels of a cell from which lines part them
const LABEL = { columns: 34, rows: 17 };  // pixels that a label needs
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500];
const PAGE = 10;  // rows that PageUp and PageDown move

const MOVES = {
  ArrowUp: ({ row, column }) => [row - 1, column],
  ArrowDown: ({ row, column }) => [row + 1, column],
  ArrowLeft: ({ row, column }) => [row, column - 1],
  ArrowRight: ({ row, column }) => [row, column + 1],
  PageUp: ({ row, column }) => [row - PAGE, column],
  PageDown: ({ row, column }) => [row + PAGE, column],
  Home: ({ row }, whole) => [whole ? 0 : row, 0],
  End: ({ row }, whole) => [whole ? Infinity : row, Infinity],
};

// Each widget has a copy of this script, so that ids are not counted but drawn.
const drawn = () => Math.random().toString(36).slice(2);

// --- colours ---

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function isDark(node) {
  const [red, green, blue] = getComputedStyle(node).color.match(/[\d.]+/g).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 127;  // the text is light
}

// The colours from low to high. What is low is near the background.
function stopsOf(diverging, dark) {
  if (diverging) return DIVERGING[dark ? "dark" : "light"];
  return dark ? [...BLUES].reverse() : BLUES;
}

// A colour in a map of `stops`, for a share from 0 to 1.
function blend(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const first = Math.min(Math.floor(place), stops.length - 2);
  const [low, high] = [stops[first], stops[first + 1]];
  return low.map((from, i) => Math.round(from + (high[i] - from) * (place - first)));
}

// --- what the kernel sent ---

// Rows, columns, and functions of a cell. It is read anew at each change.
function read(model) {
  const layers = model.get("layers"), columns = model.get("n_columns");
  const values = new Float32Array(bytes(model.get("values")));
  const order = new Int32Array(bytes(model.get("order")));
  const expert = (row, column) => order[row * columns + column];
  const value = (row, column) => values[row * columns + expert(row, column)];
  return { layers, columns, rows: layers.length, expert, value };
}

function bytes(view) {
  return view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
}

function number(value, model) {
  const scaled = Number((model.get("percent") ? 100 * value : value).toPrecision(3));
  const sign = model.get("low") < 0 && scaled > 0 ? "+" : "";
  return `${sign}${scaled}${model.get("percent") ? "%" : ""}`;
}

function make(parent, name, { kind = "div", ...attributes } = {}) {
  const node = document.createElement(kind);
  if (name) node.className = `heapr-map-${name}`;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent.append(node);
  return node;
}

// --- the view ---

class Grid {
  constructor(model, el) {
    Object.assign(this, { model, id: `heapr-map-${drawn()}`, fitted: true, size: LEAST });
    this.cursor = { row: 0, column: 0 };
    this.build(el);
    this.listen();
  }

  build(el) {
    // JupyterLab would take the arrow keys for itself.
    this.root = make(el, "root", { "data-lm-suppress-shortcuts": "true" });
    const head = make(this.root, "head");
    this.title = make(head, "title", { kind: "span" });
    this.low = make(head, "", { kind: "span" });
    this.bar = make(head, "bar", { kind: "canvas", "aria-hidden": "true" });
    this.high = make(head, "", { kind: "span" });
    const label = make(head, "zoom", { kind: "label" });
    label.append("cell size ");
    const limits = { type: "range", min: LEAST, max: MOST, step: 1 };
    this.zoom = make(label, "", { kind: "input", ...limits });
    this.scroll = make(this.root, "scroll");
    this.corner = make(this.scroll, "corner");
    this.columns = make(this.scroll, "columns", { "aria-hidden": "true" });
    this.rows = make(this.scroll, "rows", { "aria-hidden": "true" });
    this.buildCells();
    this.note = make(this.root, "note");
  }

  buildCells() {
    this.cells = make(this.scroll, "cells", { role: "grid", tabindex: 0 });
    this.canvas = make(this.cells, "canvas", { kind: "canvas", "aria-hidden": "true" });
    this.lines = make(this.cells, "lines", { "aria-hidden": "true" });
    this.chosen = make(this.cells, "chosen", { "aria-hidden": "true" });
    this.row = make(this.cells, "", { role: "row" });
    this.cell = make(this.row, "cell", { role: "gridcell", id: this.id });
    this.cells.setAttribute("aria-activedescendant", this.id);
  }

  listen() {
    this.redraw = () => this.draw();
    this.model.on("change", this.redraw);
    // The first time is when the map is in the page, and has the colours of its theme.
    this.resized = new ResizeObserver(() => (this.data ? this.fit() : this.draw()));
    this.resized.observe(this.root);
    this.themed = new MutationObserver(this.redraw);
    this.themed.observe(document.body, { attributes: true });
    this.zoom.addEventListener("input", () => {
      this.fitted = false;
      this.resize(Number(this.zoom.value));
    });
    this.cells.addEventListener("keydown", (event) => this.press(event));
    this.cells.addEventListener("click", (event) => this.click(event));
    this.cells.addEventListener("pointermove", (event) => this.hover(event));
    this.cells.addEventListener("pointerleave", () => this.tell(this.cursor));
    this.cells.addEventListener("focus", () => this.tell(this.cursor));
  }

  close() {
    this.model.off("change", this.redraw);
    this.resized.disconnect();
    this.themed.disconnect();
  }

  // --- drawing ---

  draw() {
    if (!this.root.isConnected) return;
    this.data = read(this.model);
    this.root.hidden = !this.data.rows;
    if (this.root.hidden) return;  // nothing was shown yet
    this.stops = stopsOf(this.model.get("low") < 0, isDark(this.root)).map(rgb);
    this.paint();
    this.legend();
    this.cells.setAttribute("aria-label", this.name());
    this.cells.setAttribute("aria-rowcount", this.data.rows);
    this.cells.setAttribute("aria-colcount", this.data.columns);
    this.fit();
    this.resize(this.size);
  }

  name() {
    return `${this.model.get("title")}: layers by experts; arrow keys move, Enter ` +
      "shows an expert";
  }

  paint() {
    const { rows, columns, value } = this.data;
    const [low, high] = [this.model.get("low"), this.model.get("high")];
    const image = new ImageData(columns, rows);
    this.beyond = { low: false, high: false };
    for (let row = 0, at = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++, at += 4) {
        const found = value(row, column);
        if (Number.isNaN(found)) continue;  // no expert, nothing is painted
        const color = blend(this.stops, (found - low) / (high - low));
        image.data.set([...color, 255], at);
        this.beyond.low ||= found < Math.fround(low);
        this.beyond.high ||= found > Math.fround(high);
      }
    }
    Object.assign(this.canvas, { width: columns, height: rows });
    this.canvas.getContext("2d").putImageData(image, 0, 0);
  }

  legend() {
    this.title.textContent = this.model.get("title");
    const [low, high] = ["low", "high"].map((end) => number(this.model.get(end), this.model));
    this.low.textContent = this.beyond.low ? `≤ ${low}` : low;
    this.high.textContent = this.beyond.high ? `≥ ${high}` : high;
    const width = 64, image = new ImageData(width, 1);
    for (let at = 0; at < width; at++) {
      image.data.set([...blend(this.stops, at / (width - 1)), 255], 4 * at);
    }
    Object.assign(this.bar, { width, height: 1 });
    this.bar.getContext("2d").putImageData(image, 0, 0);
  }

  // Choose the size of the cells by the room there is, until somebody else does.
  fit() {
    const room = this.scroll.clientWidth - this.cells.offsetLeft - 4;
    if (!this.fitted || room <= 0 || !this.data.rows) return;
    const size = Math.floor(room / this.data.columns);
    const fitting = Math.min(Math.max(size, LEAST), MOST);
    if (fitting !== this.size) this.resize(fitting);
  }

  resize(size) {
    const { rows, columns, layers } = this.data;
    this.size = size;
    this.zoom.value = size;
    this.root.style.setProperty("--heapr-cell", `${size}px`);
    this.cells.style.width = `${columns * size}px`;
    this.cells.style.height = `${rows * size}px`;
    this.lines.style.display = size < LINES_FROM ? "none" : "";
    const across = this.model.get("ranked") ? "rank" : "expert";
    this.corner.textContent = `layer ↓ ${across} →`;
    this.label(this.columns, LABEL.columns, [...Array(columns).keys()], "left");
    this.label(this.rows, LABEL.rows, layers, "top");
    this.mark();
    this.move(this.cursor.row, this.cursor.column);
  }

  // Write every n-th label, so that none covers the next.
  label(parent, room, texts, side) {
    const step = STEPS.find((n) => n * this.size >= room) ?? STEPS.at(-1);
    parent.replaceChildren();
    for (let at = 0; at < texts.length; at += step) {
      const node = make(parent, "label", { kind: "span" });
      node.textContent = texts[at];
      node.style[side] = `${(at + 0.5) * this.size}px`;
    }
  }

  // Outline the chosen expert, wherever it is now.
  mark() {
    const place = this.placeOf(this.model.get("selected"));
    this.chosen.style.display = place ? "" : "none";
    if (place) this.put(this.chosen, place);
  }

  put(node, { row, column }) {
    node.style.top = `${row * this.size}px`;
    node.style.left = `${column * this.size}px`;
  }

  // --- places ---

  placeOf(selected) {
    if (!selected) return null;
    const row = this.data.layers.indexOf(selected[0]);
    for (let column = 0; column < this.data.columns; column++) {
      if (row >= 0 && this.data.expert(row, column) === selected[1]) return { row, column };
    }
    return null;
  }

  placeAt(event) {
    const box = this.cells.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / this.size);
    const column = Math.floor((event.clientX - box.left) / this.size);
    return this.has(row, column) ? { row, column } : null;
  }

  has(row, column) {
    const { rows, columns, value } = this.data;
    const inside = row >= 0 && row < rows && column >= 0 && column < columns;
    return inside && !Number.isNaN(value(row, column));
  }

  text({ row, column }) {
    const { layers, expert, value } = this.data;
    const found = number(value(row, column), this.model);
    return `layer ${layers[row]}, expert ${expert(row, column)}: ${found}`;
  }

  tell(place) {
    this.note.textContent = this.has(place.row, place.column) ? this.text(place) : "";
  }

  // --- what people do ---

  // Move the cursor to the nearest expert of a row.
  move(row, column) {
    const { rows, columns } = this.data;
    row = Math.min(Math.max(row, 0), rows - 1);
    column = Math.min(Math.max(column, 0), columns - 1);
    while (column > 0 && !this.has(row, column)) column--;
    this.cursor = { row, column };
    this.put(this.cell, this.cursor);
    this.row.setAttribute("aria-rowindex", row + 1);
    this.cell.setAttribute("aria-colindex", column + 1);
    const chosen = this.placeOf(this.model.get("selected"));
    const same = chosen && chosen.row === row && chosen.column === column;
    this.cell.setAttribute("aria-selected", Boolean(same));
    this.cell.setAttribute("aria-label", this.has(row, column) ? this.text(this.cursor) : "");
    this.tell(this.cursor);
  }

  press(event) {
    const { key, ctrlKey } = event;
    if (key in MOVES) {
      this.move(...MOVES[key](this.cursor, ctrlKey));
      this.cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else if (key === "Enter" || key === " ") this.choose(this.cursor);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  click(event) {
    const place = this.placeAt(event);
    if (!place) return;
    this.move(place.row, place.column);
    this.choose(place);
  }

  hover(event) {
    this.tell(this.placeAt(event) ?? this.cursor);
  }

  choose({ row, column }) {
    if (!this.has(row, column)) return;
    const { layers, expert } = this.data;
    this.model.set("selected", [layers[row], expert(row, column)]);
    this.model.save_changes();
  }
}

function render({ model, el }) {
  const grid = new Grid(model, el);
  return () => grid.close();
}

export default { render };
