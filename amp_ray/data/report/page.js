"use strict";
// Draws the report from the data in the page. Everything that comes from input is set as text.
const data = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const PARTS = ["compute", "tensor_parallel", "bubble", "pipeline_p2p", "gradient_sync", "optimizer", "other"];
const NAMES = { tensor_parallel: "communication within layers", pipeline_p2p: "p2p", gradient_sync: "gradient sync" };
const COLOURS = ["#4c78a8", "#f2a33a", "#b9c0cb", "#c9574f", "#72b7b2", "#57a05a", "#a97bb5"];
const STAGES = ["#9ecae9", "#ffbf79", "#88d27a", "#f2a6a0", "#d6b4e8", "#83d1cb", "#f6e27a", "#c9c9c9"];
const dark = matchMedia("(prefers-color-scheme: dark)");

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
}
const number = (value, digits = 4) => value === null || value === undefined ? "-"
  : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
const most = (values) => values.reduce((one, other) => Math.max(one, other), 0);
const percent = (fraction) => fraction === null || fraction === undefined ? "-"
  : fraction > 0.999 ? ">99.9" : fraction < 0.001 ? "<0.1" : (100 * fraction).toFixed(1);
const fullest = (row) => row.peak_memory_bytes && row.memory_limit_bytes
  ? most(row.peak_memory_bytes.map((peak, stage) => peak / row.memory_limit_bytes[stage])) : null;
const plan = (row) => data.names[row.id];
const idle = (row) => Object.values(row.idle_devices || {}).reduce((one, other) => one + other, 0);
const section = (id) => {
  const found = document.getElementById(id);
  found.hidden = false;
  return found;
};

function figures(id, entries) {
  const list = element("ul", null, "figures");
  for (const [name, value] of entries) {
    const item = element("li");
    item.append(element("b", value), element("span", name, "quiet"));
    list.append(item);
  }
  section(id).append(list);
}

// A start by its own program is long: it scrolls, and is copied whole.
function command(title, text) {
  const head = element("div", null, "command"), shown = element("pre", text, text.includes("\n") ? "" : "single"), button = element("button", "Copy", "copy");
  button.type = "button";
  button.setAttribute("aria-label", `Copy: ${title}`);
  button.onclick = () => navigator.clipboard.writeText(text).then(
    () => { button.textContent = "Copied"; }, () => getSelection().selectAllChildren(shown));
  shown.tabIndex = 0;
  shown.setAttribute("role", "region");
  shown.setAttribute("aria-label", title);
  head.append(element("p", title), button);
  section("commands").append(head, shown);
  const lines = text.split("\n"), start = lines.findIndex((each) => /^(exec|srun) /.test(each));
  if (start > 0) shown.scrollTop = shown.scrollHeight * start / lines.length;  // the program, below the checks before it
}

// ---------------------------------------------------------------- charts
// Plotly takes <a>, <b> and the like in a text for markup; templates are the page's own.
const OWN = ["hovertemplate"];
function plain(value) {
  if (typeof value === "string") return value.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, OWN.includes(key) ? each : plain(each)]));
}
const charts = [];
function chart(id, title, traces, layout) {
  const place = element("div", null, "chart");
  place.setAttribute("role", "figure");
  place.setAttribute("aria-label", title);
  section(id).append(place);
  charts.push([place, traces.map(plain), plain(layout)]);
}
function drawCharts() {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
  const narrow = innerWidth < 700;
  for (const [place, traces, layout] of charts) {
    const axes = {};
    for (const name of ["xaxis", "yaxis"]) axes[name] = {
      gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...layout[name] };
    Plotly.react(place, traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 13 },
      margin: { l: 60, r: 16, t: 16, b: narrow ? 110 : 84 }, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
      hoverlabel: { font: { size: 13 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: text }, ...layout, ...axes,
      width: place.clientWidth, height: narrow ? 320 : layout.height || 360,
    }, { displaylogo: false, displayModeBar: narrow ? false : "hover", modeBarButtonsToRemove: ["lasso2d", "select2d"] });
  }
}

