// Tables: built from columns and rows, and updated in place, so that changes are highlighted.

import { flash, h } from "./dom.js";

/**
 * A column is {title, text(row), n?: number, wrap?, mark?(row), sort?, sorted?, onsort?}.
 * `identity(row)` tells rows apart from one update to the next.
 */
export class Table {
  constructor(holder, identity, caption) {
    this.holder = holder;
    this.identity = identity;
    this.caption = caption;
    this.known = new Map();
    this.heads = "";
  }

  update(columns, rows, empty = "None yet") {
    const heads = JSON.stringify(columns.map((c) => [c.title, c.sorted]));
    if (heads !== this.heads || !this.body) this.build(columns, heads);
    const before = this.known;
    this.known = new Map();
    const lines = rows.map((row) => {
      const key = this.identity(row);
      const line = before.get(key)?.line ?? h("tr", {}, ...columns.map(() => h("td")));
      const fresh = !before.has(key);
      columns.forEach((column, n) => this.fill(line.children[n], column, row, !fresh));
      if (fresh && before.size > 0) flash(line);
      this.known.set(key, { line });
      return line;
    });
    if (lines.length === 0) lines.push(h("tr", {}, h("td", { colspan: columns.length, class: "zero" }, empty)));
    this.body.replaceChildren(...lines);
  }

  fill(cell, column, row, flashes) {
    const text = column.text(row);
    const mark = column.mark?.(row) ?? "";
    cell.className = [column.n && "n", column.wrap && "wrap", mark].filter(Boolean).join(" ");
    if (cell.textContent === text) return;
    cell.textContent = text;
    if (text.length > 60) cell.title = text;
    if (flashes) flash(cell);
  }

  build(columns, heads) {
    this.heads = heads;
    this.known = new Map();
    this.body = h("tbody");
    const titles = columns.map((column) => {
      const title = column.onsort ? h("button", { type: "button", onclick: column.onsort }, column.title) : column.title;
      return h("th", { scope: "col", class: column.n && "n", "aria-sort": column.sorted }, title);
    });
    const caption = h("caption", { class: "only-read" }, this.caption);
    this.holder.replaceChildren(h("table", {}, caption, h("thead", {}, h("tr", {}, ...titles)), this.body));
  }
}
