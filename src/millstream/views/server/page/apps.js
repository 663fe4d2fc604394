// The list of apps, and the one that is shown first.

import { byId, h } from "./dom.js";

export async function json(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response.json();
}

/** Poll the list of apps until there is one; choose the one in the URL's fragment, or the first. */
export async function chooseFirst(choose, lost, everyMs) {
  try {
    const { apps } = await json("/apps");
    byId("empty").hidden = apps.length > 0;
    if (apps.length > 0) {
      byId("app").replaceChildren(...apps.map((name) => h("option", {}, name)));
      document.querySelector(".app-choice").hidden = apps.length < 2;
      byId("app-name").hidden = apps.length > 1;
      const wanted = decodeURIComponent(location.hash.slice(1));
      await choose(apps.includes(wanted) ? wanted : apps[0]);
      return;
    }
    byId("state-text").textContent = "Waiting for an app";
  } catch (error) {
    lost(error);
  }
  setTimeout(() => chooseFirst(choose, lost, everyMs), everyMs);
}