// ---------------------------------------------------------------- memory by stage
function memory() {
  const best = data.best, stages = best.peak_memory_bytes.map((_, stage) => `stage ${stage}`);
  const parts = best.memory_bytes ? Object.keys(best.memory_bytes[0]) : null;
  const traces = parts
    ? parts.map((part, index) => ({ type: "bar", name: part, x: stages, marker: { color: COLOURS[index % 7] },
        y: best.memory_bytes.map((stage) => stage[part] / GIB), hovertemplate: "%{y:.2f} GiB" }))
    : [{ type: "bar", name: "peak", x: stages, y: best.peak_memory_bytes.map((value) => value / GIB),
        marker: { color: COLOURS[0] }, hovertemplate: "%{y:.2f} GiB" }];
  traces.push({ type: "scatter", mode: "markers", name: "limit", x: stages, hovertemplate: "%{y:.2f} GiB",
    y: best.memory_limit_bytes.map((value) => value / GIB),
    marker: { symbol: "line-ew", size: 26, line: { width: 3, color: "#c9574f" } } });
  chart("memory", "Memory of each stage against its limit", traces,
    { barmode: "stack", yaxis: { title: { text: "GiB" } }, showlegend: true });
}

// ---------------------------------------------------------------- timeline
const KINDS = [
  ["forward", "#4c78a8", (name) => /^\d+F\d/.test(name)],
  ["backward", "#f2a33a", (name) => /^\d+B\d/.test(name)],
  ["message", "#c9574f", (name) => /(SEND|RECV)_/.test(name)],
  ["gradient sync", "#72b7b2", (name) => /REDUCE_GRAD/.test(name)],
  ["optimizer step", "#57a05a", (name) => /STEP/.test(name)],
];
// The left out part takes a twentieth of the rest; times behind it move to the left.
function timeline(shown, kind) {
  const { lanes, cut, num_cut, step } = shown, end = most(lanes.flatMap((lane) => lane.items.map((item) => item[2])));
  const gap = cut ? (end - (cut[1] - cut[0])) / 20 : 0, moved = cut ? cut[1] - cut[0] - gap : 0;
  const place = (time) => 1000 * (cut && time >= cut[1] ? time - moved : time);
  const traces = KINDS.map(([name, colour, is]) => {
    const trace = { type: "bar", orientation: "h", name, marker: { color: colour }, x: [], y: [], base: [],
      customdata: [], hovertemplate: "%{customdata[0]}: %{customdata[1]} to %{customdata[2]} ms<extra>%{y}</extra>" };
    for (const lane of lanes) for (const [what, begin, finish] of lane.items) if (is(what) && finish > begin) {
      trace.x.push(1000 * (finish - begin)); trace.base.push(place(begin)); trace.y.push(lane.name);
      trace.customdata.push([what, number(1000 * begin, 6), number(1000 * finish, 6)]);
    }
    return trace;
  }).filter((trace) => trace.x.length);
  const ticks = ticksOf(0, cut ? cut[0] : end).concat(cut ? ticksOf(cut[1], end) : []);
  const shapes = cut ? [{ type: "rect", yref: "paper", y0: 0, y1: 1, x0: 1000 * cut[0], x1: 1000 * (cut[0] + gap),
    line: { width: 0 }, fillcolor: "rgba(128,136,150,0.25)" }] : [];
  chart("timeline", `What every stage does when, ${kind}: ${traces.map((trace) => trace.name).join(", ")}`, traces, {
    barmode: "overlay", bargap: 0.25, height: Math.max(260, 130 + 34 * lanes.length), shapes,
    annotations: shapes.map((shape) => ({ text: "...", showarrow: false, yref: "paper", y: 0.5, x: (shape.x0 + shape.x1) / 2 })),
    xaxis: { title: { text: `ms, ${kind}` }, tickvals: ticks.map(place), ticktext: ticks.map((time) => number(1000 * time)) },
    yaxis: { autorange: "reversed", categoryorder: "array", categoryarray: lanes.map((lane) => lane.name) } });
  const notes = [];
  if (cut) notes.push(`Warm-up and cool-down. The grey gap stands for ${number(1000 * (cut[1] - cut[0]))} ms, in which the first stage begins ${num_cut} more forward passes, all alike.`);
  if (step > 1) notes.push(`One of ${step} stages is shown.`);
  if (notes.length) section("timeline").append(element("p", notes.join(" "), "quiet"));
}
function ticksOf(begin, end) {
  const raw = (end - begin) / (innerWidth < 700 ? 2 : 5), unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= raw), ticks = [];
  for (let index = Math.ceil(begin / step); index * step <= end; index += 1) ticks.push(index * step);
  return ticks;
}

