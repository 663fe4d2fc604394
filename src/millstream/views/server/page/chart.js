// Line charts and sparklines as SVG, drawn to the width of their parent.

import { h, s } from "./dom.js";
import { axis, measured, shortTime, tick } from "./format.js";

const HEIGHT = 190;
const LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 24;
const STEPS_MS = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10080, 43200].map((m) => m * 60_000);

/** Round steps for an axis from `least`, which is 0 or below, to `most`; one of them is 0. */
function steps(least, most, wanted) {
  const rough = (most - least) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map((f) => f * power).find((step) => step >= rough);
  const out = [];
  for (let n = Math.floor(least / size); n * size <= most * 1.0001; n += 1) out.push(n * size);
  return out;
}

export class LineChart {
  constructor(label) {
    this.svg = s("svg", { role: "img", tabindex: "0", height: HEIGHT });
    this.tip = h("div", { class: "tip", hidden: true });
    this.node = h("div", { class: "chart" }, this.svg, this.tip);
    this.label = label;
    this.at = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    this.svg.addEventListener("blur", () => this.show(null));
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  /** `rows` have a time and a value for each series; `labels` and `units` have an entry for the time, too. */
  update(labels, units, rows) {
    this.labels = labels;
    this.units = units;
    this.rows = rows.map(([at, ...values]) => ({ at, ms: Date.parse(at), values }));
    this.draw();
  }

  draw() {
    const width = this.node.clientWidth;
    if (!this.rows || width === 0) return;
    this.width = width;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.summary());
    this.svg.replaceChildren();
    if (this.rows.length === 0) {
      this.svg.append(s("g", { class: "axis" }, s("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "Nothing to show yet")));
      return;
    }
    const numbers = this.rows.flatMap((row) => row.values).filter((v) => v !== null).map(Number);
    const bottom = Math.min(...numbers, 0);
    const top = Math.max(...numbers, 0) || (bottom ? 0 : 1);
    const ticks = steps(bottom, top * 1.05, 4);
    this.least = ticks[0];
    this.most = Math.max(ticks.at(-1), top * 1.05);
    const [first, last] = [this.rows[0].ms, this.rows.at(-1).ms];
    this.x = (ms) => LEFT + ((ms - first) / (last - first || 1)) * (width - LEFT - RIGHT);
    const height = (HEIGHT - TOP - BOTTOM) / (this.most - this.least);
    this.y = (value) => HEIGHT - BOTTOM - (Number(value) - this.least) * height;
    this.svg.append(this.axes(ticks, first, last));
    this.labels.slice(1).forEach((_, series) => this.svg.append(...this.line(series)));
    this.cursor = s("g");
    this.svg.append(this.cursor);
  }

  summary() {
    if (this.rows.length === 0) return `${this.label}: nothing yet`;
    const newest = this.rows.at(-1);
    const values = newest.values.map((v, n) => `${this.labels[n + 1]} ${measured(v, this.units[n + 1])}`);
    return `${this.label}: ${this.rows.length} points, the newest at ${shortTime(newest.at)}: ${values.join(", ")}. Arrow keys go from point to point.`;
  }

  axes(ticks, first, last) {
    const group = s("g", { class: "axis" });
    for (const value of ticks) {
      const y = this.y(value);
      group.append(s("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      group.append(s("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, axis(value, this.units[1])));
    }
    const span = last - first;
    const fits = Math.max(2, Math.floor((this.width - LEFT) / 76));
    const size = STEPS_MS.find((step) => span / step <= fits) ?? span;
    for (let ms = Math.ceil(first / size) * size; span > 0 && ms <= last; ms += size) {
      const x = this.x(ms);
      if (x > this.width - 24) break;
      group.append(s("text", { x, y: HEIGHT - 6, "text-anchor": "middle" }, tick(ms, span)));
    }
    return group;
  }

  line(series) {
    const colour = `var(--s${series % 4})`;
    const ground = this.y(0).toFixed(1);
    let path = "", area = "", begun = null, before = null;
    for (const row of this.rows) {
      const value = row.values[series];
      if (value === null) { begun = null; continue; }
      const at = `${this.x(row.ms).toFixed(1)} ${this.y(value).toFixed(1)}`;
      if (begun === null) { path += `M${at}`; area += `${before ? `L${before} ${ground}Z` : ""}M${at.split(" ")[0]} ${ground}L${at}`; begun = at; }
      else { path += `L${at}`; area += `L${at}`; }
      before = at.split(" ")[0];
    }
    if (before) area += `L${before} ${ground}Z`;
    const out = [s("path", { class: "line", d: path, stroke: colour })];
    if (this.labels.length === 2) out.unshift(s("path", { class: "area", d: area, fill: colour }));
    const lone = this.rows.length === 1 && this.rows[0].values[series] !== null;
    if (lone) out.push(s("circle", { cx: this.x(this.rows[0].ms), cy: this.y(this.rows[0].values[series]), r: 3.5, fill: colour }));
    return out;
  }

  point(event) {
    if (!this.rows?.length) return;
    const x = ((event.clientX - this.svg.getBoundingClientRect().left) / this.svg.clientWidth) * this.width;
    let nearest = 0;
    this.rows.forEach((row, n) => {
      if (Math.abs(this.x(row.ms) - x) < Math.abs(this.x(this.rows[nearest].ms) - x)) nearest = n;
    });
    this.show(nearest);
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.rows?.length) return;
    event.preventDefault();
    const from = this.at ?? this.rows.length - (by < 0 ? 0 : 1);
    this.show(Math.min(this.rows.length - 1, Math.max(0, from + by)));
  }

  show(at) {
    this.at = at;
    this.cursor?.replaceChildren();
    this.tip.hidden = at === null;
    if (at === null || !this.rows[at]) return;
    const row = this.rows[at];
    const x = this.x(row.ms);
    this.cursor.append(s("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    row.values.forEach((value, n) => {
      if (value !== null) this.cursor.append(s("circle", { cx: x, cy: this.y(value), r: 4, fill: `var(--s${n % 4})` }));
    });
    this.tip.replaceChildren(
      h("time", {}, shortTime(row.at)),
      ...row.values.map((value, n) => h("div", {}, `${this.labels[n + 1]} ${measured(value, this.units[n + 1])}`)),
    );
    const left = x + 12 + this.tip.offsetWidth > this.width ? x - 12 - this.tip.offsetWidth : x + 12;
    this.tip.style.left = `${Math.max(0, left)}px`;
  }
}

/** A small line without axes; `values` from old to new. */
export function sparkline(values) {
  const width = 220, height = 38;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length < 2) return svg;
  const most = Math.max(...values) || 1;
  const points = values.map((v, n) => `${((n / (values.length - 1)) * width).toFixed(1)} ${(height - 2 - (v / most) * (height - 5)).toFixed(1)}`);
  svg.append(
    s("path", { d: `M0 ${height}L${points.join("L")}L${width} ${height}Z`, fill: "var(--s0)", opacity: 0.12 }),
    s("path", { d: `M${points.join("L")}`, fill: "none", stroke: "var(--s0)", "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" }),
  );
  return svg;
}
