// The page for operators: one request for all of it, every two seconds while the page is seen.

import { chooseFirst, json } from "./apps.js";
import { LineChart } from "./chart.js";
import { DeadLetters } from "./dead_letters.js";
import { byId, h } from "./dom.js";
import { NONE, bytes, count, duration, measured, time } from "./format.js";
import { PartialMatches } from "./partial_matches.js";
import { showSession } from "./session.js";
import { Table } from "./table.js";
import { VersionCommands } from "./versions.js";

const EVERY_MS = 2000;
const WORKED = ["read", "stages", "commit"]; // the other phases are one line

const number = (title, text, mark) => ({ title, n: true, text, mark });
const words = (title, text) => ({ title, wrap: true, text });
const milliseconds = (value) => (value === null || value === undefined ? NONE : `${measured(Math.round(value))} ms`);
const share = (part, whole) => (whole ? `${Math.round((part / whole) * 100)} %` : NONE);

const tables = {
  phases: new Table(byId("phases"), (row) => row.phase, "Phases of a batch"),
  work: new Table(byId("work"), (row) => row.step, "Steps, their work and state"),
  batches: new Table(byId("batches"), (row) => row.last_batch_id, "Batches"),
  partitions: new Table(byId("partitions"), (row) => `${row.topic}/${row.partition}`, "Partitions"),
  versions: new Table(byId("versions"), (row) => row.kind, "Versions of the app"),
};
const batchChart = new LineChart("Batch time");
const unreadChart = new LineChart("Unread records");
byId("batch-chart").append(batchChart.node, h("div", { class: "legend", id: "legend" }));
byId("unread-chart").append(unreadChart.node);
const dead = new DeadLetters(() => app, () => refresh());
const matches = new PartialMatches(() => app);
const commands = new VersionCommands(() => app, () => refresh());
let app = null;
let timer = null;

async function choose(name) {
  app = name;
  byId("app").value = name;
  byId("app-name").textContent = name;
  byId("overview-link").href = `/#${encodeURIComponent(name)}`;
  document.title = `${name} · operate · Millstream`;
  dead.clear();
  matches.clear();
  commands.clear();
  await refresh();
}

async function refresh() {
  clearTimeout(timer);
  try {
    const name = app;
    const found = await json(`/apps/${encodeURIComponent(name)}/operate`);
    if (name === app) draw(found);
  } catch (error) {
    lost(error);
  }
  if (!document.hidden) timer = setTimeout(refresh, EVERY_MS);
}

function draw(found) {
  const { status, findings, load, batches } = found;
  byId("notice").hidden = true;
  byId("content").hidden = false;
  byId("state").dataset.state = status.running ? "running" : status.failure ? "failed" : "stopped";
  const state = status.running ? "Running" : status.failure ? "Failed" : "Stopped";
  byId("state-text").textContent = `${state} · ${count(status.unread)} unread`;
  byId("findings").replaceChildren(...findings.map((text) => h("li", {}, text)));
  drawPhases(load);
  drawSteps(load);
  drawBatches(batches);
  drawPartitions(status.partitions);
  drawVersions(found.versions);
  matches.update(found.patterns, found.can_look);
  commands.update(found.program);
  dead.update(found.dead_letters, found.can_replay);
}

function drawPhases(load) {
  const rows = Object.entries(load.phases_ms).map(([phase, ms]) => ({ phase, ms }));
  const whole = rows.reduce((sum, row) => sum + row.ms, 0);
  tables.phases.update([
    words("Phase", (row) => row.phase),
    number("A batch", (row) => milliseconds(row.ms / load.batches)),
    number("Share", (row) => share(row.ms, whole)),
  ], rows, "No batch in the history");
}

function drawSteps(load) {
  const whole = load.steps.reduce((sum, step) => sum + step.worked_ms, 0);
  tables.work.update([
    words("Step", (row) => row.step),
    number("Work", (row) => share(row.worked_ms, whole)),
    number("Rows read", (row) => count(row.read)),
    number("State", (row) => bytes(row.state_bytes)),
    number("State rows", (row) => count(row.state_rows)),
  ], load.steps, "No batch in the history");
}

