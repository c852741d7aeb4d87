// Charts in SVG: lines and bars over one time axis, and sparklines.
// Pure functions of data, width and the moment that is pointed at. Colours come from classes (style.css).

import { h } from "./dom.js";
import { clockTime } from "./format.js";

const HEIGHT = 148;
const LEFT = 40;
const BOTTOM = 20;
const TOP = 8;

/** A round number that is not below `value`, and whose half can be written: with `digits` behind the point. */
export function roundUp(value, digits = 1) {
  const least = value > 0 ? value : 1;
  const power = 10 ** Math.floor(Math.log10(least));
  const isWritten = (number) => Math.abs(Number(number.toFixed(digits)) - number) < power / 1000;
  const steps = [1, 1.5, 2, 3, 4, 5, 6, 8, 10, 20].map((step) => step * power);
  return steps.find((step) => step >= least * 0.999 && isWritten(step / 2)) ?? 2 / 10 ** digits;
}

/** The same for what is counted. */
export const roundUpCount = (value) => roundUp(value, 0);

/** For durations the round numbers are those of a clock. */
const CLOCK = [
  2, 4, 6, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 10e3, 20e3, 30e3, 60e3, 120e3, 300e3, 600e3, 1200e3, 1800e3,
  3600e3,
];
export const roundUpTime = (ms) => CLOCK.find((step) => step >= ms * 0.999) ?? roundUp(ms / 3600e3) * 3600e3;

const SOON = "Figures follow in a moment.";

/**
 * One chart. lines: [{values, class, area?, bars?}]; format writes a value of the axis; top gives the axis end.
 * empty: what to say while there is nothing to draw.
 * pointed: index of the moment under the pointer, or null; onpoint(index | null) follows it.
 */
export function chart({ label, start, step, lines, width, format, top, empty = SOON, pointed, onpoint }) {
  const size = lines[0].values.length;
  if (!size) return h("div", { class: "chart-empty" }, empty);
  const end = top(Math.max(0, ...lines.flatMap((line) => line.values.filter((v) => v !== null))));
  const inner = Math.max(40, width - LEFT - 4);
  const x = (i) => LEFT + (size < 2 ? inner : (i / (size - 1)) * inner);
  const y = (v) => TOP + (1 - v / end) * (HEIGHT - TOP - BOTTOM);
  const at = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const place = ((event.clientX - box.left) * (width / box.width) - LEFT) / inner;
    return Math.max(0, Math.min(size - 1, Math.round(place * (size - 1))));
  };
  return h(
    "svg",
    {
      class: "chart",
      viewBox: `0 0 ${width} ${HEIGHT}`,
      width,
      height: HEIGHT,
      role: "img",
      "aria-label": label,
      onpointermove: (event) => onpoint(at(event)),
      onpointerleave: () => onpoint(null),
    },
    [0, 0.5, 1].map((part) => [
      h("line", { class: part ? "grid" : "grid base", x1: LEFT, x2: width - 4, y1: y(end * part), y2: y(end * part) }),
      h(
        "text",
        { class: "tick", x: LEFT - 6, y: y(end * part) + 4, "text-anchor": "end" },
        part ? format(end * part) : "0",
      ),
    ]),
    timeTicks(start, step, size, inner).map(({ index, text, anchor }) =>
      h("text", { class: "tick", x: x(index), y: HEIGHT - 4, "text-anchor": anchor }, text),
    ),
    lines.map((line) => (line.bars ? bars(line, y, inner / size) : curve(line, x, y))),
    pointed !== null &&
      pointed < size &&
      h("line", { class: "pointer", x1: x(pointed), x2: x(pointed), y1: TOP, y2: HEIGHT - BOTTOM }),
    pointed !== null &&
      lines
        .filter((line) => !line.bars && line.values[pointed] != null)
        .map((line) => h("circle", { class: `dot ${line.class}`, cx: x(pointed), cy: y(line.values[pointed]), r: 3 })),
  );
}

function timeTicks(start, step, size, inner) {
  let many = Math.min(size, inner > 260 ? 4 : 3);
  // Between few steps unequal gaps would be seen, and texts would meet in the small ones.
  while (size < 12 && many > 2 && (size - 1) % (many - 1)) many -= 1;
  if (many < 2) return [{ index: size - 1, text: "now", anchor: "end" }];
  return Array.from({ length: many }, (_, n) => {
    const index = Math.round((n / (many - 1)) * (size - 1));
    const text = n === many - 1 ? "now" : clockTime(start + index * step, size * step < 5 * 60_000);
    return { index, text, anchor: n === 0 ? "start" : n === many - 1 ? "end" : "middle" };
  });
}

// Nothing known is a gap in the line, not a zero.
function runs(values) {
  const found = [];
  let open = null;
  values.forEach((value, index) => {
    if (value === null || value === undefined) open = null;
    else if (open) open.push([index, value]);
    else found.push((open = [[index, value]]));
  });
  return found;
}

function curve(line, x, y) {
  return runs(line.values).map((run) => {
    const points = run.map(([index, value]) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`);
    if (run.length === 1)
      return h("circle", { class: `dot ${line.class}`, cx: x(run[0][0]), cy: y(run[0][1]), r: 1.5 });
    const area = `M${x(run[0][0]).toFixed(1)},${y(0)} L${points.join(" ")} L${x(run.at(-1)[0]).toFixed(1)},${y(0)} Z`;
    return [
      line.area && h("path", { class: `area ${line.class}`, d: area }),
      h("polyline", { class: `line ${line.class}`, points: points.join(" ") }),
    ];
  });
}

function bars(line, y, room) {
  const width = Math.max(1.5, Math.min(10, room * 0.7));
  const x = (index) => LEFT + (index + 0.5) * room;
  return line.values.map(
    (value, index) =>
      value > 0 &&
      h("rect", {
        class: `slab ${line.class}`,
        x: x(index) - width / 2,
        y: y(value),
        width,
        height: Math.max(1.5, y(0) - y(value)),
      }),
  );
}

/** The last hour of one number, small. */
export function sparkline(values, kind = "waiting", width = 96, height = 24) {
  const shown = thin(values, 60);
  const end = Math.max(1, ...shown);
  const x = (i) => (shown.length < 2 ? width : (i / (shown.length - 1)) * (width - 2) + 1);
  const y = (v) => height - 2 - (v / end) * (height - 4);
  const points = shown.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
  return h(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    shown.length > 1 && [
      h("path", {
        class: `area ${kind}`,
        d: `M${x(0)},${height - 1} L${points} L${x(shown.length - 1)},${height - 1} Z`,
      }),
      h("polyline", { class: `line ${kind}`, points }),
    ],
  );
}

function thin(values, most) {
  const known = values.map((v) => v ?? 0);
  if (known.length <= most) return known;
  const every = known.length / most;
  return Array.from({ length: most }, (_, i) =>
    Math.max(...known.slice(Math.floor(i * every), Math.floor((i + 1) * every))),
  );
}
