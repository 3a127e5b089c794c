// Draws the report of a comparison from the data in the page.
const PARTS = [["data", "reading data", "#9bbf63"], ["forward", "forward", "#4c86b8"], ["backward", "backward", "#2f5f8a"], ["passes", "forward and backward", "#3d7199"], ["update", "update", "#7b6fb0"], ["rest", "the rest of computing", "#86a9c9"], ["bubble", "bubble", "#d7b98e"], ["communication", "exposed communication", "#e08a3c"], ["waiting", "waiting for the slowest rank", "#b9c2cc"], ["off-core", "core taken by other programs", "#6b7682"]];
const state = {job: 0, off: new Set(), x: "time", sort: ["time_to_target_s", 1], filter: ""};
const job = () => DATA.jobs[state.job];
const label = (row) => job().rows.some((o) => o.name === row.name && o.ranks !== row.ranks) ? `${row.name}  ×${row.ranks}` : row.name;
const colour = (row) => PALETTE[job().rows.filter((r) => r.step_s).map((r) => r.key).sort().indexOf(row.key) % PALETTE.length];
const shown = () => job().rows.filter((row) => row.step_s && !state.off.has(row.key));

function curves(box, height, rows, points, names) {
  const all = rows.flatMap((row) => points(row).flat());
  if (!all.length) { box.append(el("p", {}, "Nothing was measured for this plot.")); return; }
  const range = (values, from) => { let a = Math.min(...values), b = Math.max(...values); if (from !== undefined) a = from; const pad = (b - a) * 0.04 || 1; return [from === undefined ? a - pad : a, b + pad]; };
  const extra = names.target == null ? [] : [names.target];
  const f = frame(box, height, {x: range(all.map((p) => p[0]), 0), y: range([...all.map((p) => p[1]), ...extra]), ...names});
  if (names.target != null) {
    f.root.append(svg("line", {x1: f.px(0), x2: f.width - 14, y1: f.py(names.target), y2: f.py(names.target), class: "target"}));
    f.root.append(svg("text", {x: f.width - 14, y: f.py(names.target) - 5, "text-anchor": "end"}, `target ${number(names.target)}`));
  }
  for (const row of rows) {
    points(row).forEach((line, seed) => {
      const path = line.map((p, n) => `${n ? "L" : "M"}${f.px(p[0]).toFixed(1)} ${f.py(p[1]).toFixed(1)}`).join("");
      f.root.append(svg("path", {d: path, fill: "none", stroke: colour(row), "stroke-width": seed ? 1 : 2.2, opacity: seed ? 0.4 : 1, "stroke-dasharray": row.own ? "none" : "6 3", class: "mark"}));
      if (!seed || line.length < 12) for (const p of line.length < 60 ? line : []) f.root.append(hover(svg("circle", {cx: f.px(p[0]), cy: f.py(p[1]), r: seed ? 2 : 3.4, fill: colour(row), opacity: seed ? 0.5 : 1}), `${label(row)}\n${names.xName}: ${(names.xText || number)(p[0])}\n${names.yName}: ${number(p[1])}\nseed ${seed}`));
      if (line.length >= 60) f.root.append(hover(svg("path", {d: path, fill: "none", stroke: "transparent", "stroke-width": 12}), `${label(row)}: ${number(line[0][1])} to ${number(line.at(-1)[1])}`));
    });
  }
}

function boxes(box, rows) {
  const width = Math.max(280, box.clientWidth - 2), left = Math.min(200, width * 0.42), line = 27;
  const most = Math.max(...rows.map((row) => row.quantiles_s[4])) * 1.05;
  const root = svg("svg", {viewBox: `0 0 ${width} ${rows.length * line + 26}`, role: "img", "aria-label": "step times"});
  const px = (v) => left + v / most * (width - left - 16);
  for (const v of ticks(0, most, 4)) root.append(svg("line", {x1: px(v), x2: px(v), y1: 0, y2: rows.length * line, class: "axis"}), svg("text", {x: px(v), y: rows.length * line + 16, "text-anchor": "middle"}, time(v)));
  rows.forEach((row, n) => {
    const q = row.quantiles_s, y = n * line + 13, room = Math.floor(left / 6.4), whole = label(row);
    root.append(svg("text", {x: left - 8, y: y + 4, "text-anchor": "end", class: "name"}, whole.length > room ? `${whole.slice(0, room - 1)}…` : whole));
    root.append(svg("path", {d: `M${px(q[0])} ${y}H${px(q[4])}`, stroke: colour(row), "stroke-width": 1.6}));
    root.append(hover(svg("rect", {x: px(q[1]), y: y - 8, width: Math.max(2, px(q[3]) - px(q[1])), height: 16, rx: 3, fill: colour(row), class: "mark"}), `${whole}\n5%: ${time(q[0])}   25%: ${time(q[1])}\nmedian: ${time(q[2])}\n75%: ${time(q[3])}   95%: ${time(q[4])}`));
    root.append(svg("path", {d: `M${px(q[2])} ${y - 8}v16`, stroke: "var(--card)", "stroke-width": 2}));
  });
  box.append(root);
}

