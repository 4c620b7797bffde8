// The dashboard: drawn every second from /metrics and /v1/speculation.

import { call, get, setKey } from "./api.js";
import { inMs } from "./answer.js";
import { scaledWords } from "./scaled.js";
import { colorOf, drawFigures, element } from "./view.js";

const at = (id) => document.getElementById(id);
const EVERY = 1000, LATELY = 30, KEPT = 120, SHOWN = 120; // ms, looks, looks, seconds
const KINDS = { prompts: "prompt tokens", guesses: "draft tokens" }; // of rows
const TIMES = {
  TTFT: "vllm:time_to_first_token_seconds",
  TPOT: "vllm:request_time_per_output_token_seconds",
  ITL: "vllm:inter_token_latency_seconds",
};

const looks = []; // {at: ms, series: Map(name -> [{labels, value}])}, ascending in time

export function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const found = line.match(/^([\w:]+)(?:\{(.*)\})? (\S+)/);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(/(\w+)="((?:\\.|[^"])*)"/g)]
      .map(([, name, value]) => [name, value]));
    if (!series.has(found[1])) series.set(found[1], []);
    series.get(found[1]).push({ labels, value: Number(found[3]) });
  }
  return series;
}

const valueOf = (look, name) => look.series.get(name)?.[0].value ?? 0;
// The latest look and one LATELY looks ago; an empty one if there is only one look.
const lately = () => [
  looks.at(-1), looks.length > 1 ? looks[Math.max(0, looks.length - 1 - LATELY)] : { series: new Map() },
];

// A quantile of a histogram between two looks, in seconds, interpolated within its bucket.
export function quantile(now, before, name, q) {
  const old = new Map((before.series.get(`${name}_bucket`) ?? []).map((b) => [b.labels.le, b.value]));
  const counts = (now.series.get(`${name}_bucket`) ?? [])
    .map((b) => [Number(b.labels.le.replace("+Inf", "Infinity")), b.value - (old.get(b.labels.le) ?? 0)]);
  const wanted = q * (counts.at(-1)?.[1] ?? 0);
  if (!wanted) return null;
  let [from, below] = [0, 0];
  for (const [to, count] of counts) {
    if (count >= wanted) {
      return to === Infinity ? from : from + (to - from) * (wanted - below) / (count - below);
    }
    [from, below] = [to, count];
  }
  return from;
}

const row = (head, ...cells) => element("tr", {}, element("th", { scope: "row" }, head),
  ...cells.map((text) => element("td", { text: text ?? "" })));

function drawTimes() {
  const [now, before] = lately();
  at("times").replaceChildren(...Object.entries(TIMES).map(([name, series]) => {
    const count = valueOf(now, `${series}_count`) - valueOf(before, `${series}_count`);
    const of = (q) => (count ? inMs(1000 * quantile(now, before, series, q)) : "");
    return row(name, of(0.5), of(0.95), count);
  }));
}

function drawCounts() {
  const [now, before] = lately();
  drawFigures(at("requests"), {
    Running: valueOf(now, "vllm:num_requests_running"),
    Waiting: valueOf(now, "vllm:num_requests_waiting"),
    "KV blocks in use": `${(100 * valueOf(now, "vllm:kv_cache_usage_perc")).toFixed(1)} %`,
    "Trees verified": valueOf(now, "vllm:spec_decode_num_drafts_total"),
  });
  const blocks = now.series.get("specserve_kv_blocks") ?? [];
  const all = blocks.reduce((sum, { value }) => sum + value, 0) || 1;
  at("blocks").replaceChildren(...blocks.map(({ labels, value }) =>
    row(labels.holder, value, `${(100 * value / all).toFixed(1)} %`)));
  const old = new Map((before.series.get("specserve_step_rows_total") ?? [])
    .map(({ labels, value }) => [labels.kind, value]));
  const rows = (now.series.get("specserve_step_rows_total") ?? [])
    .map(({ labels, value }) => [labels.kind, value - (old.get(labels.kind) ?? 0)]);
  const sum = rows.reduce((total, [, count]) => total + count, 0) || 1;
  at("rows").replaceChildren(...rows.map(([kind, count]) =>
    row(KINDS[kind] ?? kind, count, `${(100 * count / sum).toFixed(1)} %`)));
}

