import { chart } from "./chart.js";
import { percent } from "./dom.js";

// What can be found at each epsilon: the map's expectation between floor and ceiling, and this query.

const FAR = 12;

export function curve(map, epsilon, asked) {
  const { curve: told, k } = map;
  const points = (values) => told.epsilon.map((at, place) => [at, values[place]]);
  const from = (values) => [[0, told.floor], ...points(values)];
  const near = told.epsilon.reduce((best, at, place) => (Math.abs(at - epsilon) < Math.abs(told.epsilon[best] - epsilon) ? place : best), 0);
  const expected = told.expected[near];
  const at = Math.min(epsilon, FAR);
  const marks = [{ at: [at, expected], style: "ring", label: `Expected at epsilon ${epsilon}: ${percent(expected)} of the ${k} nearest` }];
  if (asked && asked.map === map.map && asked.share !== null && asked.share !== undefined) {
    marks.push({ at: [Math.min(asked.epsilon, FAR), asked.share], style: "dot", label: `Your last question: the set that it named holds about ${percent(asked.share)} of the items nearest to your image. One question may be above the ceiling; the average cannot` });
  }
  const ceiling = told.whole
    ? "Ceiling, a bound: on average no private message with answers of this size finds more (Theorem D, for the popularity of images that the map shows)"
    : "Reference line: what no private message would pass if all images were equally popular. No bound here, as the map does not tell popularity";
  const floor = told.whole ? "Floor: what the most popular images find that anybody would be sent, without asking" : "Floor: what an answer of this size finds by chance";
  return chart({
    title: `Share of the ${k} nearest images among the candidates, by epsilon`,
    words: `At epsilon ${epsilon} about ${percent(expected)} are expected; the ceiling there is ${percent(told.ceiling[near])}, the floor ${percent(told.floor)}.`,
    x: { min: 0, max: FAR, ticks: [0, 2, 4, 6, 8, 10, 12], show: String, label: "epsilon of one question" },
    y: { min: 0, max: 1, ticks: [0, 0.25, 0.5, 0.75, 1], show: percent, label: "share found" },
    lines: [
      { points: from(told.ceiling), style: "s2", label: ceiling },
      { points: points(told.expected), style: "s1", label: "This map, an expectation: from the public map alone, for queries like the gallery’s own images" },
      { points: [[0, told.floor], [FAR, told.floor]], style: "s3", label: floor },
    ],
    marks,
    table: {
      head: ["epsilon", "expected", told.whole ? "ceiling" : "reference", "floor"],
      rows: told.epsilon.flatMap((one, place) => (Number.isInteger(one) ? [[String(one), percent(told.expected[place]), percent(told.ceiling[place]), percent(told.floor)]] : [])),
    },
  });
}