function timeline(box, rows) {
  const width = Math.max(280, box.clientWidth - 2), left = Math.min(200, width * 0.42), line = 24;
  const most = Math.max(...rows.map((row) => row.timeline_s.slice(0, 20).reduce((a, b) => a + b, 0)));
  const root = svg("svg", {viewBox: `0 0 ${width} ${rows.length * line + 24}`, role: "img", "aria-label": "the first steps"});
  const px = (v) => left + v / most * (width - left - 16);
  for (const v of ticks(0, most, 4)) root.append(svg("text", {x: px(v), y: rows.length * line + 16, "text-anchor": "middle"}, time(v)));
  rows.forEach((row, n) => {
    let at = 0;
    const room = Math.floor(left / 6.4), whole = label(row), usual = row.step_s;
    root.append(svg("text", {x: left - 8, y: n * line + 15, "text-anchor": "end", class: "name"}, whole.length > room ? `${whole.slice(0, room - 1)}…` : whole));
    row.timeline_s.slice(0, 20).forEach((s, step) => {
      root.append(hover(svg("rect", {x: px(at), y: n * line + 3, width: Math.max(0.6, px(at + s) - px(at) - 1), height: 16, fill: colour(row), opacity: step < DATA.warmup ? .35 : 1, class: "mark"}), `${whole}\nstep ${step + 1}: ${time(s)}${step < DATA.warmup ? ", outside of the window" : ""}\nmedian ${time(usual)}`));
      at += s;
    });
  });
  box.append(root);
}

const COLUMNS = [
  ["name", "contestant", (r) => r.name, true], ["ranks", "ranks", (r) => r.ranks], ["verdict", "verdict", (r) => r.verdict, true],
  ["time_to_target_s", "to target", (r) => time(r.time_to_target_s)], ["epochs_to_target", "epochs to target", (r) => number(r.epochs_to_target)], ["final", "final", (r) => number(r.final)],
  ["step_s", "step", (r) => time(r.step_s)], ["samples_per_s", "samples/s", (r) => number(r.samples_per_s)],
  ["tokens_per_s", "counted/s", (r) => number(r.tokens_per_s)], ["epoch_s", "epoch", (r) => time(r.epoch_s)], ["speedup_own", "speed-up, own", (r) => r.speedup_own == null ? "–" : `${r.speedup_own.toFixed(2)}×`], ["speedup_best", "speed-up, best", (r) => r.speedup_best == null ? "–" : `${r.speedup_best.toFixed(2)}×`],
  ["efficiency", "efficiency", (r) => percent(r.efficiency)], ["utilisation", "of peak", (r) => percent(r.utilisation)],
  ["memory_bytes", "peak memory", (r) => bytes(r.memory_bytes)], ["held_bytes", "held tensors", (r) => bytes(r.held_bytes)],
  ["sent_bytes", "sent/step", (r) => bytes(r.sent_bytes)], ["sent_messages", "messages", (r) => number(r.sent_messages)], ["wire_s", "on the wire", (r) => time(r.wire_s)], ["compression", "compression", (r) => r.compression == null ? "–" : `${r.compression.toPrecision(3)}×`],
  ["imbalance", "imbalance", (r) => r.imbalance == null ? "–" : r.imbalance.toFixed(2)], ["staleness_mean", "staleness", (r) => r.staleness_mean == null ? "–" : `${number(r.staleness_mean)}, ≤ ${r.staleness_max}`], ["divergence", "divergence", (r) => number(r.divergence)],
  ["seeds", "seeds", (r) => r.seeds],
];