function drawAccepted() {
  const now = looks.at(-1);
  const accepted = now.series.get("specserve_source_accepted_tokens_total") ?? [];
  const verified = now.series.get("specserve_source_verified_tokens_total") ?? [];
  const depths = [1, 2, 3, 4, 5, 6];
  at("depths").replaceChildren(element("tr", {},
    ...["", "accepted", ...depths].map((text) => element("th", { scope: "col", text }))));
  at("accepted").replaceChildren(...verified.map(({ labels: { source }, value }) => {
    const its = accepted.filter((a) => a.labels.source === source);
    const sum = its.reduce((total, a) => total + a.value, 0);
    const by = depths.map((depth) =>
      its.find((a) => Number(a.labels.position) === depth - 1)?.value ?? 0);
    const name = element("span", { className: colorOf(source), text: source });
    return row(name, value ? `${(100 * sum / value).toFixed(0)} %` : "", ...by);
  }));
}

const SVG = "http://www.w3.org/2000/svg";

// A curve over axes that begin at 0; words: label at the end of the vertical axis.
function curve(svg, points, [mostX, mostY], words) {
  svg.previousElementSibling.textContent = words;
  const x = (value) => (100 * value / (mostX || 1)).toFixed(2);
  const y = (value) => (98 - 94 * value / (mostY || 1)).toFixed(2);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("class", "curve");
  line.setAttribute("fill", "none");
  line.setAttribute("points", points.map(([a, b]) => `${x(a)},${y(b)}`).join(" "));
  const axis = document.createElementNS(SVG, "path");
  axis.setAttribute("class", "axis");
  axis.setAttribute("d", "M0 4V98H100");
  svg.replaceChildren(axis, line);
}

function drawRate() {
  const name = "vllm:generation_tokens_total";
  const rates = looks.slice(1).map((look, i) => [
    SHOWN - (looks.at(-1).at - look.at) / 1000,
    1000 * (valueOf(look, name) - valueOf(looks[i], name)) / (look.at - looks[i].at),
  ]);
  const shown = rates.filter(([second]) => second >= 0);
  const most = Math.max(0, ...shown.map(([, rate]) => rate));
  curve(at("rate"), shown, [SHOWN, most], `${most.toFixed(0)} tokens/s`);
  at("rate-words").textContent =
    `now ${(rates.at(-1)?.[1] ?? 0).toFixed(0)}, maximum ${most.toFixed(0)} in two minutes`;
}

function drawSpeculation({ costs, plan }) {
  const target = costs.target ?? Object.values(costs)[0];
  const steps = (target?.steps ?? []).map((s) => ({ ...s, ms: 1000 * s.seconds * target.slowdown }));
  const known = steps.filter((step) => step.is_known);
  const last = known.at(-1);
  if (last) {
    const shown = steps.filter((step) => step.rows <= last.rows);
    const stairs = shown.flatMap(({ rows, ms }, i) => [[i ? shown[i - 1].rows : 0, ms], [rows, ms]]);
    const mostY = Math.max(...shown.map((step) => step.ms));
    curve(at("costs"), stairs, [last.rows, mostY], inMs(mostY));
    at("most-rows").textContent = last.rows;
    const words = [`1 row ${inMs(steps[0].ms)}${steps[0].is_known ? "" : " (estimated)"}`];
    if (last.rows > 1) words.push(`${last.rows} rows ${inMs(last.ms)}`);
    words.push(`slowdown by other load: ${target.slowdown.toFixed(2)}`);
    at("cost-words").textContent = words.join(", ");
  }
  drawFigures(at("plan"), plan ? {
    "Prompt rows": plan.prompt_rows,
    Roots: plan.roots,
    "Draft tokens": plan.guesses,
    "Expected tokens": plan.tokens.toFixed(2),
    "Expected time": inMs(1000 * plan.seconds),
  } : { "No plan yet": "" });
}

async function look() {
  const [metrics, speculation] = await Promise.all([
    call("metrics").then((response) => response.text()), get("v1/speculation"),
  ]);
  const now = { at: performance.now(), series: parse(metrics) };
  const rows = "specserve_rows_total";
  if (looks.length && valueOf(now, rows) < valueOf(looks.at(-1), rows)) looks.length = 0; // restart
  looks.push(now);
  if (looks.length > KEPT) looks.shift();
  drawTimes();
  drawCounts();
  drawAccepted();
  drawRate();
  drawSpeculation(speculation);
}

async function begin() {
  try {
    const { data: [card] } = await get("v1/models");
    at("model").textContent = card.id;
    at("scaled").textContent = scaledWords(card);
    at("scaled").hidden = !at("scaled").textContent;
    at("key-asked").hidden = true;
    await look();
    at("status").textContent = "";
  } catch (error) {
    at("status").textContent = error.message;
    at("key-asked").hidden = error.status !== 401;
    if (error.status === 401) return; // until a key is entered
  }
  setTimeout(begin, EVERY);
}

at("use-key").onclick = () => {
  try {
    setKey(at("key").value.trim());
    begin();
  } catch (error) {
    at("status").textContent = error.message;
  }
};
begin();
