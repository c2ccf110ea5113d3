import { chart } from "./chart.js";
import { percent } from "./dom.js";

// Expected recall by epsilon, between floor and ceiling, and the last query.

const FAR = 12;

export function curve(map, epsilon, asked, metric) {
  const { curve: data, k } = map;
  const points = (values) => data.epsilon.map((at, target) => [at, values[target]]);
  const from = (values) => [[0, data.floor], ...points(values)];
  const near = data.epsilon.reduce((best, at, target) => (Math.abs(at - epsilon) < Math.abs(data.epsilon[best] - epsilon) ? target : best), 0);
  const expected = data.expected[near];
  const at = Math.min(epsilon, FAR);
  const marks = [{ at: [at, expected], style: "ring", label: `Expected at epsilon ${epsilon}: ${percent(expected)} of the ${k} nearest` }];
  if (asked && asked.map === map.map && asked.share !== null && asked.share !== undefined) {
    marks.push({ at: [Math.min(asked.epsilon, FAR), asked.share], style: "dot", label: `Your last query: its set holds about ${percent(asked.share)} of the items nearest to your query. One query may be above the ceiling, the average cannot` });
  }
  const ceiling = data.whole
    ? "Ceiling: no private message with answers of this size finds more on average (Theorem D, for the popularity of items in the map)"
    : "Reference line: the ceiling if all items were equally popular. Not a bound here, because the map has no popularity";
  const floor = data.whole ? "Floor: recall if everyone got the same, most popular items" : "Floor: recall of a random answer of this size";
  return chart({
    title: `Share of the ${k} items nearest by the ${metric} among the candidates, by epsilon`,
    words: `At epsilon ${epsilon} about ${percent(expected)} are expected; the ceiling there is ${percent(data.ceiling[near])}, the floor ${percent(data.floor)}.`,
    x: { min: 0, max: FAR, ticks: [0, 2, 4, 6, 8, 10, 12], show: String, label: "epsilon of one query" },
    y: { min: 0, max: 1, ticks: [0, 0.25, 0.5, 0.75, 1], show: percent, label: "recall" },
    lines: [
      { points: from(data.ceiling), style: "s2", label: ceiling },
      { points: points(data.expected), style: "s1", label: "Expected for this map, for queries that resemble the gallery’s items" },
      { points: [[0, data.floor], [FAR, data.floor]], style: "s3", label: floor },
    ],
    marks,
    table: {
      head: ["epsilon", "expected", data.whole ? "ceiling" : "reference", "floor"],
      rows: data.epsilon.flatMap((one, target) => (Number.isInteger(one) ? [[String(one), percent(data.expected[target]), percent(data.ceiling[target]), percent(data.floor)]] : [])),
    },
  });
}