function table(card) {
  const verdict = (row) => hover(el("span", {class: `tag ${row.verdict.split(" ")[0]}`}, row.verdict), row.findings.map((f) => `${f.name}: ${f.text}`).join("\n") || row.failed.join("\n") || "same samples, parameters, optimiser and losses as the reference");
  sorted(card, {
    columns: COLUMNS, rows: job().rows, state, key: (row) => row.key, words: (r) => `${r.name} ${r.title} ${r.verdict} ${r.contract}`, hint: "Filter: name, verdict, contract …",
    cell: (name, row, text) => name === "name" ? [el("code", {}, row.name), el("br"), el("small", {}, row.title + (row.same_as ? ` – as ${row.same_as}` : row.own ? ` – ${row.contract}` : ""))]
      : name === "verdict" ? [verdict(row)]
      : [text, name === "step_s" && row.step_spread_s ? el("small", {}, ` ±${time(row.step_spread_s)}`) : "", name === "final" && row.final_spread ? el("small", {}, ` ±${number(row.final_spread)}`) : ""],
  });
}

function legend() {
  const box = el("div", {class: "legend"});
  for (const row of job().rows.filter((r) => r.step_s)) {
    box.append(el("button", {type: "button", class: state.off.has(row.key) ? "off" : "", "data-key": row.key, onclick: () => { state.off.has(row.key) ? state.off.delete(row.key) : state.off.add(row.key); draw(); }}, el("i", {style: `background:${colour(row)}`}), label(row)));
  }
  return box;
}

function tiles() {
  const fair = job().rows.filter((r) => r.step_s && !["unfair", "failed", "too well"].includes(r.verdict));
  const best = (value, way = 1) => fair.filter((r) => value(r) != null).sort((a, b) => way * (value(a) - value(b)))[0];
  const found = [["first to the target", best((r) => r.time_to_target_s), (r) => time(r.time_to_target_s)], ["most samples a second", best((r) => r.samples_per_s, -1), (r) => number(r.samples_per_s)], ["least memory a rank", best((r) => r.memory_bytes), (r) => bytes(r.memory_bytes)], [`best ${job().metric} at the end`, best((r) => r.final, job().higher ? -1 : 1), (r) => number(r.final)]];
  return el("div", {class: "tiles wide"}, ...found.filter((t) => t[1]).map(([what, row, text]) => el("div", {class: "tile"}, el("span", {}, what), el("b", {}, text(row)), el("code", {}, label(row)))));
}

