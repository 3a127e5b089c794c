// Draws a search: its history, what mattered, the front, and every trial.
const O = DATA.options, HIGHER = O.better === "higher", SEVERAL = DATA.trials.some((t) => t.predicted);
const COLOURS = {finished: PALETTE[0], "ended early": PALETTE[1], failed: PALETTE[3], running: PALETTE[8], queued: PALETTE[8]};
const FRONT = new Set(DATA.front.map((t) => t.number));
const state = {scale: null, sort: ["value", HIGHER ? -1 : 1], filter: ""};
const valued = DATA.trials.filter((t) => t.value != null);
const better = (a, b) => HIGHER ? a > b : a < b;
const brief = (v) => typeof v === "number" ? number(v) : v === null ? "none" : String(v);
const values = (t) => Object.entries(t.params).map(([name, v]) => `${name} ${brief(v)}`).join("\n");
const called = (t) => t.member == null ? `trial ${t.trial}` : `member ${t.member}, round ${t.round + 1}`;
const tip = (t) => `${called(t)}, ${t.state}\n${O.metric}: ${t.value == null ? "–" : number(t.value)}${t.predicted ? `\npredicted: ${time(t.predicted.step_s)} a step, ${bytes(t.predicted.memory_bytes)}` : ""}\n${values(t)}`;
const padded = (found, log = false) => {
  const a = Math.min(...found), b = Math.max(...found);
  if (log) return [a / (b / a) ** 0.05 / 1.001, b * (b / a) ** 0.05 * 1.001];
  const pad = (b - a) * 0.05 || Math.abs(a) * 0.05 || 1;
  return [a - pad, b + pad];
};
const canLog = valued.every((t) => t.value > 0);
const ranked = valued.map((t) => t.value).sort((a, b) => a - b);
state.scale = canLog && ranked.at(-1) > 5 * ranked[Math.floor(ranked.length / 2)] ? "log" : "linear";  // One diverged trial must not hide the others.
const quality = (also = "") => { const log = state.scale === "log"; return {y: padded(valued.map((t) => t.value), log), yName: O.metric, log: `${log ? "y" : ""}${also}`}; };

function dot(f, x, y, trial, more = {}) {
  f.root.append(hover(svg("circle", {cx: f.px(x), cy: f.py(y), r: 4, fill: COLOURS[trial.state], class: "mark", ...more}), tip(trial)));
}

function line(f, points, more = {}) {
  const path = points.map((p, n) => `${n ? "L" : "M"}${f.px(p[0]).toFixed(1)} ${f.py(p[1]).toFixed(1)}`).join("");
  f.root.append(svg("path", {d: path, fill: "none", stroke: PALETTE[0], "stroke-width": 2, class: "line", ...more}));
}

function history(box) {
  const f = frame(box, 340, {x: [-0.5, DATA.trials.length - 0.5], xName: "trial", xText: (v) => Number.isInteger(v) ? String(v) : "", ...quality()});
  let best = null;
  const steps = [];
  DATA.trials.forEach((t, n) => {
    if (t.value == null) return;
    if (best !== null) steps.push([n, best]);
    if (best === null || better(t.value, best)) { best = t.value; steps.push([n, best]); }
  });
  line(f, steps, {stroke: "var(--ink)", "stroke-width": 1.4});
  DATA.trials.forEach((t, n) => { if (t.value != null) dot(f, n, t.value, t); });
}

function generations(box) {
  const members = new Map(DATA.trials.map((t) => [t.member, []]));
  for (const t of valued) members.get(t.member).push(t);
  const f = frame(box, 340, {x: [0.8, O.rounds + 0.2], xName: "round", xText: (v) => Number.isInteger(v) ? String(v) : "", ...quality()});
  const by = new Map(DATA.trials.map((t) => [t.number, t]));
  for (const t of valued) {
    const parent = by.get(t.parent);
    if (parent && parent.value != null) line(f, [[parent.round + 1, parent.value], [t.round + 1, t.value]], t.copied ? {stroke: PALETTE[1], "stroke-width": 1.4, "stroke-dasharray": "5 3"} : {stroke: "var(--line)", "stroke-width": 1.2});
  }
  for (const t of valued) dot(f, t.round + 1, t.value, t, {fill: t.copied ? PALETTE[1] : PALETTE[0]});
}

function rungs(box) {
  const rows = DATA.trials.filter((t) => Object.keys(t.reported).length);
  const points = (t) => Object.entries(t.reported).map(([step, v]) => [+step, v]).sort((a, b) => a[0] - b[0]);
  const all = rows.flatMap(points);
  const f = frame(box, 300, {x: [0, O.steps * 1.02], y: padded(all.map((p) => p[1])), xName: "steps", yName: O.metric});
  for (const t of rows) {
    line(f, points(t), {stroke: COLOURS[t.state], "stroke-width": 1.2, opacity: 0.6});
    for (const p of points(t)) dot(f, p[0], p[1], t, {r: 3});
  }
}

