// The page: which app is shown, and the one stream of events that keeps all of it up to date.

import { byId, h } from "./dom.js";
import { Graph } from "./graph.js";
import { Panels } from "./panels.js";
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

async function json(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response.json();
}

/** Poll the list of apps until there is one; show the one in the URL's fragment, or the first. */
async function begin() {
  try {
    const { apps } = await json("/apps");
    byId("empty").hidden = apps.length > 0;
    if (apps.length === 0) {
      byId("state-text").textContent = "Waiting for an app";
    } else {
      byId("app").replaceChildren(...apps.map((name) => h("option", {}, name)));
      document.querySelector(".app-choice").hidden = apps.length < 2;
      byId("app-name").hidden = apps.length > 1;
      const wanted = decodeURIComponent(location.hash.slice(1));
      await choose(apps.includes(wanted) ? wanted : apps[0]);
      return;
    }
  } catch {
    lost();
  }
  setTimeout(begin, RETRY_MS);
}

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
  if (run !== null && newest !== null && newest !== run) describe(); // another program, perhaps
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
  byId("state").dataset.state = "lost";
  byId("state-text").textContent = "No connection, trying again";
}

byId("app").addEventListener("change", () => { location.hash = encodeURIComponent(byId("app").value); });
addEventListener("hashchange", () => choose(decodeURIComponent(location.hash.slice(1))).catch(lost));
// A hidden page reads nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream?.close();
  else if (app !== null) follow();
});
begin();
