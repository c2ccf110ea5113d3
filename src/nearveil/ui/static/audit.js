import { get, post } from "./api.js";
import { chart } from "./chart.js";
import { find, make, put, say } from "./dom.js";

const POLL = 600; // milliseconds
const STYLES = { kept: "good", broken: "bad", undecided: "open" };
let polling = null, last = "";

const power = (value) => (value >= 0.01 ? String(Number(value.toPrecision(2))) : value.toExponential(0));
const decades = (least) => Array.from({ length: Math.ceil(-Math.log10(least)) + 1 }, (_, place) => 10 ** -place).filter((one) => one >= least * 0.99);
const number = (value) => (typeof value === "number" ? String(Number(value.toPrecision(3))) : value === "inf" ? "∞" : String(value));

function events(report) {
  const { curve } = report, epsilon = Number(report.promised_epsilon), delta = report.promised_delta;
  const positive = [...curve.x, ...curve.y].filter((one) => one > 0);
  const least = Math.min(Math.max(Math.min(...positive, 0.5), 1e-6), 0.5);
  const grid = Array.from({ length: 121 }, (_, place) => least ** (1 - place / 120));
  const border = grid.map((one) => [one, Math.min(1, Math.exp(epsilon) * one + delta)]);
  return {
    title: "How often events come in either world",
    words: `The chosen event comes with probability ${power(curve.chosen[1])} in its world and ${power(curve.chosen[0])} in the other.`,
    x: { min: least, max: 1, log: true, ticks: decades(least), show: power, label: "probability in the other world" },
    y: { min: least, max: 1, log: true, ticks: decades(least), show: power, label: "in the event’s world" },
    forbidden: [...border, [least, 1]],
    lines: [
      { points: border, style: "s2", label: "The most that the guarantee allows; beyond it, in the shaded part, the guarantee is broken" },
      { points: curve.x.map((one, place) => [Math.max(one, least), Math.max(curve.y[place], least)]), style: "s1", label: "Measured, for every threshold" },
    ],
    marks: [{ at: curve.chosen.map((one) => Math.max(one, least)), style: "dot", label: "The event that the attack chose" }],
  };
}

function divergence(report) {
  const { curve } = report, epsilon = Number(report.promised_epsilon);
  const least = Math.max(report.promised_delta, 1e-9) / 10, far = Math.max(...curve.x), delta = Math.max(report.promised_delta, least);
  const points = (values) => curve.x.map((one, place) => [one, Math.max(values[place], least)]);
  return {
    title: "The divergence at each epsilon",
    words: `At the promised epsilon ${number(epsilon)} it must not be above the promised delta ${report.promised_delta}.`,
    x: { min: 0, max: far, ticks: [0, 0.25, 0.5, 0.75, 1].map((one) => one * far), show: (one) => one.toFixed(1), label: "epsilon" },
    y: { min: least, max: 1, log: true, ticks: decades(least).filter((_, place) => place % 2 === 0), show: power, label: "hockey-stick divergence" },
    forbidden: epsilon < far ? [[epsilon, delta], [far, delta], [far, 1], [epsilon, 1]] : [],
    lines: [
      { points: points(curve.y), style: "s1", label: "Estimated" },
      { points: points(curve.low), style: "s3", label: "Lower bound" },
      { points: [[0, delta], [far, delta]], style: "s2", label: "Promised delta; to the right of the promised epsilon nothing may be above it" },
    ],
  };
}

function drawn(told) {
  const { report } = told;
  const looks = told.looks.map((one) => make("tr", {}, make("td", { class: "n" }, one.trials.toLocaleString("en")), make("td", { class: "n" }, number(one.shown)), make("td", {}, make("span", { class: STYLES[one.verdict] }, one.verdict))));
  return make(
    "div", { class: "under" },
    make(
      "section", { class: "card" },
      make("h2", {}, report.mechanism),
      make("p", { class: "verdict", id: "verdict" }, make("span", { class: STYLES[report.verdict] }, report.words.slice(0, report.words.search(/\W/))), report.words.slice(report.words.search(/\W/))),
      report.sound ? null : make("p", { class: "note" }, "The mechanism itself says that its guarantee is not proved."),
      make("p", { class: "note" }, `Attack: ${report.attack}, on ${report.pair}. Each look has runs of its own, and the last one counts.`),
      make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col", class: "n" }, "runs"), make("th", { scope: "col", class: "n" }, "epsilon shown"), make("th", { scope: "col" }, "verdict"))), make("tbody", {}, ...looks)),
    ),
    make("section", { class: "card" }, make("h2", {}, "What was measured"), chart(report.curve.kind === "event" ? events(report) : divergence(report))),
  );
}

const WORDS = {
  running: (told) => `Attacking ${told.name}: look ${told.looks.length + 1}, ${Math.min(100, Math.round((100 * told.runs) / told.wanted))}% of its runs.`,
  done: (told) => (told.report ? `Done, after ${told.looks.length} looks.` : "The time was up before the first look ended."),
  stopped: () => "Stopped.",
  failed: () => "The audit failed, for a reason that is not the mechanism’s guarantee. Try another one.",
  none: () => "",
};

function show(told) {
  find("audit-status").textContent = WORDS[told.state](told);
  const running = told.state === "running";
  find("audit-start").disabled = running;
  find("audit-stop").disabled = !running;
  const mark = `${told.name}/${told.looks?.length}`;
  if (told.report && mark !== last) put(find("audit-body"), drawn(told));
  last = mark;
  return running;
}

async function poll() {
  polling = null;
  try {
    const running = show(await get("/api/audit", {}, 30));
    say(find("audit-error"), "");
    if (running) polling = setTimeout(poll, POLL);
  } catch (trouble) {
    say(find("audit-error"), trouble.message);
    find("audit-start").disabled = false;
  }
}

async function begin(event) {
  event.preventDefault();
  try {
    put(find("audit-body"));
    last = "";
    show(await post("/api/audit", { name: find("mechanism").value, epsilon: Number(find("audit-epsilon").value) }, null, 60));
    say(find("audit-error"), "");
    polling ??= setTimeout(poll, POLL);
  } catch (trouble) {
    say(find("audit-error"), trouble.message);
  }
}

async function stop() {
  try {
    show(await post("/api/audit/stop", {}, null, 30));
  } catch (trouble) {
    say(find("audit-error"), trouble.message);
  }
}

// What is broken on purpose promises an epsilon of its own.
function fitEpsilon() {
  const broken = find("mechanism").selectedOptions[0]?.parentElement.dataset.broken !== undefined;
  find("audit-epsilon").disabled = broken;
  const more = broken ? "This one is broken on purpose, and has an epsilon of its own. " : "";
  put(find("audit-note"), more, "At most half a minute. An audit in full is ", make("code", {}, "nearveil audit"), ".");
}

export function start() {
  find("mechanism").addEventListener("change", fitEpsilon);
  find("audit-form").addEventListener("submit", begin);
  find("audit-stop").addEventListener("click", stop);
}

export async function open() {
  try {
    if (!find("mechanism").options.length) {
      const told = await get("/api/mechanisms", {}, 30);
      const group = (label, names, broken) => make("optgroup", { label, "data-broken": broken }, ...names.map((name) => make("option", { value: name }, name)));
      put(find("mechanism"), group("Mechanisms", told.mechanisms), group("Broken on purpose: each must be caught", told.specimens, true));
    }
    await poll();
  } catch (trouble) {
    say(find("audit-error"), trouble.message);
  }
}
