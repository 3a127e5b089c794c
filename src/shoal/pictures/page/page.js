"use strict";
// What all pages draw with: SVG for the width that there is, no library. A page has a function draw() of its own.
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
const time = (s) => s == null ? "–" : s < 1e-3 ? `${(s * 1e6).toPrecision(3)} µs` : s < 1 ? `${(s * 1e3).toPrecision(3)} ms` : s < 120 ? `${s.toPrecision(3)} s` : `${(s / 60).toPrecision(3)} min`;
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

function frame(box, height, {x, y, xName, yName, xText = number, yText = number, left = 52}) {
  const width = Math.max(280, box.clientWidth - 2), top = 12, bottom = 34, right = 14;
  const root = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${yName} against ${xName}`});
  const px = (v) => left + (v - x[0]) / (x[1] - x[0] || 1) * (width - left - right);
  const py = (v) => height - bottom - (v - y[0]) / (y[1] - y[0] || 1) * (height - top - bottom);
  for (const v of ticks(y[0], y[1], 5)) {
    root.append(svg("line", {x1: left, x2: width - right, y1: py(v), y2: py(v), class: "axis"}));
    root.append(svg("text", {x: left - 6, y: py(v) + 4, "text-anchor": "end"}, yText(v)));
  }
  for (const v of ticks(x[0], x[1], Math.max(3, width / 110))) root.append(svg("text", {x: px(v), y: height - bottom + 16, "text-anchor": "middle"}, xText(v)));
  root.append(svg("text", {x: width - right, y: height - 3, "text-anchor": "end"}, xName));
  root.append(svg("text", {x: left, y: top - 2}, yName));
  box.append(root);
  return {root, px, py, width, height};
}

$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
