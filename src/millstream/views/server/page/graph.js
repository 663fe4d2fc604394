// The pipeline as a drawing: in layers, left to right, or downwards where there is little room.

import { s } from "./dom.js";
import { count } from "./format.js";

const BOX = { width: 178, height: 78 };
const GAP = { along: 54, across: 18 };
const LINE_CHARACTERS = 21;
const LEAST_SCALE = 0.74;

/** The layers of nodes: a node is one layer after the last of its inputs. */
function layers(nodes, edges) {
  const depth = new Map(nodes.map((node) => [node.id, 0]));
  for (let round = 0; round < nodes.length; round += 1) {
    let moved = false;
    for (const { from, to } of edges) {
      if (depth.get(to) < depth.get(from) + 1) {
        depth.set(to, depth.get(from) + 1);
        moved = true;
      }
    }
    if (!moved) break;
  }
  const out = [];
  for (const node of nodes) (out[depth.get(node.id)] ??= []).push(node);
  return out.filter(Boolean);
}

/** Order each layer by the places of its neighbours, so that few edges cross. */
function ordered(rows, edges) {
  const place = new Map();
  const note = () => rows.forEach((row) => row.forEach((node, n) => place.set(node.id, n - (row.length - 1) / 2)));
  note();
  for (let round = 0; round < 4; round += 1) {
    const [near, far] = round % 2 === 0 ? ["to", "from"] : ["from", "to"];
    for (const row of rows) {
      const weight = (node) => {
        const at = edges.filter((edge) => edge[near] === node.id).map((edge) => place.get(edge[far]));
        return at.length ? at.reduce((a, b) => a + b, 0) / at.length : place.get(node.id);
      };
      const weights = new Map(row.map((node) => [node.id, weight(node)]));
      row.sort((a, b) => weights.get(a.id) - weights.get(b.id));
    }
    note();
  }
  return rows;
}

function wrapped(name) {
  const words = name.split(/(?<=[ ,(])/);
  const lines = [""];
  for (const word of words) {
    if (lines.at(-1).length + word.length > LINE_CHARACTERS && lines.at(-1) !== "") lines.push("");
    lines[lines.length - 1] += word;
  }
  const cut = (line) => (line.length > LINE_CHARACTERS ? `${line.slice(0, LINE_CHARACTERS - 1)}…` : line);
  if (lines.length > 2) lines[1] = `${lines[1].trim().slice(0, LINE_CHARACTERS - 1)}…`;
  return lines.slice(0, 2).map((line) => cut(line.trim()));
}

export class Graph {
  constructor(holder) {
    this.holder = holder;
    this.counts = new Map();
    new ResizeObserver(() => this.relayout()).observe(holder);
  }

  update(graph) {
    this.graph = graph;
    this.down = null;
    this.relayout();
  }

  /** Put the numbers of the ledger on the nodes. */
  count(ledger) {
    this.ledger = ledger;
    const lines = new Map(ledger.map((line) => [line.step, line]));
    for (const [step, texts] of this.counts) {
      const line = lines.get(step);
      texts.through.textContent = line ? through(line) : "";
      texts.lost.textContent = line ? lost(line) : "";
    }
  }

  relayout() {
    if (!this.graph) return;
    const down = this.holder.clientWidth < 700;
    if (down === this.down) return;
    this.down = down;
    this.draw();
    if (this.ledger) this.count(this.ledger);
  }

  draw() {
    const rows = ordered(layers(this.graph.nodes, this.graph.edges), this.graph.edges);
    const widest = Math.max(...rows.map((row) => row.length), 1);
    const [along, across] = this.down ? [BOX.height + 34, BOX.width + GAP.across] : [BOX.width + GAP.along, BOX.height + GAP.across];
    const length = rows.length * along - (this.down ? 34 : GAP.along);
    const breadth = widest * across - GAP.across;
    const at = new Map();
    rows.forEach((row, layer) => row.forEach((node, n) => {
      const beside = (breadth - (row.length * across - GAP.across)) / 2 + n * across;
      at.set(node.id, this.down ? { x: beside, y: layer * along } : { x: layer * along, y: beside });
    }));
    const [width, height] = this.down ? [breadth, length] : [length, breadth];
    const marker = s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, s("path", { d: "M0 0L8 4L0 8Z" }));
    const svg = s("svg", { viewBox: `-1 -1 ${width + 2} ${height + 2}`, role: "img", "aria-label": this.summary() }, s("defs", {}, marker));
    // Drawn smaller where it does not fit, but not so small that it cannot be read.
    svg.style.maxWidth = `${width + 2}px`;
    svg.style.minWidth = `${Math.round(width * LEAST_SCALE)}px`;
    for (const edge of this.graph.edges) svg.append(this.edge(edge, at));
    this.counts = new Map();
    for (const node of this.graph.nodes) svg.append(this.node(node, at.get(node.id)));
    this.holder.replaceChildren(svg);
  }

  summary() {
    const names = new Map(this.graph.nodes.map((node) => [node.id, node.name]));
    return this.graph.edges.map((edge) => `${names.get(edge.from)} to ${names.get(edge.to)}`).join("; ");
  }

  edge({ from, to, late }, at) {
    const [a, b] = [at.get(from), at.get(to)];
    const begin = this.down ? [a.x + BOX.width / 2, a.y + BOX.height] : [a.x + BOX.width, a.y + BOX.height / 2];
    const end = this.down ? [b.x + BOX.width / 2, b.y] : [b.x, b.y + BOX.height / 2];
    const bend = this.down ? [0, (end[1] - begin[1]) / 2] : [(end[0] - begin[0]) / 2, 0];
    const path = `M${begin}C${begin[0] + bend[0]} ${begin[1] + bend[1]} ${end[0] - bend[0]} ${end[1] - bend[1]} ${end}`;
    return s("path", { class: late ? "edge late" : "edge", d: path, "marker-end": "url(#arrow)" }, late ? s("title", {}, "late events") : null);
  }

  node(node, { x, y }) {
    const lines = wrapped(node.name);
    const top = lines.length === 1 ? 40 : 34;
    const through = s("text", { class: "count", x: 14, y: 68, "data-step": node.step });
    const lost = s("text", { class: "late", x: BOX.width - 10, y: 18, "text-anchor": "end" });
    this.counts.set(node.step, { through, lost });
    return s("g", { class: node.kind, transform: `translate(${x} ${y})` },
      s("title", {}, node.name),
      s("rect", { class: "box", width: BOX.width, height: BOX.height, rx: 10 }),
      s("rect", { class: "mark", y: 14, width: 3, height: BOX.height - 28, rx: 1.5 }),
      s("text", { class: "kind", x: 14, y: 18 }, node.kind),
      ...lines.map((line, n) => s("text", { x: 14, y: top + n * 15 }, line)),
      through,
      lost);
  }
}

function through(line) {
  return `${count(line.read)} in${line.rows_out ? ` · ${count(line.rows_out)} out` : ""}`;
}

function lost({ late, dead }) {
  return [late && `${count(late)} late`, dead && `${count(dead)} dead`].filter(Boolean).join(", ");
}
