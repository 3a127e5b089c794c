// Draws a plan from the data in the page: the table, time against memory, where the step goes.
const families = [...new Set([...DATA.families.map((row) => row.family), ...DATA.points.map((p) => p[2])])];
const colour = (row) => PALETTE[families.indexOf(row.family) % PALETTE.length];
const label = (row) => row.family;
const state = {off: new Set(), plans: {sort: ["rank", 1], filter: ""}, families: {sort: ["rank", 1], filter: ""}, front: {sort: ["memory_bytes", 1], filter: ""}};

function columns(first) {
  const found = [
    [first, first === "rank" ? "#" : "family", (r) => r[first], true],
    ["step_s", `step ±${percent(DATA.errors.step)}`, (r) => r.step], ["time_s", "to target", (r) => r.time],
    ["memory_bytes", `memory ±${percent(DATA.errors.memory)}`, (r) => r.memory],
  ];
  if (DATA.money) found.push(["cost", "cost", (r) => r.costs]);
  if (DATA.energy) found.push(["energy_j", "energy", (r) => r.energy]);
  // The strategy is the widest: on a narrow screen it comes last.
  found.splice(innerWidth < 760 ? found.length : 1, 0, ["strategy", "strategy", (r) => r.strategy, true]);
  return found;
}

function plans(card, rows, id, first) {
  sorted(card, {
    columns: columns(first), rows, state: state[id], id, key: (row) => row.strategy, hint: "Filter: strategy, family, contract …",
    words: (row) => `${row.strategy} ${row.family || ""} ${row.why} ${row.contract}`,
    cell: (name, row, text) => name !== "strategy" ? [String(text ?? "–")] : [el("code", {}, row.strategy), el("br"), el("small", {class: row.fits ? null : "loss"}, row.fits ? `${row.why}; ${row.contract}` : row.misses)],
  });
}

function scatter(box) {
  const points = DATA.points.filter((p) => !state.off.has(p[2]));
  box.append(el("div", {class: "legend"}, ...families.filter((f) => DATA.points.some((p) => p[2] === f)).map((family) => el("button", {type: "button", class: state.off.has(family) ? "off" : "", onclick: () => { state.off.has(family) ? state.off.delete(family) : state.off.add(family); draw(); }}, el("i", {style: `background:${colour({family})}`}), family))));
  if (!points.length) { box.append(el("p", {}, "All families are switched off.")); return; }
  const range = (n) => { const all = points.map((p) => p[n]); return [Math.min(...all) / 1.08, Math.max(...all) * 1.08]; };
  const f = frame(box, 380, {x: range(0), y: range(1), xName: "memory of a device", yName: "time of a step", xText: bytes, yText: time, log: "xy", left: 62});
  if (DATA.limit_bytes <= range(0)[1]) f.root.append(hover(svg("line", {x1: f.px(DATA.limit_bytes), x2: f.px(DATA.limit_bytes), y1: 12, y2: f.height - 34, class: "limit"}), `what may be planned for: ${bytes(DATA.limit_bytes)}`));
  const front = points.filter((p) => p[4]).sort((a, b) => a[0] - b[0]);
  f.root.append(svg("path", {d: front.map((p, n) => `${n ? "L" : "M"}${f.px(p[0])} ${f.py(p[1])}`).join(""), fill: "none", stroke: "var(--ink)", "stroke-width": 1.4}));
  for (const p of [...points.filter((p) => !p[4]), ...front]) f.root.append(hover(svg("circle", {cx: f.px(p[0]), cy: f.py(p[1]), r: p[4] ? 5 : 3, fill: colour({family: p[2]}), "fill-opacity": p[4] ? 1 : .5, stroke: p[4] ? "var(--card)" : "none", class: "mark"}), `${p[3]}\n${time(p[1])} a step, ${bytes(p[0])}\n${p[2]}`));
}

function draw() {
  const main = el("div", {class: "grid"});
  $("main").replaceChildren(main);
  const card = (id, title, words, fill) => {
    const node = el("section", {class: "card wide", id: `card-${id}`}, el("h2", {}, title), el("p", {}, words));
    main.append(node);
    fill(node);
  };
  card("plans", "The best plans", "Click a column to sort.", (node) => plans(node, DATA.plans, "plans", "rank"));
  card("scatter", "Time against memory", "Each dot is a strategy that fits; the line joins those that no other beats in both. Point at a dot for its name.", scatter);
  card("front", "The front of time against memory", "Strategies that no other beats in both.", (node) => plans(node, DATA.front, "front", "rank"));
  card("families", "The best of each family", "One strategy of each kind, whether it fits or not.", (node) => plans(node, DATA.families, "families", "family"));
  card("split", "Where the step goes", "Point at a part for what it is.", (node) => {
    const rows = DATA.families.filter((row) => row.fits), total = (row) => row.step_s;
    node.append(el("div", {class: "legend"}, ...DATA.parts.map(([, title, fill, meant]) => hover(el("button", {type: "button"}, el("i", {style: `background:${fill}`}), title), meant))));
    bars(node, rows.sort((a, b) => a.step_s - b.step_s), total, (row) => row.step, {parts: DATA.parts, name: "where the step goes"});
  });
}
start(draw);
