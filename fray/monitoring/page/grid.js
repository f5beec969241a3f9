// A table of any length: only the rows in sight are elements. Sorting and the filter are kept in the address.

import { h, keep, place } from "./dom.js";

const HEIGHT = 28;
const BEYOND = 8; // rows above and below those in sight
const phone = matchMedia("(max-width: 640px)");

export class Grid {
  // columns: {name, title, cell(row) -> node or text, value(row) -> to sort by, width, wide: not on a phone}
  constructor({ columns, sort, name = "", whole = true, match, order }) {
    this.columns = columns;
    this.name = name;
    this.sort = place().query.get(`${name}sort`) ?? sort;
    this.match = match;
    this.order = order; // puts sorted rows into a tree
    this.found = [];
    this.head = h("div", { class: "head", role: "row" });
    this.body = h("div", { class: "rows" });
    this.element = h("div", { class: whole ? "grid whole" : "grid", role: "table", tabindex: "0" }, this.head, this.body);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.resize = new ResizeObserver(() => this.draw());
    this.resize.observe(this.element);
    phone.addEventListener("change", () => this.drawAll());
  }

  get shown() { return this.columns.filter((column) => !(column.wide && phone.matches)); }

  set(rows) {
    this.rows = rows;
    this.drawAll();
  }

  drawAll() {
    if (!this.rows) return;
    const template = this.shown.map((column) => column.width ?? "minmax(60px, 1fr)").join(" ");
    if (template !== this.template || this.sort !== this.drawnSort) this.drawHead(template);
    const by = this.sort.replace(/^-/, "");
    const column = this.columns.find((each) => each.name === by) ?? this.columns[0];
    const sign = this.sort.startsWith("-") ? -1 : 1;
    const keyed = this.rows.filter(this.match ?? (() => true)).map((row) => [column.value(row), row]);
    // What has no value comes last, whatever the direction.
    const none = (value) => value === null || value === undefined || value === "";
    keyed.sort(([a], [b]) => {
      if (none(a) || none(b)) return none(a) - none(b);
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0);
    });
    const sorted = keyed.map(([, row]) => row);
    this.found = this.order ? this.order(sorted) : sorted.map((row) => ({ row, depth: 0 }));
    this.body.style.height = `${this.found.length * HEIGHT}px`;
    this.draw();
  }

  drawHead(template) {
    this.template = template;
    this.drawnSort = this.sort;
    const by = this.sort.replace(/^-/, "");
    this.head.style.gridTemplateColumns = template;
    this.head.replaceChildren(...this.shown.map((column) => {
      const mark = column.name === by ? (this.sort.startsWith("-") ? " ↓" : " ↑") : "";
      return h("button", { type: "button", "data-sort": column.name, onclick: () => this.sortBy(column.name) }, column.title + mark);
    }));
  }

  sortBy(name) {
    this.sort = this.sort === name ? `-${name}` : name;
    keep(`${this.name}sort`, this.sort);
    this.drawAll();
  }

  draw() {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / HEIGHT) - BEYOND);
    const end = Math.min(this.found.length, Math.ceil((scrollTop + clientHeight) / HEIGHT) + BEYOND);
    const columns = this.shown;
    const drawn = [];
    for (let index = first; index < end; index += 1) {
      const { row, depth } = this.found[index];
      const cells = columns.map((column) => h("span", { role: "cell" }, column.cell(row, depth)));
      const element = h("div", { class: "row", role: "row" }, cells);
      element.style.gridTemplateColumns = this.template;
      element.style.transform = `translateY(${index * HEIGHT}px)`;
      drawn.push(element);
    }
    if (!this.found.length) drawn.push(h("div", { class: "empty" }, "nothing"));
    this.body.replaceChildren(...drawn);
    this.element.setAttribute("aria-rowcount", this.found.length);
  }
}
