// Load over time, kept by this page from what it is told once a second. Three charts share one clock and one pointer.

import { byId, count, duration, make } from "./words.js";

const SPANS_S = [60, 120, 300]; // the shortest that holds what is known
const HISTORY_S = SPANS_S[SPANS_S.length - 1];
const GAP_S = 5; // a longer silence breaks the line
const RATE_S = 5; // of a rate's window: one second of few requests jumps
const WIDTH = 300;
const HEIGHT = 100;

const CHARTS = [
  { name: "prefill", title: "Prefill", unit: "prompts", least: 4, series: [
    { kind: "first", word: "waiting or being computed", of: (one) => one.prefill },
  ] },
  { name: "decode", title: "Decode", unit: "sequences", least: 4, series: [
    { kind: "first", word: "decoded", of: (one) => one.running },
    { kind: "second", word: "waiting for their KV", of: (one) => one.waiting },
  ] },
  { name: "requests", title: "Requests", unit: "per second", least: 2, series: [
    { kind: "first", word: "placed", of: (one) => one.placed_per_s },
    { kind: "bad", word: "rejected", of: (one) => one.rejected_per_s },
  ] },
];

const history = []; // {at_s, at, prefill, running, waiting, placed, rejected, placed_per_s, rejected_per_s}
let pointedAt = null; // share of the width that the pointer is at

const amount = (value) => (Number.isInteger(value) ? count(value) : value.toFixed(1));

export function showLoad(mesh) {
  const total = (role, ...names) => mesh.instances
    .filter((one) => one.role === role && one.health !== "dead")
    .reduce((sum, one) => sum + names.reduce((part, name) => part + one[name], 0), 0);
  const now = {
    at_s: performance.now() / 1000,
    at: new Date(),
    prefill: total("prefill", "queued_jobs", "running_jobs"),
    running: total("decode", "running_jobs"),
    waiting: total("decode", "queued_jobs"),
    placed: mesh.placed,
    rejected: mesh.rejected,
  };
  now.placed_per_s = rate(now, "placed");
  now.rejected_per_s = rate(now, "rejected");
  history.push(now);
  while (history[0].at_s < now.at_s - HISTORY_S) history.shift();
  for (const chart of CHARTS) draw(chart);
  showPointer();
}

function rate(now, name) {
  const before = history.find((one) => one.at_s >= now.at_s - RATE_S - 0.5);
  return before ? Math.max(0, now[name] - before[name]) / (now.at_s - before.at_s) : 0; // a new conductor counts anew
}

const span = () => {
  const known_s = history[history.length - 1].at_s - history[0].at_s;
  return SPANS_S.find((one) => one >= known_s) ?? HISTORY_S;
};

// --- one chart ------------------------------------------------------------------------------------------------------

const parts = new Map(CHARTS.map((chart) => [chart.name, build(chart)]));

function build({ name, title, unit, series }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({
    id: `${name}-chart`, role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none",
  })) svg.setAttribute(key, value);
  const scale = ["top", "middle", "bottom"].map((place) => make("span", { class: place }));
  const pointer = make("i", { class: "pointer", hidden: "" });
  const tip = make("p", { class: "tip", hidden: "" });
  const values = series.map(() => make("b"));
  const legend = series.map(({ kind, word }, index) => make("li", {},
    make("i", { class: `swatch ${kind}`, "aria-hidden": "true" }), values[index], ` ${word}`));
  const begins = make("span");
  const plot = make("div", { class: "plot" }, ...scale, svg, pointer, tip);
  byId("charts").append(make("figure", {},
    make("figcaption", {}, make("h3", {}, title), make("small", {}, unit)),
    plot,
    make("p", { class: "axis", "aria-hidden": "true" }, begins, make("span", {}, "now")),
    make("ul", { class: "legend", id: `${name}-now` }, ...legend)));
  plot.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    pointedAt = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    showPointer();
  });
  plot.addEventListener("pointerleave", () => {
    pointedAt = null;
    showPointer();
  });
  return { svg, scale, pointer, tip, values, begins };
}

function draw({ name, title, least, series }) {
  const { svg, scale, values, begins } = parts.get(name);
  const span_s = span();
  const now = history[history.length - 1];
  const top = ceiling(Math.max(least, ...history.flatMap((one) => series.map(({ of }) => of(one)))));
  [top, top / 2, 0].forEach((value, index) => { scale[index].textContent = amount(value); });
  const paths = [line("grid", `M0,${HEIGHT / 2} H${WIDTH}`)];
  for (const { kind, of } of series) {
    for (const run of runs()) {
      const points = run.map((one) => [
        WIDTH * (1 - (now.at_s - one.at_s) / span_s), HEIGHT * (1 - of(one) / top),
      ].map((value) => value.toFixed(1)).join(","));
      const edges = [points[0], points[points.length - 1]].map((point) => point.split(",")[0]);
      paths.push(line(`area ${kind}`, `M${edges[0]},${HEIGHT} L${points.join(" L")} L${edges[1]},${HEIGHT} Z`));
      paths.push(line(`line ${kind}`, `M${points.join(" L")}`));
    }
  }
  svg.replaceChildren(...paths);
  series.forEach(({ of }, index) => { values[index].textContent = amount(of(now)); });
  begins.textContent = `${duration(span_s)} ago`;
  const told = series.map(({ word, of }) => `${amount(of(now))} ${word}`).join(", ");
  svg.setAttribute("aria-label", `${title} of the last ${duration(span_s)}: now ${told}`);
}

/** The least of 1, 2, 4, 10, 20, 40 … that is not below *value*: its half is a round number too. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 10].map((step) => step * power).find((one) => one >= value);
}

function line(kind, d) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", "path");
  element.setAttribute("class", kind);
  element.setAttribute("d", d);
  return element;
}

function runs() {
  const found = [[]];
  for (const [index, one] of history.entries()) {
    if (index && one.at_s - history[index - 1].at_s > GAP_S) found.push([]);
    found[found.length - 1].push(one);
  }
  return found;
}

// --- what the pointer is at: the same moment in every chart -----------------------------------------------------------

function showPointer() {
  const one = pointedAt === null ? null : moment();
  for (const { name, series } of CHARTS) {
    const { pointer, tip } = parts.get(name);
    pointer.hidden = tip.hidden = one === null;
    if (one === null) continue;
    const share = 1 - (history[history.length - 1].at_s - one.at_s) / span();
    pointer.style.left = `${100 * share}%`;
    tip.classList.toggle("left", share > 0.5);
    tip.style.left = `${100 * share}%`;
    tip.replaceChildren(make("small", {}, one.at.toLocaleTimeString("en-GB")), ...series.map(
      ({ kind, word, of }) => make("span", {}, make("i", { class: `swatch ${kind}` }), make("b", {}, amount(of(one))), ` ${word}`)));
  }
}

/** What was known at the moment that the pointer is at; null where nothing was. */
function moment() {
  if (!history.length) return null;
  const at_s = history[history.length - 1].at_s - (1 - pointedAt) * span();
  const nearest = history.reduce((best, one) => (Math.abs(one.at_s - at_s) < Math.abs(best.at_s - at_s) ? one : best));
  return Math.abs(nearest.at_s - at_s) > GAP_S ? null : nearest;
}
