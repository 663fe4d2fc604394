// Partial matches of patterns: looked for when asked, by the command that lists them, which takes a process some seconds.

import { byId, h } from "./dom.js";
import { NONE, count, time } from "./format.js";
import { Table } from "./table.js";

const NO_PROGRAM = "With millstream ui --program APP=FILE they are listed here; millstream why match lists them in a terminal.";

const said = (values) => Object.entries(values).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");
const words = (title, text) => ({ title, wrap: true, text });

export class PartialMatches {
  /** `app()` is the app that is shown. */
  constructor(app) {
    this.app = app;
    this.steps = "";
    this.table = new Table(byId("matches"), (row) => row.number, "Partial matches");
    byId("look").addEventListener("submit", (event) => { event.preventDefault(); this.look(); });
  }

  clear() {
    byId("matches").hidden = true;
    byId("match-key").value = "";
    byId("matches-hint").textContent = "";
    this.say(null);
  }

  update(steps, canLook) {
    byId("matches-card").hidden = steps.length === 0;
    byId("look").hidden = !canLook;
    byId("matches-program").hidden = canLook;
    byId("matches-program").textContent = NO_PROGRAM;
    if (JSON.stringify(steps) === this.steps) return; // a step that was chosen stays so
    this.steps = JSON.stringify(steps);
    byId("match-step").replaceChildren(h("option", { value: "" }, "all"), ...steps.map((step) => h("option", { value: step }, step)));
  }

  async look() {
    const name = this.app();
    const button = byId("look").querySelector("button");
    const key = byId("match-key").value.trim();
    button.disabled = true;
    this.say("millstream why match runs …");
    try {
      const response = await fetch(`/apps/${encodeURIComponent(name)}/partial-matches`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ step: byId("match-step").value || null, key: key ? [key] : [] }),
      });
      const found = await response.json();
      if (name === this.app()) response.ok ? this.draw(found) : this.say(found.error.message);
    } catch (error) {
      this.say(`It was not found out: ${error.message}`);
    }
    button.disabled = false;
  }

  draw({ batch_id: batch, partial_matches: found, more }) {
    this.say(null);
    byId("matches").hidden = false;
    byId("matches-hint").textContent = `after batch ${count(batch)}${more ? `, the first ${count(found.length)}: name a key to see others` : ""}`;
    this.table.update([
      words("Step", (row) => row.step),
      words("Key", (row) => said(row.key) || NONE),
      { title: "Since", text: (row) => time(row.since) },
      words("Waits for", (row) => row.waits_for.join("; ")),
      { title: "Ends", text: (row) => (row.ends === null ? "never" : time(row.ends)) },
      { ...words("Rows so far", (row) => this.rows(row)), mark: () => "lines" },
    ], found.map((row, number) => ({ ...row, number })), "There is no such partial match");
  }

  /** How many rows there are, and a line for each that is given: after the first one, some may be left out. */
  rows({ key, rows, row_count: all }) {
    const own = (values) => Object.fromEntries(Object.entries(values).filter(([name]) => !(name in key)));
    const lines = rows.map((row) => `${row.variable}: ${time(row.time)} ${said(own(row.values))}`);
    if (all > rows.length) lines.splice(1, 0, `… ${count(all - rows.length)} more …`);
    return [count(all), ...lines].join("\n");
  }

  say(text) {
    byId("matches-notice").hidden = text === null;
    byId("matches-notice").textContent = text ?? "";
  }
}
