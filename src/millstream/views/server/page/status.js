// The status of an app: tiles, partitions, operators, ledger.

import { sparkline } from "./chart.js";
import { byId, h } from "./dom.js";
import { NONE, bytes, count, duration, measured, shortTime, time } from "./format.js";
import { Table } from "./table.js";

const EXITS = ["emitted", "held", "late", "dead", "filtered", "duplicate"];
const ALARMS = new Set(["late", "dead"]);
const QUIET_S = 10;

const age = (text) => (text ? (Date.now() - Date.parse(text)) / 1000 : null);

export class Status {
  constructor() {
    this.tiles = new Map();
    this.partitions = new Table(byId("partitions"), (row) => `${row.topic}/${row.partition}`, "Partitions");
    this.steps = new Table(byId("steps"), (row) => row.step, "Operators and their time");
    this.ledger = new Table(byId("ledger"), (row) => row.step, "Ledger");
    this.which = "total";
    for (const which of ["total", "last"]) byId(`ledger-${which}`).addEventListener("click", () => this.choose(which));
    setInterval(() => this.status && this.header(), 1000);
  }

  choose(which) {
    this.which = which;
    for (const each of ["total", "last"]) byId(`ledger-${each}`).setAttribute("aria-pressed", each === which);
    if (this.status) this.drawLedger();
  }

  update(status) {
    this.status = status;
    this.header();
    this.drawTiles();
    this.drawPartitions();
    this.drawSteps();
    this.drawLedger();
  }

  header() {
    const { running, failure, behind_s, at, unread } = this.status;
    byId("state").dataset.state = running ? "running" : failure ? "failed" : "stopped";
    const fresh = running && !unread ? `${duration(behind_s)} behind` : `last batch ${duration(age(at))} ago`;
    const failed = failure && (failure.kind === "Killed" ? "Killed" : `Failed ${duration(age(failure.at))} ago`);
    const state = running ? "Running" : failed || "Stopped";
    byId("state-text").textContent = `${state} · ${at ? fresh : "no batch yet"}`;
    this.drawFailure(failure);
  }

  drawFailure(failure) {
    byId("failure").hidden = !failure;
    if (!failure) return;
    byId("failure-title").textContent = `${failure.kind}, ${failure.kind === "Killed" ? "running since " : ""}${time(failure.at)}`;
    byId("failure-reason").textContent = failure.reason;
    byId("failure-advice").textContent = failure.advice;
  }

  drawTiles() {
    const { throughput, totals, unread, watermark, state_bytes, duration_ms, batch_id, running, at } = this.status;
    const rates = throughput.map((sample) => sample.per_second);
    const now = running && at && age(at) < QUIET_S ? (rates.at(-1) ?? null) : null;
    const most = rates.length > 1 ? `peak ${measured(Math.round(Math.max(...rates)))}` : "";
    const spark = this.tile("throughput", "Events a second", now === null ? NONE : measured(Math.round(now)), most, { wide: true });
    spark.chart.replaceChildren(sparkline(rates));
    this.tile("read", "Read", count(totals.read), `batch ${count(batch_id)}, ${duration(duration_ms === null ? null : duration_ms / 1000)}`);
    this.tile("unread", "Unread", count(unread), unread ? "waiting in the log" : "none is waiting");
    this.tile("state", "State", bytes(state_bytes), "what operators hold");
    this.tile("watermark", "Watermark", watermark ? shortTime(watermark) : NONE, "event time is complete up to here", { wide: true });
    this.tile("late", "Late", count(totals.late), "came after their window", { alarm: totals.late > 0 });
    this.tile("dead", "Dead letters", count(totals.dead), "could not be processed", { alarm: totals.dead > 0 });
    this.tile("duplicate", "Duplicates", count(totals.duplicate), "came again, left out");
  }

  tile(name, title, value, under, { wide = false, alarm = false } = {}) {
    let tile = this.tiles.get(name);
    if (!tile) {
      tile = { value: h("dd", { "data-count": name }), under: h("div", { class: "under" }), chart: h("div", { class: "chart-cell" }) };
      const node = h("dl", { class: wide ? "tile wide" : "tile" }, h("dt", {}, title), tile.value, tile.under, tile.chart);
      node.style.margin = "0";
      byId("tiles").append(node);
      this.tiles.set(name, tile);
    }
    tile.value.dataset.alarm = alarm;
    tile.value.textContent = value;
    tile.under.textContent = under;
    return tile;
  }

  drawPartitions() {
    const number = (title, text, mark) => ({ title, n: true, text, mark });
    this.partitions.update([
      { title: "Partition", text: (row) => `${row.topic}/${row.partition}` },
      number("Read to", (row) => count(row.position)),
      number("Unread", (row) => count(row.unread), (row) => (row.unread ? "alarm" : "zero")),
      { title: "Watermark", text: (row) => time(row.watermark) },
      { title: "", text: (row) => (row.idle ? "idle" : "") },
    ], this.status.partitions);
  }

  drawSteps() {
    this.steps.update([
      { title: "Operator", wrap: true, text: (row) => row.step },
      { title: "Watermark", text: (row) => time(row.watermark) },
      { title: "Late", n: true, text: (row) => count(row.late), mark: (row) => (row.late ? "alarm" : "zero") },
      { title: "Missed by", n: true, text: (row) => (row.late_by_us_max ? duration(row.late_by_us_max / 1e6) : NONE) },
    ], this.status.steps, "No operator has windows");
  }

  drawLedger() {
    const mark = (name) => (row) => (row[name] === 0 ? "zero" : ALARMS.has(name) ? "alarm" : "");
    const counted = (name) => ({ title: name, n: true, text: (row) => count(row[name]), mark: mark(name) });
    const columns = [{ title: "step", wrap: true, text: (row) => row.step }, ...["read", ...EXITS, "rows_out"].map(counted)];
    this.ledger.update(columns, this.status.ledger[this.which]);
  }
}
