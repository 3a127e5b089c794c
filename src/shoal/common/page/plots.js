"use strict";
// What all pages draw with: SVG made for the width that there is. No library.
const DATA = JSON.parse(document.getElementById("data").textContent);
const PALETTE = ["#0b84a5", "#f6a021", "#5aa469", "#d1495b", "#8d6cab", "#00a6a6", "#b5651d", "#e377c2", "#7a8b99", "#6f9c3d", "#4062bb", "#c2a83e", "#a23b72", "#2e8b7a", "#e4572e", "#7768ae"];
const $ = (id) => document.getElementById(id);
const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value); else if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};
const svg = (tag, attributes = {}, text = null) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
};
const time = (s) => s == null ? "–" : s === 0 ? "0" : s < 1e-3 ? `${(s * 1e6).toPrecision(3)} µs` : s < 1 ? `${(s * 1e3).toPrecision(3)} ms` : s < 120 ? `${s.toPrecision(3)} s` : `${(s / 60).toPrecision(3)} min`;
const bytes = (b) => b == null ? "–" : b < 1e3 ? `${Math.round(b)} B` : b < 1e6 ? `${(b / 1e3).toPrecision(3)} kB` : b < 1e9 ? `${(b / 1e6).toPrecision(3)} MB` : `${(b / 1e9).toPrecision(3)} GB`;
const number = (v) => v == null ? "–" : Math.abs(v) >= 1e5 ? v.toExponential(2) : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
const percent = (v) => v == null ? "–" : `${(100 * v).toFixed(v < 0.1 ? 1 : 0)}%`;

function hover(node, text) {
  const tip = $("tip");
  node.addEventListener("pointermove", (event) => {
    tip.textContent = text;
    tip.hidden = false;
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = `${Math.max(6, Math.min(event.clientX + 14, innerWidth - wide - 6))}px`;
    tip.style.top = `${event.clientY + 16 + high > innerHeight ? event.clientY - high - 10 : event.clientY + 16}px`;
  });
  node.addEventListener("pointerleave", () => { tip.hidden = true; });
  return node;
}

function ticks(low, high, most) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= raw) || raw;
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) found.push(+v.toPrecision(12));
  return found;
}

// 1, 2 and 5 of every power of ten; 1 alone where that gives too many.
function logTicks(low, high, most) {
  const found = (firsts) => { const all = []; for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high) + 1; e++) for (const f of firsts) { const v = f * 10 ** e; if (v >= low * 0.999 && v <= high * 1.001) all.push(v); } return all; };
  const three = found([1, 2, 5]);
  return three.length > 2 * most ? found([1]) : three.length >= 2 ? three : found([1, 1.5, 2, 3, 4, 5, 6, 8]);
}