function drawBatches(batches) {
  const first = batches.at(0);
  const several = batches.length > 0 && batches.at(-1).batches > 1;
  byId("batches-hint").textContent = first
    ? `milliseconds of batches ${count(first.first_batch_id)} to ${count(batches.at(-1).last_batch_id)}, since ${time(first.at.slice(0, 19))}${several ? "; means of several" : ""}`
    : "";
  const rest = (row) => Object.entries(row.phases_ms).reduce((sum, [name, ms]) => sum + (WORKED.includes(name) ? 0 : ms), 0);
  const labels = ["time", ...WORKED, "the rest"];
  batchChart.update(labels, ["", "ms", "ms", "ms", "ms"], batches.map((row) => [row.at, ...WORKED.map((name) => row.phases_ms[name]), rest(row)]));
  unreadChart.update(["time", "unread"], ["", ""], batches.map((row) => [row.at, row.unread]));
  legend(labels.slice(1));
  const late = (name) => number(name, (row) => count(row[name]), (row) => (row[name] ? "alarm" : "zero"));
  tables.batches.update([
    words("Batches", (row) => (row.batches > 1 ? `${row.first_batch_id} to ${row.last_batch_id}` : count(row.last_batch_id))),
    { title: "Until", text: (row) => time(row.at.slice(0, 19)) },
    number("Longest", (row) => milliseconds(row.duration_ms_max)),
    ...Object.keys(first?.phases_ms ?? {}).map((name) => number(name, (row) => milliseconds(row.phases_ms[name]))),
    number("Read", (row) => count(row.read)),
    number("Unread", (row) => count(row.unread)),
    number("Behind", (row) => duration(row.behind_s)),
    late("late"), late("dead"), number("filtered", (row) => count(row.filtered)),
  ], [...batches].reverse(), "No batch in the history");
}

function legend(names) {
  if (byId("legend").childElementCount) return;
  const line = (name, n) => {
    const mark = h("i");
    mark.style.background = `var(--s${n})`;
    return h("span", {}, mark, name);
  };
  byId("legend").replaceChildren(...names.map(line));
}

function drawPartitions(partitions) {
  const active = partitions.filter((row) => !row.idle && row.watermark).map((row) => row.watermark).sort();
  const holds = (row) => partitions.length > 1 && !row.idle && (!row.watermark || row.watermark === active[0]) && active.at(-1) !== active[0];
  tables.partitions.update([
    words("Partition", (row) => `${row.topic}/${row.partition}`),
    number("Read to", (row) => count(row.position)),
    number("Unread", (row) => count(row.unread), (row) => (row.unread ? "alarm" : "zero")),
    { title: "Watermark", text: (row) => time(row.watermark) },
    { title: "", text: (row) => (row.idle ? "idle" : holds(row) ? "holds it back" : "") },
  ], partitions);
}

function drawVersions(versions) {
  const kinds = { live: "runs", next: "computed by a deployment", previous: "kept, to go back to" };
  const read = (row) => Object.values(row.position).flatMap((at) => Object.values(at)).reduce((sum, at) => sum + at, 0);
  tables.versions.update([
    words("Version", (row) => `${row.kind}: ${kinds[row.kind]}`),
    number("Steps with state", (row) => count(row.steps)),
    words("Outputs", (row) => row.outputs.join(", ")),
    words("Differs in", (row) => row.differs.join(", ") || NONE),
    number("Read up to", (row) => count(read(row))),
  ], versions, "No run yet");
}

function lost(error) {
  byId("state").dataset.state = "lost";
  byId("state-text").textContent = "No connection, trying again";
  byId("notice").hidden = error instanceof TypeError; // what fetch raises without a connection
  byId("notice").textContent = error.message;
}

byId("app").addEventListener("change", () => { location.hash = encodeURIComponent(byId("app").value); });
addEventListener("hashchange", () => choose(decodeURIComponent(location.hash.slice(1))));
document.addEventListener("visibilitychange", () => { if (!document.hidden && app !== null) refresh(); });
showSession();
chooseFirst(choose, lost, EVERY_MS);
