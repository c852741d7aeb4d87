// The life of a job or a flow in SVG: one bar per wait and attempt, over one time axis.
// A pure function of data and width. Colours come from classes (style.css).

import { h } from "./dom.js";
import { duration } from "./format.js";

// Marks of one axis must differ: as many digits as its length asks for.
function elapsed(ms, whole) {
  const seconds = ms / 1000;
  if (whole < 4000) return `${whole < 10 ? Number(ms.toFixed(1)) : Math.round(ms)} ms`;
  if (whole < 120_000) return `${seconds.toFixed(whole < 40_000 ? 1 : 0)} s`;
  if (whole < 7_200_000) return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")} min`;
  return duration(ms);
}

const LETTER = 7.5; // as wide as a digit: ids are mostly that

const shortened = (text, letters) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);

/** Who made the attempt, beside its bar where there is room; it is in the title in any case. */
function workerName(row, { x, left, right, width, y }) {
  const from = Math.max(x(row.to), x(row.from) + 3) + 6;
  const room = (length) => Math.floor(length / LETTER);
  const [behind, before] = [room(width - right - from), room(x(row.from) - left - 6)];
  const fits = Math.max(behind, before);
  if (fits < Math.min(8, row.worker.length)) return null;
  const name = shortened(row.worker, fits);
  return behind >= before
    ? h("text", { class: "note", x: from, y }, name)
    : h("text", { class: "note", x: x(row.from) - 6, y, "text-anchor": "end" }, name);
}

/**
 * Bars over one axis, one row each. rows: [{label, kind, from, to, note, open, hint}] in ms.
 */
export function gantt(rows, width) {
  const ROW = 24;
  const longest = Math.max(...rows.map((row) => row.label.length));
  const left = Math.max(width < 480 ? 84 : 112, Math.min(longest * LETTER + 8, width / 4));
  const right = 72;
  const first = Math.min(...rows.map((row) => row.from));
  const last = Math.max(...rows.map((row) => row.to), first + 1);
  const x = (time) => left + ((time - first) / (last - first)) * (width - left - right);
  const height = rows.length * ROW + 24;
  return h(
    "svg",
    {
      class: "gantt",
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "img",
      "aria-label": "Timeline of this job",
    },
    (width < 480 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]).map((part) => {
      const time = first + part * (last - first);
      return [
        h("line", { class: "grid", x1: x(time), x2: x(time), y1: 0, y2: height - 20 }),
        h(
          "text",
          {
            class: "tick",
            x: x(time),
            y: height - 4,
            "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle",
          },
          part === 0 ? "0" : `+${elapsed(time - first, last - first)}`,
        ),
      ];
    }),
    rows.map((row, index) => {
      const length = Math.max(3, x(row.to) - x(row.from));
      return h(
        "g",
        {},
        h("title", {}, row.hint),
        h("text", { class: "name", x: 0, y: index * ROW + 16 }, shortened(row.label, Math.floor(left / LETTER))),
        h("rect", {
          class: `slab ${row.kind}${row.open ? " open" : ""}`,
          x: Math.min(x(row.from), width - right - 3),
          y: index * ROW + 5,
          width: length,
          height: 14,
          rx: 2,
        }),
        h("text", { class: "note", x: width, y: index * ROW + 16, "text-anchor": "end" }, row.note),
        row.worker && workerName(row, { x, left, right, width, y: index * ROW + 16 }),
      );
    }),
  );
}
