// Workflows: the place is kept; runs appear here once the server runs workflows.

import { h } from "./dom.js";
import { notice } from "./parts.js";

export const still = true;
export const title = () => "Workflows";
export const load = async () => ({});

export function view() {
  return [
    h("h1", {}, "Workflows"),
    notice(
      "No workflow has run on this server",
      h(
        "p",
        {},
        "A run will be drawn here as bars over time: parallel steps stacked, attempts inside each bar, ",
        "compensation below.",
      ),
      h(
        "p",
        {},
        "Jobs that depend on each other already have a family tree on their ",
        h("a", { href: "#/jobs" }, "job page"),
        ".",
      ),
    ),
  ];
}
