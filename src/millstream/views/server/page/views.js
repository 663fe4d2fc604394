// A browser for views: rows in any order, searched by value, updated as they change.

import { byId, h } from "./dom.js";
import { cell, count, isNumber } from "./format.js";
import { Table } from "./table.js";

const ROWS = 50;
const WAIT_MS = 400;

export class Views {
  constructor() {
    this.table = null;
    byId("view").addEventListener("change", () => this.open(byId("view").value));
    byId("find").addEventListener("submit", (event) => { event.preventDefault(); this.find(byId("find-value").value); });
    byId("find").addEventListener("reset", () => this.find(null));
    this.changes = {};
    this.known = [];
  }

  /** List the views of an app; open the first that is not of dead letters. */
  async show(app) {
    this.app = app;
    const { views } = await (await fetch("/views")).json();
    this.known = views.filter((view) => view.app === app);
    byId("view").replaceChildren(...this.known.map((view) => h("option", { value: view.view }, view.view)));
    const names = this.known.map((view) => view.view);
    const chosen = names.includes(this.name) ? this.name : (names.find((name) => name !== "dead_letters") ?? names[0]);
    if (chosen) this.open(chosen);
  }

  open(name) {
    this.name = name;
    byId("view").value = name;
    this.view = this.known.find((view) => view.view === name);
    const types = Object.fromEntries(this.view.columns.map((column) => [column.name, column.type]));
    const newest = this.view.key.find((column) => types[column] === "datetime");
    this.order = newest ? `-${newest}` : "";
    this.value = null;
    byId("find-value").value = "";
    byId("find-column").replaceChildren(...this.view.columns.map((column) => h("option", {}, column.name)));
    byId("find-column").value = this.view.key.find((column) => types[column] !== "datetime") ?? this.view.columns[0].name;
    const identity = (row) => JSON.stringify(this.view.key.map((column) => row[column]));
    this.table = new Table(byId("rows"), identity, `Rows of ${name}`);
    this.load();
  }

  find(value) {
    this.value = value || null;
    this.load();
  }

  sort(column) {
    this.order = this.order === column ? `-${column}` : column;
    this.load();
  }

  /** Take the numbers of the newest changes; reload the rows if the view has changed. */
  update(changes) {
    this.changes = changes;
    if (this.view && changes[this.name] !== this.shown && !this.waiting) {
      this.waiting = setTimeout(() => { this.waiting = null; this.load(); }, WAIT_MS);
    }
    if (Object.keys(changes).length > this.known.length && this.app) this.show(this.app);
  }

  async load() {
    const name = this.name;
    const parameters = new URLSearchParams({ app: this.app, limit: ROWS });
    if (this.order) parameters.set("order", this.order);
    if (this.value !== null) parameters.set(`${byId("find-column").value}.equals`, this.value);
    let result;
    try {
      const response = await fetch(`/views/${encodeURIComponent(name)}?${parameters}`);
      result = await response.json();
    } catch {
      return; // no connection; the header says so
    }
    if (name !== this.name) return;
    byId("view-notice").hidden = !result.error;
    if (result.error) {
      byId("view-notice").textContent = result.error.message;
      return;
    }
    this.shown = result.change;
    this.draw(result);
  }

  draw(result) {
    byId("view-note").hidden = !result.note;
    byId("view-note").textContent = result.note ? `This view is incomplete: it ${result.note}.` : "";
    const columns = result.columns.map(({ name, type }) => ({
      title: name,
      n: isNumber(type),
      text: (row) => cell(row[name], type),
      mark: () => (type === "bytes" || type === "json" ? "bytes" : ""),
      sorted: this.order === name ? "ascending" : this.order === `-${name}` ? "descending" : undefined,
      onsort: type === "json" ? undefined : () => this.sort(name),
    }));
    this.table.update(columns, result.rows, this.value === null ? "No rows yet" : "No row has this value");
    const more = result.more ? `the first ${result.rows.length} rows` : `${count(result.rows.length)} ${result.rows.length === 1 ? "row" : "rows"}`;
    byId("view-hint").textContent = `${more} · change ${count(result.change)} · live`;
  }
}
