import { draw, make } from "./dom.js";

// A responsive chart of lines and marks, with a table for screen readers.

const LEFT = 52, RIGHT = 14, TOP = 12, BOTTOM = 44;

function scale({ min, max }, from, to) {
  return (value) => from + ((Math.min(Math.max(value, min), max) - min) / (max - min || 1)) * (to - from);
}

function axis(x, y, width, height, data) {
  const parts = [];
  for (const tick of data.x.ticks) {
    parts.push(draw("line", { class: "grid", x1: x(tick), x2: x(tick), y1: TOP, y2: height - BOTTOM }));
    parts.push(draw("text", { x: x(tick), y: height - BOTTOM + 18, "text-anchor": "middle" }, data.x.show(tick)));
  }
  for (const tick of data.y.ticks) {
    parts.push(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
    parts.push(draw("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, data.y.show(tick)));
  }
  parts.push(draw("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }));
  parts.push(draw("text", { x: (LEFT + width - RIGHT) / 2, y: height - 6, "text-anchor": "middle" }, data.x.label));
  const middle = (TOP + height - BOTTOM) / 2;
  parts.push(draw("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, data.y.label));
  return parts;
}

const path = (points, x, y) => points.map(([a, b], target) => `${target ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");

function drawn(data, width) {
  const height = Math.round(Math.min(340, Math.max(230, width * 0.55)));
  const x = scale(data.x, LEFT, width - RIGHT), y = scale(data.y, height - BOTTOM, TOP);
  const parts = axis(x, y, width, height, data);
  for (const line of data.lines) parts.push(draw("path", { class: `line ${line.style}`, d: path(line.points, x, y) }));
  for (const mark of data.marks ?? []) parts.push(draw("circle", { class: mark.style, cx: x(mark.at[0]), cy: y(mark.at[1]), r: 6 }));
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${data.title}. ${data.words}` }, draw("title", {}, data.title), draw("desc", {}, data.words), ...parts);
}

function sample(style) {
  const mark = style === "ring" || style === "dot";
  const part = mark ? draw("circle", { class: style, cx: 16, cy: 6, r: 5 }) : draw("line", { class: `line ${style}`, x1: 0, x2: 32, y1: 6, y2: 6 });
  return draw("svg", { viewBox: "0 0 32 12", "aria-hidden": "true" }, part);
}

function table(data) {
  const head = make("tr", {}, ...data.table.head.map((words) => make("th", { scope: "col", class: "n" }, words)));
  const rows = data.table.rows.map((row) => make("tr", {}, ...row.map((words) => make("td", { class: "n" }, words))));
  const grid = make("table", {}, make("caption", { class: "note" }, data.title), make("thead", {}, head), make("tbody", {}, ...rows));
  return make("details", {}, make("summary", {}, "Show as a table"), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": data.title }, grid));
}

// Return a figure that redraws itself when its width changes.
export function chart(data) {
  const target = make("div", {});
  const named = [...data.lines, ...(data.marks ?? [])].filter((one) => one.label);
  const legend = make("ul", { class: "legend" }, ...named.map((one) => make("li", {}, sample(one.style), make("span", {}, one.label))));
  const figure = make("figure", {}, target, legend, data.table ? table(data) : null);
  let last = 0;
  new ResizeObserver(([seen]) => {
    const width = Math.max(240, Math.round(seen.contentRect.width));
    if (width === last) return;
    last = width;
    target.replaceChildren(drawn(data, width));
  }).observe(target);
  return figure;
}
