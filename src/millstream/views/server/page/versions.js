// Versions of the app: commands on its edited program, which run beside the server.

import { byId } from "./dom.js";

const ASKED = {
  deploy: (app, file) => `Put ${app} as it is in ${file} in the place of what has run?`,
  rollback: (app, file) => `Go back to the version of ${app} before the last deployment, which ${file} has to be?`,
};
const ENDED = {
  plan: { 0: "Everything is kept.", 3: "Parts are rebuilt or dropped.", 4: "It is refused.", 5: "A rebuild needs records that the log no longer holds." },
  compare: { 0: "Compared." },
  deploy: { 0: "The new version is in place: run the app again.", 3: "It is computed, and the app runs: stop it, or let this stop it." },
  rollback: { 0: "The version before is in place: run the app again.", 3: "It is computed, and the app runs: stop it, or let this stop it." },
};

export class VersionCommands {
  /** `app()` is the app that is shown; `changed()` is called after a command was begun. */
  constructor(app, changed) {
    this.app = app;
    this.changed = changed;
    this.program = null;
    this.refused = null;
    for (const button of this.buttons()) button.addEventListener("click", () => this.start(button.dataset.action));
  }

  buttons() {
    return byId("commands").querySelectorAll("button");
  }

  clear() {
    this.refused = null;
    byId("may-stop").checked = false;
  }

  update(program) {
    this.program = program;
    byId("commands").hidden = program === null;
    byId("program-hint").textContent = program === null
      ? "An edit is looked at with millstream plan and compare, takes its place with deploy, and rollback goes back. With millstream ui --program APP=FILE there are buttons for that."
      : `The program is ${program.file}. Each button runs the command of its name.`;
    for (const button of this.buttons()) button.setAttribute("aria-disabled", String(program?.running === true));
    const output = byId("command-output");
    output.hidden = !program?.output;
    if (output.textContent !== (program?.output ?? "")) output.textContent = program?.output ?? "";
    const text = this.refused ?? (program?.action ? this.sentence(program) : null);
    byId("command-notice").hidden = text === null;
    if (byId("command-notice").textContent !== (text ?? "")) byId("command-notice").textContent = text ?? "";
  }

  sentence({ action, running, exit_code: code }) {
    if (running) return `millstream ${action} runs …`;
    return `millstream ${action}: ${ENDED[action][code] ?? `it has failed (exit code ${code}).`}`;
  }

  async start(action) {
    if (!this.program || this.program.running) return;
    const asked = ASKED[action];
    if (asked && !confirm(asked(this.app(), this.program.file))) return;
    try {
      const response = await fetch(`/apps/${encodeURIComponent(this.app())}/versions/${action}`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ stop: byId("may-stop").checked }),
      });
      this.refused = response.ok ? null : (await response.json()).error.message;
    } catch (error) {
      this.refused = `It was perhaps not begun: ${error.message}`;
    }
    this.changed();
  }
}