function lengths(box, rows, text, name) {
  const wide = Math.max(280, box.clientWidth - 2), left = Math.min(170, wide * 0.4), high = 27, most = Math.max(...rows.map((r) => r[1]));
  const root = svg("svg", {viewBox: `0 0 ${wide} ${rows.length * high + 6}`, role: "img", "aria-label": name});
  rows.forEach(([title, value], n) => {
    const y = n * high + 5, long = value / most * (wide - left - 60);
    root.append(svg("text", {x: left - 8, y: y + 13, "text-anchor": "end", class: "name"}, title), svg("rect", {x: left, y, width: long, height: 17, rx: 3, fill: PALETTE[0], class: "mark"}), svg("text", {x: left + long + 7, y: y + 13, class: "value"}, text(value)));
  });
  box.append(root);
}

function front(box, of, name, text, limit) {
  const rows = valued.filter((t) => t.predicted), costs = rows.map(of);
  const f = frame(box, 320, {x: padded(limit == null ? costs : [...costs, ...(limit < 1.6 * Math.max(...costs) ? [limit] : [])]), xName: name, xText: text, ...quality()});
  if (limit != null && limit < 1.6 * Math.max(...costs)) {
    f.root.append(svg("line", {x1: f.px(limit), x2: f.px(limit), y1: 14, y2: f.height - 34, class: "target"}), svg("text", {x: f.px(limit) - 5, y: 24, "text-anchor": "end"}, `limit ${text(limit)}`));
  }
  const edge = [];
  for (const t of [...rows].sort((a, b) => of(a) - of(b))) if (!edge.length || better(t.value, edge.at(-1).value)) edge.push(t);
  line(f, edge.map((t) => [of(t), t.value]), {stroke: "var(--ink)", "stroke-width": 1.3});
  for (const t of rows) dot(f, of(t), t.value, t, FRONT.has(t.number) ? {r: 5} : {opacity: 0.35});
}

function measured(box) {
  const rows = valued.filter((t) => t.predicted && t.step_s);
  const f = frame(box, 320, {x: padded(rows.map((t) => t.predicted.step_s)), y: padded(rows.map((t) => t.step_s)), xName: "predicted step", yName: "measured step", xText: time, yText: time, left: 64});
  for (const t of rows) dot(f, t.predicted.step_s, t.step_s, t, FRONT.has(t.number) ? {r: 5} : {opacity: 0.35});
}

function slice(box, name) {
  const rows = valued.filter((t) => name in t.params), given = rows.map((t) => t.params[name]);
  const words = given.some((v) => typeof v !== "number");
  const kinds = [...new Set(given.map(brief))];
  const log = !words && Math.min(...given) > 0 && Math.max(...given) / Math.min(...given) > 50;
  const at = (v) => words ? kinds.indexOf(brief(v)) : v;
  const x = words ? [-0.5, kinds.length - 0.5] : padded(given, log);
  const f = frame(box, 210, {x, xName: log ? `${name} (log)` : name, xText: (v) => words ? (Number.isInteger(v) ? kinds[v] ?? "" : "") : number(v), ...quality(log ? "x" : "")});
  rows.forEach((t) => dot(f, at(t.params[name]), t.value, t, {r: 3.2, opacity: 0.35 + 0.65 * t.trial / Math.max(1, DATA.trials.length - 1)}));
}

const COLUMNS = [["trial", (t) => t.number, called], ["state", (t) => t.state, (t) => t.state], ["value", (t) => t.value, (t) => t.value == null ? "–" : number(t.value)],
  ...(SEVERAL ? [["predicted step", (t) => t.predicted?.step_s, (t) => time(t.predicted?.step_s)], ["predicted memory", (t) => t.predicted?.memory_bytes, (t) => bytes(t.predicted?.memory_bytes)]] : []),
  ["step", (t) => t.step_s, (t) => time(t.step_s)], ["took", (t) => t.seconds, (t) => time(t.seconds)], ["values", (t) => values(t), (t) => values(t).replaceAll("\n", "  ")]];