function frame(box, height, {x, y, xName, yName, xText = number, yText = number, left = 52, log = "", xTicks = null}) {
  const width = Math.max(280, box.clientWidth - 2), top = 12, bottom = 34, right = 14;
  const root = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${yName} against ${xName}`});
  const part = (v, [low, high], logged) => logged ? Math.log(v / low) / (Math.log(high / low) || 1) : (v - low) / (high - low || 1);
  const px = (v) => left + part(v, x, log.includes("x")) * (width - left - right);
  const py = (v) => height - bottom - part(v, y, log.includes("y")) * (height - top - bottom);
  const rows = log.includes("y") ? logTicks(y[0], y[1], 6) : ticks(y[0], y[1], 5);
  const columns = xTicks || (log.includes("x") ? logTicks(x[0], x[1], Math.max(3, width / 110)) : ticks(x[0], x[1], Math.max(3, width / 110)));
  for (const v of rows) {
    root.append(svg("line", {x1: left, x2: width - right, y1: py(v), y2: py(v), class: "axis"}));
    root.append(svg("text", {x: left - 6, y: py(v) + 4, "text-anchor": "end"}, yText(v)));
  }
  for (const v of columns) root.append(svg("text", {x: px(v), y: height - bottom + 16, "text-anchor": "middle"}, xText(v)));
  root.append(svg("text", {x: width - right, y: height - 3, "text-anchor": "end"}, xName));
  root.append(svg("text", {x: left, y: top - 2}, yName));
  box.append(root);
  return {root, px, py, width, height};
}

// Horizontal bars. A page says what a row is called and which colour it has: label(row), colour(row).
function bars(box, rows, value, text, {error = () => 0, mark = () => null, tip = null, parts = null, name = ""} = {}) {
  rows = rows.filter((row) => parts || value(row) != null);
  if (!rows.length) { box.append(el("p", {}, "Nothing was measured for this plot.")); return; }
  const width = Math.max(280, box.clientWidth - 2), left = Math.min(200, width * 0.42), right = 74, line = 27;
  const most = Math.max(...rows.map((row) => Math.max(value(row) + error(row), mark(row) || 0))) || 1;
  const root = svg("svg", {viewBox: `0 0 ${width} ${rows.length * line + 6}`, role: "img", "aria-label": name});
  const px = (v) => left + v / most * (width - left - right);
  rows.forEach((row, n) => {
    const y = n * line + 5;
    const room = Math.floor(left / 6.4), whole = label(row);
    root.append(hover(svg("text", {x: left - 8, y: y + 13, "text-anchor": "end", class: "name"}, whole.length > room ? `${whole.slice(0, room - 1)}…` : whole), `${whole}\n${row.title}`));
    let from = left;
    for (const [part, title, fill] of parts || [[null, "", colour(row)]]) {
      const size = parts ? (row.split_s[part] || 0) : value(row), wide = Math.max(0, px(size) - left);
      if (wide > 0.3) root.append(hover(svg("rect", {x: from, y, width: wide, height: 17, rx: parts ? 0 : 3, fill, class: "mark"}), parts ? `${whole}\n${title}: ${time(size)}, ${percent(size / value(row))} of the step` : tip ? tip(row) : `${whole}: ${text(row)}`));
      from += wide;
    }
    if (error(row)) { const a = px(Math.max(0, value(row) - error(row))), b = px(value(row) + error(row)), m = y + 8.5; root.append(svg("path", {d: `M${a} ${m}H${b}M${a} ${m - 4}V${m + 4}M${b} ${m - 4}V${m + 4}`, stroke: "var(--ink)", "stroke-width": 1.2, fill: "none", opacity: .7})); }
    if (mark(row) != null) root.append(hover(svg("path", {d: `M${px(mark(row))} ${y - 3}v23`, stroke: "var(--ink)", "stroke-width": 2.4}), `${whole}\npredicted ${text({...row, __predicted: true})}`));
    root.append(svg("text", {x: Math.max(from, px(value(row) + error(row))) + 7, y: y + 13, class: "value"}, text(row)));
  });
  box.append(root);
}

// A table that sorts by its heads and is filtered by words. `state` keeps both while a page is drawn again.
function sorted(card, {columns, rows, state, key, words, cell, hint, id = "table"}) {
  const body = el("tbody"), head = el("tr"), suffix = id === "table" ? "" : `-${id}`;
  const fill = () => {
    const [by, way] = state.sort, wanted = state.filter.toLowerCase();
    const kept = rows.filter((row) => words(row).toLowerCase().includes(wanted));
    kept.sort((a, b) => { const x = a[by], y = b[by]; if (x == null || y == null) return (x == null) - (y == null); return way * (typeof x === "string" ? x.localeCompare(y) : x - y); });
    body.replaceChildren(...kept.map((row) => el("tr", {"data-key": key(row)}, ...columns.map(([name, , text, left]) => el("td", {class: `${left ? "left " : ""}c-${name}`}, ...cell(name, row, text(row)))))));
    [...head.children].forEach((th, n) => th.setAttribute("aria-sort", columns[n][0] === by ? (way > 0 ? "ascending" : "descending") : "none"));
  };
  for (const [name, title, , left] of columns) {
    const act = () => { state.sort = [name, state.sort[0] === name ? -state.sort[1] : 1]; fill(); };
    head.append(el("th", {scope: "col", "data-column": name, class: left ? "left" : null, tabindex: "0", onclick: act, onkeydown: (event) => { if (event.key === "Enter") act(); }}, title));
  }
  card.append(el("input", {type: "search", id: `filter${suffix}`, placeholder: hint, "aria-label": hint, value: state.filter, oninput: (event) => { state.filter = event.target.value; fill(); }}));
  card.append(el("div", {class: "scroll"}, el("table", {id}, el("thead", {}, head), body)));
  fill();
}

// Light or dark; drawn again where the width changes.
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
function start(draw) {
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
  draw();
}
