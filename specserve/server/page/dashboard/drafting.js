// Acceptance of draft tokens by depth and by drafter, and the cost of a step by rows.

import { at, count, element, inMs, shape } from "../shared/dom.js";
import { colorOf, describe, swatch } from "../shared/drafters.js";
import { niceTop } from "./chart.js";
import { valueOf } from "./metrics.js";

const DEPTHS = 8; // that are shown
const percent = (share) => `${(100 * share).toFixed(0)} %`;

const bar = (name, share, title) => element("span", { className: "bar-track", title },
  element("span", { className: `bar-fill ${colorOf(name)}`, "data-share": share }));

// Accepted and verified draft tokens of each source: {name, verified, accepted, byDepth}.
function sourcesOf(series) {
  const accepted = series.get("specserve_source_accepted_tokens_total") ?? [];
  const verified = series.get("specserve_source_verified_tokens_total") ?? [];
  return verified.map(({ labels: { source }, value }) => {
    const its = accepted.filter(({ labels }) => labels.source === source);
    const byDepth = [];
    for (const { labels, value: number } of its) byDepth[Number(labels.position)] = number;
    const sum = its.reduce((total, { value: number }) => total + number, 0);
    return { name: source, verified: value, accepted: sum, byDepth };
  }).filter((source) => source.verified > 0);
}

export function drawAcceptance(series) {
  const sources = sourcesOf(series);
  const drafts = valueOf(series, "vllm:spec_decode_num_drafts_total");
  const isEmpty = !sources.length || !drafts;
  for (const id of ["by-drafter", "by-depth"]) at(id).hidden = isEmpty;
  for (const empty of document.querySelectorAll(".empty-drafts")) empty.hidden = !isEmpty;
  if (isEmpty) return;
  at("by-drafter").replaceChildren(...sources.map(({ name, verified, accepted }) => {
    const words = `${count(accepted)} of ${count(verified)} verified draft tokens`;
    return element("tr", {},
      element("th", { scope: "row", title: describe(name) }, swatch(name)),
      element("td", { className: "bar-cell" }, bar(name, accepted / verified, words)),
      element("td", { text: percent(accepted / verified), title: words }),
      element("td", { className: "quiet", text: `of ${count(verified)}` }));
  }));
  const depths = Array.from({ length: DEPTHS }, (_, i) => i)
    .filter((depth) => sources.some(({ byDepth }) => byDepth[depth]));
  at("by-depth").replaceChildren(...depths.map((depth) => {
    const its = sources.filter(({ byDepth }) => byDepth[depth]);
    const bars = its.map(({ name, byDepth }) => bar(name, byDepth[depth] / drafts,
      `${name}: ${count(byDepth[depth])} accepted in ${count(drafts)} trees`));
    const shares = its.map(({ byDepth }) =>
      element("span", { className: "share", text: percent(byDepth[depth] / drafts) }));
    return element("tr", {}, element("th", { scope: "row", text: depth + 1 }),
      element("td", { className: "bar-cell" }, ...bars), element("td", {}, ...shares));
  }));
  for (const each of document.querySelectorAll("[data-share]")) {
    each.style.width = `${100 * Math.min(1, each.dataset.share)}%`;
  }
}

const WIDTH = 100, HEIGHT = 100;

// The curve of measured costs, and bars of the rows that the latest steps had.
export function drawCosts({ costs }, stepRows) {
  const target = costs.target ?? Object.values(costs)[0];
  const steps = (target?.steps ?? []).map((s) => ({ ...s, ms: 1000 * s.seconds * target.slowdown }));
  const known = steps.filter((step) => step.is_known);
  at("cost-empty").hidden = known.length > 0;
  for (const id of ["cost-plot", "cost-axis", "cost-words"]) at(id).hidden = !known.length;
  if (!known.length) return;
  const used = Object.entries(stepRows).map(([rows, number]) => [Number(rows), number]);
  const widest = Math.max(...used.map(([rows]) => rows), 1);
  // Wide prompt chunks would hide the range of drafting.
  const mostRows = Math.min(known.at(-1).rows, Math.max(32, Math.min(widest, 256)));
  const shown = steps.filter((step, i) => step.rows <= mostRows || steps[i - 1]?.rows < mostRows);
  const top = niceTop(Math.max(...shown.map((step) => step.ms)));
  const x = (rows) => (WIDTH * Math.min(1, rows / mostRows)).toFixed(2);
  const y = (ms) => (HEIGHT - 92 * ms / top).toFixed(2);
  let before = 0;
  const path = shown.map(({ rows, ms }, i) => {
    const begin = i ? `V${y(ms)}` : `M${x(before)} ${y(ms)}`;
    before = rows;
    return `${begin}H${x(rows)}`;
  }).join("");
  const most = Math.max(...used.map(([, number]) => number), 1);
  const bars = used.filter(([rows]) => rows <= mostRows).map(([rows, number]) => shape("path", {
    class: "used", d: `M${x(rows - 0.5)} ${HEIGHT}v${(-40 * number / most - 2).toFixed(1)}` }));
  at("costs").replaceChildren(shape("path", { class: "grid", d: `M0 8H${WIDTH}M0 54H${WIDTH}` }),
    ...bars, shape("path", { class: "line line-0", d: path }));
  at("cost-top").textContent = inMs(top);
  at("most-rows").textContent = `${count(mostRows)} rows`;
  const total = used.reduce((sum, [, number]) => sum + number, 0);
  const mean = used.reduce((sum, [rows, number]) => sum + rows * number, 0) / (total || 1);
  const words = [`1 row takes ${inMs(steps[0].ms)}${steps[0].is_known ? "" : " (estimated)"}`];
  if (known.at(-1).rows > 1) words.push(`${known.at(-1).rows} rows take ${inMs(known.at(-1).ms)}`);
  if (total) words.push(`mean of the last ${count(total)} steps: ${mean.toFixed(1)} rows`);
  if (target.slowdown > 1.05) words.push(`slowed by other load: ${target.slowdown.toFixed(2)} times`);
  at("cost-words").textContent = `${words.join("; ")}.`;
}
