// The panels of an app's dashboard. The server computes their values; here they are only drawn.

import { LineChart } from "./chart.js";
import { h, setText } from "./dom.js";
import { measured, time } from "./format.js";
import { Table } from "./table.js";

const isTime = (value) => typeof value === "string" && /^\d{4}-\d\d-\d\dT/.test(value);
const shown = (value, unit) => (isTime(value) ? time(value) : typeof value === "number" || unit ? measured(value, unit) : String(value ?? "–"));

class Frame {
  constructor(panel) {
    this.head = h("div", { class: "head" }, h("h2", {}, panel.title));
    this.body = h("div");
    this.node = h("section", { class: `card panel ${panel.kind}`, "aria-label": panel.title, "data-panel": panel.title }, this.head, this.body);
  }
}

class LinesPanel extends Frame {
  constructor(panel) {
    super(panel);
    const units = [...new Set(panel.units.slice(1))];
    // Measures in different units need different axes: a chart for each unit.
    this.charts = units.map((unit) => ({ unit, chart: new LineChart(panel.title) }));
    this.numbers = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Numbers of ${panel.title}` });
    this.table = new Table(this.numbers, (row) => row[0], panel.title);
    this.details = h("details", { ontoggle: () => this.list() }, h("summary", {}, "Numbers"), this.numbers);
    this.newest = h("span", { class: "legend" });
    this.head.append(this.newest);
    this.body.append(...this.charts.map(({ chart }) => chart.node), this.details);
  }

  update(panel) {
    this.panel = panel;
    for (const { unit, chart } of this.charts) {
      const of = panel.units.flatMap((each, n) => (n > 0 && each === unit ? [n] : []));
      const pick = (list) => [list[0], ...of.map((n) => list[n])];
      chart.update(pick(panel.labels), pick(panel.units), panel.rows.map(pick));
    }
    const last = panel.rows.at(-1);
    this.newest.replaceChildren(...panel.labels.slice(1).map((label, n) => {
      const line = h("i");
      line.style.background = `var(--s${n % 4})`;
      const value = h("b", { "data-newest": label }, last ? measured(last[n + 1], panel.units[n + 1]) : "");
      return h("span", {}, line, `${label} `, value);
    }));
    this.list();
  }

  list() {
    if (!this.details.open) return;
    const { labels, units, rows } = this.panel;
    const columns = labels.map((title, n) => ({ title, n: n > 0, text: (row) => shown(row[n], units[n]) }));
    this.table.update(columns, [...rows].reverse());
  }
}

class TablePanel extends Frame {
  constructor(panel) {
    super(panel);
    this.measures = panel.kind === "top";
    const holder = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": panel.title });
    this.table = new Table(holder, (row) => (panel.kind === "top" ? String(row[0]) : JSON.stringify(row)), panel.title);
    this.body.append(holder);
  }

  update({ labels, units, rows }) {
    // Measures are right-aligned; the subject of a row is text.
    const columns = labels.map((title, n) => ({ title, n: this.measures && n > 0, text: (row) => shown(row[n], units[n]) }));
    this.table.update(columns, rows);
  }
}

class CountersPanel extends Frame {
  update({ labels, units, rows }) {
    if (this.body.childElementCount === 0) {
      this.values = labels.map((label) => h("dd", { "data-counter": label }));
      this.body.append(h("dl", { class: "counter" }, ...labels.map((label, n) => h("div", {}, h("dt", {}, label), this.values[n]))));
    }
    this.values.forEach((value, n) => setText(value, measured(rows[0]?.[n], units[n])));
  }
}

class LimitsPanel extends Frame {
  constructor(panel) {
    super(panel);
    this.list = h("ul", { class: "bars" });
    this.body.append(this.list);
    this.known = new Map();
  }

  update({ units, rows }) {
    const items = rows.map(([name, value, limit]) => {
      const key = String(name);
      const item = this.known.get(key) ?? this.item(key);
      const share = Number(limit) ? Number(value) / Number(limit) : 0;
      item.node.dataset.near = share >= 0.8 && share < 1;
      item.node.dataset.full = share >= 1;
      item.fill.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
      item.track.setAttribute("aria-valuenow", Math.round(share * 100));
      setText(item.value, `${measured(value, units[1])} of ${measured(limit, units[2])}`);
      return item.node;
    });
    this.list.replaceChildren(...items);
  }

  item(name) {
    const fill = h("div", { class: "fill" });
    const value = h("span", { "data-limit": name });
    const track = h("div", { class: "track", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
    const node = h("li", {}, h("div", { class: "names" }, h("span", {}, name), value), track);
    const item = { node, fill, value, track };
    this.known.set(name, item);
    return item;
  }
}

const KINDS = { lines: LinesPanel, top: TablePanel, newest: TablePanel, counters: CountersPanel, limits: LimitsPanel };

export class Panels {
  constructor(holder) {
    this.holder = holder;
    this.clear();
  }

  clear() {
    this.drawn = [];
    this.holder.replaceChildren();
  }

  /** Draw a panel, by its number, or update it. */
  update(panel) {
    const what = JSON.stringify([panel.kind, panel.title, panel.labels]);
    let drawn = this.drawn[panel.number];
    if (drawn?.what !== what) {
      const frame = new KINDS[panel.kind](panel);
      if (drawn) drawn.frame.node.replaceWith(frame.node);
      else this.holder.append(frame.node);
      drawn = this.drawn[panel.number] = { what, frame };
    }
    if (panel.failed) drawn.frame.body.replaceChildren(h("p", { class: "notice" }, panel.failed));
    else drawn.frame.update(panel);
  }
}

