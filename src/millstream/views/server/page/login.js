// The form for a token, which the server takes for a cookie.

import { byId } from "./dom.js";

function refuse(message) {
  byId("notice").textContent = message;
  byId("notice").hidden = false;
}

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const response = await fetch("/login", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ token: byId("token").value }),
    });
    if (response.ok) location.replace("/");
    else refuse((await response.json()).error.message);
  } catch {
    refuse("The server cannot be reached. Is millstream ui running?");
  }
});