function table(box) {
  const body = el("tbody"), [key, way] = state.sort, value = COLUMNS.find((c) => c[0] === key)[1];
  const fill = () => {
    const rows = DATA.trials.filter((t) => `${called(t)} ${t.state} ${values(t)}`.toLowerCase().includes(state.filter.toLowerCase()));
    const order = (a, b) => typeof a === "string" ? way * a.localeCompare(b) : way * (a - b);
    rows.sort((a, b) => (value(a) == null) - (value(b) == null) || (value(a) == null ? 0 : order(value(a), value(b))));
    body.replaceChildren(...rows.map((t) => el("tr", {class: DATA.best && t.number === DATA.best.number ? "best" : null, title: t.reason || ""}, ...COLUMNS.map(([name, , text]) => el("td", {class: name === "values" || name === "state" ? "left" : null}, text(t))))));
  };
  box.append(el("input", {type: "search", placeholder: "filter", value: state.filter, oninput: (event) => { state.filter = event.target.value; fill(); }}));
  const head = COLUMNS.map(([name]) => el("th", {class: name === "values" || name === "state" ? "left" : null, "aria-sort": name === key ? (way > 0 ? "ascending" : "descending") : null, onclick: () => { state.sort = [name, name === key ? -way : 1]; draw(); }}, name === "value" ? O.metric : name));
  box.append(el("div", {class: "scroll"}, el("table", {}, el("thead", {}, el("tr", {}, ...head)), body)));
  fill();
}

function tiles() {
  const count = (name) => DATA.trials.filter((t) => t.state === name).length;
  const others = ["ended early", "failed", "running", "queued"].filter(count).map((name) => `${count(name)} ${name}`);
  if (DATA.rejected) others.push(`${DATA.rejected} not trained: too large`);
  if (DATA.lost) others.push(`${DATA.lost} taken up again`);
  const found = [["trials finished", String(count("finished")), others.join(", ")]];
  if (DATA.best) found.unshift([`best ${O.metric}`, number(DATA.best.value), called(DATA.best)]);
  if (DATA.winner) found.push(["retrained", number(DATA.winner.value), DATA.winner.folder]);
  if (DATA.front.length) found.push(["on the front", String(DATA.front.length), `${time(DATA.front[0].predicted.step_s)} to ${time(DATA.front.at(-1).predicted.step_s)} a step`]);
  const took = DATA.trials.reduce((sum, t) => sum + (t.seconds || 0), 0);
  found.push(["time in trials", time(took), `${O.steps} steps each`]);
  return el("div", {class: "tiles wide"}, ...found.map(([what, value, more]) => el("div", {class: "tile"}, el("span", {}, what), el("b", {}, value), el("code", {}, more))));
}

function draw() {
  const main = el("div", {class: "grid"});
  $("main").replaceChildren(main);
  main.append(tiles());
  const card = (id, title, words, wide, fill) => {
    const node = el("section", {class: `card${wide ? " wide" : ""}`, id}, el("h2", {}, title), el("p", {}, words));
    main.append(node);
    fill(node);
  };
  if (valued.length) {
    const pick = (node) => { if (canLog) node.firstChild.before(el("div", {class: "pick"}, ...["linear", "log"].map((s) => el("button", {type: "button", "aria-pressed": state.scale === s, onclick: () => { state.scale = s; draw(); }}, s)))); };
    if (O.method === "pbt") card("history", "Members from round to round", "Dashed: a bad member copied a good one's checkpoint and perturbed its values.", true, (node) => { pick(node); generations(node); });
    else card("history", "History", "Each dot is a trial; the line is the best so far. Point at a dot for its values.", true, (node) => { pick(node); history(node); });
    if (SEVERAL) {
      card("front", `${O.metric} against predicted step time`, "Large dots are on the front: no other trial is as good in quality, time and memory. The line joins the best at each time.", false, (node) => front(node, (t) => t.predicted.step_s, "predicted step", time, null));
      card("memory", `${O.metric} against predicted memory`, "Of a device, under the strategy of the trials.", false, (node) => front(node, (t) => t.predicted.memory_bytes, "predicted memory", bytes, O.memory_limit));
      if (O.cluster === "this" && valued.some((t) => t.step_s)) card("measured", "Predicted and measured step", "On this machine, where the trials were trained.", false, measured);
    }
    const shares = Object.entries(DATA.importances);
    if (shares.length) card("importances", "What mattered", "The part of each dimension in what the best trials have in common (PED-ANOVA).", false, (node) => lengths(node, shares, percent, "importances"));
    if (DATA.best && DATA.best.shares) for (const [name, each] of Object.entries(DATA.best.shares)) card(`shares-${name}`, name, "Learned shares of the candidates, in the best trial.", false, (node) => lengths(node, Object.entries(each).sort((a, b) => b[1] - a[1]), percent, name));
    if (O.method === "halving") card("rungs", "By steps", "Trials that ended early are those that were not among the best third at a rung.", false, rungs);
    for (const name of [...new Set(valued.flatMap((t) => Object.keys(t.params)))]) card(`slice-${name}`, name, "Later trials are darker.", false, (node) => slice(node, name));
  } else main.append(el("section", {class: "card wide"}, el("p", {}, "No trial has finished yet.")));
  card("all", "All trials", "Click a column to sort.", true, table);
}

start(draw);