// ---------------------------------------------------------------- table of candidates
const COLUMNS = [
  ["#", (row) => row.position, (row) => row.tied ? `=${row.position}` : row.position],
  ["plan", plan, plan, "text"],
  ["s/iter", (row) => row.iteration_time_s, (row) => number(row.iteration_time_s)],
  ["measured s", (row) => row.measured_s, (row) => number(row.measured_s)],
  ["tokens/s", (row) => row.tokens_per_s, (row) => number(row.tokens_per_s)],
  ["MFU %", (row) => row.mfu, (row) => row.mfu ? number(100 * row.mfu, 3) : "-"],
  ["memory %", fullest, (row) => fullest(row) === null ? "-" : number(100 * fullest(row), 3)],
  ["risk %", (row) => row.failure_probability, (row) => percent(row.failure_probability)],
  ["cost/iter", (row) => row.cost && row.cost.per_iteration, (row) => row.cost ? number(row.cost.per_iteration) : "-"],
  ["idle", idle, (row) => idle(row) || "-"],
  ["where the time goes", null, null],
  ["why not", (row) => row.reason, (row) => row.reason || "", "text"],
].filter(([name, , shown]) => (name === "where the time goes" ? data.rows.some((row) => row.breakdown_s)
  : data.rows.some((row) => !["", "-"].includes(shown(row)))));
let order = { column: 0, up: true };

function bar(row) {
  const place = element("div", null, "bar");
  if (!row.breakdown_s) return place;
  const told = PARTS.filter((part) => row.breakdown_s[part] > 0)
    .map((part) => `${NAMES[part] || part} ${number(row.breakdown_s[part], 3)} s`);
  place.title = told.join(", ");
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", place.title);
  PARTS.forEach((part, index) => {
    const piece = element("span");
    piece.style.width = `${100 * Math.max(0, row.breakdown_s[part] || 0) / row.iteration_time_s}%`;
    piece.style.background = COLOURS[index];
    place.append(piece);
  });
  return place;
}
function line(row) {
  const made = element("tr", null, row.feasible ? data.best && row.position === 1 ? "best" : "" : "infeasible");
  for (const [, , shown, kind] of COLUMNS) {
    const cell = element("td", shown ? shown(row) : null, kind);
    if (!shown) cell.append(bar(row));
    made.append(cell);
  }
  return made;
}
const said = (row) => ` ${plan(row)} ${row.reason || ""} `.toLowerCase().replace(/[,;:]/g, " ").replace(/ +/g, " ");
const lines = new Map();
function candidates() {
  // "tp 2" is one thing to look for, and not to be found in "etp 2" or "tp 24".
  const asked = document.getElementById("filter").value.toLowerCase().match(/[a-z-]+ \d+(?!\S)|\S+/g) || [];
  const wanted = document.getElementById("which").value;
  const key = COLUMNS[order.column][1], sign = order.up ? 1 : -1;
  const shown = data.rows.filter((row) => (wanted === "all" || row.feasible === (wanted === "feasible"))
    && asked.every((each) => said(row).includes(/\d$/.test(each) ? ` ${each} ` : each)));
  const missing = (value) => value === null || value === undefined;
  shown.sort((one, other) => {
    const a = key(one), b = key(other);
    if (missing(a) || missing(b)) return missing(a) - missing(b) || one.position - other.position;
    return sign * (a < b ? -1 : a > b ? 1 : 0) || one.position - other.position;
  });
  for (const row of shown) if (!lines.has(row)) lines.set(row, line(row));
  document.getElementById("rows").replaceChildren(...shown.map((row) => lines.get(row)));
  document.getElementById("count").textContent = `${shown.length} of ${data.rows.length} candidates`;
  document.querySelectorAll("#candidates th").forEach((head, index) => head.setAttribute(
    "aria-sort", index === order.column ? order.up ? "ascending" : "descending" : "none"));
}
function table() {
  const heads = element("tr");
  COLUMNS.forEach(([name, key, , kind], index) => {
    const head = element("th", key ? null : name, kind);
    head.scope = "col";
    if (key) {
      const button = element("button", name);
      button.type = "button";
      button.onclick = () => { order = { column: index, up: order.column === index ? !order.up : true }; candidates(); };
      head.append(button);
    }
    heads.append(head);
  });
  document.getElementById("heads").append(heads);
  document.getElementById("filter").oninput = candidates;
  document.getElementById("which").onchange = candidates;
  section("candidates");
  if (!data.lost.length) document.querySelector("#candidates .scroll").before(legend());
  candidates();
}

