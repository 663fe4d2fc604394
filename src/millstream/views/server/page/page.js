// The page: which app is shown, and the one stream of events that keeps all of it up to date.

import { chooseFirst, json } from "./apps.js";
import { byId } from "./dom.js";
import { Graph } from "./graph.js";
import { Panels } from "./panels.js";
import { showSession } from "./session.js";
import { Status } from "./status.js";
import { Views } from "./views.js";

const RETRY_MS = 2000;

const status = new Status();
const panels = new Panels(byId("panels"));
const graph = new Graph(byId("graph"));
const views = new Views();
let app = null;
let stream = null;
let run = null;
let wasLost = false;

async function choose(name) {
  app = name;
  byId("app").value = name;
  byId("app-name").textContent = name;
  document.title = `${name} · Millstream`;
  byId("operate-link").href = `/operate#${encodeURIComponent(name)}`;
  panels.clear();
  byId("content").hidden = false;
  await describe();
  follow();
}

async function describe() {
  graph.update(await json(`/apps/${encodeURIComponent(app)}/graph`));
  await views.show(app);
}

function follow() {
  stream?.close();
  stream = new EventSource(`/apps/${encodeURIComponent(app)}/live`);
  stream.addEventListener("status", (event) => update(JSON.parse(event.data)));
  stream.addEventListener("panel", (event) => panels.update(JSON.parse(event.data)));
  stream.addEventListener("failed", (event) => notice(JSON.parse(event.data).message));
  stream.addEventListener("error", lost);
}

function update(newStatus) {
  notice(null);
  const newest = newStatus.runs.at(-1)?.run ?? null;
  if (wasLost || (run !== null && newest !== null && newest !== run)) describe(); // another program, perhaps
  wasLost = false;
  run = newest ?? run;
  status.update(newStatus);
  graph.count(newStatus.ledger.total);
  views.update(newStatus.views);
}

function notice(text) {
  byId("notice").hidden = text === null;
  byId("notice").textContent = text ?? "";
}

function lost() {
  wasLost = true;
  byId("state").dataset.state = "lost";
  byId("state-text").textContent = "No connection, trying again";
  // A browser gives up where it gets an error for an answer, as from a server whose app has still to begin.
  if (stream?.readyState === EventSource.CLOSED) setTimeout(followAgain, RETRY_MS);
}

function followAgain() {
  if (stream?.readyState === EventSource.CLOSED && !document.hidden) follow();
}

byId("app").addEventListener("change", () => { location.hash = encodeURIComponent(byId("app").value); });
addEventListener("hashchange", () => choose(decodeURIComponent(location.hash.slice(1))).catch(lost));
// A hidden page reads nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream?.close();
  else if (app !== null) follow();
});
showSession();
chooseFirst(choose, lost, RETRY_MS);