function draw() {
  const j = job(), main = el("div", {class: "grid"}), rows = shown();
  $("main").replaceChildren(main);
  $("jobs").replaceChildren(...(DATA.jobs.length > 1 ? DATA.jobs.map((each, n) => el("button", {type: "button", "aria-selected": n === state.job, onclick: () => { state.job = n; state.off.clear(); draw(); }}, each.name)) : []));
  const card = (id, title, words, wide, fill) => {
    const node = el("section", {class: `card${wide ? " wide" : ""}`, id}, el("h2", {}, title), el("p", {}, words));
    main.append(node);
    if (rows.length) fill(node); else node.append(el("p", {}, "All contestants are switched off."));
  };
  main.append(tiles());
  card("deciding", `${j.metric} against ${state.x === "time" ? "time" : "epochs"}`, "Validation; thin lines are further seeds, dashed ones other frameworks. Click a name to hide it.", true, (node) => {
    node.firstChild.before(el("div", {class: "pick"}, ...["time", "epochs"].map((x) => el("button", {type: "button", "aria-pressed": state.x === x, onclick: () => { state.x = x; draw(); }}, x))));
    node.append(legend());
    curves(node, 380, rows, (row) => row.curves.map((line) => line.map((p) => [state.x === "time" ? p[1] : p[0] * row.samples_per_step / (j.samples || 1), p[2]])), {xName: state.x === "time" ? "training time" : j.samples ? "epochs" : "samples", yName: j.metric, xText: state.x === "time" ? time : number, target: j.target});
  });
  if (!rows.length) node_legend(main);
  const fast = [...rows].sort((a, b) => b.samples_per_s - a.samples_per_s);
  card("throughput", "Throughput", "Samples a second in the window after the first steps; whiskers: standard deviation over seeds.", false, (node) => bars(node, fast, (r) => r.samples_per_s, (r) => number(r.samples_per_s), {error: (r) => r.samples_per_s * (r.step_spread_s || 0) / r.step_s, name: "throughput", tip: (r) => `${label(r)}\n${number(r.samples_per_s)} samples/s\n${number(r.tokens_per_s)} counted by the loss a second\nspeed-up over the fastest single rank: ${r.speedup_best == null ? "–" : r.speedup_best.toFixed(2)}\n${percent(r.utilisation)} of ${number(j.peak_flops_per_s / 1e9)} GFLOP/s a rank`}));
  card("memory", "Memory", "Peak of the rank that needs most, above what it held before the model was built.", false, (node) => bars(node, [...rows].sort((a, b) => a.memory_bytes - b.memory_bytes), (r) => r.memory_bytes, (r) => bytes(r.memory_bytes), {error: (r) => r.memory_spread_bytes, name: "memory"}));
  card("split", "Where a step goes", "Medians. Communication is the wait of the rank that waits least; what others wait longer is for the slowest rank.", false, (node) => {
    const there = PARTS.filter(([part]) => rows.some((r) => r.split_s[part] > 0));
    node.append(el("div", {class: "legend"}, ...there.map(([, title, fill]) => el("button", {type: "button", disabled: ""}, el("i", {style: `background:${fill}`}), title))));
    const split = rows.filter((r) => Object.keys(r.split_s).length), total = (r) => PARTS.reduce((sum, [part]) => sum + (r.split_s[part] || 0), 0);
    bars(node, split.sort((a, b) => total(a) - total(b)), total, (r) => time(total(r)), {parts: PARTS, name: "time split"});
  });
  card("steps", "Step times", "Box: middle half; line: 5% to 95%; gap: median.", false, (node) => boxes(node, [...rows].sort((a, b) => a.quantiles_s[2] - b.quantiles_s[2])));
  const ranks = new Set(rows.map((r) => r.ranks));
  if (ranks.size > 1) card("scaling", `Scaling (${DATA.weak ? "weak" : "strong"})`, "Throughput relative to the fastest single rank of all; the line is perfect scaling.", false, (node) => {
    const f = frame(node, 300, {x: [0, Math.max(...ranks) + 0.4], y: [0, Math.max(...ranks, ...rows.map((r) => r.speedup_best || 0)) * 1.05], xName: "ranks", yName: "speed-up"});
    f.root.append(svg("line", {x1: f.px(0), y1: f.py(0), x2: f.px(Math.max(...ranks)), y2: f.py(Math.max(...ranks)), class: "target"}));
    for (const r of rows) if (r.speedup_best != null) f.root.append(hover(svg("circle", {cx: f.px(r.ranks), cy: f.py(r.speedup_best), r: 5, fill: colour(r), class: "mark"}), `${label(r)}\n${r.speedup_best.toFixed(2)}× the fastest single rank\n${r.speedup_own == null ? "" : `${r.speedup_own.toFixed(2)}× its own single rank`}`));
  });
  card("bytes", "Bytes sent", "By each rank in a step, counted by Shoal's ledger; the mark is the prediction. Other frameworks' groups are not counted.", false, (node) => bars(node, rows.filter((r) => r.sent_bytes != null), (r) => r.sent_bytes, (r) => bytes(r.__predicted ? r.predicted_bytes : r.sent_bytes), {mark: (r) => r.predicted_bytes, name: "bytes"}));
  if (rows.some((r) => r.predicted_step_s)) card("predicted", "Predicted step", "Bar: measured; mark: the plan's estimate for this machine.", false, (node) => bars(node, rows.filter((r) => r.predicted_step_s), (r) => r.step_s, (r) => time(r.__predicted ? r.predicted_step_s : r.step_s), {mark: (r) => r.predicted_step_s, name: "predicted"}));
  if ((j.beside || []).length) {
    const node = el("section", {class: "card wide", id: "beside"}, el("h2", {}, "Shoal beside the framework that does the same"), el("p", {}, "Throughput and peak memory over the framework's: above 1 Shoal is faster, below 1 it needs less."));
    main.append(node);
    const cell = (text, kind = "") => el("td", {class: kind}, text);
    const head = ["strategy", "framework", "ranks", "throughput", "memory", `${j.metric}, both`, "held back by"];
    node.append(el("div", {class: "scroll"}, el("table", {}, el("thead", {}, el("tr", {}, ...head.map((h, n) => el("th", {class: n < 2 || n === 6 ? "left" : null}, h)))), el("tbody", {}, ...j.beside.map((b) => el("tr", {}, cell(el("code", {}, b.name), "left"), cell(el("code", {}, b.peer), "left"), cell(b.ranks), cell(b.speed.toFixed(2) + (b.speed_spread ? ` ± ${b.speed_spread.toFixed(2)}` : ""), b.speed + b.speed_spread < 1 ? "worse" : b.speed >= 1 ? "fair" : ""), cell(b.memory.toFixed(2), b.memory > 1.05 ? "worse" : "fair"), cell(`${number(b.own_final)}, ${number(b.peer_final)}`), el("td", {class: "left long"}, b.why || "")))))));
  }
  if (j.survey) survey(main, j.survey);
  card("loss", "Training loss", "By step, first seed.", false, (node) => curves(node, 300, rows, (row) => row.losses.map((line) => line.filter((p) => p[1] != null)), {xName: "step", yName: "loss"}));
  card("timeline", "The first steps", "Twenty steps of the first seed; pale ones are outside of the window.", false, (node) => timeline(node, rows));
  card("all", "All figures", `Click a column to sort. Point at a verdict for its reasons. Of peak: the model's own operations over ${j.peak_flops_per_s ? `${number(j.peak_flops_per_s / 1e9)} GFLOP/s a rank, what a large matrix product reaches here` : "an unknown peak"}. Held tensors: allocated between two steps; peak memory: resident. Speed-up: over its own single rank, and over the fastest single rank of all.`, true, table);
  const notes = [...j.rows.flatMap((r) => [...r.findings.map((f) => [label(r), `${f.name} – ${f.text}`]), ...r.failed.map((f) => [label(r), `failed – ${f}`])]), ...j.absent.map((a) => [`${a.name} ×${a.ranks}`, `not run – ${a.why}`])];
  const held = j.rows.filter((r) => r.held_back);
  if (held.length) main.append(el("section", {class: "card wide", id: "held"}, el("h2", {}, "What held Shoal's strategies back"), el("p", {}, "The first cause of the first seed; shoal explain RUN lists them all."), el("ul", {}, ...held.map((r) => el("li", {}, el("code", {}, label(r)), " ", r.held_back)))));
  if (notes.length) main.append(el("section", {class: "card wide", id: "notes"}, el("h2", {}, "What the guard found, and who did not run"), el("ul", {}, ...notes.map(([who, what]) => el("li", {}, el("code", {}, who), " ", what)))));
}