// ---------------------------------------------------------------- the rest
function legend() {
  const list = element("ul", null, "legend");
  PARTS.forEach((part, index) => {
    if (!data.rows.some((row) => row.breakdown_s && row.breakdown_s[part] > 0)) return;
    const item = element("li"), mark = element("i");
    mark.style.background = COLOURS[index];
    item.append(mark, NAMES[part] || part);
    list.append(item);
  });
  return list;
}
// Each plan is a bar as long as its iteration; the words name the parts that differ most.
function lost() {
  const first = { ...data.rows[0], iteration_time_s: data.best.iteration_time_s, breakdown_s: data.best.breakdown_s };
  const list = element("ul", null, "compared"), compared = [first, ...data.lost.map(({ position }) => data.rows[position - 1])];
  const longest = most(compared.map((row) => row.iteration_time_s));
  compared.forEach((row, index) => {
    const item = element("li"), drawn = bar(row), words = [`${number(row.iteration_time_s)} s`];
    drawn.style.width = `${100 * row.iteration_time_s / longest}%`;
    if (index) {
      const { iteration_time, ...parts } = data.lost[index - 1].difference_s;
      const share = Math.abs(iteration_time) / data.best.iteration_time_s;
      words.push(share < 0.0005 ? "as long" : `${number(100 * share, 2)} % ${iteration_time < 0 ? "less" : "longer"}`);
      for (const [more, word] of [[1, "more"], [-1, "less"]]) {
        const names = Object.entries(parts).filter(([, value]) => more * value > 0.005 * data.best.iteration_time_s)
          .sort(([, a], [, b]) => Math.abs(b) - Math.abs(a)).map(([part]) => NAMES[part] || part);
        const ends = [names.slice(0, -1).join(", "), ...names.slice(-1)].filter(Boolean);
        if (names.length) words.push(`${word} ${ends.join(" and ")}`);
      }
    }
    if (row.failure_probability > data.best.failure_probability + 0.01) words.push(`risk of failure ${percent(row.failure_probability)} %`);
    item.append(element("b", `${index + 1}. ${plan(row)}`), drawn, element("p", words.join("; ")));
    list.append(item);
  });
  section("lost").append(legend(), list);
}
function cluster() {
  const place = element("div", null, "nodes");
  for (const node of data.cluster) {
    const box = element("div", null, "node"), slots = element("div", null, "slots");
    box.append(element("b", node.name), ` ${node.device}`);
    node.stages.forEach((stage, slot) => {
      const cell = element("span", stage === null ? "idle" : stage, stage === null ? "idle" : "");
      cell.title = stage === null ? `slot ${slot}: idle` : `slot ${slot}: stage ${stage}`;
      if (stage !== null) cell.style.background = STAGES[stage % STAGES.length];
      slots.append(cell);
    });
    box.append(slots);
    place.append(box);
  }
  section("cluster").append(place);
}
function study() {
  const told = data.trials.filter((trial) => trial.tells_time);
  if (told.length) {
    const name = (trial) => `trial ${trial.number}: ${data.names[trial.id]}`;
    const errors = (sigma, time) => time * (Math.exp(1.96 * sigma) - 1);
    const traces = [{ type: "scatter", mode: "markers", name: "predicted before the trial", text: told.map(name),
      x: told.map((trial) => trial.mean_s), y: told.map((trial) => trial.predicted_s),
      error_y: { type: "data", array: told.map((trial) => errors(trial.predicted_sigma, trial.predicted_s)),
        arrayminus: told.map((trial) => trial.predicted_s * (1 - Math.exp(-1.96 * trial.predicted_sigma))) },
      marker: { size: 10, color: COLOURS[0] }, hovertemplate: "%{text}<br>measured %{x:.4g} s, predicted %{y:.4g} s<extra></extra>" }];
    for (const [key, label, colour] of [["before_s", "with constants as shipped", COLOURS[1]], ["after_s", "after calibration", COLOURS[5]]]) {
      const own = data.fitted.filter((entry) => entry.measured_s);
      if (own.length) traces.push({ type: "scatter", mode: "markers", name: label, text: own.map((entry) => data.names[entry.id]),
        x: own.map((entry) => entry.measured_s), y: own.map((entry) => entry[key]),
        marker: { size: 9, symbol: key === "before_s" ? "diamond-open" : "square", color: colour },
        hovertemplate: "%{text}<br>measured %{x:.4g} s, %{y:.4g} s<extra></extra>" });
    }
    const times = traces.flatMap((trace) => [...trace.x, ...trace.y]);
    const ends = [0.9 * Math.min(...times), 1.1 * Math.max(...times)];
    traces.push({ type: "scatter", mode: "lines", name: "equal", x: ends, y: ends, hoverinfo: "skip",
      line: { dash: "dot", color: "#8a94a6" } });
    chart("measured", "Predicted against measured seconds", traces,
      { xaxis: { title: { text: "measured s" } }, yaxis: { title: { text: "predicted s" } }, height: 420 });
    let best = Infinity;
    const curve = data.trials.map((trial) => (best = Math.min(best, trial.tells_time ? trial.mean_s : Infinity)));
    chart("budget", "Best measured time against trials", [
      { type: "scatter", mode: "lines+markers", name: "best so far", x: data.trials.map((_, index) => index + 1),
        y: curve.map((value) => value === Infinity ? null : value), line: { shape: "hv", color: COLOURS[5] } },
      { type: "scatter", mode: "markers", name: "measured", x: told.map((trial) => trial.number + 1),
        y: told.map((trial) => trial.mean_s), marker: { color: COLOURS[0] }, text: told.map(name),
        hovertemplate: "%{text}<br>%{y:.4g} s<extra></extra>" }],
      { xaxis: { title: { text: "trials" }, dtick: data.trials.length < 30 ? 1 : undefined }, yaxis: { title: { text: "s per iteration" } } });
  }
  const failed = data.trials.filter((trial) => trial.outcome && trial.outcome !== "measured");
  if (failed.length) {
    const list = element("ul");
    for (const trial of failed) list.append(element("li", `trial ${trial.number} (${data.names[trial.id]}): ${trial.outcome}: ${trial.reason || ""}`));
    section("failed").append(list);
  }
  const warned = data.trials.filter((trial) => trial.warnings.length);
  if (warned.length) {
    const list = element("ul");
    for (const trial of warned) list.append(element("li", `trial ${trial.number} (${data.names[trial.id]}): ${trial.warnings.join("; ")}`));
    section("warned").append(list);
  }
  if (data.constants.length) chart("constants", "Calibrated constants over their priors", [
    { type: "scatter", mode: "markers", name: "ratio to the prior", x: data.constants.map((each) => each.value / each.prior),
      y: data.constants.map((each) => each.name), marker: { size: 11, color: COLOURS[0] },
      error_x: { type: "data", array: data.constants.map((each) => each.value / each.prior * (Math.exp(1.96 * each.sigma) - 1)),
        arrayminus: data.constants.map((each) => each.value / each.prior * (1 - Math.exp(-1.96 * each.sigma))) },
      hovertemplate: "%{y}: %{x:.3f} times its prior<extra></extra>" }],
    { xaxis: { title: { text: "value / prior" } }, height: 150 + 40 * data.constants.length, showlegend: false });
  if (data.constants.length) section("constants").append(element("p", "The bars are 95 % intervals.", "quiet"));
}

figures("summary", data.figures);
for (const text of data.notes) section("summary").append(element("p", text));
for (const [title, text] of data.commands) command(title, text);
if (data.best && data.best.peak_memory_bytes) memory();
if (data.timeline) timeline(data.timeline, "predicted");
if (data.measured_timeline) timeline(data.measured_timeline, "measured");
if (data.rows.length) table();
if (data.lost.length) lost();
if (data.best && data.cluster.length) cluster();
if (data.trials.length) study();
document.getElementById("environment").textContent = `Made with ${data.environment.map(([name, value]) => `${name} ${value}`).join(", ")}.`;
dark.addEventListener("change", drawCharts);
new ResizeObserver(drawCharts).observe(document.querySelector("footer"));  // also when a scroll bar comes; its height is fixed by its width
