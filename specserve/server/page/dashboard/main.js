// The dashboard: drawn from /metrics/history, /metrics and /v1/speculation.

import { call, get } from "../shared/api.js";
import { addIcons, at, count, element } from "../shared/dom.js";
import { scaledWords } from "../shared/facts.js";
import { addKeyForm, showKeyForm } from "../shared/key.js";
import { addThemeSwitch } from "../shared/theme.js";
import { SPAN } from "./chart.js";
import { drawAcceptance, drawCosts } from "./drafting.js";
import { parse, valueOf } from "./metrics.js";
import { makeCharts, marksOf } from "./panels.js";

const EVERY = 1500; // ms between two looks
const charts = makeCharts();
let samples = []; // ascending in time
let isStarted = false;

async function look() {
  const since = samples.at(-1)?.at ?? 0;
  const [history, metrics, speculation] = await Promise.all([
    get(`metrics/history?since=${since}`), call("metrics").then((response) => response.text()),
    get("v1/speculation"),
  ]);
  const { now, interval_seconds: interval } = history;
  if (since > now) samples = []; // another server, or a changed clock
  samples = [...samples, ...history.samples].filter((sample) => now - sample.at <= SPAN);
  const series = parse(metrics), marks = marksOf(samples);
  for (const chart of charts) chart.draw(samples, now, marks, interval);
  drawTotals(series, marks);
  drawAcceptance(series);
  drawCosts(speculation, history.step_rows);
}

function drawTotals(series, marks) {
  const ended = (series.get("vllm:request_success_total") ?? [])
    .filter(({ labels }) => labels.finished_reason !== "error")
    .reduce((sum, { value }) => sum + value, 0);
  const failed = (series.get("vllm:request_success_total") ?? [])
    .find(({ labels }) => labels.finished_reason === "error")?.value ?? 0;
  const totals = [
    ["Requests ended", ended],
    ["Output tokens", valueOf(series, "vllm:generation_tokens_total")],
    ["Draft tokens accepted", valueOf(series, "vllm:spec_decode_num_accepted_tokens_total")],
    ["Errors", failed],
    ["Engine restarts", valueOf(series, "specserve_engine_restarts_total")],
  ];
  at("totals").replaceChildren(...totals.flatMap(([name, value]) =>
    [element("div", {}, element("dt", { text: name }), element("dd", { text: count(value) }))]));
  at("mark-keys").hidden = !marks.length;
}

async function begin() {
  try {
    if (!isStarted) await showModel();
    await look();
    isStarted = true;
    at("status").textContent = "";
    at("status").className = "";
  } catch (error) {
    const needsKey = error.status === 401;
    at("status").textContent = needsKey ? "" : error.message;
    at("status").className = "error";
    if (needsKey) {
      isStarted = false;
      at("model").textContent = "not connected";
      showKeyForm(true);
      return; // until a key is entered
    }
  }
  setTimeout(begin, EVERY);
}

async function showModel() {
  const { data: [card] } = await get("v1/models");
  at("model").textContent = card.id;
  at("scaled").textContent = scaledWords(card);
  at("scaled").hidden = !at("scaled").textContent;
  showKeyForm(false);
}

addIcons();
addThemeSwitch(at("theme"));
addKeyForm(begin);
at("charts").prepend(...charts.map((chart) => chart.box));
begin();
