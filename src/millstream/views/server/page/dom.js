// Elements from names, properties and children; text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const h = (tag, properties, ...children) =>
  fill(document.createElement(tag), properties, children);

export const s = (tag, properties, ...children) =>
  fill(document.createElementNS(SVG, tag), properties, children);

export const byId = (id) => document.getElementById(id);

/** Set the text of a node; a change is highlighted for a moment. */
export function setText(node, text) {
  if (node.textContent === text) return;
  const first = node.textContent === "";
  node.textContent = text;
  if (!first) flash(node);
}

export function flash(node) {
  node.classList.remove("flash");
  void node.offsetWidth; // so that the animation starts over
  node.classList.add("flash");
}