const SURVEY = {DDP: "#0b84a5", ZeRO: "#5aa469", "intra-layer": "#f6a021", "inter-layer": "#8d6cab"};

// The survey's curves: one panel for each machine, relative to data parallelism on one device there.
function survey(main, found) {
  const panel = (node, value, yName) => {
    const all = found.places.flatMap((p) => Object.values(p.curves).flat()).map((p) => p[value]).filter((v) => v != null);
    if (!all.length) return;
    const y = [Math.min(...all) / 1.15, Math.max(...all) * 1.15], boxes = el("div", {class: "panels"});
    node.append(boxes);
    // All panels first: each is as wide as their number allows.
    const panels = found.places.map(({place}) => el("div", {}, el("h3", {}, place)));
    boxes.append(...panels);
    for (const [number, {place, curves}] of found.places.entries()) {
      const box = panels[number];
      const points = Object.values(curves).flat();
      if (!points.some((p) => p[value] != null)) { box.append(el("p", {}, "Not predicted.")); continue; }
      const devices = [...new Set(points.map((p) => p[0]))].sort((a, b) => a - b);
      const f = frame(box, 250, {x: [1, Math.max(2, ...devices)], y, xName: "devices", yName, log: "xy", xTicks: devices, xText: String, yText: (v) => `${+v.toPrecision(2)}×`, left: 46});
      for (const [name, line] of Object.entries(curves)) {
        const there = line.filter((p) => p[value] != null);
        f.root.append(svg("path", {d: there.map((p, n) => `${n ? "L" : "M"}${f.px(p[0])} ${f.py(p[value])}`).join(""), fill: "none", stroke: SURVEY[name], "stroke-width": 2}));
        for (const p of there) f.root.append(hover(svg("circle", {cx: f.px(p[0]), cy: f.py(p[value]), r: 4, fill: SURVEY[name], class: "mark"}), `${name}: ${p[3]}\n${p[value].toPrecision(3)}× data parallelism on one device\n${p[0]} devices, ${place}`));
      }
    }
  };
  const node = el("section", {class: "card wide", id: "survey"}, el("h2", {}, `Beside the survey: ${found.task}`), el("p", {}, "The batch of each rank is fixed. Each panel is relative to data parallelism on one of its devices; of each class the fastest contestant counts."), el("div", {class: "legend"}, ...Object.entries(SURVEY).map(([name, fill]) => el("button", {type: "button", disabled: ""}, el("i", {style: `background:${fill}`}), name))));
  main.append(node);
  panel(node, 1, "time of an epoch");
  panel(node, 2, "memory of a device");
  const head = ["finding", "published", ...found.places.map((p) => p.place)];
  node.append(el("div", {class: "scroll"}, el("table", {}, el("thead", {}, el("tr", {}, ...head.map((h) => el("th", {class: "left"}, h)))), el("tbody", {}, ...found.findings.map((row) => el("tr", {}, ...[row.what, row.published, ...row.found].map((cell) => el("td", {class: "left"}, cell))))))));
}

function node_legend(main) { main.querySelector("#deciding").append(legend()); }
start(draw);
