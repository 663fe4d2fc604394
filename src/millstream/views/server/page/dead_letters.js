// Dead letters: each with its record, and a button to send it again.

import { byId, h } from "./dom.js";
import { NONE, count, time } from "./format.js";

export class DeadLetters {
  /** `app()` is the app that is shown; `changed()` is called after something was sent. */
  constructor(app, changed) {
    this.app = app;
    this.changed = changed;
    this.drawn = "";
  }

  clear() {
    this.drawn = "";
    this.say(null);
    byId("dead").replaceChildren();
  }

  update({ count: all, rows }, canReplay) {
    const text = JSON.stringify([all, rows, canReplay]);
    if (text === this.drawn) return; // what is open stays open, and what has the focus keeps it
    this.drawn = text;
    const shown = rows.length < all ? `the newest ${count(rows.length)} of ${count(all)}` : count(all);
    byId("dead-hint").textContent = all ? shown : "";
    byId("late-label").hidden = !canReplay || rows.every((row) => row.record === null);
    const open = new Set([...document.querySelectorAll("#dead details[open]")].map((node) => node.dataset.id));
    const nodes = rows.map((row) => this.letter(row, canReplay, open));
    byId("dead").replaceChildren(...(nodes.length ? nodes : [h("p", { class: "hint" }, "None: all records could be processed")]));
  }

  letter(row, canReplay, open) {
    const id = `${row.record}/${row.step}/${row.number}`;
    const sent = row.replayed_at ? `sent again ${time(row.replayed_at.slice(0, 19))}` : "";
    const fields = [
      ["Reason", row.reason], ["Step", row.step], ["Time", time(row.time)], ["Key", row.key ?? NONE],
      ["Headers", row.headers ?? NONE], ["Sent again", sent || NONE],
    ];
    const button = canReplay && row.record && h("button", { type: "button", onclick: (event) => this.send(row.record, event.target) }, "Send again");
    return h("details", { class: "dead", "data-id": id, "data-record": row.record, open: open.has(id) },
      h("summary", {}, `${row.record ?? "a row"}: ${row.reason}${sent ? ` (${sent})` : ""}`),
      h("dl", {}, ...fields.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      h("pre", {}, row.value ?? NONE),
      row.record ? button || null : h("p", { class: "hint" }, "It failed after a shuffle, so there is no record to send again."));
  }

  async send(record, button) {
    button.disabled = true;
    try {
      const response = await fetch(`/apps/${encodeURIComponent(this.app())}/dead-letters/replay`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ records: [record], late_ok: byId("late-ok").checked }),
      });
      const found = await response.json();
      this.say(response.ok ? this.sentence(record, found) : found.error.message);
    } catch (error) {
      this.say(`It was perhaps not sent: ${error.message}`);
    }
    button.disabled = false;
    this.changed();
  }

  sentence(record, done) {
    if (done.records) return `${record} was appended to its topic again.`;
    if (done.already_replayed) return `${record} was sent again before; millstream dead replay --again sends it once more.`;
    return `${record} was not sent.`;
  }

  say(text) {
    byId("dead-notice").hidden = text === null;
    byId("dead-notice").textContent = text ?? "";
  }
}
