"use strict";
// The page of `watch`. What comes from files becomes text nodes and attributes, never markup.

const kept = JSON.parse(document.getElementById("data").textContent);
const isFile = Object.keys(kept).length > 0;
const token = new URLSearchParams(location.search).get("token") || "";
const main = document.getElementById("main"), live = document.getElementById("live");
const chosen = new Set(), checks = {}; // ids of runs; verdicts on checkpoints
const open = new Set(["Settings that differ", "Result", "Trials"]), wide = new Set(["loss"]);
let view = null, timer = 0, turn = 0; // what is shown; the next look, and the number of the last

function h(tag, attributes = {}, ...children) {
  const space = ["svg", "path", "line", "text", "circle", "title"].includes(tag) ? "http://www.w3.org/2000/svg" : "";
  const made = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) made.style.setProperty(key, each);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  return fill(made, ...children);
}

function fill(element, ...children) {
  element.replaceChildren(...children.flat(9).filter((each) => each !== null && each !== undefined && each !== ""));
  return element;
}

function number(value) {
  if (typeof value !== "number") return value || ""; // a number that is not finite is a word
  const size = Math.abs(value);
  if (size < 1e9 && (Number.isInteger(value) || size >= 1000)) return Math.round(value).toLocaleString("en");
  if (size >= 1e9 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  for (const [unit, size, smaller, part] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
    const rest = seconds < 10 * size ? ` ${Math.floor((seconds % size) / part)} ${smaller}` : "";
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}${rest}`;
  }
  return `${Math.max(0, Math.round(seconds))} s`;
}

const spread = ([, low, high]) => (high - low < 2 ? "" : ` (${duration(low)} – ${duration(high)})`); // of a forecast
const bar = (share) => h("span", { class: "bar" }, h("i", { style: { width: `${100 * Math.min(1, share)}%` } }));
const colorOf = (line, shown) => shown.colors[line.color % shown.colors.length];
const badge = (run) => h("span", { class: `state ${run.phase}` }, run.phase);
const link = (run) => h("a", { href: `#/run/${run.id}` }, run.name);

// ---- plots: the same as the report's ----

function smooth(values) { // as monitor/curves.py does it
  const keep = 1 - 1 / Math.max(1, values.length / 40);
  let average = 0, weight = 0;
  return values.map((value) => {
    if (value !== null) [average, weight] = [keep * average + (1 - keep) * value, keep * weight + (1 - keep)];
    return weight ? average / weight : null;
  });
}

function ticks(low, high, log) {
  if (log) {
    const found = [];
    for (let power = Math.floor(low); power <= high; power++)
      for (const digit of high - low > 2.5 ? [1] : [1, 2, 5]) found.push(power + Math.log10(digit));
    return found.filter((each) => each >= low && each <= high);
  }
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough), found = [];
  for (let at = Math.ceil(low / step); at * step <= high + 1e-9 * step; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

function path(xs, ys, toX, toY) {
  let text = "", pen = false;
  ys.forEach((value, at) => {
    const y = value === null ? NaN : toY(value);
    if (Number.isFinite(y)) text += `${pen ? "L" : "M"}${toX(xs[at]).toFixed(1)} ${y.toFixed(1)}`;
    pen = Number.isFinite(y);
  });
  return text;
}

function plot(spec, shown) {
  const all = spec.lines.flatMap((line) => line.series[1]).filter((each) => each !== null);
  const xs = spec.lines.flatMap((line) => line.series[0]), positive = all.filter((each) => each > 0);
  const log = spec.scale === "wide" && positive.length > 0 && Math.max(...positive) > 20 * Math.min(...positive);
  const scale = (value) => (log ? (value > 0 ? Math.log10(value) : NaN) : value);
  let low = Math.min(...(log ? positive : all).map(scale)), high = Math.max(...(log ? positive : all).map(scale));
  if (spec.scale === "zero") low = Math.min(0, low);
  if (high - low < 1e-12) {
    high += (Math.abs(high) || 1) * 0.5;
    if (spec.scale !== "zero") low -= (Math.abs(low) || 1) * 0.5;
  }
  high += 0.04 * (high - low);
  let first = Math.min(...xs), last = Math.max(...xs);
  if (first === last) [first, last] = [first - 1, last + 1];
  const isWide = wide.has(spec.name) && innerWidth > 700, W = isWide ? 1200 : 400, H = isWide ? 330 : 210, left = 52, base = H - 22;
  const toX = (x) => left + ((x - first) / (last - first)) * (W - left - 8);
  const toY = (y) => base - ((scale(y) - low) / (high - low)) * (base - 14);
  const back = (tick) => (log ? 10 ** tick : tick);
  const svg = h("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${spec.title} over ${shown.by}` });
  for (const tick of ticks(low, high, log)) {
    const y = toY(back(tick));
    svg.append(h("line", { class: "grid", x1: left, x2: W - 8, y1: y, y2: y }),
      h("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, number(back(tick))));
  }
  for (const tick of ticks(first, last, false))
    svg.append(h("text", { x: toX(tick), y: H - 6, "text-anchor": "middle" }, number(tick)));
  for (const mark of shown.marks.filter((each) => each.at >= first && each.at <= last)) {
    const x = toX(mark.at), sign = { restart: "↻", resize: "⇄", fault: "✕" }[mark.kind];
    svg.append(h("line", { class: `mark ${mark.kind}`, x1: x, x2: x, y1: 12, y2: base }, h("title", {}, mark.text)),
      h("text", { class: mark.kind, x, y: 10, "text-anchor": "middle" }, sign, h("title", {}, mark.text)));
  }
  for (const line of spec.lines) {
    let [places, values] = line.series;
    const look = { class: "curve", fill: "none", stroke: colorOf(line, shown), "stroke-linejoin": "round" };
    if (line.kind === "noisy" && values.length > 40) {
      svg.append(h("path", { ...look, d: path(places, values, toX, toY), "stroke-opacity": 0.3, "stroke-width": 1 }));
      values = smooth(values);
    }
    const dash = ["", "5 4", "1.5 3"][line.dash];
    svg.append(h("path", { ...look, d: path(places, values, toX, toY), "stroke-width": 1.8, "stroke-dasharray": dash }));
    if (values.length === 1 || (line.kind === "dots" && values.length < 80))
      for (const [at, value] of values.entries())
        if (value !== null && Number.isFinite(toY(value))) svg.append(h("circle", { ...look, cx: toX(places[at]), cy: toY(value), r: 1.4 }));
  }
  return [svg, { first, last, left, W, toX, base }];
}

function figure(spec, shown) {
  const [svg, { first, last, left, W, toX, base }] = plot(spec, shown);
  const labeled = spec.lines.filter((line) => line.label && spec.lines.length > 1);
  const names = () => labeled.map((line) => key(line, line.label));
  const key = (line, text) => h("span", {}, h("i", { class: "curve", style: { background: colorOf(line, shown) } }), text);
  const legend = h("figcaption", { class: "legend" }, names());
  const cursor = h("line", { class: "grid", y1: 12, y2: base, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * W;
    const share = (x - left) / (W - left - 8);
    const aim = first + share * (last - first);
    if (share < 0 || share > 1) return;
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, toX(aim));
    cursor.setAttribute("visibility", "visible");
    legend.replaceChildren(h("span", {}, `${shown.by} ${number(Math.round(aim))}`), ...spec.lines.slice(0, 10).map((line) => {
      const [places, values] = line.series;
      let at = places.findIndex((place) => place >= aim);
      if (at < 0) at = places.length - 1;
      if (at > 0 && aim - places[at - 1] < places[at] - aim) at--;
      return key(line, `${line.label} ${number(values[at]) || "not finite"}`);
    }));
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    legend.replaceChildren(...names());
  });
  const resize = () => {
    if (!wide.delete(spec.name)) wide.add(spec.name);
    made.replaceWith(figure(spec, shown));
  };
  const made = h("figure", { class: `card${wide.has(spec.name) ? " wide" : ""}`, "data-plot": spec.name },
    h("b", { onclick: resize }, spec.title), svg, legend);
  return made;
}

// ---- parts of the page ----

const steps = (run) => `${number(run.step)}${run.total_steps ? ` / ${number(run.total_steps)}` : ""}`;
const progress = (run) => (run.total_steps ? bar(run.step / run.total_steps) : "");
const column = (text, name) => h("span", {}, text ? [text, h("small", {}, name)] : "");

function listRow(run) {
  const choose = () => offerComparison(chosen.delete(run.id) || chosen.add(run.id));
  const tick = h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.has(run.id),
    disabled: isFile, onchange: choose });
  if (!run.spark) return h("div", { class: "row" }, h("span"), run.name, badge(run), h("span", { class: "alarm" }, run.detail));
  const [xs, ys] = run.spark, values = ys.filter((each) => each !== null), low = Math.min(...values);
  const toX = (x) => (96 * (x - xs[0])) / (xs.at(-1) - xs[0] || 1), toY = (y) => 24 - (22 * (y - low)) / (Math.max(...values) - low || 1);
  const spark = { class: "curve", fill: "none", stroke: "var(--blue)", "stroke-width": 1.5, d: path(xs, ys, toX, toY) };
  const place = [run.strategy, run.workers && `${run.workers} × ${run.device}`, run.host].filter(Boolean).join(" · ");
  return h("div", { class: "row", "data-run": run.name, "data-phase": run.phase }, tick,
    h("span", {}, h("b", { title: run.run }, link(run)), h("small", {}, place)), badge(run),
    h("span", {}, steps(run), progress(run)), h("svg", { viewBox: "0 0 96 26", "aria-hidden": "true" }, h("path", spark)),
    column(number(run.loss), "loss"), column(...(run.val.length ? [run.val.at(-1)[1], `val ${run.val.at(-1)[0]}`] : [""])),
    column(number(run.samples_per_second), "samples/s"),
    run.end ? column(duration(run.end[0]), "to the end") : column(`${duration(run.silent_seconds)} ago`, "last sign"),
    run.alarms.map((text) => h("span", { class: "alarm" }, `⚠ ${text}`)));
}

function offerComparison() {
  const offer = document.getElementById("compare"), ids = isFile ? view.runs.filter((run) => run.spark).map((run) => run.id) : [...chosen];
  offer.disabled = ids.length < 2 || ids.length > 5;
  offer.textContent = ids.length > 5 ? "at most five" : isFile ? "Compare all" : "Compare the chosen";
  offer.onclick = () => { location.hash = `#/run/${ids.join(",")}`; };
}

function showList(found) {
  const head = ["", "run", "state", "step", "loss so far", "", "", "", ""].map((text) => h("span", {}, text));
  const studies = found.studies.map((each) => h("p", {}, h("a", { href: `#/study/${each.id}` }, each.name)));
  fill(main, h("h1", {}, found.paths.join(", ")),
    h("p", { class: "soft" }, found.runs.length ? h("button", { id: "compare" }) : "there is no run yet"),
    h("div", { class: "card rows" }, h("div", { class: "row head" }, head), found.runs.map(listRow)),
    studies.length ? h("h2", {}, "Studies") : "", studies);
  if (found.runs.length) offerComparison();
}

function foldable(title, rows) {
  const note = (event) => (event.target.open ? open.add(title) : open.delete(title));
  return h("details", { class: "card", open: open.has(title), ontoggle: note },
    h("summary", {}, title), h("div", { class: "wrap" }, h("table", {}, rows)));
}

function table(spec, links) {
  const differs = (cells) => spec.title === "Configuration" && cells.length > 2 && new Set(cells.slice(0, -1)).size > 1;
  const head = h("tr", {}, h("th"), spec.columns.map((text) => h("th", {}, text)));
  return foldable(spec.title, [head, spec.rows.map(([name, cells]) => h("tr", { class: differs(cells) ? "differs" : false },
    h("th", {}, links.has(name) ? h("a", { href: `#/run/${links.get(name)}` }, name) : name), cells.map((cell) => h("td", {}, cell))))]);
}

function strips(run) {
  if (!run.shares) return "";
  const [step, names, parts, says, measured] = run.shares;
  const kinds = [["data", "waiting for data"], ["compute", measured || run.workers === 1 ? "compute" : "compute and communication"],
    ["communication", "exposed communication"], ["waiting", "waiting for slower ranks"]];
  const present = kinds.filter((_, at) => parts.some((part) => part[at] > 0));
  const strip = (part) => kinds.map(([kind, text], at) =>
    h("i", { class: kind, title: `${text}: ${number(part[at])} ms`, style: { width: `${(100 * part[at]) / step}%` } }));
  return [h("h2", {}, "Where the time of a step goes"), h("div", { class: "card strips" },
    parts.map((part, at) => h("div", { class: "strip", "data-rank": at }, h("span", {}, names[at]),
      h("span", { class: "bar" }, strip(part)), h("span", { class: "soft" }, `${number(step)} ms`))),
    h("p", { class: "key" }, says, " ", present.map(([kind, text]) => h("span", {}, h("i", { class: kind }), text))))];
}

function cards(run) {
  const [at, due] = run.next || [], saved = run.checkpoint_step;
  const next = due ? `, the next ${at ? `at step ${number(at)} ` : ""}in ${duration(due[0])}${spread(due)}` : "";
  const all = [["step", steps(run)], ["loss", number(run.loss)], ...run.val.map(([name, text]) => [`val ${name}`, text]),
    ["samples per second", number(run.samples_per_second)], run.end ? [`to the end${spread(run.end)}`, duration(run.end[0])] : ["", ""],
    [`checkpoint${next}`, saved === null ? "none yet" : `step ${number(saved)}`]];
  const shown = all.filter(([, text]) => text).map(([name, text]) => h("div", { class: "card" }, h("b", {}, text), h("span", {}, name)));
  return h("div", { class: "cards" }, shown);
}

function headOf(run, color, shown) {
  const several = shown.runs.length > 1, again = run.attempts > 1 ? ` · started ${run.attempts} times` : "";
  const title = several ? [h("i", { class: "curve", style: { background: shown.colors[color] } }), link(run)] : run.name;
  return h("section", { "data-run": run.name, "data-phase": run.phase }, h("h1", { class: "runs" }, title),
    h("div", {}, badge(run), h("span", { class: "soft" }, ` ${run.detail} · last sign ${duration(run.silent_seconds)} ago${again}`)),
    several ? "" : [cards(run), progress(run)], run.alarms.map((text) => h("div", { class: "card notes" }, text)), several ? "" : strips(run));
}

function checkpoints(rows, id) {
  const verdict = (row) => checks[`${id} ${row.name}`] || row.damage || "manifest intact";
  const say = (row, text) => {
    checks[`${id} ${row.name}`] = text;
    if (view && view.checkpoints) showView(view);
  };
  const check = async (row) => {
    say(row, "reading …");
    const found = await get(`check?run=${id}&checkpoint=${encodeURIComponent(row.name)}`).catch((error) => ({ error: String(error) }));
    say(row, found.error || found.damage || "intact: every file matches its SHA-256");
  };
  return rows.length ? foldable("Checkpoints", rows.map((row) => h("tr", {}, h("th", {}, row.name), h("td", {}, `${number(row.bytes / 1e6)} MB`),
    h("td", {}, verdict(row)), h("td", {}, isFile ? "" : h("button", { onclick: () => check(row) }, "Read and check"))))) : "";
}

function showView(found) {
  const links = new Map(Object.entries(found.links || {})), first = found.tables.find((each) => each.title === "Settings that differ");
  const plots = found.plots.filter((spec) => spec.lines.some((line) => line.series[0].length));
  const heads = found.name ? h("h1", {}, found.name) : found.runs.map((run, at) => headOf(run, at, found));
  fill(main, h("div", { id: "heads" }, heads), (found.verified || []).map((text) => h("div", { class: "card notes equal" }, text)),
    first ? table(first, links) : "", h("h2", {}, "Curves"), h("div", { class: "plots" }, plots.map((spec) => figure(spec, found))),
    h("h2", {}, "Tables"), found.tables.filter((each) => each !== first).map((each) => table(each, links)),
    found.runs.map((run, at) => checkpoints(found.checkpoints[at], run.id)));
}

// ---- data ----

async function get(address, options) {
  if (isFile) return kept[address] || { error: "this file does not hold that" };
  const answer = await fetch(`/${address}${address.includes("?") ? "&" : "?"}token=${encodeURIComponent(token)}`, options);
  if (answer.status === 403) return { error: "the token is not this server's: open the address that it printed" };
  return answer.json();
}

async function look() {
  const mine = ++turn, [, kind, id = ""] = location.hash.split("/");
  clearTimeout(timer);
  let wait = 500, found = null; // milliseconds; the answer
  const runs = id.split(",").map((each) => `run=${encodeURIComponent(each)}`).join("&");
  const known = view && view.version && !isFile ? `&known=${encodeURIComponent(view.version)}` : "";
  const address = kind === "run" ? `view?${runs}${known}` : kind === "study" ? `study?id=${encodeURIComponent(id)}` : "runs";
  try {
    found = await get(address, { signal: AbortSignal.timeout(20000) });
  } catch (error) {
    live.textContent = "no answer: `watch` has ended, or the tunnel is closed";
  }
  if (mine !== turn) return;
  document.body.classList.toggle("stale", !found); // what it shows is no longer known
  if (found && found.error) {
    view = null;
    fill(main, h("div", { class: "card notes" }, found.error));
  } else if (found) {
    live.textContent = isFile ? `saved page of ${kept.saved}` : found.share < 1 ? `reading older lines: ${Math.floor(100 * found.share)} %` : "live";
    if (found.share < 1) wait = 50;
    if (main.matches(":active")) wait = 50; // a click ends on what it began on
    else if (kind === "run" && (!found.plots || (view && main.querySelector("figure:hover")))) { // who reads a value keeps it
      view.runs = found.runs;
      fill(document.getElementById("heads"), found.runs.map((run, at) => headOf(run, at, view)));
    } else (kind ? showView : showList)(view = found);
    document.title = kind === "run" ? found.runs.map((run) => `${run.name}: ${run.phase}`).join(", ") : "multigpu watch";
  }
  if (!isFile) timer = setTimeout(look, wait);
}

addEventListener("hashchange", () => { view = null; look(); });
look();
