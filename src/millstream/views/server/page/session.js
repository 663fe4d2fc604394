// Who has logged in, and logging out; without a session, to the form.

import { h } from "./dom.js";

async function logOut() {
  await fetch("/logout", { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
  location.replace("/login");
}

export async function showSession() {
  const response = await fetch("/who");
  if (response.status === 401) location.replace("/login");
  if (!response.ok) return;
  const { name, role } = await response.json();
  if (name === null) return;
  const who = h("span", { class: "who" }, `${name} (${role}) `, h("button", { type: "button", onclick: logOut }, "Log out"));
  document.querySelector(".bar-in").append(who);
}
